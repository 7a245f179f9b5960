"""Which rows of a generation batch share a micro-batch: few prompts in each, and similar token counts."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heapreplace
from itertools import chain
from typing import Any

import numpy as np
import torch

from .rows import ScoredTokens, is_rowwise


@dataclass(frozen=True)
class RowTokens:
    """The tokens that each row adds to a forward, in which rows with the same prompt share the prompt's tokens."""

    prompt_B: list[int]  # an id of each row's prompt, the same for rows that share it; -1 for a row that does not run
    prompt_tokens_B: list[int]
    own_tokens_B: list[int]  # of the completion

    @classmethod
    def of(
        cls, batch: dict[str, Any], scored: ScoredTokens, *, packed: bool = True, shared: bool = True
    ) -> "RowTokens":
        """Return the tokens of each row of TRL's batch. Prompts are compared by content.

        Args:
            packed (`bool`): whether the forward leaves out padding and what follows a row's last scored token.
            shared (`bool`): whether rows of a forward share equal prompts.
        """
        (rows, C), P = scored.tokens_BC.shape, batch["prompt_ids"].size(1)
        runs = {*(range(rows) if scored.every_row else scored.rows_R.tolist())}
        # One copy, so the host waits for the device once
        on_host = torch.cat([batch["prompt_ids"], batch["prompt_mask"], scored.tokens_BC], dim=1).cpu().numpy()
        ids_BP, mask_BP, tokens_BC = np.split(on_host, [P, 2 * P], axis=1)
        prompt_tokens, own_tokens = [P] * rows, [C] * rows
        prompts: Iterable[Hashable] = range(rows)
        if packed:
            prompt_tokens = np.count_nonzero(mask_BP, axis=1).tolist()
            # The last scored token is only predicted; it is not an input
            own_tokens = (tokens_BC.any(axis=1) * (C - 1 - tokens_BC[:, ::-1].argmax(axis=1))).tolist()
        if packed and shared:
            prompts = (prompt_P.tobytes() for prompt_P in np.where(mask_BP, ids_BP, -1))
        numbers: dict[Hashable, int] = {}
        prompt_B = [numbers.setdefault(prompt, len(numbers)) for prompt in prompts]
        return cls([x if row in runs else -1 for row, x in enumerate(prompt_B)], prompt_tokens, own_tokens)

    def by_prompt(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Return `rows` grouped by prompt, in their order; those that do not run are under -1."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            groups[self.prompt_B[row]].append(row)
        return groups

    def of_rows(self, rows: Sequence[int]) -> int:
        """Return the number of tokens in one forward over `rows`, at least 1: a forward is never empty."""
        return max(1, sum(self.of_group(group) for group in self.by_prompt(rows).values()))

    def of_group(self, rows: Sequence[int]) -> int:
        """Return the number of tokens of rows with the same prompt."""
        if self.prompt_B[rows[0]] == -1:
            return 0
        return self.prompt_tokens_B[rows[0]] + sum(self.own_tokens_B[row] for row in rows)


def micro_batches_per_step(
    *, steps_per_generation: int, accumulation_steps: int, micro_batches_of_an_epoch: int | None, window_began: int
) -> int:
    """Return how many slices of a generation batch, counted from its first, are certain to share an optimizer step.

    An optimizer step follows every `accumulation_steps` micro-batches, counted from `window_began`, and the end of
    every epoch. `window_began` is the number of micro-batches before some accumulation window, over the whole run.
    """
    if micro_batches_of_an_epoch is None:
        return 1
    return math.gcd(steps_per_generation, accumulation_steps, micro_batches_of_an_epoch, window_began)


def kept_together(
    batch: dict[str, Any], tokens: RowTokens, *, slices: int, micro_batches_per_step: int
) -> dict[str, Any]:
    """Return `batch`, which TRL has shuffled, with its rows in the order of `grouped_order`."""
    rows_of_a_slice = len(tokens.prompt_B) // slices
    order = grouped_order(tokens, rows_of_a_slice=rows_of_a_slice, micro_batches_per_step=micro_batches_per_step)
    order_on = cache(lambda device: torch.tensor(order, device=device))  # one copy from the host

    def ordered(value: Any) -> Any:
        if is_rowwise(value):
            return value[order_on(value.device)]
        return [value[row] for row in order] if isinstance(value, list) else value

    return {name: ordered(value) for name, value in batch.items()}


def grouped_order(tokens: RowTokens, *, rows_of_a_slice: int, micro_batches_per_step: int) -> list[int]:
    """Return the rows, reordered within each unit (the slices of one optimizer step) so that a slice has few prompts.

    A unit is reordered only if it then has fewer tokens, or the same number and a smaller largest slice. It is never
    reordered if its largest slice, which determines the memory, would grow.
    """
    rows = len(tokens.prompt_B)
    size = rows_of_a_slice * micro_batches_per_step
    order: list[int] = []
    for start in range(0, rows - size + 1, size):
        unit = list(range(start, start + size))
        before = [unit[i : i + rows_of_a_slice] for i in range(0, size, rows_of_a_slice)]
        after = _grouped(tokens, unit, rows_of_a_slice)
        ours, theirs = ([tokens.of_rows(rows) for rows in slices] for slices in (after, before))
        is_better = max(ours) <= max(theirs) and (sum(ours), max(ours)) < (sum(theirs), max(theirs))
        order += chain.from_iterable(after if is_better else before)
    return order + list(range(len(order), rows))


def _grouped(tokens: RowTokens, unit: list[int], capacity: int) -> list[list[int]]:
    """Return the rows of a unit in slices of `capacity`: the largest group first, into the slice with fewest tokens.

    A slice without room for one group gets no later one either. In the end, groups that fit nowhere fill the gaps.
    """
    longest_first = sorted(unit, key=lambda row: -tokens.own_tokens_B[row])
    groups = [piece for group in tokens.by_prompt(longest_first).values() for piece in _pieces(group, capacity)]
    slices: list[list[int]] = [[] for _ in range(len(unit) // capacity)]
    emptiest = [(0, i) for i in range(len(slices))]  # a heap, by tokens
    tight, left = [], []
    for group in sorted(groups, key=tokens.of_group, reverse=True):
        while emptiest and len(slices[emptiest[0][1]]) + len(group) > capacity:
            tight.append(slices[heappop(emptiest)[1]])
        if emptiest:
            tokens_so_far, i = emptiest[0]
            slices[i] += group
            heapreplace(emptiest, (tokens_so_far + tokens.of_group(group), i))
        else:
            left.append(group)
    for group in left:
        while group:
            piece, group = _cut(group, min(len(group), capacity - len(tight[-1])))
            tight[-1] += piece
            if len(tight[-1]) == capacity:
                tight.pop()
    return slices


def _pieces(group: list[int], capacity: int) -> Iterator[list[int]]:
    """Yield a group, sorted by length, in pieces of at most `capacity` rows with similar numbers of tokens."""
    full, rest = divmod(len(group), capacity)
    if rest:
        piece, group = _cut(group, rest)
        yield piece
    for i in range(full):
        yield group[i :: 2 * full] + group[2 * full - 1 - i :: 2 * full]


def _cut(rows: list[int], count: int) -> tuple[list[int], list[int]]:
    """Return `count` of `rows` at equal distances, and the other rows. `rows` are sorted by length."""
    chosen = {(2 * i + 1) * len(rows) // (2 * count) for i in range(count)}
    return [rows[i] for i in sorted(chosen)], [row for i, row in enumerate(rows) if i not in chosen]
