"""The metrics of DPO: TRL's as one process would log them for the rows of all ranks, and ours."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat import dpo as internals
from ..distributed.ranks import Ranks
from ..losses.preference import LossOptions, Pairs, rpo_margins
from ..scoring.scorer import Scorer
from .row_balance import RowBalance


class Counts(NamedTuple):
    """The number of `pairs` in a batch, and of scored tokens in `chosen` and `rejected` completions."""

    pairs: int = 0
    chosen: int = 0
    rejected: int = 0


# The metrics of TRL's DPO trainer that are means over tokens. All others are means over pairs
_MEANS_OVER_TOKENS: dict[str, Any] = {
    "entropy": lambda counts: counts.chosen + counts.rejected,
    "logits/chosen": lambda counts: counts.chosen,
    "logits/rejected": lambda counts: counts.rejected,
    "mean_token_accuracy": lambda counts: counts.chosen,
}


class DPOMetrics:
    def __init__(self, trainer: internals.DPOInternals, ranks: Ranks, scorer: Scorer, balance: RowBalance) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.scorer = scorer
        self.balance = balance
        # Of the passes over the last micro-batch on all ranks, if they were gathered with its metrics
        self.token_counts: list[int] | None = None

    @cached_property
    def combines_ranks(self) -> bool:
        """Whether each rank's loss logs the metrics of its own rows, which `record` combines.

        TRL's are means of the ranks' means, count rows that are repeated to fill a batch, and take 15 gathers. But a
        loss whose source is not known may need what it gathers, so it gets the real accelerator, and TRL logs.
        """
        return self.trainer.accelerator.state.num_processes > 1 and internals.is_loss_of_one_rank(self.trainer)

    def record(self, rank_metrics: dict[str, list[float]], completion_mask: Tensor | None) -> None:
        """Log the metrics of all ranks, after one gather.

        Args:
            rank_metrics (`dict`): what the loss of this rank has logged.
            completion_mask (`Tensor` of shape `(2B, S)`, *optional*):
                of the rows that count; None if all of this rank's are repeated.
        """
        counts = Counts() if completion_mask is None else counts_of(completion_mask)
        latest = {name: values[-1] for name, values in rank_metrics.items()}
        num_tokens = latest.pop("num_tokens", 0)
        weighted_metrics = weighted(latest, counts)
        token_counts = [num_tokens if counts.pairs else 0, *self.scorer.take_counts()]
        row = torch.tensor([[*weighted_metrics, *token_counts]], dtype=torch.float64, device=self.ranks.device)
        rows = self.ranks.accelerator.gather(row)
        internals.log_metrics(self.trainer, of_all_ranks(sorted(latest), rows[:, : len(weighted_metrics)]))
        total_tokens, *of_passes = map(int, rows[:, len(weighted_metrics) :].sum(0).tolist())
        # A subclass may compute the loss of several batches
        before = self.token_counts or [0] * len(of_passes)
        self.token_counts = [a + b for a, b in zip(before, of_passes, strict=True)]
        internals.log_tokens(self.trainer, total_tokens)

    def record_margins(self, pairs: Pairs, options: LossOptions, rank_metrics: dict[str, list[float]] | None) -> None:
        """Log how far the policy's margins are from those of the rewards, which RPO makes equal."""
        with torch.no_grad():
            margin_B, target_B = rpo_margins(pairs, options)
            metrics = {
                "rewards/target_margins": target_B.mean().item(),
                "rewards/margin_errors": (margin_B - target_B).abs().mean().item(),
            }
        internals.log_metrics(self.trainer, metrics, rank_metrics)

    def record_balance(self) -> None:
        # Before the first step, the policy may still be in evaluation mode
        internals.log_metrics(self.trainer, self.balance.metrics(), internals.mode_metrics(self.trainer, "train"))

    def drop_rewards(self) -> None:
        """Remove what TRL has logged of rewards: without a reference they have no meaning."""
        internals.drop_reward_metrics(self.trainer)


def counts_of(completion_mask: Tensor) -> Counts:
    """Return the counts of a batch `(2B, S)` whose first half is chosen. The first token of a row is not scored."""
    chosen, rejected = completion_mask[:, 1:].sum(1).chunk(2)
    return Counts(len(chosen), int(chosen.sum()), int(rejected.sum()))


def weighted(metrics: Mapping[str, float], counts: Counts) -> list[float]:
    """Return two numbers for each metric, sorted by name: the count that it is a mean over, and count * metric."""
    numbers: list[float] = []
    for name in sorted(metrics):
        count = _MEANS_OVER_TOKENS.get(name, lambda counts: counts.pairs)(counts)
        # NaN stays NaN, unless this rank has nothing to average
        numbers += [count, count * metrics[name] if count else 0.0]
    return numbers


def of_all_ranks(names: list[str], numbers: Tensor) -> dict[str, float]:
    """Return the mean of each metric over all ranks; 0, as in TRL, if there is nothing to average.

    Args:
        names (`list[str]`): names of the metrics, sorted.
        numbers (`Tensor` of shape `(ranks, 2 * len(names))`): float64, the results of [`weighted`] on each rank.
    """
    counts, sums = numbers.sum(0).view(-1, 2).T
    means = torch.where(counts > 0, sums / counts.clamp(min=1), 0.0)
    return dict(zip(names, means.tolist(), strict=True))
