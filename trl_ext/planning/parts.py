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

    micro_batch: ScoredTokens
    rows: list[list[int]]  # the rows of each part, ascending; a part without rows runs one row, and scores nothing

    @classmethod
    def of(
        cls, batch: dict[str, Any], scored_tokens: ScoredTokens, budget: int, *, packed: bool, shared: bool
    ) -> "Parts":
        """Return few parts of at most `budget` tokens, with a prompt's rows in one part where there is room.

        A row with more tokens than `budget` gets its own part.
        """
        tokens = RowTokens.of(batch, scored_tokens, packed=packed, shared=shared)
        return cls(scored_tokens, few_parts(tokens, scored_tokens.rows_R.tolist(), budget))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ScoredTokens]:
        rows_R = self.micro_batch.rows_R
        tokens_BC = self.micro_batch.tokens_BC
        for rows in self.rows:
            part_rows_r = torch.tensor(rows, dtype=rows_R.dtype, device=rows_R.device)
            part_tokens_BC = torch.zeros_like(tokens_BC).index_copy(0, part_rows_r, tokens_BC[part_rows_r])
            # A part without rows runs the first one, because every rank runs as many parts
            yield ScoredTokens(part_rows_r if rows else rows_R[:1], part_tokens_BC)

    def at_least(self, count: int) -> "Parts":
        """Return at least `count` parts. If some must be added, they come first and have no rows."""
        return Parts(self.micro_batch, [[]] * (count - len(self)) + self.rows)

    def skipped_tokens(self, batch: dict[str, Any]) -> int:
        """Return how many tokens of `batch`, with padding, no part runs, minus those that parts without rows run."""
        rows = len(self.micro_batch.tokens_BC)
        return padded_tokens(batch) // rows * (rows - sum(len(part) or 1 for part in self.rows))

    def join(self, values: list[Tensor]) -> Tensor:
        """Return the `(R, C)` tensor of the whole micro-batch, with its graph, from the tensors of the parts."""
        values_of_rows = [value for value, rows in zip(values, self.rows, strict=True) if rows]
        order_R = torch.tensor([row for rows in self.rows for row in rows], device=self.micro_batch.rows_R.device)
        return torch.cat(values_of_rows)[order_R.argsort()]


def few_parts(tokens: RowTokens, rows: list[int], budget: int, *, at_least: int = 1) -> list[list[int]]:
    """Return `rows` in few parts of at most `budget` tokens, but in `at_least` parts if there are as many rows."""
    groups: list[list[int]] = []  # rows of one prompt that fit into one part
    for prompt_rows in tokens.by_prompt(rows).values():
        row_tokens = [(tokens.own_tokens_B[row], [row]) for row in prompt_rows]
        groups += _best_fit(row_tokens, budget - tokens.prompt_tokens_B[prompt_rows[0]])
    group_tokens = [(tokens.of_group(group), group) for group in groups]
    parts = [sorted(part) for part in _best_fit(group_tokens, budget)]
    while len(parts) < min(at_least, len(rows)):
        largest = max(parts, key=len)
        parts.remove(largest)
        half = len(largest) // 2
        parts += [largest[:half], largest[half:]]
    return parts


def _best_fit(items: list[tuple[int, list[int]]], budget: int) -> list[list[int]]:
    """Distribute `items` (tokens, rows) over few parts: the largest first, each where it leaves the least room."""
    rooms: list[tuple[int, int]] = []  # what is left of the budget, and the part; ascending
    parts: list[list[int]] = []
    for tokens, rows in sorted(items, key=lambda item: -item[0]):
        place = bisect_left(rooms, (tokens, 0))
        if place == len(rooms):
            room, part = budget, len(parts)
            parts.append([])
        else:
            room, part = rooms.pop(place)
        parts[part] += rows
        insort(rooms, (room - tokens, part))
    return parts
