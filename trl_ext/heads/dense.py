"""The dense head: log-probs and statistics from the whole matrix of logits."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .adapters import Operands, ReplacedRows
from .gradients import Coefficients
from .logits import LinearLogProbs, LogitTransform, without_gradient
from .products import ExactLinear, exact_arithmetic, refuse_second_derivative
from .sampling_mask import SamplingMask
from .statistics import ABSENT, RunningStatistics


def dense_logits(
    x: Operands,
    transform: LogitTransform,
    operand_dtype: torch.dtype,
    accumulate: torch.dtype,
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    up_dtype: torch.dtype,
    replaced: ReplacedRows | None = None,
) -> Tensor:
    """Return logits of shape (N, V). Operands are rounded to `operand_dtype`; sums have the dtype `accumulate`."""
    weight = x.weight
    if replaced is not None and x.rows is not None:
        weight = replaced.put(weight, slice(0, len(weight)), x.rows)
    with exact_arithmetic(x.hidden.device):
        product = ExactLinear.apply(x.hidden, weight, x.bias, (operand_dtype, operand_dtype), accumulate, readable)
        if x.down is not None:
            product = product + ExactLinear.apply(x.down, x.up, None, (accumulate, up_dtype), accumulate, nullcontext)
        return transform(product)


def masked_logits(logits_NV: Tensor, sampling_mask: SamplingMask | None) -> Tensor:
    """Return the logits, with `ABSENT` for classes outside of a token's sampling mask, which includes its target."""
    if sampling_mask is None:
        return logits_NV
    N, V = logits_NV.shape
    return logits_NV.masked_fill(sampling_mask.absent(slice(0, N), slice(0, V)), ABSENT)


def log_probs_of(
    logits_NV: Tensor, targets: Tensor, outputs: tuple[str, ...], *, entropy_requires_grad: bool = False
) -> LinearLogProbs:
    """Return the head's outputs, each computed from all logits by its definition."""
    with exact_arithmetic(logits_NV.device):
        log_p_NV = logits_NV.log_softmax(-1)
        log_p = log_p_NV.gather(-1, targets[:, None])[:, 0]
        results: dict[str, Tensor] = {}
        if "log_probs" in outputs:
            results["log_probs"] = log_p
        if "entropy" in outputs:
            entropy = -(log_p_NV.exp() * log_p_NV).sum(-1)
            results["entropy"] = entropy if entropy_requires_grad else entropy.detach()
        if "mean_log_probs" in outputs:
            results["mean_log_probs"] = log_p_NV.mean(-1)
        with torch.no_grad():
            if "log_sum_sq_probs" in outputs:
                results["log_sum_sq_probs"] = (2 * log_p_NV).logsumexp(-1)
            if "mean_logits" in outputs:
                results["mean_logits"] = logits_NV.mean(-1)
            if "is_top1" in outputs:
                results["is_top1"] = (logits_NV.argmax(-1) == targets) & ~log_p.isnan()
        return LinearLogProbs(**results)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def log_probs_from_logits(
    product: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    *,
    entropy_requires_grad: bool = False,
    absent: Tensor | None = None,
) -> LinearLogProbs:
    """Return per-token results from the product `(n, V)` before scale, softcap and temperature; differentiable.

    Computes in fp32, or in float64 for a float64 product, with the formulas of the tiled head. `absent` (n, V) marks
    classes that the vocabulary of a token does not have.
    """
    product = product.to(torch.float64 if product.dtype == torch.float64 else torch.float32)
    entropy_grad = entropy_requires_grad and "entropy" in outputs
    return LinearLogProbs(*_LogProbsFromLogits.apply(product, targets, transform, outputs, entropy_grad, absent))


class _LogProbsFromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        outputs: tuple[str, ...],
        entropy_grad: bool,
        absent: Tensor | None,
    ) -> LinearLogProbs:
        ctx.set_materialize_grads(False)
        all_rows = slice(0, len(product))
        with exact_arithmetic(product.device):
            logits = transform.apply_(product.clone())
            if absent is not None:
                logits.masked_fill_(absent, ABSENT)
            scratch = torch.empty_like(logits)
            statistics = RunningStatistics(targets, product.shape[1], outputs, product.dtype)
            statistics.fold_(all_rows, 0, logits, scratch)
            results = statistics.finish_(outputs).results
        ctx.save_for_backward(
            product,
            targets,
            statistics.shift,
            statistics.sum_exp,
            statistics.target_logit,
            results.entropy if entropy_grad else None,
            absent,
        )
        ctx.transform = transform
        ctx.mark_non_differentiable(*without_gradient(results, entropy_grad=entropy_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        product, targets, maximum, sum_exp, target_logit, entropy, absent = ctx.saved_tensors
        if all(x is None for x in gradients):
            return None, None, None, None, None, None
        all_rows = slice(0, len(product))
        with exact_arithmetic(product.device):
            coefficients = Coefficients(
                maximum, sum_exp, target_logit, entropy, LinearLogProbs(*gradients), ctx.transform, product.shape[1]
            )
            logits = ctx.transform.apply_(product.clone())
            nontarget_grad = coefficients.nontarget_grad_(all_rows, targets, logits, torch.empty_like(logits))
            if absent is not None:
                nontarget_grad.masked_fill_(absent, 0.0)
            gradient = coefficients.add_target_grad_(all_rows, targets, nontarget_grad).mul_(coefficients.size[:, None])
        return gradient, None, None, None, None, None
