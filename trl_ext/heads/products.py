"""Matrix products in fp32 or float64, for operands of every dtype.

The tiled and the dense head compute all their products here, so the precision of both depends on this file.
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
_WITHOUT_TENSOR_CORES = "Tensor cores, which are 15 times faster by an H100's data sheet, do not compute such products."


def statistics_dtype(operands: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of such operands are summed: float64 for float64, otherwise fp32."""
    return torch.float64 if operands == torch.float64 else torch.float32


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Turn off autocast, TF32 (or bf16) in fp32 products, and fp16 accumulation, which would round inside the head.

    The switches are global to the process. They are restored on exit, even after an exception.
    """
    backends: Any = torch.backends
    generic_precision = backends.fp32_precision
    cuda = backends.cuda.matmul
    precisions = [(matmul, matmul.fp32_precision) for matmul in (cuda, backends.mkldnn.matmul)]
    rounding = [(matmul, precision) for matmul, precision in precisions if precision not in ("none", "ieee")]
    fp16_accumulation = cuda.allow_fp16_accumulation
    try:
        for matmul, _ in rounding:
            matmul.fp32_precision = "ieee"
        if fp16_accumulation:
            cuda.allow_fp16_accumulation = False
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for matmul, precision in rounding:
            # Reading a switch returns the resolved value. "none" makes it follow the generic switch again
            matmul.fp32_precision = "none" if precision == generic_precision else precision
        if fp16_accumulation:
            cuda.allow_fp16_accumulation = True


@cache
def multiplies_halves(device: torch.device) -> bool:
    """Whether torch multiplies half-precision operands into an fp32 result on `device`. The first call tries it.

    Warns if a CUDA device cannot do it. Running out of memory raises an error and is not cached.
    """
    if device.type != "cuda":
        return False
    try:
        _multiply_halves(device)
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError, TypeError) as error:
        warnings.warn(
            f"On {device} torch cannot multiply bf16 operands into an fp32 result, so the LM head casts them to fp32. "
            f"{_WITHOUT_TENSOR_CORES} Use a newer build of torch. This one says: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False
    return True


@cache
def _warn_of_fp32(products: str, instead: str) -> None:
    warnings.warn(f"{products} multiplies fp32 numbers on a GPU. {_WITHOUT_TENSOR_CORES} {instead}", stacklevel=2)


def _multiply_halves(device: torch.device) -> None:
    out, half = (torch.ones(8, 8, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))
    torch.addmm(out, half, half, beta=1, out_dtype=out.dtype, out=out)


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """Compute `out = a @ b`, or `out += a @ b`, in the dtype of `out` (fp32 or float64).

    Tensor cores read half-precision operands directly if torch supports that. Otherwise the operands are cast first,
    which gives the same sums: a product of two bf16 or fp16 numbers is exact in fp32.
    """
    if a.dtype in _HALF and out.dtype == torch.float32 and multiplies_halves(a.device):
        # With `beta=0`, `out` is not read, so it may be uninitialised
        torch.addmm(out, a, b, beta=int(accumulate), out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(accumulate), out=out)


def project_into(out: Tensor, hidden_NH: Tensor, weight_VH: Tensor) -> None:
    """Compute `out_NV = hidden_NH @ weight_VH.T`, the head's product.

    On the CPU, fp32 operands with more than 1024 hidden units are multiplied in float64: with fp32 partial sums, the
    worst of a million logits is off by 4e-7 of the largest. Half-precision operands have a wider bound.
    """
    long = hidden_NH.dtype == torch.float32 and hidden_NH.shape[1] > 1024
    if out.device.type == "cpu" and long and out.dtype == torch.float32:
        out.copy_(hidden_NH.double() @ weight_VH.double().t())
    else:
        if out.is_cuda and hidden_NH.dtype == weight_VH.dtype == torch.float32:
            _warn_of_fp32("The LM head", "Train with `bf16=True` and without `cast_lm_head_to_fp32`.")
        matmul_into(out, hidden_NH, weight_VH.t(), accumulate=False)


def refuse_second_derivative() -> None:
    """Raise `RuntimeError` in a backward under `create_graph=True`: only then is grad mode on in a backward."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "`create_graph=True` needs a second derivative, which the LM head does not have. Call the backward "
            "without `create_graph=True`."
        )


def coefficients_dtype(operands: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of logit gradients in a matrix product whose other operand has the dtype `operands`.

    Tensor cores need the same half precision for both. Elsewhere the other operand is cast to fp32.
    """
    return operands if multiplies_halves(device) else statistics_dtype(operands)


class ExactLinear(torch.autograd.Function):
    """The product of the dense head, `hidden_NH @ weight_VH.T + bias_V`; differentiable.

    Hidden states and weight are rounded to `dtypes`. Sums, bias, logits and their gradient are in `accumulate`. The
    weight is read in slices, so no cast copy of the whole weight is needed.
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
        ctx.dtypes = dtypes
        ctx.readable = readable
        hidden_dtype, weight_dtype = dtypes
        with readable(), exact_arithmetic(hidden.device):
            operand_NH = hidden.to(hidden_dtype)
            logits_NV = hidden.new_empty(hidden.shape[0], weight.shape[0], dtype=accumulate)
            for columns in _slices(weight.shape[0]):
                project_into(logits_NV[:, columns], operand_NH, weight[columns].to(weight_dtype))
            if bias is not None:
                logits_NV += bias
        return logits_NV

    @staticmethod
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hidden, weight, bias = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        hidden_dtype, weight_dtype = ctx.dtypes
        if hidden.is_cuda and grad_NV.dtype == torch.float32 and hidden_dtype in _HALF:
            _warn_of_fp32("The backward of `head='dense'`", "Train with `head='tiled'` if the model allows it.")
        with ctx.readable(), exact_arithmetic(hidden.device):
            operand_NH = hidden.to(hidden_dtype).to(grad_NV.dtype)
            grad_hidden = torch.zeros_like(operand_NH) if needs_hidden else None
            grad_weight = torch.empty_like(weight) if needs_weight else None
            for columns in _slices(weight.shape[0]):
                grad_tile = grad_NV[:, columns]
                if grad_hidden is not None:
                    grad_hidden.addmm_(grad_tile, weight[columns].to(weight_dtype).to(grad_NV.dtype))
                if grad_weight is not None:
                    grad_weight[columns] = (grad_tile.t() @ operand_NH).to(weight.dtype)
            grad_bias = grad_NV.sum(0).to(bias.dtype) if needs_bias else None
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _slices(rows: int, step: int = 2048) -> list[slice]:
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
