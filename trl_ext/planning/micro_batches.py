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
    """Tokens that each row adds to a forward, which computes a prompt once for all its rows."""

    prompt_B: list[int]  # the number of each row's prompt, equal where rows share it; -1 for a row that is left out
    prompt_tokens_B: list[int]
    own_tokens_B: list[int]  # of the completion

    @classmethod
    def of(
        cls, batch: dict[str, Any], scored: ScoredTokens, *, packed: bool = True, shared: bool = True
    ) -> "RowTokens":
        """Return the tokens of the rows of TRL's batch. Equal prompts get the same number.

        Args:
            packed (`bool`): whether padding, and what follows a row's last scored token, is left out.
            shared (`bool`): whether rows of a forward share their prompt.
        """
        (rows, C), P = scored.tokens_BC.shape, batch["prompt_ids"].size(1)
        runs = {*(range(rows) if scored.every_row else scored.rows_R.tolist())}
        # In one copy, for which the host waits
        on_host = torch.cat([batch["prompt_ids"], batch["prompt_mask"], scored.tokens_BC], dim=1).cpu().numpy()
        ids_BP, mask_BP, tokens_BC = np.split(on_host, [P, 2 * P], axis=1)
        prompt_tokens, own_tokens = [P] * rows, [C] * rows
        prompts: Iterable[Hashable] = range(rows)
        if packed:
            prompt_tokens = np.count_nonzero(mask_BP, axis=1).tolist()
            # The last scored token is predicted, and is no input
            own_tokens = (tokens_BC.any(axis=1) * (C - 1 - tokens_BC[:, ::-1].argmax(axis=1))).tolist()
        if packed and shared:
            prompts = (prompt_P.tobytes() for prompt_P in np.where(mask_BP, ids_BP, -1))
        numbers: dict[Hashable, int] = {}
        prompt_B = [numbers.setdefault(prompt, len(numbers)) for prompt in prompts]
        return cls([x if row in runs else -1 for row, x in enumerate(prompt_B)], prompt_tokens, own_tokens)

    def by_prompt(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """`rows` by their prompt in their order, those left out under -1."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            groups[self.prompt_B[row]].append(row)
        return groups

    def of_rows(self, rows: Sequence[int]) -> int:
        """Tokens of one forward over `rows`, which is never empty."""
        return max(1, sum(self.of_group(group) for group in self.by_prompt(rows).values()))

    def of_group(self, rows: Sequence[int]) -> int:
        """Tokens of rows with one prompt."""
        if self.prompt_B[rows[0]] == -1:
            return 0
        return self.prompt_tokens_B[rows[0]] + sum(self.own_tokens_B[row] for row in rows)


def micro_batches_per_step(
    *, steps_per_generation: int, accumulation_steps: int, micro_batches_of_an_epoch: int | None, window_began: int
) -> int:
    """How many slices of a generation batch, counted from its first, are sure to share an optimizer step.

    Optimizer steps follow every `accumulation_steps` micro-batches from `window_began` on, where an accumulation window
    began (counted from the first micro-batch of all), and the end of every epoch.
    """
    if micro_batches_of_an_epoch is None:
        return 1
    return math.gcd(steps_per_generation, accumulation_steps, micro_batches_of_an_epoch, window_began)


def kept_together(
    batch: dict[str, Any], tokens: RowTokens, *, slices: int, micro_batches_per_step: int
) -> dict[str, Any]:
    """`batch`, shuffled, with its rows in the order of `grouped_order`."""
    rows_of_a_slice = len(tokens.prompt_B) // slices
    order = grouped_order(tokens, rows_of_a_slice=rows_of_a_slice, micro_batches_per_step=micro_batches_per_step)
    order_on = cache(lambda device: torch.tensor(order, device=device))  # one copy from the host

    def ordered(value: Any) -> Any:
        if is_rowwise(value):
            return value[order_on(value.device)]
        return [value[row] for row in order] if isinstance(value, list) else value

    return {name: ordered(value) for name, value in batch.items()}


def grouped_order(tokens: RowTokens, *, rows_of_a_slice: int, micro_batches_per_step: int) -> list[int]:
    """The rows, reordered within each unit (the slices of one optimizer step) so that each slice has few prompts.

    A unit is reordered only if that leaves fewer tokens, or as many in a smaller largest slice, and never if the
    largest slice, and so memory, would grow.
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
    """The rows of a unit in slices of `capacity`: greedy, the largest group first, into the slice with fewest tokens.

    A slice without room for a group takes no further group. In the end, groups that fit nowhere fill what is left.
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
    """A group, sorted by length, in pieces of at most `capacity` rows with similar numbers of tokens."""
    full, rest = divmod(len(group), capacity)
    if rest:
        piece, group = _cut(group, rest)
        yield piece
    for i in range(full):
        yield group[i :: 2 * full] + group[2 * full - 1 - i :: 2 * full]


def _cut(rows: list[int], count: int) -> tuple[list[int], list[int]]:
    """`count` of `rows`, which are sorted by length, at equal distances, and the others."""
    chosen = {(2 * i + 1) * len(rows) // (2 * count) for i in range(count)}
    return [rows[i] for i in sorted(chosen)], [row for i, row in enumerate(rows) if i not in chosen]
