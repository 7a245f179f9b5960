"""The rows of the head's weight: tensors on this rank, or slices that the ranks broadcast in turn."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Bytes of a slice that travels: large enough for a link's full rate, small beside a weight of 1 GB
_SLICE = {"cuda": 2**25, "cpu": 2**21}


class Block(NamedTuple):
    """Consecutive rows of the weight: `weight` (v, H) and `bias` (v,) of the classes from `first` on."""

    first: int
    weight: Tensor
    bias: Tensor | None


class LocalShards:
    """Some or all rows of a weight, on this rank. A pass reads them once, from the first block to the last.

    Attributes:
        vocabulary (`int`): V, the rows of all ranks together.
    """

    def __init__(self, blocks: tuple[Block, ...], targets: Tensor, vocabulary: int) -> None:
        self._blocks, self._targets, self.vocabulary = blocks, targets, vocabulary

    def blocks(self) -> Iterator[Block]:
        """Every block, in ascending order of classes. Asking for the next one may overwrite a block."""
        return iter(self._blocks)

    def of_targets(self, rows: slice) -> Tensor:
        """The rows of the targets `rows`, of shape (n, H), 0 where no block has them; after all blocks are read."""
        targets = self._targets[rows]
        weight = self._blocks[0].weight
        if len(weight) == self.vocabulary:
            # Clamped for devices where targets are not checked: one out of range has NaN as its coefficient
            return weight[targets.clamp(0, weight.shape[0] - 1)]
        found = weight.new_zeros(len(targets), weight.shape[1])
        for block in self._blocks:
            _take_targets_(found, targets, block)
        return found


class BroadcastShards:
    """As `LocalShards`, with rows spread over a group: each rank broadcasts its own to the others in turn.

    The next slice travels while the tiles of this one are folded: two slices take memory beside a rank's own rows.

    Args:
        here (`tuple[Block, ...]`): this rank's rows; without a bias.
        ranges (`list[list[tuple[int, int]]]`): (first class, rows) of each block of each rank of the group.
        group (`ProcessGroup`): the ranks, which all read the rows equally often.
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
        width = self._like.shape[1]
        self._found = self._like.new_zeros(len(self._targets), width)
        most = max(count for blocks in self._ranges for _, count in blocks)
        size = _SLICE["cpu" if self._like.device.type == "cpu" else "cuda"]
        step = min(max(1, size // (width * self._like.element_size())), most)
        self._buffers = self._like.new_empty(2, step, width)
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
            # Free again: the slice before the last was folded before this one was asked for
            rows = self._buffers[number % 2, : stop - start]
        work = dist.broadcast(rows, group=self._group, group_src=owner, async_op=True)
        return work, Block(self._ranges[owner][block][0] + start, rows, None)

    def _arrived(self, work: dist.Work, block: Block) -> Block:
        work.wait()
        _take_targets_(self._found, self._targets, block)
        return block


Rows = LocalShards | BroadcastShards


def _take_targets_(found: Tensor, targets: Tensor, block: Block) -> None:
    """Copy the rows of the targets that lie in the block to the targets' places in `found` (n, H)."""
    if not len(block.weight):
        return
    local = targets - block.first
    inside = (local >= 0) & (local < len(block.weight))
    rows = block.weight[local.clamp(0, len(block.weight) - 1)]
    torch.where(inside[:, None], rows, found, out=found)
