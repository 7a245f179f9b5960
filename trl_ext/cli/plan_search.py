"""The search of `plan`: which options there are, and which of them fit into memory, with few counts of memory.

Pure functions and data. Dimensions: U units (rows, or pairs in DPO), C completions of a unit.
"""

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..memory.step import Row
from ..planning.micro_batches import UNSHARED, RowTokens
from ..planning.parts import few_parts
from ..planning.speed import StepWork

Array = NDArray[np.int64]


class Setting(NamedTuple):
    """The arguments that trade time for memory."""

    engine: str
    checkpointing: bool
    precompute: bool = False  # `precompute_ref_log_probs`
    offloads: bool = False  # `activation_offloading`
    hosts: bool = False  # `reference_device="cpu"`

    def only_slows(self, other: "Setting") -> bool:
        """Return whether this is `other` with more in host memory: the same results, slower."""
        return self[:3] == other[:3] and self.offloads >= other.offloads and self.hosts >= other.hosts


@dataclass(frozen=True, kw_only=True)
class Option:
    """The arguments that a plan chooses."""

    setting: Setting
    batch: int  # `per_device_train_batch_size`
    accumulation: int
    generation: int | None = None  # `steps_per_generation`
    budget: int | None = None  # `max_tokens_per_micro_batch`


@dataclass(frozen=True, kw_only=True)
class Space:
    """What the arguments give, and what may change without changing a result."""

    given: Option
    settings: tuple[Setting, ...]  # those that keep more in host memory last
    changes_batch: bool = False  # else the batch is kept
    changes_budget: bool = False  # `max_tokens_per_micro_batch` is allowed
    together: int = 1  # micro-batches of an optimizer step that it joins
    most_rows: int  # units in a pass whose memory can be counted

    def ladders(self, lengths: "Lengths") -> Iterator[list[Option]]:
        """Yield, for each setting, the options from the smallest micro-batch up."""
        for setting in self.settings:
            yield [
                Option(
                    setting=setting,
                    batch=batch,
                    accumulation=self.given.accumulation * self.given.batch // batch,
                    generation=self.given.generation and self.given.generation * self.given.batch // batch,
                    budget=budget,
                )
                for batch, budget in self._sizes(lengths)
            ]

    def _sizes(self, lengths: "Lengths") -> list[tuple[int, int | None]]:
        batch, accumulation, generation = self.given.batch, self.given.accumulation, self.given.generation
        if self.changes_budget:
            whole = batch * self.together
            units = min(whole, self.most_rows)
            # Budgets that the longest rows fill, so that none has room to spare: some of a group, or whole groups
            steps = {min(units, round(2 ** (i / 4))) for i in range(4 * units.bit_length() + 1)}
            group = lengths.group
            counts = sorted({min(units, x if x <= group else -(-x // group) * group) for x in steps})
            budgets = sorted({lengths.tokens_of(lengths.most(count)) for count in counts})
            ladder: list[tuple[int, int | None]] = [(batch, x) for x in budgets]
            # The whole step in one pass needs no budget if it is one micro-batch
            return [*ladder[:-1], (batch, None)] if accumulation == 1 and units == whole else ladder
        if not self.changes_batch:
            return [(batch, None)]
        rows = batch * accumulation
        sizes = [x for x in range(1, min(rows, self.most_rows) + 1) if rows % x == 0]
        return [(x, None) for x in sizes if generation is None or generation * batch % x == 0]


@dataclass(frozen=True, eq=False)
class Lengths:
    """The tokens of each unit of the data, truncated as in training. A pass has no padding."""

    prompts_U: Array
    completions_UC: Array
    group: int = 1  # completions of a prompt, each of which is a unit
    shares: bool = True  # completions of a prompt share it in a pass
    kept_together: bool = True  # completions of a group share a micro-batch where there is room

    @property
    def rows_U(self) -> Array:
        """The tokens of the longest row of each unit."""
        longest: Array = self.prompts_U + self.completions_UC.max(axis=1)
        return longest

    @cached_property
    def _longest_first(self) -> Array:
        """The numbers of the units, those with the most tokens first."""
        return np.argsort(-self.units_U, kind="stable")

    @cached_property
    def units_U(self) -> Array:
        """The tokens that the model processes of each unit, alone."""
        return self._tokens(self.prompts_U, self.completions_UC, self.shares)

    @staticmethod
    def _tokens(prompts_U: Array, completions_UC: Array, shares: bool) -> Array:
        copies = 1 if shares else completions_UC.shape[1]
        # A row's last token is only predicted, and its first is not
        own_UC = np.maximum(completions_UC - 1, 0)
        tokens: Array = np.maximum(copies * prompts_U + own_UC.sum(axis=1), 1)
        return tokens

    def most(self, units: int) -> tuple[Row, ...]:
        """Return the rows of the `units` units with the most tokens."""
        prompts = units
        if self.group > 1:
            whole, rest = divmod(units, self.group)
            # Without sharing, every copy of a prompt counts; with it, the worst has the most prompts
            together = self.kept_together or not self.shares
            prompts = whole + (rest > 0) + (rest > 0 and whole > 0 and self.shares) if together else units
        order_U = self._longest_first[:prompts]
        at = [int(order_U[i % len(order_U)]) for i in range(units)]
        return tuple(row for unit, i in enumerate(at) for row in self._rows(unit, i))

    def within(self, budget: int, units: int) -> tuple[Row, ...]:
        """Return as many rows of the longest of `units` units as fill a pass of `budget` tokens; at least one unit."""
        count = bisect.bisect_right(range(2, units + 1), budget, key=lambda x: self.tokens_of(self.most(x)))
        return self.most(count + 1)

    def _rows(self, unit: int, i: int) -> Iterator[Row]:
        for c, completion in enumerate(self.completions_UC[i]):
            prompts = i if self.group > 1 else unit
            group = prompts if self.shares else unit * len(self.completions_UC[i]) + c
            yield Row(group, int(self.prompts_U[i]), int(completion))

    def tokens_of(self, rows: tuple[Row, ...]) -> int:
        """Return the number of tokens in a pass over `rows`."""
        prompts = {row.group: row.prompt for row in rows}
        return max(1, sum(prompts.values()) + sum(max(row.completion - 1, 0) for row in rows))

    def worst(self, option: Option, together: int) -> tuple[Row, ...]:
        """Return the rows of the largest micro-batch with `option`."""
        if option.budget is None:
            return self.most(option.batch)
        return self.within(option.budget, option.batch * together)

    def work(self, option: Option, devices: int, together: int, reference: float, offloaded: float = 0.0) -> StepWork:
        """Return the optimizer step with `option` on one of `devices`, of units of average length.

        Args:
            reference: forward passes of the reference, on average.
            offloaded: bytes of activations that go to host memory for each token.
        """
        units = option.batch * option.accumulation
        lengths_UC = self.prompts_U[:, None] + self.completions_UC
        tokens = units * float(self.units_U.mean())
        if self.group > 1 and self.shares and (option.batch > 1 or option.budget is not None):
            sharing = min(self.group, option.batch * (together if option.budget else 1))
            tokens -= units * float(self.prompts_U.mean()) * (1 - 1 / sharing)
        passes = option.accumulation
        if option.budget is not None:
            passes = option.accumulation // together * self._parts(option.budget, option.batch * together)
        return StepWork(
            passes=passes,
            tokens=tokens,
            pairs=units * float((lengths_UC.astype(float) ** 2 / 2).sum(axis=1).mean()),
            scored=units * float(self.completions_UC.sum(axis=1).mean()),
            checkpointing=option.setting.checkpointing,
            engine=option.setting.engine,
            devices=devices,
            reference=reference,
            offloaded=tokens * offloaded,
            hosts_reference=option.setting.hosts,
        )

    def _parts(self, budget: int, units: int) -> int:
        """Return in how many passes of at most `budget` tokens `units` typical units run."""
        order_U = self._longest_first
        prompts = -(-units // self.group)
        typical = order_U[((np.arange(prompts) + 0.5) / prompts * len(order_U)).astype(int)]
        prompt_B = [i // self.group if self.group > 1 and self.shares else UNSHARED for i in range(units)]
        tokens = [self.prompts_U[typical], (self.units_U - self.prompts_U)[typical]]
        of_prompts, own = (np.repeat(x, self.group)[:units].tolist() for x in tokens)
        return len(few_parts(RowTokens(prompt_B, of_prompts, own), list(range(units)), budget))


class Counted(NamedTuple):
    option: Option
    peak: int  # predicted bytes


def search(
    ladders: Iterable[list[Option]],
    peak_of: Callable[[Option], int],
    size_of: Callable[[Option], int],
    bound: int,
    wanted: int = 3,
) -> tuple[list[Counted], list[Counted]]:
    """Return the options that fit into `bound` bytes, and those that do not, of all whose memory was counted.

    Memory and size, in tokens of a pass, grow along a ladder. Of each ladder, the largest option that fits is among
    those counted, and the next one, too. If fewer than `wanted` fit, smaller ones are counted. If all of a ladder fits,
    those that only slow it down are left out.
    """
    counted: list[Counted] = []
    smaller: list[Option] = []
    whole: list[Setting] = []
    for ladder in ladders:
        if any(ladder[0].setting.only_slows(x) for x in whole):
            continue
        of_ladder = _counted(ladder, peak_of, size_of, bound)
        if of_ladder[-1].peak <= bound:
            whole.append(ladder[0].setting)
        counted += of_ladder
        least = next((x.option for x in of_ladder if x.peak <= bound), ladder[0])
        smaller += reversed(ladder[: ladder.index(least)])
    lacking = max(0, wanted - sum(x.peak <= bound for x in counted))
    counted += [Counted(option, peak_of(option)) for option in smaller[:lacking]]
    return [x for x in counted if x.peak <= bound], [x for x in counted if x.peak > bound]


def _counted(
    ladder: list[Option], peak_of: Callable[[Option], int], size_of: Callable[[Option], int], bound: int
) -> list[Counted]:
    """Count the largest option, then the smallest; then follow the line between the two nearest to `bound`."""
    known: dict[int, int] = {}
    fits, exceeds, at = -1, len(ladder), len(ladder) - 1
    while exceeds - fits > 1:
        known[at] = peak_of(ladder[at])
        fits, exceeds = (at, exceeds) if known[at] <= bound else (fits, at)
        at = 0
        if fits in known and exceeds in known:
            low, high = size_of(ladder[fits]), size_of(ladder[exceeds])
            size = low + (high - low) * (bound - known[fits]) / max(1, known[exceeds] - known[fits])
            at = bisect.bisect_right(ladder, size, key=size_of) - 1
            if len(known) % 3 == 0:  # the line misleads
                at = (fits + exceeds) // 2
        at = min(max(at, fits + 1), exceeds - 1)
    return [Counted(ladder[i], peak) for i, peak in sorted(known.items())]


def ranked(fits: list[Counted], seconds_of: Callable[[Option], float], given: Option) -> list[tuple[Counted, float]]:
    """Return the options and their time over that of the fastest, the best first.

    Of options within 1 % of each other, the one nearest to the arguments `given` comes first, then the smallest.
    """
    times = [seconds_of(x.option) for x in fits]
    least = min(times, default=1.0)

    def key(item: tuple[Counted, float]) -> tuple[Any, ...]:
        option = item[0].option
        changed = sum(x != y for x, y in zip(option.setting[1:], given.setting[1:], strict=True))
        changed += sum(vars(option)[name] != value for name, value in vars(given).items() if name != "setting")
        return round(item[1], 2), changed, item[0].peak

    return sorted(zip(fits, (x / least for x in times), strict=True), key=key)


def varied(best: list[tuple[Counted, float]], count: int) -> list[tuple[Counted, float]]:
    """Return `count` options: those that save memory over all faster ones, of different settings first; then others."""
    settings: set[Setting] = set()
    order: list[tuple[bool, bool, int]] = []
    for i, (counted, _) in enumerate(best):
        setting = counted.option.setting
        # A faster one may need as little memory by keeping more on the host
        saves = all(
            counted.peak < faster.peak
            or faster.option.setting.offloads > setting.offloads
            or faster.option.setting.hosts > setting.hosts
            for faster, _ in best[:i]
        )
        order.append((not saves, setting in settings, i))
        if saves:
            settings.add(setting)
    return [best[i] for i in sorted(i for *_, i in sorted(order)[:count])]
