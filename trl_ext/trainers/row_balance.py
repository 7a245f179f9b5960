"""Balance: the rows of an optimizer step move between ranks and micro-batches, so that all have about the same cost."""

from dataclasses import replace
from functools import cache, cached_property
from typing import Any, Protocol

import torch

from ..distributed.exchange import Column, Rows
from ..distributed.ranks import Ranks
from ..planning.cost import CostModel
from ..planning.micro_batches import RowTokens, max_over_mean, row_order
from ..planning.plan import Decision
from ..planning.rows import is_rowwise


class Trainer(Protocol):
    """The trainer members that the balance reads."""

    model: Any


class RowBalance:
    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self.trainer, self.ranks = trainer, ranks
        # Tokens of the rank with the most over their mean, of the last optimizer steps: in TRL's order, and in ours
        self.max_over_mean: tuple[float, float] | None = None

    @cached_property
    def _cost(self) -> CostModel:
        return CostModel.of(self.trainer.model.config.get_text_config())

    def metrics(self) -> dict[str, float]:
        """Return what the logs show of the last rows that moved between ranks; nothing if they did not move."""
        names = ("balance/max_over_mean_before", "balance/max_over_mean")
        return dict(zip(names, self.max_over_mean or (), strict=False))

    def measured(self, decision: Decision) -> Decision:
        """Return a decision; that on the balance with the effect on the last optimizer steps, once it is known."""
        if decision.name != "balance" or self.max_over_mean is None:
            return decision
        before, after = (f"{x:.2f}" for x in self.max_over_mean)
        now = f"Tokens of the largest rank over the mean: {after}, in TRL's order {before}."
        return replace(decision, reason=f"{decision.reason} {now}")

    def arranged(
        self,
        batch: dict[str, Any],
        tokens: RowTokens,
        columns: dict[str, Column],
        unit: dict[str, int],
        *,
        over_ranks: bool = True,
        completions: int = 1,
    ) -> dict[str, Any]:
        """Return `batch` with its rows in the order of `row_order`; with `over_ranks`, with rows of all ranks.

        Args:
            columns (`dict[str, Column]`): how the entries of shape (B, W) are padded.
            unit (`dict[str, int]`): the slices of an optimizer step, as arguments of `row_order`.
            completions (`int`): of a row.
        """
        self.max_over_mean = None
        rows = Rows({name: x for name, x in sorted(batch.items()) if is_rowwise(x)}, columns)
        if not over_ranks or not self._alike(batch, rows, len(tokens.prompt_B)):
            return in_order(batch, row_order(self._cost.costs(tokens, completions), **unit))
        count, device = self.ranks.accelerator.num_processes, self.ranks.device
        of_rank = (tokens.prompt_B, tokens.prompt_tokens_B, tokens.own_tokens_B, tokens.scored_tokens_B)
        of_rank_BF = torch.cat([torch.tensor(of_rank, device=device).T, rows.lengths_BE.to(device)], dim=1)
        facts_NF = self.ranks.accelerator.gather(of_rank_BF).cpu()
        every = RowTokens(*facts_NF[:, : len(of_rank)].T.tolist())
        order = row_order(self._cost.costs(every, completions), ranks=count, **unit)
        theirs = list(range(len(order)))
        before, after = (max_over_mean(every, x, ranks=count, **unit) for x in (theirs, order))
        self.max_over_mean = before, after
        if order == theirs:
            return batch
        return {**batch, **rows.exchanged(torch.tensor(order), facts_NF[:, len(of_rank) :], self.ranks)}

    def _alike(self, batch: dict[str, Any], rows: Rows, count: int) -> bool:
        """Return whether several ranks have equally many rows, with the same entries, all of which can be exchanged."""
        known = all(x.ndim == 1 or name in rows.columns for name, x in rows.entries.items())
        known = known and not any(isinstance(x, list) for x in batch.values())
        of_ranks = self.ranks.gather_counts([rows.signature if known else -1, count])
        return len(of_ranks) > 1 and known and all(x == of_ranks[0] for x in of_ranks)


def in_order(batch: dict[str, Any], order: list[int]) -> dict[str, Any]:
    """Return a batch with its rows in another order."""
    if order == list(range(len(order))):
        return batch
    order_on = cache(lambda device: torch.tensor(order, device=device))  # one copy from the host

    def ordered(value: Any) -> Any:
        if is_rowwise(value):
            return value[order_on(value.device)]
        return [value[row] for row in order] if isinstance(value, list) else value

    return {name: ordered(value) for name, value in batch.items()}
