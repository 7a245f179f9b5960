"""Runs some of an LM head's tiles in place of all: each allocates and frees the same as its neighbours."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import Tensor

from ..heads.divergence import Settings
from ..heads.divergence_sums import Tile
from ..heads.parallel import Block, BroadcastShards, Rows
from ..heads.tiled import Head

# Slices of the weight that are read. The first begins the sums, the second adds to them, as all others do
_SLICES = 2


@contextmanager
def few_tiles() -> Iterator[None]:
    """Read only some slices of each head's weight in the `with` block. Results are wrong, allocations are not."""
    tiles = Head.tiles

    def some_tiles(head: Head, x: Any, rows: Rows) -> Any:
        return tiles(head, x, _FewRows(rows, head.columns))  # type: ignore[arg-type]

    tiles_of_divergence = Settings.tiles

    def some_tiles_of_divergence(settings: Settings, *args: Any, **kwargs: Any) -> Iterator[Tile]:
        slices = 0
        for tile in tiles_of_divergence(settings, *args, **kwargs):
            slices += tile.is_first_of_columns
            if slices > _SLICES:
                return
            yield tile

    Head.tiles = some_tiles  # type: ignore[method-assign, assignment]
    Settings.tiles = some_tiles_of_divergence  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Head.tiles = tiles  # type: ignore[method-assign]
        Settings.tiles = tiles_of_divergence  # type: ignore[method-assign]


class _FewRows:
    """The first rows of a weight."""

    def __init__(self, rows: Rows, columns: int | None) -> None:
        self._rows = rows
        self._columns = columns
        self.vocabulary = rows.vocabulary

    def blocks(self) -> Iterator[Block]:
        if isinstance(self._rows, BroadcastShards):
            slices = self._rows._slices
            self._rows._slices = lambda step: islice(slices(step), 2 * _SLICES)  # type: ignore[method-assign]
            yield from self._rows.blocks()
            del self._rows._slices  # the method, which would keep the rows alive
            return
        for block in islice(self._rows.blocks(), _SLICES):
            stop = None if self._columns is None else _SLICES * self._columns
            bias = None if block.bias is None else block.bias[:stop]
            yield Block(block.first, block.weight[:stop], bias)

    def of_targets(self, rows: slice) -> Tensor:
        return self._rows.of_targets(rows)
