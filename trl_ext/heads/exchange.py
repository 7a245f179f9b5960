"""Who holds which rows of the weight: how tokens reach every row, and how statistics and sums come together again.

A rank that holds some rows of the vocabulary folds their logits into its own statistics. One max and one sum of a few
numbers a token over the group make them those of the whole vocabulary; the logits and the weight stay where they are.
Where ranks have tokens of their own (FSDP2, ZeRO-3), hidden states and targets are gathered first, so many at a time,
and each rank gets the sums of its own tokens back.

Dimensions: N tokens of this rank, M tokens of a part of them (of all ranks, where they differ), R ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .outputs import LinearLogProbs
from .statistics import RunningStatistics

# Named anew in torch 2.13, where the old names warn
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Tokens of all ranks that are scored in one go where they are gathered. Their hidden states and fp32 sums stand beside
# this rank's rows: 8192 tokens of 4096 units are 200 MB in bf16.
_GATHERED_TOKENS = {"cuda": 8192, "cpu": 2048}


class Part:
    """Some tokens of this rank, alone: nothing is exchanged."""

    def __init__(self, rows: slice) -> None:
        self.rows = rows

    def gathered(self, x: Tensor) -> Tensor:
        """Of `x` (N, ...), what is to be scored together: (M, ...)."""
        return x[self.rows]

    def own(self, x: Tensor) -> Tensor:
        """Of `x` (M, ...), what is of this rank's tokens."""
        return x

    def own_results(self, results: LinearLogProbs) -> LinearLogProbs:
        """Of results for M tokens, those for this rank's."""
        return LinearLogProbs(*(None if x is None else self.own(x) for x in results))

    def summed(self, x: Tensor) -> Tensor:
        """The sum of `x` (M, ...) over the group, of this rank's tokens."""
        return x


class OneProcess:
    """Every row of the weight is here, or comes here slice by slice."""

    def parts(self, tokens: int, device: torch.device) -> list[Part]:
        """The `tokens` of this rank, in parts that are scored together; as many on every rank."""
        return [Part(slice(0, tokens))]

    def combine_(self, statistics: RunningStatistics) -> Tensor:
        """Make this rank's statistics those of all rows; returns what its sums were rescaled by, of shape (M, 1)."""
        return statistics.move_to_(statistics.maxima())[:, None]


@dataclass(frozen=True)
class SameTokens:
    """The rows are spread over a group whose ranks all have the same tokens, as under tensor parallelism."""

    group: dist.ProcessGroup

    def parts(self, tokens: int, device: torch.device) -> list[Part]:
        return [_Replicated(slice(0, tokens), self.group)]

    def combine_(self, statistics: RunningStatistics) -> Tensor:
        return _combine_(statistics, self.group)


@dataclass(frozen=True)
class OwnTokens:
    """The rows are spread over a group whose ranks have tokens of their own, also none: as under FSDP2 and ZeRO-3.

    `counts`: how many tokens each rank has.
    """

    group: dist.ProcessGroup
    counts: tuple[int, ...]

    def parts(self, tokens: int, device: torch.device) -> list[Part]:
        most = max(self.counts)
        step = max(1, _GATHERED_TOKENS["cpu" if device.type == "cpu" else "cuda"] // len(self.counts))
        widths = [min(step, most - start) for start in range(0, most, step)]
        edges = [min(start, tokens) for start in range(0, most, step)] + [tokens]
        gathered = zip(edges, edges[1:], widths, strict=False)
        return [_Gathered(slice(start, stop), width, self.group) for start, stop, width in gathered] or [Part(slice(0))]

    def combine_(self, statistics: RunningStatistics) -> Tensor:
        return _combine_(statistics, self.group)


Exchange = OneProcess | SameTokens | OwnTokens


def tokens_of_ranks(tokens: int, group: dist.ProcessGroup, device: torch.device) -> tuple[int, ...]:
    """How many tokens each rank of `group` has. Waits for the device."""
    counts = torch.empty(group.size(), dtype=torch.int64, device=device)
    all_gather(counts, torch.tensor([tokens], device=device), group=group)
    return tuple(counts.tolist())


class _Replicated(Part):
    def __init__(self, rows: slice, group: dist.ProcessGroup) -> None:
        super().__init__(rows)
        self.group = group

    def summed(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x


class _Gathered(Part):
    """`width` tokens of each rank, filled up with zeros."""

    def __init__(self, rows: slice, width: int, group: dist.ProcessGroup) -> None:
        super().__init__(rows)
        self.width, self.group = width, group

    def gathered(self, x: Tensor) -> Tensor:
        own = x.new_zeros(self.width, *x.shape[1:])
        own[: self.rows.stop - self.rows.start] = x[self.rows]
        every = x.new_empty(self.group.size() * self.width, *x.shape[1:])
        all_gather(every, own, group=self.group)
        return every

    def own(self, x: Tensor) -> Tensor:
        first = self.group.rank() * self.width
        return x[first : first + self.rows.stop - self.rows.start]

    def summed(self, x: Tensor) -> Tensor:
        own = x.new_empty(self.width, *x.shape[1:])
        reduce_scatter(own, x, group=self.group)
        return own[: self.rows.stop - self.rows.start]


def _combine_(statistics: RunningStatistics, group: dist.ProcessGroup) -> Tensor:
    maxima = statistics.maxima()
    if not maxima.numel():
        return statistics.max[:, None]
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    factor = statistics.move_to_(maxima)
    sums = statistics.sums()
    dist.all_reduce(sums, group=group)
    statistics.take_sums_(sums)
    return factor[:, None]
