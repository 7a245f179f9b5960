"""Keys and values of one turn of a tool loop, from which the next turn starts.

Dimensions: R rows that the model runs, S columns of their prompts with padding, T stored tokens of a row.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# A row's keys and values `(..., T, channels)` in each layer, `None` in layers that have moved
_Layers = list[Any]


class EarlierTurn:
    """The keys and values of a turn's rows, without padding.

    TRL's tool loop appends the tool's result to the tokens of a row, and generates again. Until then, keys and values
    of all rows stay in memory, even of rows that call no tool: at most what TRL's cache holds when the turn ends.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, ...], _Layers] = {}  # by token ids

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        self._rows.clear()

    def store(self, ids: list[int], cache: Any, place: int, columns: slice, *, copies: bool = True) -> None:
        """Store from the cache the `columns` of the row with the index `place`, which have the token ids `ids`.

        Args:
            copies (`bool`): whether `generate` goes on with the cache. Otherwise a view costs no memory.
        """
        if tuple(ids) not in self._rows:
            pairs = [
                (layer.keys[place, ..., columns, :], layer.values[place, ..., columns, :]) for layer in cache.layers
            ]
            self._rows[tuple(ids)] = [
                (keys.clone(), values.clone()) if copies else (keys, values) for keys, values in pairs
            ]

    def move_into(self, cache: Any, ids_RS: Tensor, padding_R: Tensor) -> int:
        """Fill an empty cache with the first columns of prompts, as many as are stored for every prompt.

        Then no row is stored: TRL's loop continues with the rows of this turn.

        Returns:
            `int`: number of columns, less than S.
        """
        if not self._rows:
            return 0
        lengths = sorted({len(ids) for ids in self._rows}, reverse=True)
        stored_rows: list[_Layers] = []
        ends: list[int] = []
        paddings = padding_R.tolist()
        for row_ids, padding in zip(ids_RS.tolist(), paddings, strict=True):
            ids = tuple(row_ids[padding:])
            # At least one token must run, for its logits
            length = next((x for x in lengths if x < len(ids) and ids[:x] in self._rows), 0)
            stored_rows.append(self._rows.get(ids[:length], []))
            ends.append(padding + length)
        self.clear()
        columns = min(ends)
        if columns <= min(paddings):
            return 0
        # A row with only padding in these columns needs no stored row
        any_row = next(layers for layers in stored_rows if layers)
        for index in range(len(any_row)):
            pairs = [(layers or any_row)[index] for layers in stored_rows]
            keys = [_padded(pair[0], padding, columns) for pair, padding in zip(pairs, paddings, strict=True)]
            values = [_padded(pair[1], padding, columns) for pair, padding in zip(pairs, paddings, strict=True)]
            cache.update(torch.stack(keys), torch.stack(values), index)
            for layers in filter(None, stored_rows):
                layers[index] = None  # frees its memory
        return columns


def _padded(states: Tensor, padding: int, columns: int) -> Tensor:
    """Return `columns` states of a row: left padding, then its first states."""
    tokens = max(columns - padding, 0)
    return F.pad(states[..., :tokens, :], (0, 0, columns - tokens, 0))
