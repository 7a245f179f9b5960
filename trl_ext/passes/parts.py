"""Which rows of a micro-batch are fed in one forward, where a forward may feed so many tokens at most.

Dimensions: B rows of a micro-batch, R fed rows, C completion tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .micro_batches import FedTokens
from .rows import ScoredTokens, tokens_of


@dataclass(frozen=True)
class Parts:
    """A micro-batch's scored tokens in parts, each of which is one forward.

    Args:
        whole (`ScoredTokens`): of the micro-batch.
        parts (`list[ScoredTokens]`): no two score one row; together they score all that `whole` does.
    """

    whole: ScoredTokens
    parts: list[ScoredTokens]

    @classmethod
    def of(cls, batch: dict[str, Any], scored: ScoredTokens, budget: int, *, packed: bool, shared: bool) -> "Parts":
        """In about as few parts as can be, balanced, a prompt's rows in one where there is room.

        A row with more tokens than the budget is alone.

        Args:
            budget (`int`): the most tokens of a part.
            packed (`bool`): whether neither padding is fed nor what comes after a row's last scored token.
            shared (`bool`): whether rows of a part feed a prompt that they have in common once.
        """
        fed = FedTokens.of(batch, scored, packed=packed, shared=shared)
        items: list[list[int]] = []
        for group in fed.by_prompt(scored.rows_R.tolist()).values():
            fits = fed.of_rows(group) <= budget
            items += [group] if fits else _spread(fed, [[row] for row in group], budget)
        return cls(scored, [_of_rows(scored, rows) for rows in _spread(fed, items, budget)])

    def at_least(self, count: int) -> "Parts":
        """With parts before them that feed one row, and score nothing, so that there are `count`."""
        nothing = ScoredTokens(self.whole.rows_R[:1], torch.zeros_like(self.whole.tokens_BC))
        return Parts(self.whole, [nothing] * (count - len(self.parts)) + self.parts)

    def tokens_left_out(self, batch: dict[str, Any]) -> int:
        """How many tokens of `batch`, padding included, are in no part; less than 0 where rows are fed again."""
        rows = len(self.whole.tokens_BC)
        return tokens_of(batch) // rows * (rows - sum(len(part.rows_R) for part in self.parts))

    def joined(self, values: list[Tensor]) -> Tensor:
        """The `(R, C)` of the whole, from those of the parts; what was scored is in their graph."""
        values_BC = [part.spread(value) for part, value in zip(self.parts, values, strict=True)]
        return torch.stack(values_BC).sum(dim=0)[self.whole.rows_R]


def _of_rows(scored: ScoredTokens, rows: list[int]) -> ScoredTokens:
    rows_R = torch.tensor(sorted(rows), device=scored.rows_R.device)
    kept_B = torch.zeros_like(scored.tokens_BC[:, 0]).index_fill(0, rows_R, True)
    return ScoredTokens(rows_R, scored.tokens_BC & kept_B.unsqueeze(1))


def _spread(fed: FedTokens, items: list[list[int]], budget: int) -> list[list[int]]:
    """`items`, rows that stay together, in as few parts as are found: the largest first, where there is least."""
    items = sorted(items, key=fed.of_rows, reverse=True)
    everything = fed.of_rows([row for item in items for row in item])
    for count in range(min(math.ceil(everything / budget), len(items)), len(items)):
        parts: list[list[int]] = [[] for _ in range(count)]
        tokens = [0] * count
        for item in items:
            least = tokens.index(min(tokens))
            parts[least] += item
            tokens[least] = fed.of_rows(parts[least])
        if all(fed.of_rows(part) <= budget for part in parts):
            return parts
    return items


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
