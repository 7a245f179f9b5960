"""The plain definition of the head: all logits at once, then log_softmax.

It is what the tiled head is checked against at the start of training, and a choice by name where memory does not
matter. Memory is O(N V).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .adapted import Operands, ReplacedRows
from .logits import LogitTransform
from .outputs import LinearLogProbs
from .products import ExactLinear, exact_arithmetic, statistics_dtype


def dense_log_probs(
    x: Operands,
    targets: Tensor,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    *,
    operand_dtype: torch.dtype,
    up_dtype: torch.dtype,
    replaced: ReplacedRows | None = None,
    entropy_requires_grad: bool = False,
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> LinearLogProbs:
    """Per-token results from the whole (N, V) matrix of logits."""
    accumulate = statistics_dtype(operand_dtype)
    logits_NV = dense_logits(x, transform, operand_dtype, accumulate, readable, up_dtype=up_dtype, replaced=replaced)
    return log_probs_of(logits_NV, targets, outputs, entropy_requires_grad=entropy_requires_grad)


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
    """Logits of shape (N, V), from operands rounded to `operand_dtype`, summed and returned in `accumulate`."""
    weight = x.weight
    if replaced is not None and x.rows is not None:
        weight = replaced.put(weight, slice(0, len(weight)), x.rows)
    with exact_arithmetic(x.hidden.device):
        product = ExactLinear.apply(x.hidden, weight, x.bias, (operand_dtype, operand_dtype), accumulate, readable)
        if x.down is not None:
            product = product + ExactLinear.apply(x.down, x.up, None, (accumulate, up_dtype), accumulate, nullcontext)
        return transform(product)


def log_probs_of(
    logits_NV: Tensor, targets: Tensor, outputs: tuple[str, ...], *, entropy_requires_grad: bool = False
) -> LinearLogProbs:
    """Every output by its definition."""
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
