"""Which rows of a generation batch share a micro-batch: a group's completions, so that their prompt is fed once.

Dimensions: B rows of a generation batch. A slice is what TRL makes one micro-batch of; a unit is a run of slices that
meet one optimizer step for certain, so that its rows may change places without a change of any gradient.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .rows import ScoredTokens, is_rowwise


@dataclass(frozen=True)
class FedTokens:
    """How many tokens each row feeds, where a prompt is fed once for all its rows in a forward.

    Args:
        prompt_B (`list[int]`): a number for each row's prompt, equal where it is fed once; -1 for a row that is not
            fed.
        prompt_tokens_B (`list[int]`): tokens of the prompt.
        own_tokens_B (`list[int]`): tokens of the completion.
    """

    prompt_B: list[int]
    prompt_tokens_B: list[int]
    own_tokens_B: list[int]

    @classmethod
    def of(
        cls, batch: dict[str, Any], scored: ScoredTokens, *, packed: bool = True, shared: bool = True
    ) -> "FedTokens":
        """Of TRL's batch. Prompts are compared by content.

        Args:
            packed (`bool`): whether neither padding is fed nor what comes after a row's last scored token.
            shared (`bool`): whether rows of a forward feed a prompt that they have in common once.
        """
        mask_BP = batch["prompt_mask"]
        content_BP = torch.cat([batch["prompt_ids"].masked_fill(mask_BP == 0, 0), mask_BP], dim=1)
        prompt_B = torch.unique(content_BP, dim=0, return_inverse=True)[1]
        if not (packed and shared):
            prompt_B = torch.arange(len(prompt_B), device=prompt_B.device)
        fed_B = torch.zeros_like(prompt_B, dtype=torch.bool)
        fed_B[scored.rows_R] = True
        place_C = torch.arange(scored.tokens_BC.size(1), device=mask_BP.device)
        prompt_tokens_B = mask_BP.sum(dim=1)
        own_B = (scored.tokens_BC * place_C).amax(dim=1)  # the last scored token is predicted, and not fed
        if not packed:
            prompt_tokens_B = torch.full_like(prompt_tokens_B, mask_BP.size(1))
            own_B = torch.full_like(own_B, scored.tokens_BC.size(1))
        return cls(prompt_B.masked_fill(~fed_B, -1).tolist(), prompt_tokens_B.tolist(), own_B.tolist())

    def by_prompt(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """`rows` by their prompt, those that are not fed under -1; in the order in which they come."""
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


def slices_of_a_unit(
    *, steps_per_generation: int, accumulation_steps: int, micro_batches_of_an_epoch: int | None, window_began: int
) -> int:
    """The most slices in a unit, if units are cut from the beginning of every generation batch.

    Micro-batches are counted from the first of all. Optimizer steps come after every `accumulation_steps` of them, from
    `window_began` on, and at the end of every epoch; so before a multiple of each of these numbers.

    Args:
        micro_batches_of_an_epoch (`int`, *optional*): `None` where it is not known: anything can happen.
        window_began (`int`): a micro-batch that was the first of its window.
    """
    if micro_batches_of_an_epoch is None:
        return 1
    return math.gcd(steps_per_generation, accumulation_steps, micro_batches_of_an_epoch, window_began)


def kept_together(batch: dict[str, Any], fed: FedTokens, *, slices: int, slices_of_a_unit: int) -> dict[str, Any]:
    """`batch`, shuffled, with its rows in the order of `grouped_order`."""
    order = grouped_order(fed, rows_of_a_slice=len(fed.prompt_B) // slices, slices_of_a_unit=slices_of_a_unit)

    def ordered(value: Any) -> Any:
        if is_rowwise(value):
            return value[torch.tensor(order, device=value.device)]
        return [value[row] for row in order] if isinstance(value, list) else value

    return {name: ordered(value) for name, value in batch.items()}


def grouped_order(fed: FedTokens, *, rows_of_a_slice: int, slices_of_a_unit: int) -> list[int]:
    """The rows in an order in which each unit holds the rows it held, and each slice few prompts.

    A group's rows in a unit lie in one slice where there is room; the slices are balanced by the tokens that they feed.
    Where a unit would not feed fewer tokens, nor its largest slice, its order stays; so it does where the largest slice
    would feed more, as memory follows it.
    """
    rows = len(fed.prompt_B)
    size = rows_of_a_slice * slices_of_a_unit
    order: list[int] = []
    for start in range(0, rows - size + 1, size):
        unit = list(range(start, start + size))
        before = [unit[i : i + rows_of_a_slice] for i in range(0, size, rows_of_a_slice)]
        after = _slices(fed, unit, rows_of_a_slice)
        _balance(fed, after)
        order += [row for of_slice in (after if _is_better(fed, after, before) else before) for row in of_slice]
    return order + list(range(len(order), rows))


def _is_better(fed: FedTokens, slices: list[list[int]], than: list[list[int]]) -> bool:
    ours, theirs = ([fed.of_rows(rows) for rows in either] for either in (slices, than))
    return max(ours) <= max(theirs) and (sum(ours), max(ours)) < (sum(theirs), max(theirs))


def _slices(fed: FedTokens, unit: list[int], capacity: int) -> list[list[int]]:
    """The rows of a unit in slices of `capacity`, with few groups cut.

    Where groups together fill slices exactly, c groups in s slices are met c + s - 1 times; so the sets that do are
    taken as small as they come.
    """
    slices: list[list[int]] = []
    pieces: list[list[int]] = []
    for prompt, group in fed.by_prompt(unit).items():
        if prompt == -1:
            pieces += [[row] for row in group]
            continue
        whole = len(group) - len(group) % capacity
        slices += [group[i : i + capacity] for i in range(0, whole, capacity)]
        pieces += [group[whole:]] if group[whole:] else []
    # What is cut is what comes last: short prompts, which cost little
    pieces.sort(key=lambda piece: (fed.prompt_B[piece[0]] == -1, -fed.prompt_tokens_B[piece[0]], -len(piece)))
    filled = 1
    while pieces:
        chosen = _fewest_that_sum_to([len(piece) for piece in pieces], filled * capacity)
        if chosen is None:
            filled += 1
            continue
        together = [row for i in chosen for row in pieces[i]]
        slices += [together[i : i + capacity] for i in range(0, len(together), capacity)]
        pieces = [piece for i, piece in enumerate(pieces) if i not in chosen]
    return slices


def _fewest_that_sum_to(sizes: list[int], total: int) -> list[int] | None:
    """Indices of as few of `sizes` as sum to `total`, ascending."""
    best: list[list[int] | None] = [[], *[None] * total]
    met: dict[int, int] = defaultdict(int)
    for i, size in enumerate(sizes):
        met[size] += size
        if met[size] > total:  # so many of one size cannot be among them
            continue
        for reached in range(total, size - 1, -1):
            without = best[reached - size]
            known = best[reached]
            if without is not None and (known is None or len(without) + 1 < len(known)):
                best[reached] = [*without, i]
    return best[total]


def _balance(fed: FedTokens, slices: list[list[int]]) -> None:
    """Exchange rows between the largest slice and another as long as that makes the larger of the two smaller."""
    tokens = [fed.of_rows(rows) for rows in slices]
    while True:
        largest = max(range(len(slices)), key=tokens.__getitem__)
        for other in sorted(range(len(slices)), key=tokens.__getitem__):
            gap = tokens[largest] - tokens[other]
            exchange = _best_exchange(fed, slices[largest], slices[other], gap) if gap > 1 else None
            if exchange is not None:
                break
        else:
            return
        out, back = exchange
        for to, gone, come in ((largest, out, back), (other, back, out)):
            slices[to] = [row for row in slices[to] if row not in gone] + list(come)
            tokens[to] = fed.of_rows(slices[to])


def _best_exchange(
    fed: FedTokens, large: list[int], small: list[int], gap: int
) -> tuple[Sequence[int], Sequence[int]] | None:
    """Equally many rows of each, whose exchange brings the two slices nearest: whole groups, or rows of one group."""
    in_large, in_small = fed.by_prompt(large), fed.by_prompt(small)
    candidates: list[tuple[int, Sequence[int], Sequence[int]]] = []
    for prompt, group in in_large.items():
        if prompt in in_small:
            candidates += [
                (fed.own_tokens_B[a] - fed.own_tokens_B[b], (a,), (b,)) for a in group for b in in_small[prompt]
            ]
            continue
        candidates += [
            (fed.of_group(group) - fed.of_group(theirs), group, theirs[: len(group)])
            for other, theirs in in_small.items()
            if (len(theirs) == len(group) and other not in in_large) or (other == -1 and len(theirs) >= len(group))
        ]
    better = [candidate for candidate in candidates if 0 < candidate[0] < gap]
    if not better:
        return None
    _, out, back = min(better, key=lambda candidate: abs(gap - 2 * candidate[0]))
    return out, back
