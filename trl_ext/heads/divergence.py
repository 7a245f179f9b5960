"""The exact divergence between two LM heads, from hidden states, tile by tile.

A Kullback-Leibler divergence takes one pass over the vocabulary, a Jensen-Shannon divergence two, because it needs the
normalisers first. With a frozen student head, the last pass also forms the gradient of the hidden states. Otherwise
the backward recomputes the tiles.

If student and teacher have one head, the gap of their logits is the product of the head and the difference of the
hidden states. The error of the results is then relative to the divergence, not to the logits.

Dimensions: N tokens, H hidden size, V vocabulary, (n, v) tokens and columns of a tile.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .divergence_sums import Gradients, Tile, TokenSums
from .divergence_terms import Divergence, divergence_of
from .linear_log_probs import operand_dtype
from .logits import LogitTransform
from .products import (
    coefficients_dtype,
    exact_arithmetic,
    matmul_into,
    multiplies_halves,
    project_into,
    refuse_second_derivative,
    statistics_dtype,
)
from .tiled import columns_per_tile, rows_per_tile

# Replaces a logit of -inf: far below any logit, and finite, so 0 times this number is 0. The same in fp32 and float64
_ABSENT_LOGIT = -(2.0**100)
# On the CPU seven float64 tiles of this size exist at a time: 7 MiB, and as much again for intermediate results
_CPU_TOKENS = 128
_CPU_COLUMNS = 1024


@dataclass(frozen=True)
class DivergenceHead:
    """One model's head."""

    weight: Tensor
    """(V, H)"""
    bias: Tensor | None = None
    """(V,), or None"""
    transform: LogitTransform = field(default_factory=LogitTransform)


class LinearDivergence(NamedTuple):
    """Per-token results, (N,) each: fp32, or float64 if an operand is."""

    divergence: Tensor
    """Divergence of student and teacher, in nats, differentiable."""
    entropy: Tensor
    """The student's entropy, in nats, without gradient."""


class _Operands(NamedTuple):
    student_hidden: Tensor
    student_weight: Tensor
    student_bias: Tensor | None
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None


@dataclass(frozen=True)
class Settings:
    """What the call asks for. Forward and backward read weights and biases only inside `readable()`."""

    student: LogitTransform
    teacher: LogitTransform
    student_dtype: torch.dtype
    teacher_dtype: torch.dtype
    divergence: Divergence
    chunk_size: int | None
    columns: int | None
    tile_dtype: torch.dtype | None
    readable: Callable[[], AbstractContextManager[Any]]

    @cached_property
    def accumulate(self) -> torch.dtype:
        """The dtype of results and of sums of gradients, and of the backward's tiles."""
        return statistics_dtype(torch.promote_types(self.student_dtype, self.teacher_dtype))

    def logits_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of the forward's tiles. On the CPU, the rounding of results to fp32 is then the only one."""
        if self.tile_dtype is not None:
            return self.tile_dtype
        return torch.float64 if device.type == "cpu" else self.accumulate

    def sums(self, hidden: Tensor, has_one_head: bool) -> TokenSums:
        """Return sums of nothing, for the tokens of `hidden`."""
        tile_dtype = self.logits_dtype(hidden.device)
        return TokenSums(
            self.divergence, hidden, has_one_head=has_one_head, dtype=self.accumulate, tile_dtype=tile_dtype
        )

    def has_one_head(self, x: _Operands) -> bool:
        """Whether both models have the same weight, bias and transform. Call it inside `readable()`."""
        return (
            self.student == self.teacher
            and _is_same(x.student_weight, x.teacher_weight)
            and _is_same(x.student_bias, x.teacher_bias)
        )

    def gradient_dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of coefficients, and of what they are multiplied with. Those of a token may exceed fp16's range."""
        if self.student_dtype == torch.float16:
            return torch.float32
        return coefficients_dtype(self.student_dtype, device)

    def tiles(self, x: _Operands, *, has_one_head: bool, is_forward: bool) -> Iterator[Tile]:
        """Yield every tile. The outer loop is over classes, so each slice of a weight is cast once.

        Only the forward computes the logits in `logits_dtype`: the gradient does not need more than fp32.
        """
        N = len(x.student_hidden)
        V, H = x.student_weight.shape
        device = x.student_hidden.device
        n = rows_per_tile(N, device, self.chunk_size, V * H)
        v = columns_per_tile(n, V, device, self.columns, V * H)
        if device.type == "cpu":
            n = min(n, _CPU_TOKENS) if self.chunk_size is None else n
            v = min(v, _CPU_COLUMNS) if self.columns is None else v
        logits_dtype = self.logits_dtype(device) if is_forward else self.accumulate
        buffers = [x.student_hidden.new_empty(n * v, dtype=logits_dtype) for _ in range(7)]
        for first_column in range(0, V, v):
            columns = slice(first_column, min(first_column + v, V))
            weight_vH = _operand(x.student_weight[columns], self.student_dtype)
            student_vH = weight_vH.to(logits_dtype) if logits_dtype == torch.float64 else weight_vH
            if not has_one_head:
                teacher_vH = _operand(x.teacher_weight[columns], self.teacher_dtype)
                teacher_vH = teacher_vH.to(logits_dtype) if logits_dtype == torch.float64 else teacher_vH
            for first_token in range(0, N, n):
                tokens = slice(first_token, min(first_token + n, N))
                shape = (tokens.stop - tokens.start, columns.stop - columns.start)
                student_logits, other_logits, *scratch = (
                    buffer[: shape[0] * shape[1]].view(shape) for buffer in buffers
                )
                hidden_nH = _operand(x.student_hidden[tokens], self.student_dtype)
                _project(student_logits, hidden_nH, student_vH, x.student_bias, columns)
                if has_one_head:
                    self._project_gap_(other_logits, student_logits, x, tokens, student_vH)
                else:
                    teacher_nH = _operand(x.teacher_hidden[tokens], self.teacher_dtype)
                    _project(other_logits, teacher_nH, teacher_vH, x.teacher_bias, columns)
                    self.teacher.apply_(other_logits).clamp_(min=_ABSENT_LOGIT)
                    self.student.apply_(student_logits)
                slope = self.student.softcap_derivative(student_logits)
                student_logits.clamp_(min=_ABSENT_LOGIT)
                yield Tile(tokens, columns, student_logits, other_logits, hidden_nH, weight_vH, slope, *scratch)

    def _project_gap_(
        self, gap: Tensor, student_logits: Tensor, x: _Operands, tokens: slice, weight_vH: Tensor
    ) -> None:
        """Write z_t - z_s to `gap`, and overwrite the products `student_logits` with z_s."""
        difference_nH = x.teacher_hidden[tokens].to(gap.dtype) - x.student_hidden[tokens].to(gap.dtype)
        _project_exactly(gap, difference_nH, weight_vH)
        softcap = self.student.softcap
        if softcap is None:
            self.student.apply_(student_logits)
            gap *= self.student.slope
            return
        # tanh(y + d) - tanh(y) = tanh(d) (1 - tanh(y)^2) / (1 + tanh(y) tanh(d)), which does not cancel for a small d
        scale = self.student.logit_scale / softcap
        gap *= scale
        is_far = gap.abs() > 1
        teacher_tanh = torch.tanh(student_logits * scale + gap) if bool(is_far.any()) else None
        student_logits.mul_(scale).tanh_()
        gap.tanh_()
        rise = (1 - student_logits.square()).mul_(gap).div_(gap.mul(student_logits).add_(1))
        if teacher_tanh is not None:
            torch.where(is_far, teacher_tanh.sub_(student_logits), rise, out=rise)
        torch.mul(rise, softcap / self.student.temperature, out=gap)
        student_logits.mul_(softcap / self.student.temperature)


def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is b:
        return True
    return a is not None and b is not None and a.numel() > 0 and _place(a) == _place(b)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where the values of a tensor are. Unlike a pointer, a tensor without data has it too."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the operand of matrix products, rounded to `dtype`."""
    return tensor.to(dtype).to(coefficients_dtype(dtype, tensor.device))


def _project(out: Tensor, hidden_nH: Tensor, weight_vH: Tensor, bias: Tensor | None, columns: slice) -> None:
    """Compute the head's product and add the bias, in the dtype of `out`."""
    if hidden_nH.dtype == weight_vH.dtype == out.dtype:
        project_into(out, hidden_nH, weight_vH)
    else:
        matmul_into(out, hidden_nH, weight_vH.t(), accumulate=False)
    if bias is not None:
        out += bias[columns]


def _project_exactly(out: Tensor, difference_nH: Tensor, weight_vH: Tensor) -> None:
    """Compute the head's product of a difference in fp32 or float64.

    For tensor cores, the difference is split into three bf16 numbers, whose sum is the difference.
    """
    if weight_vH.dtype != torch.bfloat16 or not multiplies_halves(out.device):
        matmul_into(out, difference_nH, weight_vH.t(), accumulate=False)
        return
    rest_nH = difference_nH
    for part in range(3):
        part_nH = rest_nH.to(torch.bfloat16)
        matmul_into(out, part_nH, weight_vH.t(), accumulate=part > 0)
        rest_nH = rest_nH - part_nH


def _scan(settings: Settings, x: _Operands, gradients: Gradients | None) -> TokenSums:
    """Fold all tiles. `gradients`, if given, is filled too."""
    has_one_head = settings.has_one_head(x)
    sums = settings.sums(x.student_hidden, has_one_head)
    is_centred = settings.divergence.is_centred
    for tile in settings.tiles(x, has_one_head=has_one_head, is_forward=True):
        sums.fold_(tile, gradients, with_terms=not is_centred)
    if is_centred:
        sums.centre_()
        for tile in settings.tiles(x, has_one_head=has_one_head, is_forward=True):
            sums.fold_terms_(tile, sums.gaps(tile, sums.exponentials(tile)), gradients)
    return sums


class _DivergenceFrozen(torch.autograd.Function):
    """The divergence with a gradient for the student's hidden states only, which the forward forms and saves."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, x: _Operands, hidden: Tensor) -> LinearDivergence:
        ctx.set_materialize_grads(False)
        with settings.readable(), exact_arithmetic(hidden.device):
            gradients = Gradients(hidden, settings.accumulate, settings.gradient_dtype(hidden.device))
            sums = _scan(settings, x._replace(student_hidden=hidden), gradients)
            a, b = sums.gradient_factors()
            slope = settings.student.slope
            gradient_NH = gradients.student_sums.mul_((a * slope)[:, None])
            gradient_NH.sub_(gradients.coefficient_sums.mul_((b * slope)[:, None]))
        results = LinearDivergence(*sums.results())
        ctx.save_for_backward(gradient_NH)
        ctx.hidden_dtype = hidden.dtype
        ctx.mark_non_differentiable(results.entropy)
        return results

    @staticmethod
    def backward(ctx: Any, grad_divergence: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        if grad_divergence is None:
            return None, None, None
        (gradient_NH,) = ctx.saved_tensors
        grad_hidden = torch.empty(gradient_NH.shape, dtype=ctx.hidden_dtype, device=gradient_NH.device)
        torch.mul(gradient_NH, grad_divergence[:, None], out=grad_hidden)
        return None, None, grad_hidden


class _DivergenceRecompute(torch.autograd.Function):
    """The divergence with a gradient for each of the student's operands. The backward recomputes the tiles."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, *operands: Tensor | None) -> LinearDivergence:
        x = _Operands(*operands)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        with settings.readable(), exact_arithmetic(x.student_hidden.device):
            sums = _scan(settings, x, None)
        results = LinearDivergence(*sums.results())
        ctx.save_for_backward(*x, sums.student_shift, sums.other_shift, *sums.gradient_factors())
        ctx.settings = settings
        ctx.has_one_head = sums.has_one_head
        ctx.mark_non_differentiable(results.entropy)
        return results

    @staticmethod
    def backward(ctx: Any, grad_divergence: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        if grad_divergence is None:
            return (None,) * 7
        settings: Settings = ctx.settings
        # Read only once: offloading and checkpointing allow no second read
        saved_tensors = ctx.saved_tensors
        x = _Operands(*saved_tensors[:6])
        student_shift, other_shift, a, b = saved_tensors[6:]
        slope = settings.student.slope
        upstream_grad = grad_divergence.to(settings.accumulate) * slope
        with settings.readable(), exact_arithmetic(x.student_hidden.device):
            # As in the forward: hooks of saved tensors may have copied one of the weights
            sums = settings.sums(x.student_hidden, ctx.has_one_head)
            sums.student_shift = student_shift
            sums.other_shift = other_shift
            sums.largest_teacher = other_shift
            gradients = _backward(settings, x, sums, a * upstream_grad, b * upstream_grad, ctx.needs_input_grad[1:4])
        return None, *gradients, None, None, None


def _backward(
    settings: Settings, x: _Operands, sums: TokenSums, a: Tensor, b: Tensor, needs_gradient: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Recompute the tiles, and return the gradients of the student's hidden states, weight and bias."""
    needs_hidden, needs_weight, needs_bias = needs_gradient
    hidden, weight, bias = x[:3]
    product_dtype = settings.gradient_dtype(hidden.device)
    grad_hidden = hidden.new_zeros(hidden.shape, dtype=settings.accumulate) if needs_hidden else None
    # Zeros, because no tile is written if there is no token
    grad_weight = torch.zeros_like(weight) if needs_weight else None
    grad_bias = None
    if needs_bias and bias is not None:
        grad_bias = torch.zeros_like(bias, dtype=settings.accumulate)
    for tile in settings.tiles(x, has_one_head=sums.has_one_head, is_forward=False):
        gaps = sums.gaps(tile, sums.exponentials(tile))
        coefficients = settings.divergence.coefficients(gaps, tile.scratch, tile.shifted_logits)
        grad_tile = gaps.student.mul_(a[tile.tokens, None]).sub_(coefficients.mul_(b[tile.tokens, None]))
        if tile.slope is not None:
            grad_tile.mul_(tile.slope)
        if grad_bias is not None:
            grad_bias[tile.columns] += grad_tile.sum(0)
        rounded_grad = grad_tile.to(product_dtype)
        if grad_hidden is not None:
            matmul_into(grad_hidden[tile.tokens], rounded_grad, tile.weight.to(product_dtype), accumulate=True)
        if grad_weight is not None:
            if tile.is_first_of_columns:
                sums_vH = weight.new_empty(tile.weight.shape, dtype=settings.accumulate)
            matmul_into(
                sums_vH, rounded_grad.t(), tile.hidden.to(product_dtype), accumulate=not tile.is_first_of_columns
            )
            if tile.tokens.stop == len(hidden):
                grad_weight[tile.columns] = sums_vH.to(weight.dtype)
    return (
        None if grad_hidden is None else grad_hidden.to(hidden.dtype),
        grad_weight,
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


# Not compiled: torch.compile may change rounding and the order of sums
@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_divergence(
    student_hidden: Tensor,
    student: DivergenceHead,
    teacher_hidden: Tensor,
    teacher: DivergenceHead,
    beta: float,
    *,
    chunk_size: int | None = None,
    tile_columns: int | None = None,
    tile_dtype: torch.dtype | None = None,
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> LinearDivergence:
    """Return the divergence of student and teacher for each token, without storing all logits.

    Logits are computed tile by tile, accumulated in fp32 (on the CPU in float64) and never rounded to half precision.
    If both models have one head (the same weight, bias and transform), the error is relative to the difference of their
    hidden states. Only the student's hidden states, weight and bias get a gradient.

    Args:
        student_hidden (`torch.Tensor` of shape `(N, Hs)`), teacher_hidden (`torch.Tensor` of shape `(N, Ht)`):
            Hidden states: bf16, fp16, fp32 or float64. Each model's are multiplied in the wider dtype of hidden states
            and weight, or in autocast's dtype under autocast (except float64).
        student (`DivergenceHead`), teacher (`DivergenceHead`):
            The heads, with the same number of classes.
        beta (`float`):
            As in TRL's `DistillationConfig`: 0 is KL(teacher || student), 1 is KL(student || teacher), and a number
            between them is the Jensen-Shannon divergence with the mixture (1 - beta) student + beta teacher.
        chunk_size (`int`, *optional*):
            Tokens in a tile. `None` chooses from the number of tokens and the device.
        tile_columns (`int`, *optional*):
            Columns of the vocabulary in a tile. `None` chooses from the tokens in a tile and the device.
        tile_dtype (`torch.dtype`, *optional*):
            The dtype of the forward's tiles. `None`: float64 on the CPU, else that of the results.
        readable (`Callable`, *optional*):
            Returns a context in which weights and biases can be read, for engines that shard parameters. The forward
            enters it, and so does a backward that reads the weights.
    """
    if student.weight.shape[0] != teacher.weight.shape[0] or len(student_hidden) != len(teacher_hidden):
        raise ValueError(
            "Student and teacher must have equal numbers of classes and of tokens, got "
            f"{(student.weight.shape[0], len(student_hidden))} and {(teacher.weight.shape[0], len(teacher_hidden))}."
        )
    if not 0 <= beta <= 1:
        raise ValueError(f"`beta` must be between 0 and 1, got {beta}.")
    settings = Settings(
        student.transform,
        teacher.transform,
        operand_dtype(student_hidden, student.weight),
        operand_dtype(teacher_hidden, teacher.weight),
        divergence_of(beta),
        chunk_size,
        tile_columns,
        tile_dtype,
        readable,
    )
    x = _Operands(
        student_hidden, student.weight, student.bias, teacher_hidden.detach(), teacher.weight.detach(), teacher.bias
    )
    needs_gradient = [tensor is not None and tensor.requires_grad for tensor in x[:3]]
    if not (torch.is_grad_enabled() and any(needs_gradient)):
        with torch.no_grad(), readable(), exact_arithmetic(student_hidden.device):
            return LinearDivergence(*_scan(settings, x, None).results())
    if any(needs_gradient[1:]):
        return LinearDivergence(*_DivergenceRecompute.apply(settings, *x))
    return LinearDivergence(*_DivergenceFrozen.apply(settings, x, student_hidden))
