"""Which rows of an optimizer step share a micro-batch, and on which rank: few prompts in each, and similar costs.

Dimensions: B rows, R ranks, M slices of a rank, K slices of all ranks, S rows of a slice, A pairs of slices.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heapreplace
from typing import Any

import numpy as np
import torch

from .rows import ScoredTokens

Array = np.ndarray[Any, Any]

# In place of a prompt: the row does not run, or shares its prompt with no other
DEAD = -1
UNSHARED = -2


def content_hash(ids: Array) -> int:
    """Return a hash of token ids, the same on every rank: 63 bits."""
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class RowTokens:
    """The tokens that each row adds to a forward, in which rows with the same prompt share the prompt's tokens."""

    prompt_B: list[int]  # a hash of each row's prompt, the same for rows that share it; or `DEAD` or `UNSHARED`
    prompt_tokens_B: list[int]
    own_tokens_B: list[int]  # of the completion
    scored_tokens_B: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, batch: dict[str, Any], scored_tokens: ScoredTokens, *, packed: bool = True, shared: bool = True
    ) -> "RowTokens":
        """Return the tokens of each row of TRL's batch. Prompts are compared by content.

        Args:
            packed (`bool`): whether the forward leaves out padding and what follows a row's last scored token.
            shared (`bool`): whether rows of a forward share equal prompts.
        """
        (rows, C), P = scored_tokens.tokens_BC.shape, batch["prompt_ids"].size(1)
        runs = {*(range(rows) if scored_tokens.all_rows_run else scored_tokens.rows_R.tolist())}
        # One copy, so the host waits for the device once
        on_host = torch.cat([batch["prompt_ids"], batch["prompt_mask"], scored_tokens.tokens_BC], dim=1).cpu().numpy()
        ids_BP, mask_BP, tokens_BC = np.split(on_host, [P, 2 * P], axis=1)
        prompt_tokens, own_tokens = [P] * rows, [C] * rows
        prompts = [UNSHARED] * rows
        if packed:
            prompt_tokens = np.count_nonzero(mask_BP, axis=1).tolist()
            # The last scored token is only predicted; it is not an input
            own_tokens = (tokens_BC.any(axis=1) * (C - 1 - tokens_BC[:, ::-1].argmax(axis=1))).tolist()
        if packed and shared:
            prompts = [content_hash(ids_P[mask_P != 0]) for ids_P, mask_P in zip(ids_BP, mask_BP, strict=True)]
        prompt_B = [x if row in runs else DEAD for row, x in enumerate(prompts)]
        return cls(prompt_B, prompt_tokens, own_tokens, tokens_BC.sum(axis=1).tolist())

    def by_prompt(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Return `rows` grouped by prompt, in their order; those that do not run are under `DEAD`."""
        groups: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            prompt = self.prompt_B[row]
            groups[UNSHARED - row if prompt == UNSHARED else prompt].append(row)
        return groups

    def of_rows(self, rows: Sequence[int]) -> int:
        """Return the number of tokens in one forward over `rows`, at least 1: a forward is never empty."""
        return max(1, sum(self.of_group(group) for group in self.by_prompt(rows).values()))

    def of_group(self, rows: Sequence[int]) -> int:
        """Return the number of tokens of rows with the same prompt."""
        if self.prompt_B[rows[0]] == DEAD:
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


@dataclass(frozen=True)
class StepRows:
    """The rows of one optimizer step on a rank, which may change places."""

    rows: int  # of a micro-batch
    micro_batches: int

    @property
    def merged(self) -> "StepRows":
        """The same rows in one micro-batch."""
        return StepRows(self.rows * self.micro_batches, 1)


def row_order(tokens: RowTokens, step: StepRows, *, ranks: int = 1) -> list[int]:
    """Return the rows of all ranks, one rank after another, reordered within each unit: the slices of one optimizer
    step on every rank.

    Slices of a unit keep their number of rows. On one rank, a prompt's rows share a slice where there is room. On
    several, slices then exchange rows until they have about the same cost. A unit is reordered only if that lowers the
    cost of its steps, if every rank waits for the slowest in each slice. It is never reordered if that raises the cost
    of the largest slice, which determines the memory, or that of the largest rank.
    """
    order_RB = np.arange(len(tokens.prompt_B)).reshape(ranks, -1)
    size = step.merged.rows
    rows = _Rows.of(tokens)
    for start in range(0, order_RB.shape[1] - size + 1, size):
        trl_RMS = order_RB[:, start : start + size].reshape(ranks, step.micro_batches, step.rows)
        trl_costs = _costs(rows, trl_RMS)
        best_RMS = trl_RMS
        best_costs = trl_costs
        for slices_KS in _candidates(tokens, rows, trl_RMS):
            candidate_RMS = _over_ranks(slices_KS, rows.of_slices(slices_KS), ranks)
            costs = _costs(rows, candidate_RMS)
            if costs < best_costs and all(x <= y for x, y in zip(costs, trl_costs, strict=True)):
                best_RMS = candidate_RMS
                best_costs = costs
        order_RB[:, start : start + size] = best_RMS.reshape(ranks, size)
    return order_RB.flatten().tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Rows:
    """`RowTokens` as arrays. Integers, so that all ranks decide the same."""

    prompt_B: Array  # each `DEAD` or `UNSHARED` row has its own
    shared_B: Array  # tokens of the prompt
    own_B: Array

    @classmethod
    def of(cls, tokens: RowTokens) -> "_Rows":
        prompt_B, shared_B, own_B = (
            np.array(x, dtype=np.int64) for x in (tokens.prompt_B, tokens.prompt_tokens_B, tokens.own_tokens_B)
        )
        dead_B = prompt_B == DEAD
        numbers_B = np.where(prompt_B < 0, -1 - np.arange(len(prompt_B)), prompt_B)
        return cls(numbers_B, np.where(dead_B, 0, shared_B), np.where(dead_B, 0, own_B))

    def of_slices(self, slices_KS: Array) -> Array:
        """Return the tokens of each of K slices of S rows: `(K,)`, at least 1."""
        by_prompt_KS = np.argsort(self.prompt_B[slices_KS], axis=1, kind="stable")
        slices_KS = np.take_along_axis(slices_KS, by_prompt_KS, axis=1)
        first_KS = np.ones(slices_KS.shape, dtype=bool)
        first_KS[:, 1:] = np.diff(self.prompt_B[slices_KS], axis=1) != 0
        tokens_K = self.own_B[slices_KS].sum(axis=1) + (self.shared_B[slices_KS] * first_KS).sum(axis=1)
        return np.maximum(tokens_K, 1)  # type: ignore[no-any-return]


def _costs(rows: _Rows, slices_RMS: Array) -> tuple[int, int, int]:
    """Return the cost of a unit if ranks wait for each other in each slice; of its largest rank; and slice."""
    cost_RM = rows.of_slices(slices_RMS.reshape(-1, slices_RMS.shape[2])).reshape(slices_RMS.shape[:2])
    return int(cost_RM.max(axis=0).sum()), int(cost_RM.sum(axis=1).max()), int(cost_RM.max())


def max_over_mean(tokens: RowTokens, order: list[int], step: StepRows, *, ranks: int) -> float:
    """Return the tokens of the rank with the most, over the mean of all ranks: the mean over optimizer steps."""
    order_RB = np.array(order).reshape(ranks, -1)
    whole = order_RB.shape[1] // step.rows * step.rows
    slices_KS = order_RB[:, :whole].reshape(-1, step.rows)
    tokens_RM = _Rows.of(tokens).of_slices(slices_KS).reshape(ranks, -1)
    steps = np.add.reduceat(tokens_RM, range(0, tokens_RM.shape[1], step.micro_batches), axis=1)
    return float((steps.max(axis=0) / steps.mean(axis=0)).mean())


def _candidates(tokens: RowTokens, rows: _Rows, theirs_RMS: Array) -> Iterator[Array]:
    ranks, _, capacity = theirs_RMS.shape
    slices_KS = theirs_RMS.reshape(-1, capacity)
    if capacity > 1:
        slices_KS = np.array(_grouped(tokens, theirs_RMS.flatten().tolist(), capacity))
    yield slices_KS
    if ranks > 1 and capacity > 1:
        yield _evened(rows, slices_KS)


def _over_ranks(slices_KS: Array, cost_K: Array, ranks: int) -> Array:
    """Return slices as (ranks, slices of a rank, S): similar ones run at the same time, and ranks get equal totals."""
    by_cost_MR = np.argsort(-cost_K, kind="stable").reshape(-1, ranks)
    at_RM = np.empty_like(by_cost_MR.T)
    total_R = np.zeros(ranks, dtype=np.int64)
    for i, largest_first_R in enumerate(by_cost_MR):
        lightest_first_R = np.argsort(total_R, kind="stable")
        at_RM[lightest_first_R, i] = largest_first_R
        total_R[lightest_first_R] += cost_K[largest_first_R]
    return slices_KS[at_RM]  # type: ignore[no-any-return]


# Limits on the time of `_evened`
_ROUNDS = 40
_SHIFTS = 6
_ROWS_TRIED = 32


def _evened(rows: _Rows, slices_KS: Array) -> Array:
    """Return slices of about equal cost: large ones exchange single rows with small ones.

    In each round, each large slice makes the exchange with one small slice that lowers the larger of the two costs the
    most. If the largest slice finds none, it tries the next small slice.
    """
    slices_KS, cost_K = slices_KS.copy(), rows.of_slices(slices_KS)
    pairs, shift = len(cost_K) // 2, 0
    tried = np.linspace(0, slices_KS.shape[1] - 1, min(slices_KS.shape[1], _ROWS_TRIED)).astype(np.int64)
    for _ in range(_ROUNDS):
        if cost_K.max() * len(cost_K) * 100 <= cost_K.sum() * 102:  # within 2 % of the mean
            break
        by_cost_K = np.argsort(-cost_K, kind="stable")
        large_A, small_A = by_cost_K[:pairs], np.roll(by_cost_K[::-1][:pairs], -shift)
        after_ATT = _after_exchange(rows, slices_KS[large_A], slices_KS[small_A], tried)
        after_ATT = cost_K[[large_A, small_A]][:, :, None, None] + after_ATT
        larger_AE = after_ATT.max(axis=0).reshape(pairs, -1)
        best_A = larger_AE.argmin(axis=1)
        gains_A = np.take_along_axis(larger_AE, best_A[:, None], axis=1)[:, 0] < cost_K[large_A]
        shift = 0 if gains_A[0] else shift + 1
        if shift > min(_SHIFTS, pairs - 1):
            break
        give_A, take_A = (x[gains_A] for x in np.divmod(best_A, len(tried)))
        large_A, small_A = large_A[gains_A], small_A[gains_A]
        cost_K[large_A], cost_K[small_A] = after_ATT[:, gains_A, give_A, take_A]
        give_A, take_A = (large_A, tried[give_A]), (small_A, tried[take_A])
        slices_KS[give_A], slices_KS[take_A] = slices_KS[take_A], slices_KS[give_A]
    return slices_KS


def _after_exchange(rows: _Rows, large_AS: Array, small_AS: Array, tried: Array) -> Array:
    """Return what each exchange adds to the cost of both slices: `(2, A, T, T)`, for T rows of each."""

    def gives(from_AS: Array, to_AS: Array) -> tuple[Array, Array, Array]:
        """Return the tokens that a row takes from its slice and adds to the other, and its own."""
        prompt_AT1 = rows.prompt_B[from_AS[:, tried]][:, :, None]
        alone_AT = (prompt_AT1 == rows.prompt_B[from_AS][:, None, :]).sum(axis=2) == 1
        new_AT = ~(prompt_AT1 == rows.prompt_B[to_AS][:, None, :]).any(axis=2)
        own_AT, shared_AT = (x[from_AS[:, tried]] for x in (rows.own_B, rows.shared_B))
        return own_AT + shared_AT * alone_AT, own_AT + shared_AT * new_AT, own_AT

    (leaves_AT, enters_AT, own_AT), (their_leaves_AT, their_enters_AT, their_own_AT) = (
        gives(large_AS, small_AS),
        gives(small_AS, large_AS),
    )
    same_ATT = rows.prompt_B[large_AS[:, tried]][:, :, None] == rows.prompt_B[small_AS[:, tried]][:, None, :]
    own_ATT = their_own_AT[:, None, :] - own_AT[:, :, None]
    of_large_ATT = np.where(same_ATT, own_ATT, their_enters_AT[:, None, :] - leaves_AT[:, :, None])
    of_small_ATT = np.where(same_ATT, -own_ATT, enters_AT[:, :, None] - their_leaves_AT[:, None, :])
    return np.stack([of_large_ATT, of_small_ATT])


def _grouped(tokens: RowTokens, unit: list[int], capacity: int) -> list[list[int]]:
    """Return the rows of a unit in slices of `capacity`: the largest group first, into the slice with fewest tokens.

    A slice without room for one group gets no later one either. In the end, groups that fit nowhere fill the gaps.
    """
    longest_first = sorted(unit, key=lambda row: -tokens.own_tokens_B[row])
    groups = [piece for group in tokens.by_prompt(longest_first).values() for piece in _pieces(group, capacity)]
    slices: list[list[int]] = [[] for _ in range(len(unit) // capacity)]
    emptiest = [(0, i) for i in range(len(slices))]  # a heap, by tokens
    full_slices = []  # without room for a whole group
    remaining_groups = []
    for group in sorted(groups, key=tokens.of_group, reverse=True):
        while emptiest and len(slices[emptiest[0][1]]) + len(group) > capacity:
            full_slices.append(slices[heappop(emptiest)[1]])
        if emptiest:
            tokens_so_far, i = emptiest[0]
            slices[i] += group
            heapreplace(emptiest, (tokens_so_far + tokens.of_group(group), i))
        else:
            remaining_groups.append(group)
    for group in remaining_groups:
        while group:
            piece, group = _cut(group, min(len(group), capacity - len(full_slices[-1])))
            full_slices[-1] += piece
            if len(full_slices[-1]) == capacity:
                full_slices.pop()
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
    places = {(2 * i + 1) * len(rows) // (2 * count) for i in range(count)}
    return [rows[i] for i in sorted(places)], [row for i, row in enumerate(rows) if i not in places]
