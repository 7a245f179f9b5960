"""Metrics averaged over the pairs or tokens of all ranks, as a single process would log them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
