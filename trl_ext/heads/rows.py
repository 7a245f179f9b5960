"""Where the rows of the head's weight are read from: tensors on this rank, or slices that other ranks send in turn."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Block(NamedTuple):
    """Consecutive rows of the weight: `weight` (v, H) and `bias` (v,) of the classes from `first` on."""

    first: int
    weight: Tensor
    bias: Tensor | None


class Rows(Protocol):
    """Some or all rows of a weight, to be read once from the first block to the last.

    Attributes:
        vocabulary (`int`): V, of all ranks' rows together.
    """

    vocabulary: int

    def blocks(self) -> Iterator[Block]:
        """Every block, in ascending order of classes. A block may be overwritten when the next one is asked for."""

    def of_targets(self, rows: slice) -> Tensor:
        """The rows of the targets `rows`, of shape (n, H), 0 where they are not among the blocks.

        To be asked for once all blocks were read.
        """


class LocalShards:
    """Rows that lie on this rank."""

    def __init__(self, blocks: tuple[Block, ...], targets: Tensor, vocabulary: int) -> None:
        self._blocks, self._targets, self.vocabulary = blocks, targets, vocabulary

    def blocks(self) -> Iterator[Block]:
        return iter(self._blocks)

    def of_targets(self, rows: slice) -> Tensor:
        targets = self._targets[rows]
        weight = self._blocks[0].weight
        if len(weight) == self.vocabulary:
            # Clamped for other devices than the CPU: a target out of range has NaN for its coefficient
            return weight[targets.clamp(0, weight.shape[0] - 1)]
        found = weight.new_zeros(len(targets), weight.shape[1])
        for block in self._blocks:
            _take_targets_(found, targets, block)
        return found


class BroadcastShards:
    """Rows spread over a group, each rank's sent to all in turn, while the tiles of the slice before are folded.

    Two slices stand on a rank at a time, beside its own rows.

    Args:
        here (`tuple[Block, ...]`): this rank's rows; without a bias.
        ranges (`list[list[tuple[int, int]]]`): of each rank of the group, (first class, rows) of each of its blocks.
        group (`ProcessGroup`): the ranks. All read their rows equally often.
        like (`Tensor`): a tensor on the weight's device, of its dtype and with H columns.
        targets (`Tensor` of shape `(N,)`): this rank's own.
    """

    def __init__(
        self,
        here: tuple[Block, ...],
        ranges: list[list[tuple[int, int]]],
        group: dist.ProcessGroup,
        like: Tensor,
        targets: Tensor,
    ) -> None:
        self._here, self._ranges, self._group, self._like, self._targets = here, ranges, group, like, targets
        self.vocabulary = sum(count for blocks in ranges for _, count in blocks)

    def blocks(self) -> Iterator[Block]:
        self._found = self._like.new_zeros(len(self._targets), self._like.shape[1])
        most = max(count for blocks in self._ranges for _, count in blocks)
        step = min(_rows_of_a_slice(self._like), most)
        self._buffers = self._like.new_empty(2, step, self._like.shape[1])
        coming: tuple[dist.Work, Block] | None = None
        for number, (owner, block, start, stop) in enumerate(self._slices(step)):
            came, coming = coming, self._send(number, owner, block, start, stop)
            if came is not None:
                yield self._arrived(*came)
        if coming is not None:
            yield self._arrived(*coming)
        del self._buffers

    def of_targets(self, rows: slice) -> Tensor:
        return self._found[rows]

    def _slices(self, step: int) -> Iterator[tuple[int, int, int, int]]:
        """(rank, number of its block, first row, last row + 1) of each slice: the same on all ranks."""
        for owner, blocks in enumerate(self._ranges):
            for block, (_, count) in enumerate(blocks):
                for start in range(0, count, step):
                    yield owner, block, start, min(start + step, count)

    def _send(self, number: int, owner: int, block: int, start: int, stop: int) -> tuple[dist.Work, Block]:
        if owner == self._group.rank():
            rows = self._here[block].weight.detach()[start:stop]
        else:
            # Nobody reads it any more: the slice before the last was folded before this one was asked for
            rows = self._buffers[number % 2, : stop - start]
        work = dist.broadcast(rows, group=self._group, group_src=owner, async_op=True)
        return work, Block(self._ranges[owner][block][0] + start, rows, None)

    def _arrived(self, work: dist.Work, block: Block) -> Block:
        work.wait()
        _take_targets_(self._found, self._targets, block)
        return block


def _take_targets_(found: Tensor, targets: Tensor, block: Block) -> None:
    """Put the rows of those targets that lie in the block where the targets stand in `found` (n, H)."""
    if not len(block.weight):
        return
    local = targets - block.first
    inside = (local >= 0) & (local < len(block.weight))
    rows = block.weight[local.clamp(0, len(block.weight) - 1)]
    torch.where(inside[:, None], rows, found, out=found)


# Bytes of a slice on the way: large enough for a link's full rate, small beside a weight of 1 GB
_SLICE = {"cuda": 2**25, "cpu": 2**21}


def _rows_of_a_slice(weight: Tensor) -> int:
    return max(1, _SLICE["cpu" if weight.device.type == "cpu" else "cuda"] // (weight.shape[1] * weight.element_size()))
