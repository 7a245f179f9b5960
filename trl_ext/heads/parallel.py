"""The head on several ranks: which tokens each rank has, and which rows of the weight it holds or receives."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames these two functions and warns about the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# How many tokens of all ranks are gathered and scored at a time. Besides the rank's rows, their hidden states and fp32
# sums need memory: 200 MB for 8192 tokens, bf16 and a hidden size of 4096
_GATHERED_TOKENS = {"cuda": 8192, "cpu": 2048}
# Bytes of a slice that is broadcast: large enough for a link's full rate, small compared with a weight of 1 GB
_SLICE = {"cuda": 2**25, "cpu": 2**21}


class Block(NamedTuple):
    """Consecutive rows of the weight: `weight` (v, H) and `bias` (v,) of the classes from `first` on."""

    first: int
    weight: Tensor
    bias: Tensor | None


class LocalShards:
    """This rank's rows of a weight with `vocabulary` rows. A forward or backward reads each block once, in order."""

    def __init__(self, blocks: tuple[Block, ...], targets: Tensor, vocabulary: int) -> None:
        self._blocks = blocks
        self._targets = targets
        self.vocabulary = vocabulary

    def blocks(self) -> Iterator[Block]:
        """Yield every block, in ascending order of classes. Each is valid until the next one is requested."""
        return iter(self._blocks)

    def of_targets(self, rows: slice) -> Tensor:
        """Return the weight's rows of the targets, (n, H), 0 for targets in no block. Read all blocks first."""
        targets = self._targets[rows]
        weight = self._blocks[0].weight
        if len(weight) == self.vocabulary:
            # Clamped for devices where targets are not checked; the coefficient of a target out of range is NaN
            return weight[targets.clamp(0, weight.shape[0] - 1)]
        target_rows = weight.new_zeros(len(targets), weight.shape[1])
        for block in self._blocks:
            _take_targets_(target_rows, targets, block)
        return target_rows


class BroadcastShards:
    """Like `LocalShards`, for a weight whose rows are spread over a group: the ranks broadcast their rows in turn.

    The next slice is received while the current one is processed. Besides the rank's own rows, two slices are in
    memory.
    """

    def __init__(
        self,
        rank_blocks: tuple[Block, ...],  # this rank's rows; without a bias
        ranges: list[list[tuple[int, int]]],  # (first class, rows) of each block of each rank of the group
        group: dist.ProcessGroup,  # all its ranks must read the blocks equally often
        like: Tensor,  # a tensor with the weight's device and dtype, and H columns
        targets: Tensor,  # (N,), of this rank
    ) -> None:
        self._rank_blocks = rank_blocks
        self._ranges = ranges
        self._group = group
        self._like = like
        self._targets = targets
        self.vocabulary = sum(count for blocks in ranges for _, count in blocks)

    def blocks(self) -> Iterator[Block]:
        width = self._like.shape[1]
        self._target_rows = self._like.new_zeros(len(self._targets), width)
        most = max(count for blocks in self._ranges for _, count in blocks)
        size = _SLICE["cpu" if self._like.device.type == "cpu" else "cuda"]
        step = min(max(1, size // (width * self._like.element_size())), most)
        self._buffers = self._like.new_empty(2, step, width)
        in_transit: tuple[dist.Work, Block] | None = None
        for number, (owner, block, start, stop) in enumerate(self._slices(step)):
            # Sent before the earlier slice is waited for, so that it is received while that one is processed
            earlier, in_transit = in_transit, self._send(number, owner, block, start, stop)
            if earlier is not None:
                yield self._receive(*earlier)
        if in_transit is not None:
            yield self._receive(*in_transit)
        del self._buffers

    def of_targets(self, rows: slice) -> Tensor:
        return self._target_rows[rows]

    def _slices(self, step: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (rank, number of its block, first row, last row + 1) of each slice, the same on all ranks."""
        for owner, blocks in enumerate(self._ranges):
            for block, (_, count) in enumerate(blocks):
                for start in range(0, count, step):
                    yield owner, block, start, min(start + step, count)

    def _send(self, number: int, owner: int, block: int, start: int, stop: int) -> tuple[dist.Work, Block]:
        if owner == self._group.rank():
            rows = self._rank_blocks[block].weight.detach()[start:stop]
        else:
            # This buffer is free: the slice that it held, two slices ago, has been processed
            rows = self._buffers[number % 2, : stop - start]
        work = dist.broadcast(rows, group=self._group, group_src=owner, async_op=True)
        return work, Block(self._ranges[owner][block][0] + start, rows, None)

    def _receive(self, work: dist.Work, block: Block) -> Block:
        work.wait()
        _take_targets_(self._target_rows, self._targets, block)
        return block


Rows = LocalShards | BroadcastShards


def _take_targets_(target_rows: Tensor, targets: Tensor, block: Block) -> None:
    """Copy the block's weight rows that are targets to `target_rows` (n, H), each to the index of its target."""
    if not len(block.weight):
        return
    local = targets - block.first
    inside = (local >= 0) & (local < len(block.weight))
    rows = block.weight[local.clamp(0, len(block.weight) - 1)]
    torch.where(inside[:, None], rows, target_rows, out=target_rows)


class Part:
    """Some of this rank's N tokens, M in number. All ranks of `group`, if any, have the same tokens."""

    def __init__(self, rows: slice, group: dist.ProcessGroup | None = None) -> None:
        self.rows = rows
        self.group = group

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of `x` (N, ...) that are scored together: (M, ...)."""
        return x[self.rows]

    def select_local(self, *results: Tensor | None) -> list[Any]:
        """Return the rows of this rank's tokens from each tensor (M, ...)."""
        return list(results)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of `x` (M, ...) over the group, for this rank's tokens."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x


class _Gathered(Part):
    """Some tokens of each rank of `group`, padded with zeros to `width` per rank: M is `width` times the ranks."""

    group: dist.ProcessGroup

    def __init__(self, rows: slice, group: dist.ProcessGroup, width: int) -> None:
        super().__init__(rows, group)
        self.width = width
        self.count = rows.stop - rows.start

    def gather(self, x: Tensor) -> Tensor:
        local_rows = x.new_zeros(self.width, *x.shape[1:])
        local_rows[: self.count] = x[self.rows]
        all_rows = x.new_empty(self.group.size() * self.width, *x.shape[1:])
        all_gather(all_rows, local_rows, group=self.group)
        return all_rows

    def select_local(self, *results: Tensor | None) -> list[Any]:
        first = self.group.rank() * self.width
        return [None if x is None else x[first : first + self.count] for x in results]

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        local_sums = x.new_empty(self.width, *x.shape[1:])
        reduce_scatter(local_sums, x, group=self.group)
        return local_sums[: self.count]


@dataclass(frozen=True)
class Exchange:
    """How ranks that share the rows of a weight exchange tokens.

    The ranks have the same tokens (tensor parallelism), or each has its own tokens, possibly none (FSDP2, ZeRO-3).
    """

    group: dist.ProcessGroup | None = None  # None: this rank reads every row of the weight
    counts: tuple[int, ...] | None = None  # tokens of each rank; None if all have the same tokens

    def parts(self, tokens: int, device: torch.device) -> list[Part]:
        """Return this rank's `tokens` in parts that are scored in turn. Every rank has the same number of parts."""
        if self.group is None or self.counts is None:
            return [Part(slice(0, tokens), self.group)]
        most = max(self.counts)
        step = max(1, _GATHERED_TOKENS["cpu" if device.type == "cpu" else "cuda"] // len(self.counts))
        parts: list[Part] = []
        for start in range(0, most, step):
            rows = slice(min(start, tokens), min(start + step, tokens))
            parts.append(_Gathered(rows, self.group, min(step, most - start)))
        return parts or [Part(slice(0))]


def tokens_of_ranks(tokens: int, group: dist.ProcessGroup, device: torch.device) -> tuple[int, ...]:
    """Return how many tokens each rank of `group` has. Waits for the device."""
    counts = torch.empty(group.size(), dtype=torch.int64, device=device)
    all_gather(counts, torch.tensor([tokens], device=device), group=group)
    return tuple(counts.tolist())


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the vocabulary this rank holds."""

    vocabulary: int | None = None  # V; None: the number of rows of the weight on this rank
    first: int = 0  # class of the first row on this rank
    exchange: Exchange = Exchange()
    rows_for: Callable[[Tensor], Rows] | None = None  # the rows for given targets; None: the rows are one tensor

    @property
    def communicates(self) -> bool:
        """Whether a pass communicates with other ranks."""
        return self.is_partial or self.rows_for is not None

    @property
    def is_partial(self) -> bool:
        """Whether this rank processes only some rows of the weight, and other ranks the others."""
        return self.exchange.group is not None


def shard_of_group(
    group: dist.ProcessGroup, rows: int, first: int, vocabulary: int | None, targets: Tensor, own_tokens: bool
) -> VocabularyShard:
    """Return the shard that a rank's arguments describe, after a check against the arguments of all ranks.

    Gathers five integers from each rank.

    Raises:
        `ValueError`: the ranks' rows do not cover the vocabulary exactly once, the ranks should have the same tokens
            but have different numbers of them, or a target on the CPU is out of range. Every rank raises it.
    """
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    gathered = torch.empty(group.size() * 5, dtype=torch.int64, device=device)
    all_gather(gathered, torch.tensor([first, rows, targets.numel(), *range_of(targets)], device=device), group=group)
    numbers: list[list[int]] = gathered.view(-1, 5).tolist()
    shards = [(start, count) for start, count, *_ in numbers]
    tokens = [count for _, _, count, *_ in numbers]
    total = sum(count for _, count in shards)
    end = 0
    for start, count in sorted(shards):
        if count and start != end:
            raise ValueError(
                f"`first_class` and the rows of `weight` must cover the vocabulary once, got (first class, rows) "
                f"{shards} on the ranks of the group: class {min(start, end)} is missing or on two ranks."
            )
        end += count
    if vocabulary is not None and vocabulary != total:
        raise ValueError(f"`vocab_size` must be {total}, the number of rows on all ranks together, got {vocabulary}.")
    if total < 2:
        raise ValueError(f"`weight` must have at least 2 rows on all ranks together, got {total}.")
    if not own_tokens and len(set(tokens)) > 1:
        raise ValueError(
            f"`own_tokens=False` needs the same tokens on all ranks, but the ranks have {tokens} tokens. Set "
            "`own_tokens=True` if each rank has its own tokens."
        )
    check_range(min(lowest for *_, lowest, _ in numbers), max(highest for *_, highest in numbers), total)
    return VocabularyShard(total, first, Exchange(group, tuple(tokens) if own_tokens else None))


def range_of(targets: Tensor) -> tuple[int, int]:
    """Return the lowest and highest target on the CPU. Return (0, 0) elsewhere, where reading waits for the device."""
    return (int(targets.min()), int(targets.max())) if targets.device.type == "cpu" and targets.numel() else (0, 0)


def check_range(lowest: int, highest: int, vocabulary: int) -> None:
    """Raise `ValueError` if `lowest` or `highest` is not a class id."""
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"`targets` must be class ids in [0, {vocabulary}), got values from {lowest} to {highest}. Remove "
            "positions that are not scored (label -100) from `hidden` and `targets`."
        )
