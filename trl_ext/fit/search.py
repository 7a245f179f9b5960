"""The search for what fits into memory, with few counts of it, and the order of what was found.

Pure functions. Each count takes seconds.
"""

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .coverage import WHOLE_WEIGHT_ENGINES
from .options import Option, Setting

# Another engine, or more in host memory, is of no use unless it may take less than this share of the time
_FASTER = 0.9


@dataclass(frozen=True)
class Counted:
    """An option, and its predicted peak in bytes."""

    option: Option
    peak: int
    is_least: bool = False  # `peak` is what weights, gradients and optimizer states need; activations were not counted


@dataclass(frozen=True)
class SearchResult:
    """All options whose memory was counted."""

    fits: list[Counted]
    misses: list[Counted]


@dataclass(frozen=True)
class Ranked:
    """An option that fits, and its predicted time over that of the fastest."""

    candidate: Counted
    time: float


def counted_near(
    bound: int,
    bytes_of: Callable[[int], int],
    count: int,
    first: int,
    size_of: Callable[[int], float] = float,
) -> dict[int, int]:
    """Return the bytes of the candidates that a search counted for the last one that fits into `bound`.

    There are `count` candidates. Bytes grow with the number of a candidate, nearly linearly in its size. The search
    begins at number `first`. It goes up in steps that double, or to number 0, until it has one that fits and one that
    does not; then it follows the line between the two, and bisects if that misleads.
    """
    peaks: dict[int, int] = {}
    fits, exceeds = -1, count
    number = max(0, first)
    while exceeds - fits > 1:
        peaks[number] = bytes_of(number)
        if peaks[number] <= bound:
            fits = number
        else:
            exceeds = number
        if exceeds not in peaks:
            number = 2 * number + 1
        elif fits not in peaks:
            number = 0
        elif len(peaks) % 3 == 0:
            number = (fits + exceeds) // 2
        else:
            low, high = size_of(fits), size_of(exceeds)
            size = low + (high - low) * (bound - peaks[fits]) / max(1, peaks[exceeds] - peaks[fits])
            number = bisect.bisect_right(range(count), size, key=size_of) - 1
        number = min(max(number, fits + 1), exceeds - 1)
    return peaks


def search(
    ladders: Iterable[list[Option]],
    peak_of: Callable[[Option], int],
    size_of: Callable[[Option], int],
    bound: int,
    *,
    seconds_of: Callable[[Option], float],
    least_seconds_of: Callable[[Option], float] | None = None,
    floor_of: Callable[[Option], int] = lambda option: 0,
    least: int = 3,
) -> SearchResult:
    """Return the options that fit into `bound` bytes, and those that do not, of all whose memory was counted.

    Memory and size, in tokens of a pass, grow along a ladder. Of each ladder, the largest option that fits is among
    those counted, and the next one, too. If fewer than `least` fit, smaller ones are counted. Some ladders are left
    out: those that only slow down one that fits as a whole; those of another engine, or with more in host memory, that
    cannot be much faster than an option that fits; and those whose weights, gradients and states exceed the bound.

    Args:
        seconds_of: the predicted time.
        least_seconds_of: a time that needs no count and is at most the predicted one; by default `seconds_of`.
        floor_of: bytes of weights, gradients and states, as far as they are known.
    """
    least_seconds_of = least_seconds_of or seconds_of
    counted_options: list[Counted] = []
    smaller: list[Option] = []
    whole: list[Setting] = []
    best: Setting | None = None
    best_time = 0.0
    for ladder in sorted(ladders, key=lambda x: (_cost(x[0].setting), _least(least_seconds_of, x))):
        setting = ladder[0].setting
        if any(setting.only_slows(x) for x in whole):
            continue
        if best is not None and (setting.engine != best.engine or _is_on_host(setting)):
            share = _FASTER if _cost(setting) >= _cost(best) else 1.0
            if _least(least_seconds_of, ladder) >= share * best_time:
                continue
        floor = floor_of(ladder[0])
        if floor > bound:
            counted_options.append(Counted(ladder[0], floor, is_least=True))
            continue
        options_counted = _counted(ladder, peak_of, size_of, bound, lambda x: floor_of(x) > bound)
        if options_counted[-1].peak <= bound:
            whole.append(setting)
        counted_options += options_counted
        fits = [x.option for x in options_counted if x.peak <= bound]
        for option in fits:
            time = seconds_of(option)
            if best is None or time < best_time:
                best, best_time = setting, time
        largest = max((ladder.index(x) for x in fits), default=0)
        known_options = {x.option for x in options_counted}
        smaller += [option for option in reversed(ladder[:largest]) if option not in known_options]
    lacking = max(0, least - sum(x.peak <= bound for x in counted_options))
    counted_options += [Counted(option, peak_of(option)) for option in smaller[:lacking]]
    return SearchResult(
        fits=[x for x in counted_options if x.peak <= bound],
        misses=[x for x in counted_options if x.peak > bound],
    )


def _least(seconds_of: Callable[[Option], float], ladder: list[Option]) -> float:
    return min(map(seconds_of, ladder))


def _is_on_host(setting: Setting) -> bool:
    return setting.offloads or setting.hosts


def _cost(setting: Setting) -> tuple[bool, bool]:
    """Return what makes a setting harder to run: activations or weights in host memory, and an engine that shards."""
    return _is_on_host(setting), setting.engine not in WHOLE_WEIGHT_ENGINES


def _counted(
    ladder: list[Option],
    peak_of: Callable[[Option], int],
    size_of: Callable[[Option], int],
    bound: int,
    never_fits: Callable[[Option], bool],
) -> list[Counted]:
    """Return the options of a ladder that a search counted, from the largest micro-batch on; the smallest is first."""

    def size(number: int) -> int:
        return size_of(ladder[number])

    last = len(ladder) - 1
    peaks = {last: peak_of(ladder[last])}
    # The first count may show that no size fits
    if peaks[last] > bound and not never_fits(ladder[last]):
        peaks = counted_near(bound, lambda number: peak_of(ladder[number]), len(ladder), last, size)
    return [Counted(ladder[number], peaks[number]) for number in sorted(peaks)]


def ranked(fits: list[Counted], seconds_of: Callable[[Option], float], given_option: Option) -> list[Ranked]:
    """Return the options with their times, the best first.

    Of options within 1 % of each other, the one with the plainest engine comes first, DDP before those that shard, then
    the one nearest to the `given_option`, then the smallest.
    """
    times = [seconds_of(x.option) for x in fits]
    least = min(times, default=1.0)

    def key(best: Ranked) -> tuple[Any, ...]:
        option = best.candidate.option
        changes = option.setting.changes(given_option.setting)
        changes += sum(vars(option)[name] != value for name, value in vars(given_option).items() if name != "setting")
        return round(best.time, 2), _cost(option.setting), changes, best.candidate.peak

    return sorted([Ranked(x, time / least) for x, time in zip(fits, times, strict=True)], key=key)


def varied(best: list[Ranked], count: int) -> list[Ranked]:
    """Return `count` options: those that save memory over all faster ones, of different settings first; then others."""
    settings: set[Setting] = set()
    order: list[tuple[bool, bool, int]] = []
    for i, option in enumerate(best):
        setting = option.candidate.option.setting
        is_smaller = all(_saves_memory(option.candidate, faster.candidate) for faster in best[:i])
        order.append((not is_smaller, setting in settings, i))
        if is_smaller:
            settings.add(setting)
    return [best[i] for i in sorted(i for *_, i in sorted(order)[:count])]


def _saves_memory(slower: Counted, faster: Counted) -> bool:
    # A faster one may need as little memory by keeping more on the host
    return (
        slower.peak < faster.peak
        or faster.option.setting.offloads > slower.option.setting.offloads
        or faster.option.setting.hosts > slower.option.setting.hosts
    )
