"""A micro-batch in parts: which of its rows share a forward pass, given the maximum number of tokens in a pass.

Dimensions: B rows of a micro-batch, R rows that run, C completion tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .micro_batches import RowTokens
from .rows import ScoredTokens, padded_tokens


@dataclass(frozen=True)
class Parts:
    """A micro-batch's scored tokens in parts, one forward each. Iterating builds one part at a time."""

    whole: ScoredTokens  # of the micro-batch
    rows: list[list[int]]  # the rows of each part, ascending; a part without rows runs one row, and scores nothing

    @classmethod
    def of(cls, batch: dict[str, Any], scored: ScoredTokens, budget: int, *, packed: bool, shared: bool) -> "Parts":
        """Return few parts of at most `budget` tokens, with a prompt's rows in one part where there is room.

        A row with more tokens than `budget` gets its own part.
        """
        tokens = RowTokens.of(batch, scored, packed=packed, shared=shared)
        return cls(scored, few_parts(tokens, scored.rows_R.tolist(), budget))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ScoredTokens]:
        rows_R, tokens_BC = self.whole.rows_R, self.whole.tokens_BC
        for rows in self.rows:
            part_R = torch.tensor(rows, dtype=rows_R.dtype, device=rows_R.device)
            kept_BC = torch.zeros_like(tokens_BC).index_copy(0, part_R, tokens_BC[part_R])
            yield ScoredTokens(part_R if rows else rows_R[:1], kept_BC)

    def at_least(self, count: int) -> "Parts":
        """Return at least `count` parts. If some must be added, they come first and have no rows."""
        return Parts(self.whole, [[]] * (count - len(self)) + self.rows)

    def skipped_tokens(self, batch: dict[str, Any]) -> int:
        """Return how many tokens of `batch`, with padding, no part runs, minus those that parts without rows run."""
        rows = len(self.whole.tokens_BC)
        return padded_tokens(batch) // rows * (rows - sum(len(part) or 1 for part in self.rows))

    def joined(self, values: list[Tensor]) -> Tensor:
        """Return the `(R, C)` tensor of the whole micro-batch, with its graph, from the tensors of the parts."""
        scored = [value for value, rows in zip(values, self.rows, strict=True) if rows]
        order_R = torch.tensor([row for rows in self.rows for row in rows], device=self.whole.rows_R.device)
        return torch.cat(scored)[order_R.argsort()]


def few_parts(tokens: RowTokens, rows: list[int], budget: int, *, at_least: int = 1) -> list[list[int]]:
    """Return `rows` in few parts of at most `budget` tokens, but in `at_least` parts if there are as many rows."""
    pieces: list[list[int]] = []
    for group in tokens.by_prompt(rows).values():
        own_tokens = [(tokens.own_tokens_B[row], [row]) for row in group]
        pieces += _best_fit(own_tokens, budget - tokens.prompt_tokens_B[group[0]])
    parts = [sorted(part) for part in _best_fit([(tokens.of_group(piece), piece) for piece in pieces], budget)]
    while len(parts) < min(at_least, len(rows)):
        most = max(parts, key=len)
        parts.remove(most)
        parts += [most[: len(most) // 2], most[len(most) // 2 :]]
    return parts


def _best_fit(items: list[tuple[int, list[int]]], budget: int) -> list[list[int]]:
    """Distribute `items` (tokens, rows) over few parts: the largest first, each where it leaves the least room."""
    rooms: list[tuple[int, int]] = []
    parts: list[list[int]] = []
    for tokens, rows in sorted(items, key=lambda item: -item[0]):
        at = bisect_left(rooms, (tokens, 0))
        if at == len(rooms):
            room, part = budget, len(parts)
            parts.append([])
        else:
            room, part = rooms.pop(at)
        parts[part] += rows
        insort(rooms, (room - tokens, part))
    return parts
