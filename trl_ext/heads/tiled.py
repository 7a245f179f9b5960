"""The tiled head: the forward computes the gradient (frozen weight), or the backward recomputes the tiles.

Dimensions: N tokens, H hidden size, V vocabulary, (n, v) tokens and columns of a tile, M tokens that several ranks
score together, R rank of a low-rank term.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from .adapters import Operands, ReplacedRows
from .gradients import Coefficients
from .kernels.work import Tile, TileWork, as_tile, row_stride, work_of
from .logits import LinearLogProbs, LogitTransform, without_gradient
from .parallel import Block, LocalShards, Part, Rows, VocabularyShard
from .products import (
    coefficients_dtype,
    exact_arithmetic,
    matmul_into,
    project_into,
    refuse_second_derivative,
    statistics_dtype,
)
from .sampling_mask import SamplingMask
from .statistics import Finished, RunningStatistics

# Elements of one fp32 tile. On the CPU two such buffers of 4 MiB exist at a time, three with a softcap
_ELEMENTS = {"cpu": 2**20}
_TOKENS = {"cpu": 1024, "accelerator": 4096}
# With a head of so many weights (1 GiB in bf16), an accelerator's tiles have twice as many tokens. Their 384 MiB are
# small beside such a model, and the weight is read half as often
_LARGE = 2**29
# A matrix product assigns blocks of this size to the multiprocessors; some blocks each keep all of them busy
_BLOCK = 128 * 256
_BLOCKS_EACH = 8
# A tile is a multiple of this wide, so that each of its rows is aligned for vector loads and for TMA
_COLUMNS = 256
# Limits the tile also for few tokens, because a cast copy of the tile's slice of the weight has as many rows
MOST_COLUMNS = 8192


def _more(device: torch.device, weights: int) -> int:
    return 2 if device.type != "cpu" and weights >= _LARGE else 1


def rows_per_tile(tokens: int, device: torch.device, chunk_size: int | None, weights: int = 0) -> int:
    """Return the tokens of a tile: the user's `chunk_size`, or an even share of all tokens. `weights`: of the head."""
    if chunk_size is not None:
        return max(1, min(tokens, chunk_size))
    most = _TOKENS["cpu" if device.type == "cpu" else "accelerator"] * _more(device, weights)
    if tokens <= most:
        return max(1, tokens)
    even = -(-tokens // -(-tokens // most))
    return -(-even // 128) * 128


def columns_per_tile(
    rows: int, vocabulary: int, device: torch.device, columns: int | None = None, weights: int = 0
) -> int:
    """Return the columns of a tile of `rows` tokens: `columns`, or as many as fit, at most `MOST_COLUMNS`."""
    elements = (_ELEMENTS.get(device.type) or _elements_of(device)) * _more(device, weights)
    return min(vocabulary, MOST_COLUMNS, columns or max(1, elements // rows // _COLUMNS) * _COLUMNS)


@cache
def _elements_of(device: torch.device) -> int:
    """Return how many elements keep an accelerator busy: 2^25 on an H200, a tile of 4096 x 8192.

    That is a buffer of 128 MiB and 64 MiB of bf16 coefficients, less than the 256 MiB of TRL 1.16's one bf16 tile. The
    number is estimated; `benchmarks/head.py --sweep` measures it.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 2**25
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return 2 ** min(25, max(21, round(math.log2(_BLOCKS_EACH * multiprocessors * _BLOCK))))


@dataclass(frozen=True)
class Head:
    """The settings of the tiled head.

    Forward and backward read weight and bias only inside `readable()`, where an engine that shards parameters gathers
    them.
    """

    dtype: torch.dtype  # of the operands
    transform: LogitTransform
    outputs: tuple[str, ...]
    shard: VocabularyShard
    chunk_size: int | None = None
    columns: int | None = None
    kernels: str | None = None  # one of `KERNELS`; None chooses from the device
    up_dtype: torch.dtype = torch.float32  # the dtype to which the second factor of a low-rank term is rounded
    replaced: ReplacedRows | None = None
    sampling_mask: SamplingMask | None = None
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext

    @cached_property
    def accumulate(self) -> torch.dtype:
        """The dtype of products and statistics."""
        return statistics_dtype(self.dtype)

    def work(self, device: torch.device) -> TileWork:
        """Return the kernels that run between the matrix products of a tile."""
        # In Triton, the product of an absent class must give any logit, which a softcap bounds
        is_bounded = self.sampling_mask is not None and (
            self.transform.softcap is not None or self.transform.slope == 0
        )
        return work_of("torch" if is_bounded else self.kernels, device, self.accumulate, self.transform)

    def rows(self, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Rows:
        """Return the rows of the weight that this rank folds."""
        if self.shard.rows_for is not None:
            return self.shard.rows_for(targets)
        # `len(weight)` is right only inside `readable`, which may gather the weight
        vocabulary = self.shard.vocabulary or len(weight)
        return LocalShards((Block(self.shard.first, weight, bias),), targets, vocabulary)

    def tiles(self, x: Operands, rows: Rows) -> Iterator[Tile]:
        """Yield every tile. The outer loop is over classes, so each slice of the weight is cast once."""
        N = x.hidden.shape[0]
        device = x.hidden.device
        weights = rows.vocabulary * x.hidden.shape[1]
        n = rows_per_tile(N, device, self.chunk_size, weights)
        v = columns_per_tile(n, rows.vocabulary, device, self.columns, weights)
        buffer = x.hidden.new_empty(n * row_stride(v), dtype=self.accumulate)
        for block in rows.blocks():
            for start in range(0, len(block.weight), v):
                columns = slice(start, min(start + v, len(block.weight)))
                classes = slice(block.first + columns.start, block.first + columns.stop)
                weight_vH = block.weight[columns]
                if self.replaced is not None and x.rows is not None:
                    weight_vH = self.replaced.put(weight_vH, classes, x.rows)
                weight_vH = weight_vH.to(self.dtype)
                up_vR = None if x.up is None else x.up[classes].to(self.up_dtype).to(self.accumulate)
                bias_v = None if block.bias is None else block.bias[columns]
                for first in range(0, N, n):
                    tokens = slice(first, min(first + n, N))
                    product = as_tile(buffer, tokens.stop - tokens.start, columns.stop - columns.start)
                    hidden_nH = x.hidden[tokens].to(self.dtype)
                    project_into(product, hidden_nH, weight_vH)
                    down_nR = None if x.down is None else x.down[tokens]
                    if down_nR is not None and up_vR is not None:
                        matmul_into(product, down_nR, up_vR.t(), accumulate=True)
                    absent = None
                    if self.sampling_mask is not None:
                        absent = self.sampling_mask.absent(tokens, classes)
                    yield Tile(tokens, classes, product, bias_v, hidden_nH, weight_vH, down_nR, up_vR, absent)

    def add_targets_(
        self, sums_NH: Tensor, coefficient_N: Tensor, rows: Rows, targets_N: Tensor, replacing: Tensor | None
    ) -> None:
        """Add each target's coefficient times its weight row; rows of `replaced` come from `replacing`.

        This runs in fp32: the rounding error of a half-precision product would be large next to a small 1 - p.
        """
        n = rows_per_tile(sums_NH.shape[0], sums_NH.device, self.chunk_size)
        for first in range(0, sums_NH.shape[0], n):
            tokens = slice(first, first + n)
            target_nH = rows.of_targets(tokens)
            if self.replaced is not None and replacing is not None:
                target_nH = self.replaced.of_targets(target_nH, targets_N[tokens], replacing)
            sums_NH[tokens].addcmul_(target_nH.to(self.dtype).to(sums_NH.dtype), coefficient_N[tokens, None])


def _scan(
    head: Head, x: Operands, rows: Rows, targets: Tensor, nontarget_NH: Tensor | None
) -> tuple[RunningStatistics, Finished]:
    """Fold every tile, and finish.

    Fill `nontarget_NH`, if given, with sum_{v != t} exp(z_v - shift) dz_v/dx_v W_v in fp32, in units before `rescale`.
    """
    is_partial = head.shard.is_partial
    statistics = RunningStatistics(targets, rows.vocabulary, head.outputs, head.accumulate, partial=is_partial)
    work = head.work(x.hidden.device)
    operand = None if nontarget_NH is None else coefficients_dtype(head.dtype, x.hidden.device)
    first_class = None
    for tile in head.tiles(x, rows):
        first_class = tile.classes.start if first_class is None else first_class
        is_later = tile.classes.start != first_class
        sums_nH = None if nontarget_NH is None else nontarget_NH[tile.tokens]
        coefficients = work.fold(statistics, tile, operand, sums_nH if is_later else None)
        if sums_nH is not None and coefficients is not None:
            matmul_into(sums_nH, coefficients, tile.weight, accumulate=is_later)
    if nontarget_NH is not None and first_class is None:
        nontarget_NH.zero_()  # this rank has no row of the weight
    elif nontarget_NH is not None and head.transform.slope != 1:
        nontarget_NH.mul_(head.transform.slope)
    return statistics, work.finish(statistics, head.outputs, head.shard.exchange.group)


def _gather_operands(x: Operands, part: Part) -> Operands:
    """Return the operands of the tokens that are scored together. Only a head on one rank has a low-rank term."""
    return x._replace(hidden=part.gather(x.hidden), down=None if x.down is None else part.gather(x.down))


def _score(
    head: Head, x: Operands, targets: Tensor, *, form_gradient: bool = False
) -> tuple[LinearLogProbs, list[Tensor]]:
    """Return the results and the tensors that the backward needs.

    With `form_gradient` that is the gradient of the hidden states, (N, H). Otherwise it is the maximum, the sum of
    exponentials and the target's logit, (N,) each.
    """
    results: list[list[Any]] = []  # of each part
    saved_tensors: list[list[Tensor]] = []
    with head.readable(), exact_arithmetic(x.hidden.device):
        for part in head.shard.exchange.parts(len(x.hidden), x.hidden.device):
            part_x = _gather_operands(x, part)
            targets_M = part.gather(targets)
            rows = head.rows(x.weight, x.bias, targets_M)
            gradient_MH = None
            if form_gradient:
                gradient_MH = x.hidden.new_empty(part_x.hidden.shape, dtype=head.accumulate)
            statistics, finished = _scan(head, part_x, rows, targets_M, gradient_MH)
            if gradient_MH is not None:
                others_share = torch.sigmoid(-finished.log_odds)
                gradient_MH.mul_((-others_share / statistics.sum_exp * finished.rescale)[:, None])
                slope = head.transform.derivative(statistics.target_logit)
                head.add_targets_(gradient_MH, others_share * slope, rows, targets_M, x.rows)
                saved_tensors.append([part.sum_over_ranks(gradient_MH)])
            else:
                saved_tensors.append(part.select_local(statistics.shift, statistics.sum_exp, statistics.target_logit))
            results.append(part.select_local(*finished.results))
    fields = (None if x[0] is None else _concatenated(x) for x in zip(*results, strict=True))
    return LinearLogProbs(*fields), [_concatenated(x) for x in zip(*saved_tensors, strict=True)]


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


class TiledLogProbsRecompute(torch.autograd.Function):
    """Log-probs, entropy and mean log-probs with a gradient for every operand. The backward recomputes the tiles.

    On several ranks, the gradient of this rank's rows is that of the sum of all ranks' losses.
    """

    @staticmethod
    def forward(ctx: Any, head: Head, targets: Tensor, entropy_grad: bool, *operands: Tensor | None) -> LinearLogProbs:
        x = Operands(*operands)  # type: ignore[arg-type]
        ctx.set_materialize_grads(False)
        results, saved_tensors = _score(head, x, targets)
        ctx.save_for_backward(*x, targets, *saved_tensors, results.entropy if entropy_grad else None)
        ctx.head = head
        ctx.mark_non_differentiable(*without_gradient(results, entropy_grad=entropy_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        head: Head = ctx.head
        upstream = LinearLogProbs(*gradients)
        # With other ranks, continue: they may have a gradient and wait for this rank
        if all(x is None for x in upstream) and not head.shard.communicates:
            return (None,) * len(ctx.needs_input_grad)
        saved_tensors = ctx.saved_tensors  # read only once: offloading and checkpointing allow no second read
        x = Operands(*saved_tensors[:6])
        targets, *statistics = saved_tensors[6:]
        with head.readable(), exact_arithmetic(x.hidden.device):
            parts = []
            for part in head.shard.exchange.parts(len(x.hidden), x.hidden.device):
                targets_M = part.gather(targets)
                rows = head.rows(x.weight, x.bias, targets_M)
                numbers = _gather_numbers(part, head, statistics, upstream)
                parts.append((part, rows, targets_M, Coefficients(*numbers, head.transform, rows.vocabulary)))
            # With one unit for all parts, a sum over tokens overflows only where the gradient does, and is never NaN
            units = [coefficients.unit() for *_, coefficients in parts]
            unit = units[0] if len(units) == 1 else torch.stack(units).amax()
            grads = _Gradients(ctx.needs_input_grad[3:], head, x, unit, several=len(parts) > 1)
            for part, rows, targets_M, coefficients in parts:
                coefficients.use_unit(unit)
                grads.add_(part, _gather_operands(x, part), rows, targets_M, coefficients)
        return None, None, None, *grads.of_operands()


def _gather_numbers(
    part: Part, head: Head, saved_statistics: list[Any], upstream: LinearLogProbs
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, LinearLogProbs]:
    """Return maximum, sum of exponentials, target logit, entropy and upstream of the tokens scored together."""
    maximum, sum_exp, target_logit, entropy = saved_statistics
    if not head.shard.is_partial:
        return maximum, sum_exp, target_logit, entropy, upstream
    # Every rank sends the same number of tensors: zeros for a missing gradient
    zeros = torch.zeros_like(maximum)
    has_gradient = {
        "log_probs": "log_probs" in head.outputs,
        "entropy": entropy is not None,
        "mean_log_probs": "mean_log_probs" in head.outputs,
    }
    upstreams = {name: getattr(upstream, name) for name, is_sent in has_gradient.items() if is_sent}
    rank_numbers = [*saved_statistics, *(zeros if x is None else x for x in upstreams.values())]
    gathered_numbers = iter(part.gather(torch.stack([x for x in rank_numbers if x is not None], 1)).unbind(1))
    numbers: list[Any] = [None if x is None else next(gathered_numbers) for x in rank_numbers]
    maximum, sum_exp, target_logit, entropy, *upstream_numbers = numbers
    # The sum of a padded row is 0. It gets no gradient, but the logarithm of the sum must be finite
    sum_exp = sum_exp.masked_fill(sum_exp == 0, 1.0)
    upstream = LinearLogProbs(**dict(zip(upstreams, upstream_numbers, strict=True)))
    return maximum, sum_exp, target_logit, entropy, upstream


class _Gradients:
    """The gradients of a backward, summed over tiles and parts. Gradients of classes are in units of `unit`."""

    def __init__(
        self, needs_gradient: tuple[bool, ...], head: Head, x: Operands, unit: Tensor, *, several: bool
    ) -> None:
        self.needs = Operands(*needs_gradient)  # type: ignore[arg-type]
        self.head = head
        self.x = x
        self.unit = unit
        self.has_several_parts = several
        self.operand_dtype = coefficients_dtype(head.dtype, x.hidden.device)
        self.hidden: list[Tensor] = []
        self.down: list[Tensor] = []
        # Zeros, because no tile is written if there is no token
        dtype = unit.dtype if several else x.weight.dtype
        self.weight = torch.zeros_like(x.weight, dtype=dtype) if self.needs.weight else None
        self.bias, self.up, self.rows = (
            tensor.new_zeros(tensor.shape, dtype=unit.dtype) if needs and tensor is not None else None
            for needs, tensor in ((self.needs.bias, x.bias), (self.needs.up, x.up), (self.needs.rows, x.rows))
        )

    def add_(self, part: Part, x: Operands, rows: Rows, targets_M: Tensor, coefficients: Coefficients) -> None:
        """Add the tiles of the tokens of `part` on all ranks. `x` holds their operands."""
        head = self.head
        sums = self.unit.dtype
        operand = self.operand_dtype
        grad_hidden = x.hidden.new_zeros(x.hidden.shape, dtype=sums) if self.needs.hidden else None
        grad_down = torch.zeros_like(x.down) if self.needs.down and x.down is not None else None
        sums_classes = any(total is not None for total in (self.bias, self.up, self.rows))
        dtypes = {
            "nontarget_grad": sums if grad_down is not None else operand if grad_hidden is not None else None,
            "grad_logits": sums if sums_classes else operand if self.weight is not None else None,
        }
        work = head.work(x.hidden.device)
        for tile in head.tiles(x, rows):
            nontarget_grad, grad_logits = work.gradient(coefficients, tile, targets_M[tile.tokens], **dtypes)
            if grad_hidden is not None and nontarget_grad is not None:
                matmul_into(grad_hidden[tile.tokens], nontarget_grad.to(operand), tile.weight, accumulate=True)
            if grad_down is not None and nontarget_grad is not None and tile.up is not None:
                matmul_into(grad_down[tile.tokens], nontarget_grad, tile.up, accumulate=True)
            if grad_logits is not None:
                self._add_to_classes_(tile, grad_logits, last=tile.tokens.stop == len(x.hidden))
        if grad_hidden is not None:
            grad_hidden.mul_(coefficients.row_factor[:, None])
            head.add_targets_(grad_hidden, coefficients.target, rows, targets_M, x.rows)
            self.hidden.append(part.sum_over_ranks(grad_hidden.mul_(coefficients.size[:, None])))
        if grad_down is not None and x.up is not None:
            grad_down.mul_(coefficients.row_factor[:, None])
            # Clamped for the same reason as in `LocalShards.of_targets`
            target_up = x.up[targets_M.clamp(0, len(x.up) - 1)].to(head.up_dtype).to(grad_down.dtype)
            grad_down.addcmul_(target_up, coefficients.target[:, None])
            self.down.append(grad_down.mul_(coefficients.size[:, None]))

    def _add_to_classes_(self, tile: Tile, grad_logits: Tensor, *, last: bool) -> None:
        """Add a tile to the gradients of its classes. `last`: it is their last tile. May overwrite `grad_logits`."""
        first = self.head.shard.first
        replaced = self.head.replaced
        columns = slice(tile.classes.start - first, tile.classes.stop - first)
        if self.bias is not None:
            self.bias[columns].add_(grad_logits.sum(0))
        if self.up is not None and tile.down is not None:
            self.up[columns] += grad_logits.t() @ tile.down
        inside = slice(0, 0) if replaced is None else replaced.within(tile.classes)
        if replaced is not None and inside.start < inside.stop:
            places = replaced.ids[inside] - tile.classes.start
            if self.rows is not None:
                self.rows[inside] += grad_logits[:, places].t() @ tile.hidden.to(self.rows.dtype)
            grad_logits.index_fill_(1, places, 0.0)  # the product does not read these rows of the weight
        if self.weight is not None:
            if tile.tokens.start == 0:
                self.tile_grad = tile.weight.new_empty(tile.weight.shape, dtype=self.unit.dtype)
            matmul_into(
                self.tile_grad, grad_logits.to(self.operand_dtype).t(), tile.hidden, accumulate=tile.tokens.start > 0
            )
            if last and self.has_several_parts:
                self.weight[columns] += self.tile_grad
            elif last:
                torch.mul(self.tile_grad, self.unit, out=self.weight[columns])

    def of_operands(self) -> Operands:
        """Return the gradients in the operands' dtypes; None where none is needed."""
        hidden, down = (_concatenated(x) if x else None for x in (self.hidden, self.down))
        for total in (self.bias, self.up, self.rows, self.weight if self.has_several_parts else None):
            if total is not None:
                total.mul_(self.unit)
        sums = (hidden, self.weight, self.bias, down, self.up, self.rows)
        gradients = (
            None if total is None or tensor is None else total.to(tensor.dtype)
            for total, tensor in zip(sums, self.x, strict=True)
        )
        return Operands(*gradients)  # type: ignore[arg-type]


class TiledLogProbsFrozen(torch.autograd.Function):
    """Log-probs with a gradient for the hidden states only, which the forward computes.

    d log p_t / dh = (1 - p_t) (c_t W_t - sum_{v != t} q_v c_v W_v), with q the softmax over the others and c = dz/dx.
    Neither factor cancels when the target is nearly certain. The forward saves this gradient in fp32 instead of the
    hidden states, so the backward exchanges nothing with other ranks.
    """

    @staticmethod
    def forward(ctx: Any, head: Head, targets: Tensor, x: Operands, hidden: Tensor) -> LinearLogProbs:
        ctx.set_materialize_grads(False)
        results, gradient = _score(head, x._replace(hidden=hidden), targets, form_gradient=True)
        ctx.save_for_backward(*gradient)
        ctx.hidden_dtype = hidden.dtype
        ctx.mark_non_differentiable(*(x for x in results[1:] if x is not None))
        return results

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        if grad_log_probs is None:
            return None, None, None, None
        (gradient_NH,) = ctx.saved_tensors
        grad_hidden = torch.empty(gradient_NH.shape, dtype=ctx.hidden_dtype, device=gradient_NH.device)
        torch.mul(gradient_NH, grad_log_probs[:, None], out=grad_hidden)
        return None, None, None, grad_hidden


def tiled_log_probs(head: Head, x: Operands, targets: Tensor, *, entropy_requires_grad: bool = False) -> LinearLogProbs:
    """Return per-token results, computed tile by tile. The gradients that are needed choose the path, not the result.

    Grad mode is read here because it is always off inside an autograd function.
    """
    entropy_grad = entropy_requires_grad and "entropy" in head.outputs
    mean_grad = "mean_log_probs" in head.outputs
    differentiable = "log_probs" in head.outputs or entropy_grad or mean_grad
    needs_gradient = [tensor is not None and tensor.requires_grad for tensor in x]
    if not (torch.is_grad_enabled() and differentiable and any(needs_gradient)):
        with torch.no_grad():
            return _score(head, x, targets)[0]
    if any(needs_gradient[1:]) or entropy_grad or mean_grad:
        return LinearLogProbs(*TiledLogProbsRecompute.apply(head, targets, entropy_grad, *x))
    return LinearLogProbs(*TiledLogProbsFrozen.apply(head, targets, x, x.hidden))
