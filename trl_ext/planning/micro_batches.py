"""Whether a group's rows are kept in one micro-batch, and micro-batches fed in parts: decided from facts, and why."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Any

import torch

from .non_finite import steps_in_backward
from .plan import Decision
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
            content_BP = batch["prompt_ids"].to(torch.int32, copy=True).masked_fill_(mask_BP == 0, -1).cpu().numpy()
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


def micro_batches_per_step(
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


def kept_together(batch: dict[str, Any], fed: FedTokens, *, slices: int, micro_batches_per_step: int) -> dict[str, Any]:
    """`batch`, shuffled, with its rows in the order of `grouped_order`."""
    order = grouped_order(
        fed, rows_of_a_slice=len(fed.prompt_B) // slices, micro_batches_per_step=micro_batches_per_step
    )

    def ordered(value: Any) -> Any:
        if is_rowwise(value):
            return value[torch.tensor(order, device=value.device)]
        return [value[row] for row in order] if isinstance(value, list) else value

    return {name: ordered(value) for name, value in batch.items()}


def grouped_order(fed: FedTokens, *, rows_of_a_slice: int, micro_batches_per_step: int) -> list[int]:
    """The rows in an order in which each unit holds the rows it held, and each slice few prompts.

    A group's rows in a unit lie in one slice where there is room; slices feed about as many tokens each. Where a unit
    would not feed fewer tokens, nor its largest slice, its order stays; so it does where the largest slice would feed
    more, as memory follows it.
    """
    rows = len(fed.prompt_B)
    size = rows_of_a_slice * micro_batches_per_step
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


if TYPE_CHECKING:
    from .grpo import GRPOFacts


def plan_micro_batches(facts: "GRPOFacts") -> tuple[Decision, bool]:
    """What is said of micro-batches, and whether a group's rows are kept together.

    Raises:
        `ValueError`: an option asks for what would change the gradient, or share no prompt.
    """
    decision = _groups(facts)
    together = decision.action == "run"
    budget = facts.max_tokens_per_micro_batch
    if budget is None:
        return decision, together
    against = why_micro_batches_count(facts)
    consequence = "parts of a micro-batch have another gradient"
    if steps_in_backward(facts.optimizer):
        against = f"the optimizer `{facts.optimizer}` steps in every backward"
        consequence = "it would step after each part of a micro-batch"
    if against is not None:
        raise ValueError(
            f"`max_tokens_per_micro_batch={budget}` cannot be had here: {against}, so {consequence}. Leave "
            "`max_tokens_per_micro_batch` at None."
        )
    parts = f" Each micro-batch is fed in parts of at most {budget} tokens, with a forward and a backward of their own."
    return Decision(decision.name, "run", decision.reason + parts), together


def _groups(facts: "GRPOFacts") -> Decision:
    if facts.keep_groups_together is False:
        return Decision("micro-batches", "skip", "rows in TRL's order (`keep_groups_together=False`).")
    if facts.steps_per_generation == 1:
        return Decision("micro-batches", "skip", "rows in TRL's order: a generation batch is one micro-batch.")
    against = _why_rows_stay(facts)
    if against is not None:
        if facts.keep_groups_together:
            raise ValueError(
                f"`keep_groups_together=True` cannot be had here: {against}. Leave `keep_groups_together` at None, "
                "which takes TRL's order then."
            )
        return Decision("micro-batches", "skip", f"rows in TRL's order: {against}.")
    return Decision(
        "micro-batches",
        "run",
        f"a group's rows are kept together, as far as there is room, within {_steps_share(facts)} micro-batches that "
        "meet the same optimizer step: fewer prompts are fed, and the gradient of the step is the same. What is logged "
        "as a mean over micro-batches is one over others.",
    )


def _steps_share(facts: "GRPOFacts") -> int:
    """How many micro-batches of a generation batch surely meet the same optimizer step."""
    return math.gcd(facts.steps_per_generation, facts.gradient_accumulation_steps)


def _why_rows_stay(facts: "GRPOFacts") -> str | None:
    """Why rows keep the micro-batch that TRL's order gives them."""
    rule = why_micro_batches_count(facts)
    if rule is not None:
        return f"{rule}, so other micro-batches have another gradient"
    if not facts.shares_prompts:
        return "prompts are not shared in training, so nothing would be saved"
    if _steps_share(facts) == 1:
        return (
            "no two micro-batches of a generation batch surely meet the same optimizer step "
            f"(`gradient_accumulation_steps`={facts.gradient_accumulation_steps}, "
            f"`steps_per_generation`={facts.steps_per_generation})"
        )
    if not facts.epoch_is_known:
        return "where an epoch of a streaming data set ends, and an optimizer step with it, is not known beforehand"
    if facts.own_step is not None and not facts.keep_groups_together:
        return (
            f"this trainer has a `{facts.own_step}` of its own, which may look at a micro-batch as a whole "
            "(`keep_groups_together=True` says that it does not)"
        )
    return None


def why_micro_batches_count(facts: "GRPOFacts") -> str | None:
    """Why the gradient of a window depends on which rows share a micro-batch."""
    if facts.has_own_loss:
        return "this trainer has a loss of its own, of which nothing is known"
    if facts.loss_type == "bnpo":
        return "the loss `bnpo` is normalised by the tokens of each micro-batch"
    if facts.has_entropy_bonus:
        return "the entropy bonus is a mean over the tokens of each micro-batch"
    if facts.has_router_loss:
        return "the router loss is formed for each micro-batch"
    if facts.top_entropy_quantile < 1.0:
        return f"tokens are selected in each micro-batch (top_entropy_quantile={facts.top_entropy_quantile})"
    if facts.has_images:
        return "rows of a batch with images are not told apart"
    return None
