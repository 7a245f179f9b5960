"""Balance: the rows of an optimizer step move between ranks and micro-batches, so that all have about the same cost."""

from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch

from ..distributed.exchange import Column, Rows
from ..distributed.ranks import Ranks
from ..planning.cost import CostModel
from ..planning.micro_batches import RowTokens, StepRows, max_over_mean, row_order
from ..planning.plan import Decision
from ..planning.rows import is_rowwise


class RowBalance:
    """Orders the rows of a trainer's batches.

    Args:
        trainer (`ExactTrainer`): whose `model` has the config from which costs are computed.
    """

    def __init__(self, trainer: Any, ranks: Ranks) -> None:
        self.trainer = trainer
        self.ranks = ranks
        # Tokens of the rank with the most over their mean, of the last optimizer steps: in TRL's order, and in ours
        self.max_over_mean: tuple[float, float] | None = None

    @cached_property
    def _cost(self) -> CostModel:
        return CostModel.of(self.trainer.model.config.get_text_config())

    def metrics(self) -> dict[str, float]:
        """Return what the logs show of the last rows that moved between ranks; nothing if they did not move."""
        if self.max_over_mean is None:
            return {}
        before, after = self.max_over_mean
        return {"balance/max_over_mean_before": before, "balance/max_over_mean": after}

    def measured(self, decision: Decision) -> Decision:
        """Return a decision; that on the balance with the effect on the last optimizer steps, once it is known."""
        if decision.name != "balance" or self.max_over_mean is None:
            return decision
        before, after = self.max_over_mean
        effect = f"The rank with the most tokens has {after:.2f} times the mean, and {before:.2f} times in TRL's order."
        return replace(decision, reason=f"{decision.reason} {effect}")

    def reorder(
        self,
        batch: dict[str, Any],
        tokens: RowTokens,
        columns: dict[str, Column],
        step: StepRows,
        *,
        over_ranks: bool = True,
        completions: int = 1,
    ) -> dict[str, Any]:
        """Return `batch` with its rows in the order of `row_order`; with `over_ranks`, with rows of all ranks.

        Args:
            columns (`dict[str, Column]`): how the entries of shape (B, W) are padded.
            step (`StepRows`): the rows of an optimizer step.
            completions (`int`): of a row.
        """
        self.max_over_mean = None
        rows = Rows({key: x for key, x in sorted(batch.items()) if is_rowwise(x)}, columns)
        if not over_ranks or not self._can_exchange(batch, rows, len(tokens.prompt_B)):
            return in_order(batch, row_order(self._cost.costs(tokens, completions), step))
        ranks = self.ranks.accelerator.num_processes
        device = self.ranks.device
        counts = (tokens.prompt_B, tokens.prompt_tokens_B, tokens.own_tokens_B, tokens.scored_tokens_B)
        # One gather: the fields of `RowTokens`, then the lengths of the entries
        fields_BF = torch.cat([torch.tensor(counts, device=device).T, rows.lengths_BE.to(device)], dim=1)
        fields_NF = self.ranks.accelerator.gather(fields_BF).cpu()
        all_tokens = RowTokens(*fields_NF[:, : len(counts)].T.tolist())
        lengths_NE = fields_NF[:, len(counts) :]
        order = row_order(self._cost.costs(all_tokens, completions), step, ranks=ranks)
        trl_order = list(range(len(order)))
        self.max_over_mean = (
            max_over_mean(all_tokens, trl_order, step, ranks=ranks),
            max_over_mean(all_tokens, order, step, ranks=ranks),
        )
        if order == trl_order:
            return batch
        return {**batch, **rows.exchanged(torch.tensor(order), lengths_NE, self.ranks)}

    def _can_exchange(self, batch: dict[str, Any], rows: Rows, count: int) -> bool:
        """Return whether several ranks have equally many rows, with the same entries, all of which can be exchanged."""
        has_columns = all(x.ndim == 1 or key in rows.columns for key, x in rows.entries.items())
        is_known = has_columns and not any(isinstance(x, list) for x in batch.values())
        signatures = self.ranks.gather_counts([rows.signature if is_known else -1, count])
        return len(signatures) > 1 and is_known and all(x == signatures[0] for x in signatures)


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
