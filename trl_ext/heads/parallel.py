"""The head over several ranks: which rank has which tokens and which rows of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .logits import LinearLogProbs
from .rows import Rows
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
class ReplicatedTokens:
    """The rows are spread over a group whose ranks all have the same tokens, as under tensor parallelism."""

    group: dist.ProcessGroup

    def parts(self, tokens: int, device: torch.device) -> list[Part]:
        return [_Replicated(slice(0, tokens), self.group)]

    def combine_(self, statistics: RunningStatistics) -> Tensor:
        return _combine_(statistics, self.group)


@dataclass(frozen=True)
class ShardedTokens:
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


Exchange = OneProcess | ReplicatedTokens | ShardedTokens


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


@dataclass(frozen=True)
class VocabularyShard:
    """What a head needs to know beside the weight's rows that are here.

    Args:
        vocabulary (`int`, *optional*): V, of all ranks' rows together. `None`: as many as the weight has here.
        first (`int`): class of the first row that is here.
        exchange (`Exchange`): how tokens, statistics and sums come together.
        rows_for (`Callable`, *optional*): makes the rows to be read for given targets, where they are no plain tensor.
    """

    vocabulary: int | None = None
    first: int = 0
    exchange: Exchange = field(default_factory=OneProcess)
    rows_for: Callable[[Tensor], Rows] | None = None

    @property
    def spread(self) -> bool:
        """Whether a pass waits for other ranks."""
        return self.partial or self.rows_for is not None

    @property
    def partial(self) -> bool:
        """Whether other ranks fold other rows of the weight."""
        return not isinstance(self.exchange, OneProcess)


def shard_of_group(
    group: dist.ProcessGroup, rows: int, first: int, vocabulary: int | None, targets: Tensor, own_tokens: bool
) -> VocabularyShard:
    """The shard that a rank's arguments describe, once all ranks' arguments were seen to fit.

    One exchange of five integers, at which the ranks wait for each other.

    Raises:
        `ValueError`: the ranks' rows are not the whole vocabulary, each once, their tokens are not equally many, or a
        target on the CPU is out of range. On every rank, also where one alone is at fault: no rank waits for another.
    """
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    every = torch.empty(group.size() * 5, dtype=torch.int64, device=device)
    all_gather(every, torch.tensor([first, rows, targets.numel(), *range_of(targets)], device=device), group=group)
    numbers: list[list[int]] = every.view(-1, 5).tolist()
    shards = [(start, count) for start, count, *_ in numbers]
    tokens = [count for _, _, count, *_ in numbers]
    total = sum(count for _, count in shards)
    end = 0
    for start, count in sorted(shards):
        if count and start != end:
            raise ValueError(
                f"`first_class` and the rows of `weight` must cover the vocabulary once: the ranks of the group hold "
                f"(first class, rows) {shards}; class {min(start, end)} is missing or doubled."
            )
        end += count
    if vocabulary is not None and vocabulary != total:
        raise ValueError(f"`vocab_size` is {vocabulary}, but the ranks of the group hold {total} rows in all.")
    if total < 2:
        raise ValueError(f"The vocabulary must have at least 2 classes, the ranks of the group hold {total}.")
    if not own_tokens and len(set(tokens)) > 1:
        raise ValueError(
            f"With `own_tokens=False` all ranks of the group must have the same tokens, they have {tokens}. Set "
            "`own_tokens=True` if each rank has its own."
        )
    check_range(min(lowest for *_, lowest, _ in numbers), max(highest for *_, highest in numbers), total)
    return VocabularyShard(total, first, ShardedTokens(group, tuple(tokens)) if own_tokens else ReplicatedTokens(group))


def range_of(targets: Tensor) -> tuple[int, int]:
    """The lowest and the highest target on the CPU. Elsewhere the look at the values would wait for the device."""
    return (int(targets.min()), int(targets.max())) if targets.device.type == "cpu" and targets.numel() else (0, 0)


def check_range(lowest: int, highest: int, vocabulary: int) -> None:
    """Raise `ValueError` if targets from `lowest` to `highest` are not all classes."""
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"`targets` must lie in [0, {vocabulary}), got values from {lowest} to {highest}. Leave out the "
            "positions that are not to be scored: -100 is no class id."
        )
