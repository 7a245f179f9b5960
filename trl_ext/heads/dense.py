"""The plain definition of the head: all logits at once, then log_softmax.

It is what the tiled head is checked against at the start of training, and a choice by name where memory does not
matter. Memory is O(N V).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .logits import LogitTransform
from .outputs import LinearLogProbs
from .products import ExactLinear, exact_arithmetic, statistics_dtype


def dense_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    *,
    operand_dtype: torch.dtype,
    entropy_requires_grad: bool = False,
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> LinearLogProbs:
    """Per-token results from the whole (N, V) matrix of logits."""
    accumulate = statistics_dtype(operand_dtype)
    logits_NV = dense_logits(hidden, weight, bias, transform, operand_dtype, accumulate, readable)
    return log_probs_of(logits_NV, targets, outputs, entropy_requires_grad=entropy_requires_grad)


def dense_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transform: LogitTransform,
    operand_dtype: torch.dtype,
    accumulate: torch.dtype,
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Logits of shape (N, V), from operands rounded to `operand_dtype`, summed and returned in `accumulate`."""
    with exact_arithmetic(hidden.device):
        return transform(ExactLinear.apply(hidden, weight, bias, operand_dtype, accumulate, readable))


def log_probs_of(
    logits_NV: Tensor, targets: Tensor, outputs: tuple[str, ...], *, entropy_requires_grad: bool = False
) -> LinearLogProbs:
    """Every output by its definition."""
    with exact_arithmetic(logits_NV.device):
        log_p_NV = logits_NV.log_softmax(-1)
        results: dict[str, Tensor] = {}
        if "log_probs" in outputs:
            results["log_probs"] = log_p_NV.gather(-1, targets[:, None])[:, 0]
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
                results["is_top1"] = logits_NV.argmax(-1) == targets
        return LinearLogProbs(**results)
