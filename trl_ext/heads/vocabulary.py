"""This rank's share of a vocabulary whose rows lie on several ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange, OneProcess, OwnTokens, SameTokens, all_gather
from .rows import Rows


@dataclass(frozen=True)
class VocabularyShard:
    """What a head needs to know beside the weight's rows that are here.

    Args:
        vocabulary (`int`, *optional*): V, of all ranks' rows together. `None`: as many as the weight has here.
        first (`int`): class of the first row that is here.
        exchange (`Exchange`): how tokens, statistics and sums come together.
        rows_for (`Callable`, *optional*): makes the rows to be read for given targets, where they are no plain tensor.
    """

    vocabulary: int | None = None
    first: int = 0
    exchange: Exchange = field(default_factory=OneProcess)
    rows_for: Callable[[Tensor], Rows] | None = None

    @property
    def spread(self) -> bool:
        """Whether a pass waits for other ranks."""
        return self.partial or self.rows_for is not None

    @property
    def partial(self) -> bool:
        """Whether other ranks fold other rows of the weight."""
        return not isinstance(self.exchange, OneProcess)


def shard_of_group(
    group: dist.ProcessGroup, rows: int, first: int, vocabulary: int | None, targets: Tensor, own_tokens: bool
) -> VocabularyShard:
    """The shard that a rank's arguments describe, once all ranks' arguments were seen to fit.

    One exchange of five integers, at which the ranks wait for each other.

    Raises:
        `ValueError`: the ranks' rows are not the whole vocabulary, each once, their tokens are not equally many, or a
        target on the CPU is out of range. On every rank, also where one alone is at fault: no rank waits for another.
    """
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    every = torch.empty(group.size() * 5, dtype=torch.int64, device=device)
    all_gather(every, torch.tensor([first, rows, targets.numel(), *range_of(targets)], device=device), group=group)
    numbers: list[list[int]] = every.view(-1, 5).tolist()
    shards = [(start, count) for start, count, *_ in numbers]
    tokens = [count for _, _, count, *_ in numbers]
    total = sum(count for _, count in shards)
    end = 0
    for start, count in sorted(shards):
        if count and start != end:
            raise ValueError(
                f"`first_class` and the rows of `weight` must cover the vocabulary once: the ranks of the group hold "
                f"(first class, rows) {shards}; class {min(start, end)} is missing or doubled."
            )
        end += count
    if vocabulary is not None and vocabulary != total:
        raise ValueError(f"`vocab_size` is {vocabulary}, but the ranks of the group hold {total} rows in all.")
    if total < 2:
        raise ValueError(f"The vocabulary must have at least 2 classes, the ranks of the group hold {total}.")
    if not own_tokens and len(set(tokens)) > 1:
        raise ValueError(
            f"With `own_tokens=False` all ranks of the group must have the same tokens, they have {tokens}. Set "
            "`own_tokens=True` if each rank has its own."
        )
    check_range(min(lowest for *_, lowest, _ in numbers), max(highest for *_, highest in numbers), total)
    return VocabularyShard(total, first, OwnTokens(group, tuple(tokens)) if own_tokens else SameTokens(group))


def range_of(targets: Tensor) -> tuple[int, int]:
    """The lowest and the highest target on the CPU. Elsewhere the look at the values would wait for the device."""
    return (int(targets.min()), int(targets.max())) if targets.device.type == "cpu" and targets.numel() else (0, 0)


def check_range(lowest: int, highest: int, vocabulary: int) -> None:
    """Raise `ValueError` if targets from `lowest` to `highest` are not all classes."""
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"`targets` must lie in [0, {vocabulary}), got values from {lowest} to {highest}. Leave out the "
            "positions that are not to be scored: -100 is no class id."
        )
