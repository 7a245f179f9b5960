"""One pass over the tiles of the logits: what does not change between them, and the statistics that come of them.

Dimensions: N tokens, H hidden size, V vocabulary, n and v those of a tile, M tokens scored together with other ranks',
R rank of a low-rank term.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .adapters import Operands, ReplacedRows
from .kernels.choice import TileWork, work_of
from .logits import LinearLogProbs, LogitTransform
from .parallel import Part, VocabularyShard
from .products import coefficients_dtype, matmul_into, project_into, statistics_dtype
from .rows import Block, LocalShards, Rows
from .statistics import RunningStatistics
from .tiles import Tile, columns_per_tile, rows_per_tile


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
    kernels: str | None = None  # of `KERNELS`; None chooses by the device
    up_dtype: torch.dtype = torch.float32  # what the second factor of a low-rank term is rounded to
    replaced: ReplacedRows | None = None
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext

    def work(self, device: torch.device) -> TileWork:
        """What is done with the tiles between the products."""
        return work_of(self.kernels, device, statistics_dtype(self.dtype), self.transform)

    def parts(self, hidden: Tensor) -> list[Part]:
        """The tokens of this rank, in parts that are scored together."""
        return self.shard.exchange.parts(len(hidden), hidden.device)

    def rows(self, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Rows:
        """The rows that this rank folds."""
        if self.shard.rows_for is not None:
            return self.shard.rows_for(targets)
        # An engine may have made the weight's rows readable only now
        vocabulary = self.shard.vocabulary or len(weight)
        return LocalShards((Block(self.shard.first, weight, bias),), targets, vocabulary)

    def tiles(self, x: Operands, rows: Rows) -> Iterator[Tile]:
        """Every tile, classes outermost, so that each slice of the weight is cast once."""
        accumulate = statistics_dtype(self.dtype)
        N = x.hidden.shape[0]
        n = rows_per_tile(N, x.hidden.device, self.chunk_size)
        v = columns_per_tile(n, rows.vocabulary, x.hidden.device, self.columns)
        buffer = x.hidden.new_empty(n * v, dtype=accumulate)
        for block in rows.blocks():
            for start in range(0, len(block.weight), v):
                columns = slice(start, min(start + v, len(block.weight)))
                classes = slice(block.first + columns.start, block.first + columns.stop)
                weight_vH = self._rounded(block, columns, classes, x)
                up_vR = None if x.up is None else x.up[classes].to(self.up_dtype).to(accumulate)
                bias_v = None if block.bias is None else block.bias[columns]
                width = columns.stop - columns.start
                for first in range(0, N, n):
                    tokens = slice(first, min(first + n, N))
                    shape = (tokens.stop - tokens.start, width)
                    product = buffer[: shape[0] * width].view(shape)
                    hidden_nH = x.hidden[tokens].to(self.dtype)
                    project_into(product, hidden_nH, weight_vH)
                    down_nR = None if x.down is None else x.down[tokens]
                    if down_nR is not None and up_vR is not None:
                        matmul_into(product, down_nR, up_vR.t(), accumulate=True)
                    yield Tile(tokens, classes, product, bias_v, hidden_nH, weight_vH, down_nR, up_vR)

    def _rounded(self, block: Block, columns: slice, classes: slice, x: Operands) -> Tensor:
        weight = block.weight[columns]
        if self.replaced is not None and x.rows is not None:
            weight = self.replaced.put(weight, classes, x.rows)
        return weight.to(self.dtype)

    def add_targets_(
        self, sums_NH: Tensor, coefficient_N: Tensor, rows: Rows, targets_N: Tensor, replacing: Tensor | None
    ) -> None:
        """Add each target's row of the weight, times its coefficient.

        In fp32: it stays out of the product in half precision, whose rounding would not cancel against 1 - p.
        """
        n = rows_per_tile(sums_NH.shape[0], sums_NH.device, self.chunk_size)
        for first in range(0, sums_NH.shape[0], n):
            some = slice(first, first + n)
            target_nH = rows.of_targets(some)
            if self.replaced is not None and replacing is not None:
                target_nH = self.replaced.of_targets(target_nH, targets_N[some], replacing)
            sums_NH[some].addcmul_(target_nH.to(self.dtype).to(sums_NH.dtype), coefficient_N[some, None])


def scan(head: Head, x: Operands, rows: Rows, targets: Tensor, others_NH: Tensor | None = None) -> RunningStatistics:
    """Fold every tile; with `others_NH`, also leave there sum_{v != t} exp(z_v - shift) dz_v/dx_v W_v (fp32)."""
    statistics = RunningStatistics(
        targets, rows.vocabulary, head.outputs, statistics_dtype(head.dtype), partial=head.shard.partial
    )
    work = head.work(x.hidden.device)
    operand = None if others_NH is None else coefficients_dtype(head.dtype, x.hidden.device)
    first_class = None
    for tile in head.tiles(x, rows):
        first_class = tile.classes.start if first_class is None else first_class
        later = tile.classes.start != first_class
        sums_nH = None if others_NH is None else others_NH[tile.tokens]
        coefficients = work.fold(statistics, tile, operand, sums_nH if later else None)
        if sums_nH is not None and coefficients is not None:
            matmul_into(sums_nH, coefficients, tile.weight, accumulate=later)
    if others_NH is not None and first_class is None:
        others_NH.zero_()  # a rank without a row of the weight
    elif others_NH is not None and head.transform.slope != 1:
        others_NH.mul_(head.transform.slope)
    return statistics


def gathered(x: Operands, part: Part) -> Operands:
    """The operands of the tokens that are scored together; the low-rank term is there where no other rank has any."""
    return x._replace(hidden=part.gathered(x.hidden), down=None if x.down is None else part.gathered(x.down))


def joined(scored: list[LinearLogProbs]) -> LinearLogProbs:
    """The results of parts as one."""
    if len(scored) == 1:
        return scored[0]
    return LinearLogProbs(*(None if x[0] is None else torch.cat(x) for x in zip(*scored, strict=True)))
