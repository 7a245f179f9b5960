"""The head on several ranks: which rank has which tokens and which rows of the weight."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .rows import Rows
from .statistics import RunningStatistics

# torch 2.13 renames both and warns about the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Tokens of all ranks that are gathered and scored at a time. Their hidden states and fp32 sums take memory beside this
# rank's rows: 8192 tokens of 4096 units are 200 MB in bf16.
_GATHERED_TOKENS = {"cuda": 8192, "cpu": 2048}


class Part:
    """Some tokens of this rank; with `group`, all of its ranks have the same ones. N tokens of this rank, M scored."""

    def __init__(self, rows: slice, group: dist.ProcessGroup | None = None) -> None:
        self.rows, self.group = rows, group

    def gathered(self, x: Tensor) -> Tensor:
        """Of `x` (N, ...), the rows that are scored together: (M, ...)."""
        return x[self.rows]

    def own(self, x: Tensor) -> Tensor:
        """Of `x` (M, ...), the rows of this rank's tokens."""
        return x

    def summed(self, x: Tensor) -> Tensor:
        """The sum of `x` (M, ...) over the group, for this rank's tokens."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x


class _Gathered(Part):
    """Some tokens of each rank of `group`: `width` of each, padded with zeros."""

    group: dist.ProcessGroup

    def __init__(self, rows: slice, group: dist.ProcessGroup, width: int) -> None:
        super().__init__(rows, group)
        self.width, self.count = width, rows.stop - rows.start

    def gathered(self, x: Tensor) -> Tensor:
        own = x.new_zeros(self.width, *x.shape[1:])
        own[: self.count] = x[self.rows]
        every = x.new_empty(self.group.size() * self.width, *x.shape[1:])
        all_gather(every, own, group=self.group)
        return every

    def own(self, x: Tensor) -> Tensor:
        first = self.group.rank() * self.width
        return x[first : first + self.count]

    def summed(self, x: Tensor) -> Tensor:
        own = x.new_empty(self.width, *x.shape[1:])
        reduce_scatter(own, x, group=self.group)
        return own[: self.count]


class Exchange:
    """How tokens and statistics of ranks come together. Without a group, this rank reads every row of the weight."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def parts(self, tokens: int, device: torch.device) -> list[Part]:
        """The `tokens` of this rank in parts that are scored one after another; equally many on every rank."""
        return [Part(slice(0, tokens), self.group)]

    def combine_(self, statistics: RunningStatistics) -> Tensor:
        """Combine the statistics of all rows; returns the factor that rescales this rank's sums, of shape (M, 1)."""
        maxima = statistics.maxima()
        if self.group is None or not maxima.numel():
            return statistics.move_to_(maxima)[:, None]
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.group)
        factor = statistics.move_to_(maxima)
        sums = statistics.sums()
        dist.all_reduce(sums, group=self.group)
        statistics.take_sums_(sums)
        return factor[:, None]


class ReplicatedTokens(Exchange):
    """The rows are spread over a group whose ranks all have the same tokens, as under tensor parallelism."""


class ShardedTokens(Exchange):
    """The rows are spread over a group whose ranks have different tokens, or none, as under FSDP2 and ZeRO-3.

    `counts`: how many tokens each rank has.
    """

    group: dist.ProcessGroup

    def __init__(self, group: dist.ProcessGroup, counts: tuple[int, ...]) -> None:
        super().__init__(group)
        self.counts = counts

    def parts(self, tokens: int, device: torch.device) -> list[Part]:
        most = max(self.counts)
        step = max(1, _GATHERED_TOKENS["cpu" if device.type == "cpu" else "cuda"] // len(self.counts))
        parts: list[Part] = []
        for start in range(0, most, step):
            rows = slice(min(start, tokens), min(start + step, tokens))
            parts.append(_Gathered(rows, self.group, min(step, most - start)))
        return parts or [Part(slice(0))]


def tokens_of_ranks(tokens: int, group: dist.ProcessGroup, device: torch.device) -> tuple[int, ...]:
    """How many tokens each rank of `group` has. Waits for the device."""
    counts = torch.empty(group.size(), dtype=torch.int64, device=device)
    all_gather(counts, torch.tensor([tokens], device=device), group=group)
    return tuple(counts.tolist())


@dataclass(frozen=True)
class VocabularyShard:
    """Which part of the vocabulary the weight on this rank holds.

    Args:
        vocabulary (`int`, *optional*): V, the rows of all ranks together. `None`: the rows of the weight here.
        first (`int`): class of the first row here.
        exchange (`Exchange`): how tokens, statistics and sums come together.
        rows_for (`Callable`, *optional*): makes the rows to read for given targets, where they are no plain tensor.
    """

    vocabulary: int | None = None
    first: int = 0
    exchange: Exchange = field(default_factory=Exchange)
    rows_for: Callable[[Tensor], Rows] | None = None

    @property
    def spread(self) -> bool:
        """Whether a pass waits for other ranks."""
        return self.partial or self.rows_for is not None

    @property
    def partial(self) -> bool:
        """Whether other ranks fold other rows of the weight."""
        return self.exchange.group is not None


def shard_of_group(
    group: dist.ProcessGroup, rows: int, first: int, vocabulary: int | None, targets: Tensor, own_tokens: bool
) -> VocabularyShard:
    """The shard that a rank's arguments describe; checks that the arguments of all ranks fit together.

    Gathers five integers of each rank.

    Raises:
        `ValueError`: the ranks' rows do not cover the vocabulary exactly once, their numbers of tokens differ, or a
        target on the CPU is out of range. Every rank raises, so that none waits for another.
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
    """The lowest and highest target on the CPU; (0, 0) elsewhere, where reading them would wait for the device."""
    return (int(targets.min()), int(targets.max())) if targets.device.type == "cpu" and targets.numel() else (0, 0)


def check_range(lowest: int, highest: int, vocabulary: int) -> None:
    """Raise `ValueError` unless targets from `lowest` to `highest` are all classes."""
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"`targets` must lie in [0, {vocabulary}), got values from {lowest} to {highest}. Leave out the "
            "positions that are not to be scored: -100 is no class id."
        )
