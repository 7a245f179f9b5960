"""Log-probs from a product that something else has made, by the tiled head's own statistics and gradient."""

from typing import Any

import torch
from torch import Tensor

from .coefficients import Coefficients, Upstream
from .logits import LogitTransform
from .outputs import LinearLogProbs
from .products import exact_arithmetic, refuse_second_derivative
from .statistics import RunningStatistics


@torch.compiler.disable  # type: ignore[untyped-decorator]
def log_probs_of_product(
    product: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    *,
    entropy_requires_grad: bool = False,
) -> LinearLogProbs:
    """Per-token results from the product `(n, V)` before scale, softcap and temperature; differentiable.

    In fp32, or float64 where the product is. A nearly certain token keeps its digits, as in the tiled head.
    """
    product = product.to(torch.float64 if product.dtype == torch.float64 else torch.float32)
    entropy_grad = entropy_requires_grad and "entropy" in outputs
    return LinearLogProbs(*_OfProduct.apply(product, targets, transform, outputs, entropy_grad))


class _OfProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor,
        targets: Tensor,
        transform: LogitTransform,
        outputs: tuple[str, ...],
        entropy_grad: bool,
    ) -> LinearLogProbs:
        ctx.set_materialize_grads(False)
        every = slice(0, len(product))
        with exact_arithmetic(product.device):
            logits = transform.apply_(product.clone())
            scratch = torch.empty_like(logits)
            statistics = RunningStatistics(targets, product.shape[1], outputs, product.dtype)
            statistics.take_target_(every, 0, logits, scratch)
            statistics.fold_(every, logits, scratch)
            results = statistics.results(outputs)
        kept = statistics.shift, statistics.sum_exp, statistics.target_logit
        ctx.save_for_backward(product, targets, *kept, results.entropy if entropy_grad else None)
        ctx.transform = transform
        differentiable = {"log_probs", "mean_log_probs", *(["entropy"] if entropy_grad else [])}
        ctx.mark_non_differentiable(
            *(x for name, x in results._asdict().items() if x is not None and name not in differentiable)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        product, targets, *statistics = ctx.saved_tensors
        given = LinearLogProbs(*gradients)
        upstream = Upstream(given.log_probs, given.entropy, given.mean_log_probs)
        if all(x is None for x in upstream):
            return None, None, None, None, None
        every = slice(0, len(product))
        with exact_arithmetic(product.device):
            maximum, sum_exp, target_logit, entropy = statistics
            vocabulary = product.shape[1]
            coefficients = Coefficients(*(maximum, sum_exp, target_logit, entropy), upstream, ctx.transform, vocabulary)
            logits = ctx.transform.apply_(product.clone())
            bracket = coefficients.of_others_(every, targets, logits, torch.empty_like(logits))
            gradient = coefficients.with_target_(every, targets, bracket).mul_(coefficients.size[:, None])
        return gradient, None, None, None, None
