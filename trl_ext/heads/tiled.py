"""The tiled head: logits in tiles, statistics online, the gradient in as few products as it needs.

`scan` runs over the tiles once. `FrozenHead` forms the gradient of the hidden states in that same pass, which is
possible because d log p / dh does not depend on the gradient that will come in (2 products). `TrainedHead` recomputes
each tile in the backward (4 products, 3 if only the entropy's gradient asked for it). Without a gradient there is one.

Dimensions: N tokens, H hidden size, V vocabulary, n and v those of a tile.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .logits import LogitTransform
from .outputs import LinearLogProbs
from .products import (
    as_operand,
    exact_arithmetic,
    matmul_into,
    project_into,
    refuse_second_derivative,
    statistics_dtype,
)
from .statistics import RunningStatistics
from .tiles import columns_per_tile, rows_per_tile


@dataclass(frozen=True)
class Head:
    """What does not change from tile to tile.

    `readable` is entered whenever the weight and bias are read, in the forward and again in the backward: an engine
    that shards parameters gathers them there.
    """

    dtype: torch.dtype  # of the operands
    transform: LogitTransform
    outputs: tuple[str, ...]
    chunk_size: int | None
    columns: int | None
    readable: Callable[[], AbstractContextManager[Any]]

    def tiles(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> "Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Tensor]]":
        """Yield (rows, columns, logits_nv, scratch_nv, hidden_nH, weight_vH) for every tile, columns outermost.

        So each slice of the weight is cast once. `logits` and `scratch` are buffers that the next tile overwrites.
        """
        accumulate = statistics_dtype(self.dtype)
        N, V = hidden.shape[0], weight.shape[0]
        n = rows_per_tile(N, hidden.device, self.chunk_size)
        v = columns_per_tile(n, V, hidden.device, self.columns)
        buffers = hidden.new_empty(2, n * v, dtype=accumulate)
        for start in range(0, V, v):
            columns = slice(start, min(start + v, V))
            weight_vH = weight[columns].to(self.dtype)
            width = columns.stop - columns.start
            for first in range(0, N, n):
                rows = slice(first, min(first + n, N))
                shape = (rows.stop - rows.start, width)
                logits, scratch = (buffer[: shape[0] * width].view(shape) for buffer in buffers)
                hidden_nH = hidden[rows].to(self.dtype)
                project_into(logits, hidden_nH, weight_vH)
                if bias is not None:
                    logits.add_(bias[columns].to(self.dtype))
                self.transform.apply_(logits)
                yield rows, columns, logits, scratch, hidden_nH, weight_vH

    def add_targets_(self, sums_NH: Tensor, coefficient_N: Tensor, weight: Tensor, targets: Tensor) -> None:
        """Add each target's row of the weight, times its coefficient.

        In fp32: it stays out of the product in half precision, whose rounding would not cancel against 1 - p.
        """
        n = rows_per_tile(sums_NH.shape[0], sums_NH.device, self.chunk_size)
        for first in range(0, sums_NH.shape[0], n):
            rows = slice(first, first + n)
            # Clamped for other devices than the CPU: a target out of range has NaN for its coefficient
            target_nH = weight[targets[rows].clamp(0, weight.shape[0] - 1)].to(self.dtype).to(sums_NH.dtype)
            sums_NH[rows].addcmul_(target_nH, coefficient_N[rows, None])


def scan(
    head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, others_NH: Tensor | None = None
) -> RunningStatistics:
    """Fold every tile; with `others_NH`, also leave there sum_{v != t} exp(z_v - max) dz_v/dx_v W_v (fp32)."""
    statistics = RunningStatistics(targets, weight.shape[0], head.outputs, statistics_dtype(head.dtype))
    for rows, columns, logits, scratch, _, weight_vH in head.tiles(hidden, weight, bias):
        # Read before the target's column is put out: that column holds no logit
        slope = head.transform.derivative(logits) if others_NH is not None else None
        statistics.take_target_(rows, columns.start, logits, scratch)
        rescale = statistics.fold_(rows, logits, scratch)
        if others_NH is not None:
            coefficients = scratch.mul_(slope) if isinstance(slope, Tensor) else scratch
            if columns.start:
                others_NH[rows].mul_(rescale)
            operand = as_operand(coefficients, head.dtype)
            matmul_into(others_NH[rows], operand, weight_vH, accumulate=columns.start > 0)
    if others_NH is not None and head.transform.softcap is None:
        others_NH.mul_(head.transform.logit_scale / head.transform.temperature)
    return statistics


class FrozenHead(torch.autograd.Function):
    """Log-probs whose gradient goes to the hidden states alone, formed in the forward.

    d log p_t / dh = (1 - p_t) (c_t W_t - sum_{v != t} q_v c_v W_v), with q the softmax over the others and c = dz/dx.
    Neither factor cancels when the target is nearly certain. It is kept in fp32 in the place of the hidden states.
    """

    @staticmethod
    def forward(
        ctx: Any, head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> LinearLogProbs:
        ctx.set_materialize_grads(False)
        gradient_NH = torch.empty(hidden.shape, dtype=statistics_dtype(head.dtype), device=hidden.device)
        with head.readable(), exact_arithmetic(hidden.device):
            statistics = scan(head, hidden, weight, bias, targets, others_NH=gradient_NH)
            others_share = torch.sigmoid(-statistics.log_odds)[:, None]
            gradient_NH.mul_(-others_share / statistics.sum_exp[:, None])
            slope = head.transform.derivative(statistics.target_logit)
            head.add_targets_(gradient_NH, others_share[:, 0] * slope, weight, targets)
        ctx.save_for_backward(gradient_NH)
        ctx.hidden_dtype = hidden.dtype
        results = statistics.results(head.outputs)
        ctx.mark_non_differentiable(*(x for x in results[1:] if x is not None))
        return results

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        if grad_log_probs is None:
            return None, None, None, None, None
        (gradient_NH,) = ctx.saved_tensors
        grad_hidden = torch.empty(gradient_NH.shape, dtype=ctx.hidden_dtype, device=gradient_NH.device)
        torch.mul(gradient_NH, grad_log_probs[:, None], out=grad_hidden)
        return None, grad_hidden, None, None, None


class TrainedHead(torch.autograd.Function):
    """Log-probs and entropy with a gradient to hidden states, weight and bias; the backward recomputes the tiles."""

    @staticmethod
    def forward(
        ctx: Any, head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, entropy_grad: bool
    ) -> LinearLogProbs:
        ctx.set_materialize_grads(False)
        with head.readable(), exact_arithmetic(hidden.device):
            statistics = scan(head, hidden, weight, bias, targets)
        results = statistics.results(head.outputs)
        entropy = results.entropy if entropy_grad else None
        saved = (statistics.max, statistics.sum_exp, statistics.target_logit, entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, *saved)
        ctx.head = head
        without_grad = results[2:] if entropy_grad else results[1:]
        ctx.mark_non_differentiable(*(x for x in without_grad if x is not None))
        return results

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        hidden, weight, bias, targets, maximum, sum_exp, target_logit, entropy = ctx.saved_tensors
        head: Head = ctx.head
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None, None
        coefficients = _Coefficients(
            maximum, sum_exp, target_logit, entropy, grad_log_probs, grad_entropy, head.transform
        )
        _, needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        with head.readable(), exact_arithmetic(hidden.device):
            sums = {"dtype": maximum.dtype, "device": hidden.device}
            grad_hidden = torch.empty(hidden.shape, **sums) if needs_hidden else None
            # Zeros: with no token at all no tile is written
            grad_weight = torch.zeros_like(weight) if needs_weight else None
            grad_bias = torch.zeros(bias.shape, **sums) if needs_bias else None
            unit = coefficients.unit()
            for rows, columns, logits, scratch, hidden_nH, weight_vH in head.tiles(hidden, weight, bias):
                local = targets[rows] - columns.start
                tile = coefficients.of_others_(rows, local, logits, scratch)
                if grad_hidden is not None:
                    operand = as_operand(tile, head.dtype)
                    matmul_into(grad_hidden[rows], operand, weight_vH, accumulate=columns.start > 0)
                if grad_weight is None and grad_bias is None:
                    continue
                tile = coefficients.with_target_(rows, local, tile, unit)
                if grad_bias is not None:
                    grad_bias[columns] += tile.sum(0)
                if grad_weight is not None:
                    if rows.start == 0:
                        grad_weight_vH = torch.empty(weight_vH.shape, **sums)
                    operand = as_operand(tile, head.dtype)
                    matmul_into(grad_weight_vH, operand.t(), hidden_nH, accumulate=rows.start > 0)
                    if rows.stop == hidden.shape[0]:
                        grad_weight[columns] = grad_weight_vH.mul_(unit)
            if grad_hidden is not None:
                grad_hidden.mul_(coefficients.row_factor[:, None])
                head.add_targets_(grad_hidden, coefficients.target, weight, targets)
                grad_hidden = grad_hidden.to(hidden.dtype)
            if grad_bias is not None:
                grad_bias = grad_bias.mul_(unit).to(bias.dtype)
        return None, grad_hidden, grad_weight, grad_bias, None, None


class _Coefficients:
    """The gradient of each product x_v of a token, as a row factor times a tile that half precision holds well.

    With g and e the gradients of log p and of the entropy E, and c = dz/dx, it is c_v p_v (-g - e (log p_v + E)) for
    v != t. With p_v = exp(z_v - max) * share that is share * s * [c_v exp(z_v - max) (a + b (z_v - max))]: s is the
    larger of what stands at the largest logit and of e, so that the bracket is near 1 there, and exactly 1 without an
    entropy. The target's is c_t ((1 - p_t) g - e p_t (log p_t + E)), of shape (N,), and kept in fp32.
    """

    def __init__(
        self,
        maximum: Tensor,
        sum_exp: Tensor,
        target_logit: Tensor,
        entropy: Tensor | None,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        transform: LogitTransform,
    ) -> None:
        self.maximum, self.transform = maximum, transform
        log_odds = target_logit - maximum - sum_exp.log()
        log_p, log_q = F.logsigmoid(log_odds), F.logsigmoid(-log_odds)
        share = log_q.exp() / sum_exp
        g = torch.zeros_like(maximum) if grad_log_probs is None else grad_log_probs
        target = g * log_q.exp()
        self.slope_of_surprise: Tensor | None = None
        if grad_entropy is None or entropy is None:
            row_factor = -g
        else:
            at_maximum = -g - grad_entropy * (log_q - sum_exp.log() + entropy)
            row_factor = torch.where(at_maximum.abs() >= grad_entropy.abs(), at_maximum, -grad_entropy)
            nonzero = torch.where(row_factor == 0, 1.0, row_factor)
            self.offset, self.slope_of_surprise = at_maximum / nonzero, -grad_entropy / nonzero
            target = target - grad_entropy * log_p.exp() * (log_p + entropy)
        self.row_factor = row_factor * share
        self.target = target * transform.derivative(target_logit)

    def of_others_(self, rows: slice, local: Tensor, logits: Tensor, scratch: Tensor) -> Tensor:
        """The bracket for this tile, 0 in the target's column; both buffers are overwritten."""
        slope = self.transform.derivative(logits)
        shifted = logits.sub_(self.maximum[rows, None])
        bracket = torch.exp(shifted, out=scratch).mul_(slope)
        if self.slope_of_surprise is not None:
            bracket.mul_(shifted.mul_(self.slope_of_surprise[rows, None]).add_(self.offset[rows, None]))
        return _put(bracket, local, torch.zeros_like(self.maximum[rows]))

    def with_target_(self, rows: slice, local: Tensor, bracket: Tensor, unit: Tensor) -> Tensor:
        """The whole gradient of this tile's products in units of `unit`, in the place of the bracket."""
        return _put(bracket.mul_((self.row_factor / unit)[rows, None]), local, (self.target / unit)[rows])

    def unit(self) -> Tensor:
        """A power of two near the largest coefficient, so that fp16 does not lose them where the loss is small."""
        largest = torch.cat([self.row_factor, self.target, self.target.new_zeros(1)]).abs().amax()
        return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


def _put(tile: Tensor, local: Tensor, value: Tensor) -> Tensor:
    """Write `value` (n,) into the columns `local` of the tile (n, v), where they lie in it."""
    inside = ((local >= 0) & (local < tile.shape[1]))[:, None]
    column = local[:, None].clamp(0, tile.shape[1] - 1)
    return tile.scatter_(1, column, torch.where(inside, value[:, None], tile.gather(1, column)))


def tiled_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    *,
    operand_dtype: torch.dtype,
    entropy_requires_grad: bool = False,
    chunk_size: int | None = None,
    columns: int | None = None,
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> LinearLogProbs:
    """Per-token results tile by tile; chooses the path by what needs a gradient, which changes no result.

    Tiles are `chunk_size` tokens by `columns` of the vocabulary, each chosen where None.

    Whether a gradient is recorded is read here: inside an autograd function grad mode is always off.
    """
    head = Head(operand_dtype, transform, outputs, chunk_size, columns, readable)
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    entropy_grad = entropy_requires_grad and "entropy" in outputs
    differentiable = "log_probs" in outputs or entropy_grad
    if not torch.is_grad_enabled() or not differentiable or not (hidden.requires_grad or trained):
        with readable(), exact_arithmetic(hidden.device):
            return scan(head, hidden, weight, bias, targets).results(outputs)
    if trained or entropy_grad:
        return LinearLogProbs(*TrainedHead.apply(head, hidden, weight, bias, targets, entropy_grad))
    return LinearLogProbs(*FrozenHead.apply(head, hidden, weight, bias, targets))
