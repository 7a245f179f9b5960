"""Which rows of a generation batch share a micro-batch: a group's completions, so that their prompt is fed once.

Dimensions: B rows of a generation batch. A slice is what TRL makes one micro-batch of; a unit is a run of slices that
meet one optimizer step for certain, so that its rows may change places without a change of any gradient.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
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
        rows, completion_tokens = scored.tokens_BC.shape
        prompt_tokens_B = mask_BP.sum(dim=1)
        is_fed_B = torch.zeros_like(prompt_tokens_B).index_fill(0, scored.rows_R, 1)
        behind_last_B = scored.tokens_BC.flip(dims=[1]).view(torch.uint8).argmax(dim=1)
        # The last scored token is predicted, and not fed
        own_B = scored.tokens_BC.any(dim=1) * (completion_tokens - 1 - behind_last_B)
        if not packed:
            prompt_tokens_B = torch.full_like(prompt_tokens_B, mask_BP.size(1))
            own_B = torch.full_like(own_B, completion_tokens)
        is_fed, prompt_tokens, own_tokens = torch.stack([is_fed_B, prompt_tokens_B, own_B]).tolist()
        prompts: Iterable[Hashable] = range(rows)
        if packed and shared:
            content_BP = batch["prompt_ids"].int().masked_fill(mask_BP == 0, -1).cpu().numpy()
            prompts = (content_P.tobytes() for content_P in content_BP)
        numbers: dict[Hashable, int] = {}
        prompt_B = [numbers.setdefault(prompt, len(numbers)) for prompt in prompts]
        return cls([x if fed else -1 for x, fed in zip(prompt_B, is_fed, strict=True)], prompt_tokens, own_tokens)

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

    A group's rows in a unit lie in one slice where there is room; slices feed about as many tokens each. Where a unit
    would not feed fewer tokens, nor its largest slice, its order stays; so it does where the largest slice would feed
    more, as memory follows it.
    """
    rows = len(fed.prompt_B)
    size = rows_of_a_slice * slices_of_a_unit
    order: list[int] = []
    for start in range(0, rows - size + 1, size):
        unit = list(range(start, start + size))
        before = [unit[i : i + rows_of_a_slice] for i in range(0, size, rows_of_a_slice)]
        after = _grouped(fed, unit, rows_of_a_slice)
        order += [row for of_slice in (after if _is_better(fed, after, before) else before) for row in of_slice]
    return order + list(range(len(order), rows))


def _is_better(fed: FedTokens, slices: list[list[int]], than: list[list[int]]) -> bool:
    ours, theirs = ([fed.of_rows(rows) for rows in either] for either in (slices, than))
    return max(ours) <= max(theirs) and (sum(ours), max(ours)) < (sum(theirs), max(theirs))


def _grouped(fed: FedTokens, unit: list[int], capacity: int) -> list[list[int]]:
    """The rows of a unit in slices of `capacity`: the piece with the most tokens first, into the slice with the fewest.

    A slice without room for a piece waits until all slices do. Then the roomiest comes first, and a piece is cut to its
    room. Every cut fills a slice, so there are fewer cuts than slices.
    """
    pieces = [(-fed.of_group(piece), piece) for piece in _pieces(fed, unit, capacity)]
    heapify(pieces)
    slices: list[list[int]] = [[] for _ in range(len(unit) // capacity)]
    emptiest = [(0, i) for i in range(len(slices))]  # by tokens
    roomiest: list[tuple[int, int]] = []  # by rows
    while pieces:
        minus_tokens, piece = heappop(pieces)
        while emptiest and len(slices[emptiest[0][1]]) + len(piece) > capacity:
            _, i = heappop(emptiest)
            heappush(roomiest, (len(slices[i]), i))
        heap = emptiest or roomiest
        tokens, i = heap[0]
        room = capacity - len(slices[i])
        if room < len(piece):
            piece, rest = _cut(piece, room)
            heappush(pieces, (-fed.of_group(rest), rest))
        slices[i] += piece
        if room == len(piece):
            heappop(heap)
        else:
            heapreplace(heap, (tokens - minus_tokens if emptiest else len(slices[i]), i))
    return slices


def _pieces(fed: FedTokens, unit: list[int], capacity: int) -> Iterator[list[int]]:
    """The groups of a unit, those with more than `capacity` rows cut; the longest rows of each piece first."""
    longest_first = sorted(unit, key=lambda row: -fed.own_tokens_B[row])
    for group in fed.by_prompt(longest_first).values():
        full, rest = divmod(len(group), capacity)
        if rest:
            piece, group = _cut(group, rest)
            yield piece
        rounds = [group[i : i + full] for i in range(0, len(group), max(full, 1))]
        rounds[1::2] = [rows[::-1] for rows in rounds[1::2]]  # a piece gets a long row in one and a short in the next
        yield from map(list, zip(*rounds, strict=True))


def _cut(rows: list[int], count: int) -> tuple[list[int], list[int]]:
    """`count` of `rows`, which are sorted by length, and the others: each about as long on average."""
    chosen = {(2 * i + 1) * len(rows) // (2 * count) for i in range(count)}
    return [rows[i] for i in sorted(chosen)], [row for i, row in enumerate(rows) if i not in chosen]
