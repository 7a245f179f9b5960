"""Metrics of a GRPO micro-batch when rows were left out: what TRL averages over all rows, over the scored ones."""

import torch
from torch import Tensor

from .visit import Visit


def statistics(visit: Visit, tokens: list[int]) -> Tensor:
    """This rank's part of what `over_scored_rows` takes, to be summed over ranks: `(5 + len(tokens),)`.

    The fifth number, and those after it, are the rows that were skipped, and `tokens`.
    """
    scored = visit.scored
    rows = len(scored.tokens_BC)
    return torch.stack(
        [
            torch.where(scored.tokens_BC, visit.entropies_BC.detach(), 0.0).sum(),
            scored.tokens_BC.sum().float(),
            scored.tokens_BC.any(dim=1).sum().float(),
            *visit.entropies_BC.new_tensor([rows, rows - len(scored.rows_R), *tokens]),
        ]
    )


def over_scored_rows(metrics: dict[str, list[float]], totals: Tensor) -> None:
    """Correct the values that TRL has just appended to `metrics` in training; absent where no rank has scored a row.

    Args:
        totals (`Tensor`): the `statistics` of all ranks, summed.
    """
    entropy, tokens, scored_rows, rows = totals[:4].tolist()
    if scored_rows == rows:
        return
    _replace_last(metrics, "entropy", entropy / tokens if tokens else None)
    phi = metrics.get("vespo/phi_seq_mean")
    if phi:
        # A row that was not scored has a ratio of 1, and phi(1) is 1
        mean = (phi[-1] * rows - (rows - scored_rows)) / scored_rows if scored_rows else None
        _replace_last(metrics, "vespo/phi_seq_mean", mean)


def _replace_last(metrics: dict[str, list[float]], name: str, value: float | None) -> None:
    if name not in metrics:  # a loss of a subclass's own
        return
    metrics[name].pop()
    if value is not None:
        metrics[name].append(value)
    elif not metrics[name]:
        del metrics[name]
