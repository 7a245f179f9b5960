"""Tokens picked by index, some of them several times, with a gradient that is summed in fp32."""

from typing import Any

import torch
from torch import Tensor


class _Picked(torch.autograd.Function):
    """`x.index_select(dim, index)`. Its own backward would add half-precision copies in half precision: with 64
    completions of a prompt the sum's error is 8 times that of one rounding."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, dim: int) -> Tensor:
        return x.index_select(dim, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        x, index, ctx.dim = inputs
        ctx.save_for_backward(index)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        sums = torch.float32 if gradient.dtype in (torch.bfloat16, torch.float16) else gradient.dtype
        total = gradient.new_zeros(ctx.shape, dtype=sums)
        return total.index_add_(ctx.dim, index, gradient.to(sums)).to(gradient.dtype), None, None


def picked(x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """`x.index_select(dim, index)`, whose gradient sums repeated places in fp32 (float64 for float64)."""
    return _Picked.apply(x, index, dim)  # type: ignore[no-any-return, no-untyped-call]
