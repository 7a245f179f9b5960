"""A factor on the gradient of a tensor, where an engine takes a mean for a sum, or a sum for a mean."""

from typing import Any, cast

import torch
from torch import Tensor


def with_gradient_times(x: Tensor, factor: float) -> Tensor:
    """`x`, or a view of it, whose gradient is multiplied by `factor`."""
    if factor == 1.0 or not x.requires_grad:
        return x
    return cast(Tensor, _GradientTimes.apply(x, factor))  # type: ignore[no-untyped-call]


class _GradientTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None
