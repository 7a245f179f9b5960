"""Metrics of several ranks as one process would log them: means over all pairs or tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Counts(NamedTuple):
    """The number of `pairs` in a batch, and of scored tokens in `chosen` and `rejected` completions."""

    pairs: int = 0
    chosen: int = 0
    rejected: int = 0


# Metrics of TRL's DPO trainer that are means over tokens. All others are means over pairs
_MEANS_OVER_TOKENS: dict[str, Any] = {
    "entropy": lambda counts: counts.chosen + counts.rejected,
    "logits/chosen": lambda counts: counts.chosen,
    "logits/rejected": lambda counts: counts.rejected,
    "mean_token_accuracy": lambda counts: counts.chosen,
}


def counts_of(completion_mask: Tensor) -> Counts:
    """The counts of a batch `(2B, S)` whose first half is chosen. The first token of a row is not scored."""
    chosen, rejected = completion_mask[:, 1:].sum(1).chunk(2)
    return Counts(len(chosen), int(chosen.sum()), int(rejected.sum()))


def weighted(metrics: Mapping[str, float], counts: Counts) -> list[float]:
    """Two numbers for each metric, in the order of the names: what it is a mean over, and that times the metric."""
    numbers: list[float] = []
    for name in sorted(metrics):
        count = _MEANS_OVER_TOKENS.get(name, lambda counts: counts.pairs)(counts)
        # NaN stays NaN, except on a rank whose mean is over nothing
        numbers += [count, count * metrics[name] if count else 0.0]
    return numbers


def of_all_ranks(names: list[str], numbers: Tensor) -> dict[str, float]:
    """The means over all ranks; 0, as in TRL, where a mean is over nothing.

    Args:
        names (`list[str]`): sorted.
        numbers (`Tensor` of shape `(ranks, 2 * len(names))`): float64, what [`weighted`] returns on each rank.
    """
    counts, sums = numbers.sum(0).view(-1, 2).T
    means = torch.where(counts > 0, sums / counts.clamp(min=1), 0.0)
    return dict(zip(names, means.tolist(), strict=True))
