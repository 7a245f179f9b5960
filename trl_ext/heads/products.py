"""Matrix products whose result is never rounded below fp32, for operands of every dtype.

Every product of the tiled and of the dense head is made here, so that the exactness of both rests on these few lines.
Dimensions: N tokens, H hidden size, V vocabulary (or one tile of its columns).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def statistics_dtype(operands: torch.dtype) -> torch.dtype:
    """The dtype in which products of such operands accumulate: float64 for float64, fp32 for all others."""
    return torch.float64 if operands == torch.float64 else torch.float32


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Turn off what would round inside the head: autocast, TF32 (or bf16) in fp32 products, fp16 accumulation.

    The switches are global to the process; they are put back as they were found, also after an exception.
    """
    generic = torch.backends.fp32_precision  # type: ignore[attr-defined]
    backends: Any = torch.backends
    matmuls = (backends.cuda.matmul, backends.mkldnn.matmul)
    precisions = [matmul.fp32_precision for matmul in matmuls]
    fp16_accumulation = torch.backends.cuda.matmul.allow_fp16_accumulation
    try:
        for matmul, precision in zip(matmuls, precisions, strict=True):
            if precision not in ("none", "ieee"):
                matmul.fp32_precision = "ieee"
        if fp16_accumulation:
            torch.backends.cuda.matmul.allow_fp16_accumulation = False
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for matmul, precision in zip(matmuls, precisions, strict=True):
            if precision not in ("none", "ieee"):
                # What is read is resolved: a switch that only follows the generic one goes on following it
                matmul.fp32_precision = "none" if precision == generic else precision
        if fp16_accumulation:
            torch.backends.cuda.matmul.allow_fp16_accumulation = True


@cache
def multiplies_halves(device: torch.device) -> bool:
    """Whether torch has a product of two half-precision operands that leaves fp32 there: seen by making one.

    Warns where a CUDA device has none. DetectedEngine out of memory raises, and says nothing about the next time.
    """
    if device.type != "cuda":
        return False
    try:
        _multiply_halves(device)
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError, TypeError) as error:
        warnings.warn(
            f"The head upcasts its operands, which is many times slower: on {device} torch has no product of halves "
            f"that is summed in fp32 ({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return False
    return True


def _multiply_halves(device: torch.device) -> None:
    out, half = (torch.ones(8, 8, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))
    torch.addmm(out, half, half, beta=1, out_dtype=out.dtype, out=out)


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """`out = a @ b`, or `out += a @ b`, accumulated and left in `out`'s dtype (fp32 or float64).

    Half-precision operands go to the tensor cores as they are, where torch can. Elsewhere they are upcast first, which
    gives the same sums: a product of two bf16 or fp16 numbers is exact in fp32.
    """
    if a.dtype in _HALF and out.dtype == torch.float32 and multiplies_halves(a.device):
        # `beta=0` does not read `out`, which may be uninitialised
        torch.addmm(out, a, b, beta=int(accumulate), out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(accumulate), out=out)


def project_into(out: Tensor, hidden_NH: Tensor, weight_VH: Tensor) -> None:
    """`out_NV = hidden_NH @ weight_VH.T`, the head's product.

    On the CPU fp16 operands, and sums over more than 1024 hidden units, are multiplied in float64: with fp32 partial
    sums the worst of a million logits was off by 4e-7 of the largest, more than the head's bound of 3e-7. (A bf16
    product has so few bits that most of its partial sums are exact.)
    """
    long = hidden_NH.dtype == torch.float16 or hidden_NH.shape[1] > 1024
    if out.device.type == "cpu" and long and out.dtype == torch.float32:
        out.copy_(hidden_NH.double() @ weight_VH.double().t())
    else:
        matmul_into(out, hidden_NH, weight_VH.t(), accumulate=False)


def refuse_second_derivative() -> None:
    """Called first in every backward: grad mode is on there only under `create_graph=True`."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "The head has no second derivative, and `create_graph=True` asks for one. Without this error its part "
            "would be taken for a constant."
        )


def coefficients_dtype(operands: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which coefficients of a gradient product stand beside operands of the dtype `operands`.

    Tensor cores need both operands in the same half precision. Elsewhere the other operand is upcast anyway, so the
    coefficients keep their fp32.
    """
    return operands if multiplies_halves(device) else statistics_dtype(operands)


class ExactLinear(torch.autograd.Function):
    """`hidden_NH @ weight_VH.T + bias_V`, differentiable: the product of the dense head.

    Hidden states and weight are rounded to `dtypes`; sums, the bias in them, logits and the gradient of the logits are
    in `accumulate`, on any device. The weight is read in slices, so that no cast copy of it stands beside the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        accumulate: torch.dtype,
        readable: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.dtypes, ctx.readable = dtypes, readable
        of_hidden, of_weight = dtypes
        with readable(), exact_arithmetic(hidden.device):
            operand_NH = hidden.to(of_hidden)
            logits_NV = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=accumulate)
            for columns in _slices(weight.shape[0]):
                project_into(logits_NV[:, columns], operand_NH, weight[columns].to(of_weight))
            if bias is not None:
                logits_NV += bias
        return logits_NV

    @staticmethod
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hidden, weight, bias = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        with ctx.readable(), exact_arithmetic(hidden.device):
            of_hidden, of_weight = ctx.dtypes
            operand_NH = hidden.to(of_hidden).to(grad_NV.dtype)
            grad_hidden = torch.zeros_like(operand_NH) if needs_hidden else None
            grad_weight = torch.empty_like(weight) if needs_weight else None
            for columns in _slices(weight.shape[0]):
                grad_tile = grad_NV[:, columns]
                if grad_hidden is not None:
                    grad_hidden.addmm_(grad_tile, weight[columns].to(of_weight).to(grad_NV.dtype))
                if grad_weight is not None:
                    grad_weight[columns] = (grad_tile.t() @ operand_NH).to(weight.dtype)
            grad_bias = grad_NV.sum(0).to(bias.dtype) if needs_bias else None
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _slices(rows: int, step: int = 2048) -> Iterator[slice]:
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
