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
from .products import as_operand, exact_arithmetic, matmul_into, statistics_dtype
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
        v = columns_per_tile(n, V, hidden.device)
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
                matmul_into(logits, hidden_nH, weight_vH.t(), accumulate=False)
                if bias is not None:
                    logits.add_(bias[columns].to(self.dtype))
                self.transform.apply_(logits)
                yield rows, columns, logits, scratch, hidden_nH, weight_vH

    def row_chunks(self, hidden: Tensor) -> Iterator[slice]:
        """Slices of tokens as long as a tile's."""
        n = rows_per_tile(hidden.shape[0], hidden.device, self.chunk_size)
        for first in range(0, hidden.shape[0], n):
            yield slice(first, min(first + n, hidden.shape[0]))

    def slope_at_target(self, target_logit: Tensor) -> Tensor:
        """dz/dx of the target, of shape (n, 1)."""
        slope = self.transform.derivative(target_logit)
        return slope[:, None] if isinstance(slope, Tensor) else torch.full_like(target_logit, slope)[:, None]


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
            for rows in head.row_chunks(hidden):
                # The target's row stays out of the half-precision product, else 1 - p cancels
                target_nH = weight[targets[rows]].to(head.dtype).to(gradient_NH.dtype)
                coefficient = head.slope_at_target(statistics.target_logit[rows]) * others_share[rows]
                gradient_NH[rows].addcmul_(target_nH, coefficient)
        ctx.save_for_backward(gradient_NH)
        ctx.hidden_dtype = hidden.dtype
        results = statistics.results(head.outputs)
        ctx.mark_non_differentiable(*(x for x in results[1:] if x is not None))
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
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
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, maximum, sum_exp, target_logit, entropy = ctx.saved_tensors
        head: Head = ctx.head
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None, None
        coefficients = _Coefficients(
            maximum, sum_exp, target_logit, entropy, grad_log_probs, grad_entropy, head.transform
        )
        accumulate = maximum.dtype
        _, needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        with head.readable(), exact_arithmetic(hidden.device):
            grad_hidden = torch.empty(hidden.shape, dtype=accumulate, device=hidden.device) if needs_hidden else None
            # Zeros: with no token at all no tile is written
            grad_weight = torch.zeros_like(weight) if needs_weight else None
            grad_bias = torch.zeros(bias.shape, dtype=accumulate, device=bias.device) if needs_bias else None
            weight_tile: Tensor | None = None
            for rows, columns, logits, scratch, hidden_nH, weight_vH in head.tiles(hidden, weight, bias):
                first_rows, last_rows = rows.start == 0, rows.stop == hidden.shape[0]
                local = targets[rows] - columns.start
                grad_nv = coefficients.of_others_(rows, local, logits, scratch)
                if grad_hidden is not None:
                    operand = as_operand(grad_nv, head.dtype)
                    matmul_into(grad_hidden[rows], operand, weight_vH, accumulate=columns.start > 0)
                if grad_weight is None and grad_bias is None:
                    continue
                coefficients.put_target_(rows, local, grad_nv)
                if grad_weight is not None:
                    if first_rows:
                        weight_tile = torch.empty(weight_vH.shape, dtype=accumulate, device=hidden.device)
                    assert weight_tile is not None
                    operand = as_operand(grad_nv, head.dtype)
                    matmul_into(weight_tile, operand.t(), hidden_nH, accumulate=not first_rows)
                    if last_rows:
                        grad_weight[columns] = weight_tile.mul_(coefficients.unit)
                if grad_bias is not None:
                    grad_bias[columns] += grad_nv.sum(0)
            if grad_hidden is not None:
                for rows in head.row_chunks(hidden):
                    target_nH = weight[targets[rows]].to(head.dtype).to(accumulate)
                    grad_hidden[rows].addcmul_(target_nH, coefficients.target[rows, None])
                grad_hidden = grad_hidden.mul_(coefficients.unit).to(hidden.dtype)
            if grad_bias is not None:
                grad_bias = grad_bias.mul_(coefficients.unit).to(bias.dtype)
        return None, grad_hidden, grad_weight, grad_bias, None, None


class _Coefficients:
    """The gradient of each product x_nv, in units of a power of two so that fp16 operands do not lose small ones.

    With g and e the gradients of log p and of the entropy E, and c = dz/dx:
    c_v p_v (-g - e (log p_v + E)) for v != t, and c_t ((1 - p_t) g - e p_t (log p_t + E)) for the target.
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
        zero = torch.zeros_like(maximum)
        grads = torch.stack([zero if grad is None else grad for grad in (grad_log_probs, grad_entropy)])
        largest = grads.abs().amax() if grads.numel() else grads.new_zeros(())
        exponent = torch.frexp(largest).exponent
        self.unit = torch.ldexp(torch.ones_like(largest), exponent)
        self.g, self.e = grads / self.unit
        self.with_entropy = grad_entropy is not None
        self.maximum, self.transform = maximum, transform
        log_odds = target_logit - maximum - sum_exp.log()
        self.log_q, log_p = F.logsigmoid(-log_odds), F.logsigmoid(log_odds)
        self.log_others = self.log_q - sum_exp.log()  # log p_v = z_v - max + log_others
        self.others = self.log_q.exp() / sum_exp  # p_v = exp(z_v - max) * others
        self.entropy = zero if entropy is None else entropy
        target = self.g * self.log_q.exp() - self.e * log_p.exp() * (log_p + self.entropy)
        self.target = target * transform.derivative(target_logit)

    def of_others_(self, rows: slice, local: Tensor, logits: Tensor, scratch: Tensor) -> Tensor:
        """The gradient of this tile, 0 in the target's column; both buffers are overwritten."""
        slope = self.transform.derivative(logits)
        shifted = logits.sub_(self.maximum[rows, None])
        p = torch.exp(shifted, out=scratch).mul_(self.others[rows, None])
        if self.with_entropy:
            surprise = shifted.add_((self.log_others + self.entropy)[rows, None])
            p.mul_(surprise.mul_(-self.e[rows, None]).sub_(self.g[rows, None]))
        else:
            p.mul_(-self.g[rows, None])
        p.mul_(slope)
        return self._put(local, p, torch.zeros_like(self.target[rows]))

    def put_target_(self, rows: slice, local: Tensor, grad_nv: Tensor) -> Tensor:
        """Put the target's gradient into its column, where it lies in this tile."""
        return self._put(local, grad_nv, self.target[rows])

    @staticmethod
    def _put(local: Tensor, grad_nv: Tensor, value: Tensor) -> Tensor:
        inside = ((local >= 0) & (local < grad_nv.shape[1]))[:, None]
        column = local[:, None].clamp(0, grad_nv.shape[1] - 1)
        return grad_nv.scatter_(1, column, torch.where(inside, value[:, None], grad_nv.gather(1, column)))


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
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> LinearLogProbs:
    """Per-token results tile by tile; chooses the path by what needs a gradient, which changes no result.

    Whether a gradient is recorded is read here: inside an autograd function grad mode is always off.
    """
    head = Head(operand_dtype, transform, outputs, chunk_size, readable)
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    entropy_grad = entropy_requires_grad and "entropy" in outputs
    differentiable = "log_probs" in outputs or entropy_grad
    if not torch.is_grad_enabled() or not differentiable or not (hidden.requires_grad or trained):
        with readable(), exact_arithmetic(hidden.device):
            return scan(head, hidden, weight, bias, targets).results(outputs)
    if trained or entropy_grad:
        return LinearLogProbs(*TrainedHead.apply(head, hidden, weight, bias, targets, entropy_grad))
    return LinearLogProbs(*FrozenHead.apply(head, hidden, weight, bias, targets))
