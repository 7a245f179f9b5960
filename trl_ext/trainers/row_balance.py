"""Balance: the rows of an optimizer step move between ranks and micro-batches, so that all have about the same cost."""

from dataclasses import replace
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

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

    def metrics(self) -> list[tuple[str, float]]:
        """Return the names and values in the logs; none if no rows moved between ranks."""
        names = ("balance/max_over_mean_before", "balance/max_over_mean")
        return list(zip(names, self.max_over_mean or (), strict=False))

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
        *,
        over_ranks: bool,
        shared: bool,
        **unit: int,
    ) -> dict[str, Any]:
        """Return `batch` with its rows in the order of `row_order`; with `over_ranks`, with rows of all ranks.

        Args:
            columns (`dict[str, Column]`): how the entries of shape (B, W) are padded.
            shared (`bool`): whether rows share equal prompts.
            unit (`int`): the slices of an optimizer step, in the words of `row_order`.
        """
        if over_ranks and self.ranks.accelerator.num_processes > 1:
            entries = {name: x for name, x in sorted(batch.items()) if is_rowwise(x)}
            known = all(x.ndim == 1 or name in columns for name, x in entries.items())
            known = known and not any(isinstance(x, list) for x in batch.values())
            rows = Rows(entries, columns)
            of_ranks = self.ranks.gather_counts([rows.signature if known else -1, len(tokens.prompt_B)])
            if known and all(x == of_ranks[0] for x in of_ranks):
                return {**batch, **self._over_ranks(rows, tokens, shared, **unit)}
        return in_order(batch, row_order(self._cost.costs(tokens), **unit))

    def _over_ranks(self, rows: Rows, tokens: RowTokens, shared: bool, **unit: int) -> dict[str, Tensor]:
        ranks = self.ranks.accelerator.num_processes
        of_rank_4B = torch.tensor(
            [tokens.prompt_B, tokens.prompt_tokens_B, tokens.own_tokens_B, tokens.scored_tokens_B],
            device=self.ranks.device,
        )
        facts = torch.cat([of_rank_4B.T, rows.lengths_BE.to(self.ranks.device)], dim=1)
        facts_NF = self.ranks.accelerator.gather(facts).cpu()
        prompt_N, *counts = facts_NF[:, :4].T
        if not shared:
            prompt_N = torch.where(prompt_N == -1, prompt_N, torch.arange(len(prompt_N)))
        every = RowTokens(prompt_N.tolist(), *(x.tolist() for x in counts))
        order = row_order(self._cost.costs(every), ranks=ranks, **unit)
        theirs = list(range(len(order)))
        before, after = (max_over_mean(every, x, ranks=ranks, **unit) for x in (theirs, order))
        self.max_over_mean = before, after
        return rows.exchanged(torch.tensor(order), facts_NF[:, 4:], self.ranks)


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
