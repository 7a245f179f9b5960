"""Dynamic sampling: more generation batches are drawn, and their live groups replace the dead groups of the first.

A group is dead if none of its completions has an advantage to learn from. As in DAPO
(https://huggingface.co/papers/2503.14476, section 3.2), each prompt then has completions with different rewards.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .rows import is_rowwise, zero_advantages


class FurtherPrompts:
    """Prompts of a map-style or streaming data set, epoch after epoch, the same on every rank.

    With `shuffle`, each epoch has its own order, which depends on `seed`. The first `taken` prompts are skipped.
    """

    def __init__(self, dataset: Any, *, shuffle: bool, seed: int, taken: int = 0) -> None:
        self._stream = self._endless(dataset, shuffle, seed, taken)
        self.taken = taken

    def take(self, prompts: int) -> list[Any]:
        """Return the next `prompts` rows."""
        self.taken += prompts
        return list(itertools.islice(self._stream, prompts))

    @staticmethod
    def _endless(dataset: Any, shuffle: bool, seed: int, taken: int) -> Iterator[Any]:
        if not hasattr(dataset, "__len__"):
            epochs = (dataset.shuffle(seed=epoch) if shuffle else dataset for epoch in itertools.count(seed))
            yield from itertools.islice(itertools.chain.from_iterable(epochs), taken, None)
            return
        rows = len(dataset)
        epochs_taken, first = divmod(taken, rows)
        for epoch in itertools.count(seed + epochs_taken):
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(rows, generator=generator).tolist() if shuffle else range(rows)
            yield from (dataset[row] for row in order[first:])
            first = 0


def dead_groups(advantages_B: Tensor, equal_rewards_B: Tensor, group_size: int) -> Tensor:
    """Return which groups have no advantage to learn from: `(G,)`, bool."""
    return (equal_rewards_B | zero_advantages(advantages_B)).view(-1, group_size).all(dim=1)


def with_live_groups(
    batch: dict[str, Any],
    dead_G: Tensor,
    draw: dict[str, Any],
    dead_in_draw_G: Tensor,
    group_size: int,
    padding: dict[str, float],
) -> tuple[dict[str, Any], Tensor]:
    """Return `batch` with its first dead groups replaced by live groups of `draw`, and which groups are still dead.

    `padding` has the fill values for entries of different width: prompts are padded on the left, others on the right.
    """
    dead_groups_here = dead_G.nonzero().squeeze(1)
    live_groups_of_draw = (~dead_in_draw_G).nonzero().squeeze(1)
    replaced_groups = dead_groups_here[: len(live_groups_of_draw)]
    rows_to = _rows(replaced_groups, group_size)
    rows_from = _rows(live_groups_of_draw[: len(replaced_groups)], group_size)
    merged = dict(batch)
    for key, value in batch.items():
        if is_rowwise(value):
            values, drawn_values = _equally_wide(
                value, draw[key], left=key.startswith("prompt_"), fill=padding.get(key, 0)
            )
            # Some entries stay on the host
            drawn_rows = drawn_values[rows_from.to(value.device)]
            merged[key] = values.index_copy(0, rows_to.to(value.device), drawn_rows)
    still_dead_G = dead_G.clone()
    still_dead_G[replaced_groups] = False
    return merged, still_dead_G


def _rows(groups: Tensor, group_size: int) -> Tensor:
    return (groups.unsqueeze(1) * group_size + torch.arange(group_size, device=groups.device)).flatten()


def _equally_wide(a: Tensor, b: Tensor, *, left: bool, fill: float) -> tuple[Tensor, Tensor]:
    """Return two entries, `(B,)` or `(B, W, ...)`, with the same W."""
    if a.ndim == 1:
        return a, b
    width = max(a.size(1), b.size(1))
    trailing = (0, 0) * (a.ndim - 2)  # `pad` begins with the last dimension

    def padded(x: Tensor) -> Tensor:
        more = width - x.size(1)
        return torch.nn.functional.pad(x, (*trailing, *((more, 0) if left else (0, more))), value=fill)

    return padded(a), padded(b)
