"""Which rows of a micro-batch are fed in one forward, where a forward may feed so many tokens at most.

Dimensions: B rows of a micro-batch, R fed rows, C completion tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .micro_batches import FedTokens
from .rows import ScoredTokens, tokens_of


@dataclass(frozen=True)
class Parts:
    """A micro-batch's scored tokens in parts, each of which is one forward.

    Iterating makes one part after the other: each has a mask of the whole micro-batch.

    Args:
        whole (`ScoredTokens`): of the micro-batch.
        rows (`list[list[int]]`): the rows of each part, ascending; all fed rows, each once. A part without rows feeds
            one, and scores nothing.
    """

    whole: ScoredTokens
    rows: list[list[int]]

    @classmethod
    def of(cls, batch: dict[str, Any], scored: ScoredTokens, budget: int, *, packed: bool, shared: bool) -> "Parts":
        """In few parts, a prompt's rows in one where there is room.

        A row with more tokens than the budget is alone.

        Args:
            budget (`int`): the most tokens of a part.
            packed (`bool`): whether neither padding is fed nor what comes after a row's last scored token.
            shared (`bool`): whether rows of a part feed a prompt that they have in common once.
        """
        fed = FedTokens.of(batch, scored, packed=packed, shared=shared)
        pieces: list[list[int]] = []
        for group in fed.by_prompt(scored.rows_R.tolist()).values():
            prompt_tokens = fed.prompt_tokens_B[group[0]]
            own_tokens = [(fed.own_tokens_B[row], [row]) for row in group]
            pieces += _best_fit(own_tokens, budget - prompt_tokens)
        parts = _best_fit([(fed.of_group(piece), piece) for piece in pieces], budget)
        return cls(scored, [sorted(rows) for rows in parts])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ScoredTokens]:
        rows_R, tokens_BC = self.whole.rows_R, self.whole.tokens_BC
        for rows in self.rows:
            part_R = torch.tensor(rows, dtype=rows_R.dtype, device=rows_R.device)
            kept_BC = torch.zeros_like(tokens_BC).index_copy(0, part_R, tokens_BC[part_R])
            yield ScoredTokens(part_R if rows else rows_R[:1], kept_BC)

    def at_least(self, count: int) -> "Parts":
        """With parts before them that feed one row, and score nothing, so that there are `count`."""
        return Parts(self.whole, [[]] * (count - len(self)) + self.rows)

    def tokens_left_out(self, batch: dict[str, Any]) -> int:
        """How many tokens of `batch`, padding included, are in no part; less than 0 where rows are fed again."""
        rows = len(self.whole.tokens_BC)
        return tokens_of(batch) // rows * (rows - sum(len(part) or 1 for part in self.rows))

    def joined(self, values: list[Tensor]) -> Tensor:
        """The `(R, C)` of the whole, from those of the parts, in whose graph it is."""
        scored = [value for value, rows in zip(values, self.rows, strict=True) if rows]
        order_R = torch.tensor([row for rows in self.rows for row in rows], device=self.whole.rows_R.device)
        return torch.cat(scored)[order_R.argsort()]


def _best_fit(items: list[tuple[int, list[int]]], budget: int) -> list[list[int]]:
    """Rows that stay together, with their tokens, in few parts: the largest first, where it leaves the least room."""
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


def check_gradients_alike(of_parts: list[Tensor], of_last: Tensor) -> None:
    """Each part's loss must get the gradient that the last one gets.

    Raises:
        `RuntimeError`: they differ, because what was made of the last one's loss was not made of the others'.
    """
    if any(not torch.equal(gradient, of_last) for gradient in of_parts):
        raise RuntimeError(_CHANGED)


def check_all_trained(last_parts_to_come: int) -> None:
    """After a training step, no micro-batch may be left whose last part got no gradient, while the others did.

    Raises:
        `RuntimeError`: there is one, because what was made of its loss left it out.
    """
    if last_parts_to_come:
        raise RuntimeError(_CHANGED)


_CHANGED = (
    "The loss was changed after it was computed, by a `compute_loss` of this trainer's class. With "
    "`max_tokens_per_micro_batch` that reaches only the last of several forwards. Override `_compute_loss` "
    "instead, and leave `max_tokens_per_micro_batch` at None."
)
