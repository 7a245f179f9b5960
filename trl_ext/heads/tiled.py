"""The tiled head: logits in tiles, statistics online, the gradient in as few products as it needs.

`scan` runs over the tiles once. `FrozenHead` forms the gradient of the hidden states in that same pass, which is
possible because d log p / dh does not depend on the gradient that will come in (2 products). `TrainedHead` recomputes
each tile in the backward (4 products, 3 if only the entropy or the mean log-prob asked for it). Without a gradient
there is one.

Where the rows of the weight lie on several ranks, `Exchange` brings tokens, statistics and sums together, and the loops
below are the same.

Dimensions: N tokens, H hidden size, V vocabulary, n and v those of a tile, M tokens scored together with other ranks'.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .coefficients import Coefficients, Upstream
from .exchange import Part
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
from .rows import Block, Rows, RowsHere
from .statistics import RunningStatistics
from .tiles import columns_per_tile, rows_per_tile
from .vocabulary import VocabularyShard


@dataclass(frozen=True)
class Head:
    """What does not change from tile to tile.

    `readable` is entered whenever the weight and bias are read, in the forward and again in the backward: an engine
    that shards parameters gathers them there.
    """

    dtype: torch.dtype  # of the operands
    transform: LogitTransform
    outputs: tuple[str, ...]
    shard: VocabularyShard
    chunk_size: int | None = None
    columns: int | None = None
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext

    def parts(self, hidden: Tensor) -> list[Part]:
        """The tokens of this rank, in parts that are scored together."""
        return self.shard.exchange.parts(len(hidden), hidden.device)

    def rows(self, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Rows:
        """The rows that this rank folds."""
        if self.shard.rows_for is not None:
            return self.shard.rows_for(targets)
        # An engine may have made the weight's rows readable only now
        vocabulary = self.shard.vocabulary or len(weight)
        return RowsHere((Block(self.shard.first, weight, bias),), targets, vocabulary)

    def tiles(self, hidden: Tensor, rows: Rows) -> "Iterator[tuple[slice, slice, Tensor, Tensor, Tensor, Tensor]]":
        """Yield (rows, classes, logits_nv, scratch_nv, hidden_nH, weight_vH) for every tile, classes outermost.

        So each slice of the weight is cast once. `logits` and `scratch` are buffers that the next tile overwrites.
        """
        accumulate = statistics_dtype(self.dtype)
        N = hidden.shape[0]
        n = rows_per_tile(N, hidden.device, self.chunk_size)
        v = columns_per_tile(n, rows.vocabulary, hidden.device, self.columns)
        buffers = hidden.new_empty(2, n * v, dtype=accumulate)
        for block in rows.blocks():
            for start in range(0, len(block.weight), v):
                columns = slice(start, min(start + v, len(block.weight)))
                weight_vH = block.weight[columns].to(self.dtype)
                width = columns.stop - columns.start
                classes = slice(block.first + columns.start, block.first + columns.stop)
                for first in range(0, N, n):
                    tokens = slice(first, min(first + n, N))
                    shape = (tokens.stop - tokens.start, width)
                    logits, scratch = (buffer[: shape[0] * width].view(shape) for buffer in buffers)
                    hidden_nH = hidden[tokens].to(self.dtype)
                    project_into(logits, hidden_nH, weight_vH)
                    if block.bias is not None:
                        logits.add_(block.bias[columns].to(self.dtype))
                    self.transform.apply_(logits)
                    yield tokens, classes, logits, scratch, hidden_nH, weight_vH

    def add_targets_(self, sums_NH: Tensor, coefficient_N: Tensor, rows: Rows) -> None:
        """Add each target's row of the weight, times its coefficient.

        In fp32: it stays out of the product in half precision, whose rounding would not cancel against 1 - p.
        """
        n = rows_per_tile(sums_NH.shape[0], sums_NH.device, self.chunk_size)
        for first in range(0, sums_NH.shape[0], n):
            some = slice(first, first + n)
            target_nH = rows.of_targets(some).to(self.dtype).to(sums_NH.dtype)
            sums_NH[some].addcmul_(target_nH, coefficient_N[some, None])


def scan(head: Head, hidden: Tensor, rows: Rows, targets: Tensor, others_NH: Tensor | None = None) -> RunningStatistics:
    """Fold every tile; with `others_NH`, also leave there sum_{v != t} exp(z_v - max) dz_v/dx_v W_v (fp32)."""
    statistics = RunningStatistics(
        targets, rows.vocabulary, head.outputs, statistics_dtype(head.dtype), partial=head.shard.partial
    )
    first_class = None
    for tokens, classes, logits, scratch, _, weight_vH in head.tiles(hidden, rows):
        first_class = classes.start if first_class is None else first_class
        # Read before the target's column is put out: that column holds no logit
        slope = head.transform.derivative(logits) if others_NH is not None else None
        statistics.take_target_(tokens, classes.start, logits, scratch)
        rescale = statistics.fold_(tokens, logits, scratch)
        if others_NH is not None:
            coefficients = scratch.mul_(slope) if isinstance(slope, Tensor) else scratch
            later = classes.start != first_class
            if later:
                others_NH[tokens].mul_(rescale)
            operand = as_operand(coefficients, head.dtype)
            matmul_into(others_NH[tokens], operand, weight_vH, accumulate=later)
    if others_NH is not None and first_class is None:
        others_NH.zero_()  # a rank without a row of the weight
    elif others_NH is not None and head.transform.softcap is None:
        others_NH.mul_(head.transform.logit_scale / head.transform.temperature)
    return statistics


def score(head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> LinearLogProbs:
    """Per-token results without a gradient."""
    scored = []
    with torch.no_grad(), head.readable(), exact_arithmetic(hidden.device):
        for part in head.parts(hidden):
            targets_M = part.gathered(targets)
            statistics = scan(head, part.gathered(hidden), head.rows(weight, bias, targets_M), targets_M)
            head.shard.exchange.combine_(statistics)
            scored.append(part.own_results(statistics.results(head.outputs)))
    return joined(scored)


class FrozenHead(torch.autograd.Function):
    """Log-probs whose gradient goes to the hidden states alone, formed in the forward.

    d log p_t / dh = (1 - p_t) (c_t W_t - sum_{v != t} q_v c_v W_v), with q the softmax over the others and c = dz/dx.
    Neither factor cancels when the target is nearly certain. It is kept in fp32 in the place of the hidden states. So
    the backward exchanges nothing with other ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> LinearLogProbs:
        ctx.set_materialize_grads(False)
        scored, gradients = [], []
        with head.readable(), exact_arithmetic(hidden.device):
            for part in head.parts(hidden):
                hidden_MH, targets_M = part.gathered(hidden), part.gathered(targets)
                gradient_MH = torch.empty(hidden_MH.shape, dtype=statistics_dtype(head.dtype), device=hidden.device)
                rows = head.rows(weight, bias, targets_M)
                statistics = scan(head, hidden_MH, rows, targets_M, others_NH=gradient_MH)
                rescale = head.shard.exchange.combine_(statistics)
                others_share = torch.sigmoid(-statistics.log_odds)[:, None]
                factor = -others_share / statistics.sum_exp[:, None]
                gradient_MH.mul_(factor if rescale is None else factor * rescale)
                slope = head.transform.derivative(statistics.target_logit)
                head.add_targets_(gradient_MH, others_share[:, 0] * slope, rows)
                gradients.append(part.summed(gradient_MH))
                scored.append(part.own_results(statistics.results(head.outputs)))
        ctx.save_for_backward(gradients[0] if len(gradients) == 1 else torch.cat(gradients))
        ctx.hidden_dtype = hidden.dtype
        results = joined(scored)
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
    """Log-probs, entropy and mean log-probs with a gradient to hidden states, weight and bias.

    The backward recomputes the tiles.

    On several ranks the gradient of the weight's rows that are here is that of the sum of all ranks' losses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        entropy_grad: bool,
    ) -> LinearLogProbs:
        ctx.set_materialize_grads(False)
        scored, saved = [], []
        with head.readable(), exact_arithmetic(hidden.device):
            for part in head.parts(hidden):
                targets_M = part.gathered(targets)
                statistics = scan(head, part.gathered(hidden), head.rows(weight, bias, targets_M), targets_M)
                head.shard.exchange.combine_(statistics)
                scored.append(part.own_results(statistics.results(head.outputs)))
                saved.append([part.own(x) for x in (statistics.max, statistics.sum_exp, statistics.target_logit)])
        results = joined(scored)
        kept = [x[0] if len(saved) == 1 else torch.cat(x) for x in zip(*saved, strict=True)]
        ctx.save_for_backward(hidden, weight, bias, targets, *kept, results.entropy if entropy_grad else None)
        ctx.head = head
        differentiable = {"log_probs", "mean_log_probs", *(["entropy"] if entropy_grad else [])}
        ctx.mark_non_differentiable(
            *(x for name, x in results._asdict().items() if x is not None and name not in differentiable)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        head: Head = ctx.head
        of_results = LinearLogProbs(*gradients)
        upstream = Upstream(of_results.log_probs, of_results.entropy, of_results.mean_log_probs)
        # The other ranks may have a gradient, and wait for this one
        if all(x is None for x in upstream) and not head.shard.spread:
            return None, None, None, None, None, None
        hidden, weight, bias, targets, *statistics = ctx.saved_tensors
        parts = head.parts(hidden)
        grads = _Gradients(ctx.needs_input_grad, hidden, weight, bias, statistics[0].dtype, several=len(parts) > 1)
        with head.readable(), exact_arithmetic(hidden.device):
            for part in parts:
                targets_M = part.gathered(targets)
                rows = head.rows(weight, bias, targets_M)
                of_tokens = _gathered_numbers(part, head, statistics, upstream)
                coefficients = Coefficients(*of_tokens, head.transform, rows.vocabulary)
                grads.add_(part, head, part.gathered(hidden), rows, targets_M, coefficients)
        return None, grads.of_hidden(), grads.of_weight(), grads.of_bias(), None, None


def _gathered_numbers(
    part: Part, head: Head, saved: list[Any], upstream: Upstream
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Upstream]:
    """What the coefficients of the tokens that are scored together are made of: numbers of shape (M,), or None."""
    maximum, sum_exp, target_logit, entropy = saved
    if not head.shard.partial:
        return maximum, sum_exp, target_logit, entropy, upstream
    # Every rank sends as many numbers, also where one has no gradient
    asked = {"log_probs": "log_probs" in head.outputs, "entropy": entropy is not None}
    asked["mean_log_probs"] = "mean_log_probs" in head.outputs
    zeros = torch.zeros_like(maximum)
    of_upstream = {name: zeros if x is None else x for name, x in upstream._asdict().items() if asked[name]}
    sent = [maximum, sum_exp, target_logit, *([] if entropy is None else [entropy]), *of_upstream.values()]
    numbers = iter(part.gathered(torch.stack(sent, 1)).unbind(1))
    maximum_M, sum_exp_M, target_logit_M = next(numbers), next(numbers), next(numbers)
    # 0 where a rank's tokens were filled up: nothing comes back from there, but log 0 must not either
    sum_exp_M = sum_exp_M.masked_fill(sum_exp_M == 0, 1.0)
    entropy_M = None if entropy is None else next(numbers)
    upstream_M = Upstream(**dict(zip(of_upstream, numbers, strict=True)))
    return maximum_M, sum_exp_M, target_logit_M, entropy_M, upstream_M


class _Gradients:
    """The gradients of a backward, added up tile by tile and part by part."""

    def __init__(
        self,
        needs_input_grad: tuple[bool, ...],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        several: bool,
    ) -> None:
        _, self.needs_hidden, needs_weight, needs_bias, *_ = needs_input_grad
        self.sums: dict[str, Any] = {"dtype": dtype, "device": hidden.device}
        self.hidden_shape, self.hidden_dtype = hidden.shape, hidden.dtype
        self.hidden: list[Tensor] = []
        # Zeros: with no token at all no tile is written
        sums_of_weight = self.sums["dtype"] if several else weight.dtype
        self.weight = torch.zeros_like(weight, dtype=sums_of_weight) if needs_weight else None
        self.weight_dtype = weight.dtype
        self.bias = torch.zeros(bias.shape, **self.sums) if needs_bias and bias is not None else None
        self.bias_dtype = None if bias is None else bias.dtype

    def add_(
        self, part: Part, head: Head, hidden_MH: Tensor, rows: Rows, targets_M: Tensor, coefficients: Coefficients
    ) -> None:
        """Add the tiles of the tokens of `part`, of all ranks."""
        grad_hidden = torch.zeros(hidden_MH.shape, **self.sums) if self.needs_hidden else None
        unit = coefficients.unit()
        for tokens, classes, logits, scratch, hidden_nH, weight_vH in head.tiles(hidden_MH, rows):
            local = targets_M[tokens] - classes.start
            tile = coefficients.of_others_(tokens, local, logits, scratch)
            if grad_hidden is not None:
                matmul_into(grad_hidden[tokens], as_operand(tile, head.dtype), weight_vH, accumulate=True)
            if self.weight is None and self.bias is None:
                continue
            tile = coefficients.with_target_(tokens, local, tile, unit)
            columns = slice(classes.start - head.shard.first, classes.stop - head.shard.first)
            if self.bias is not None:
                self.bias[columns].add_(tile.sum(0) * unit)
            if self.weight is not None:
                if tokens.start == 0:
                    grad_weight_vH = torch.empty(weight_vH.shape, **self.sums)
                operand = as_operand(tile, head.dtype)
                matmul_into(grad_weight_vH, operand.t(), hidden_nH, accumulate=tokens.start > 0)
                if tokens.stop == len(hidden_MH):
                    self.weight[columns] += grad_weight_vH.mul_(unit)
        if grad_hidden is not None:
            grad_hidden.mul_(coefficients.row_factor[:, None])
            head.add_targets_(grad_hidden, coefficients.target, rows)
            self.hidden.append(part.summed(grad_hidden))

    def of_hidden(self) -> Tensor | None:
        if not self.needs_hidden:
            return None
        every = self.hidden[0] if len(self.hidden) == 1 else torch.cat(self.hidden)
        return every.to(self.hidden_dtype)

    def of_weight(self) -> Tensor | None:
        return None if self.weight is None else self.weight.to(self.weight_dtype)

    def of_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias.to(self.bias_dtype)


def joined(scored: list[LinearLogProbs]) -> LinearLogProbs:
    """The results of parts as one."""
    if len(scored) == 1:
        return scored[0]
    return LinearLogProbs(*(None if x[0] is None else torch.cat(x) for x in zip(*scored, strict=True)))


def tiled_log_probs(
    head: Head,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    entropy_requires_grad: bool = False,
) -> LinearLogProbs:
    """Per-token results tile by tile; chooses the path by what needs a gradient, which changes no result.

    Whether a gradient is recorded is read here: inside an autograd function grad mode is always off.
    """
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    entropy_grad = entropy_requires_grad and "entropy" in head.outputs
    mean_grad = "mean_log_probs" in head.outputs
    differentiable = "log_probs" in head.outputs or entropy_grad or mean_grad
    if not torch.is_grad_enabled() or not differentiable or not (hidden.requires_grad or trained):
        return score(head, hidden, weight, bias, targets)
    if trained or entropy_grad or mean_grad:
        return LinearLogProbs(*TrainedHead.apply(head, hidden, weight, bias, targets, entropy_grad))
    return LinearLogProbs(*FrozenHead.apply(head, hidden, weight, bias, targets))
