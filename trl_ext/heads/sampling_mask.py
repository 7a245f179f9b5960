"""The classes over which tokens are normalised, where a sampler could choose from only some of the vocabulary.

Dimensions: N tokens, B rows, C completion tokens of a row, K pairs of a row, (n, v) tokens and columns of a tile, E
pairs.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SamplingMask(NamedTuple):
    """Pairs of a token and a class that it may be, E in number; a token without a pair may be any class."""

    tokens: Tensor  # (E,) int64, -1 for a pair that belongs to no token
    classes: Tensor  # (E,) int64
    has_pair: Tensor  # (N,) bool: which tokens have a pair

    @classmethod
    def of_rows(cls, ids_BK: Tensor, counts_BC: Tensor, token_BC: Tensor, tokens: int) -> "SamplingMask":
        """Return the mask of N `tokens`. The host does not wait for the device.

        Args:
            ids_BK (`Tensor`): the classes of each row's tokens, one token after another.
            counts_BC (`Tensor`): how many of them each token has; 0 for all classes.
            token_BC (`Tensor`): index of each token among the N, -1 for a token that is not scored.
        """
        ends_BC = counts_BC.long().cumsum(1)
        entry_BK = torch.arange(ids_BK.size(1), device=ids_BK.device).expand(ids_BK.shape).contiguous()
        column_BK = torch.searchsorted(ends_BC, entry_BK, right=True)
        # Beyond a row's last entry there is padding
        padded_BC = torch.nn.functional.pad(token_BC, (0, 1), value=-1)
        has_pair = torch.zeros(tokens + 1, dtype=torch.bool, device=ids_BK.device)  # the last is for -1
        has_pair[token_BC] = counts_BC > 0
        return cls(padded_BC.gather(1, column_BK).flatten(), ids_BK.long().flatten(), has_pair[:-1])

    def with_targets(self, targets_N: Tensor) -> "SamplingMask":
        """Return the mask with each token's target added."""
        token_N = torch.arange(len(targets_N), device=targets_N.device)
        return self._replace(tokens=torch.cat([self.tokens, token_N]), classes=torch.cat([self.classes, targets_N]))

    def of_tokens(self, selected_N: Tensor) -> "SamplingMask":
        """Return the mask of the tokens for which `selected_N` is true."""
        index_N = torch.where(selected_N, selected_N.cumsum(0) - 1, -1)
        padded = torch.nn.functional.pad(index_N, (0, 1), value=-1)  # for -1
        return SamplingMask(padded[self.tokens], self.classes, self.has_pair[selected_N])

    def absent(self, tokens: slice, classes: slice) -> Tensor:
        """Return which classes of a tile its tokens cannot be: `(n, v)`, bool."""
        rows = tokens.stop - tokens.start
        columns = classes.stop - classes.start
        row_E = self.tokens - tokens.start
        column_E = self.classes - classes.start
        inside_E = (row_E >= 0) & (row_E < rows) & (column_E >= 0) & (column_E < columns)
        place_E = torch.where(inside_E, row_E * columns + column_E, rows * columns)
        absent = self.has_pair.new_empty(rows * columns + 1)  # the last is for pairs outside of the tile
        absent[:-1].view(rows, columns).copy_(self.has_pair[tokens, None].expand(rows, columns))
        return absent.index_fill_(0, place_E, 0)[:-1].view(rows, columns)
