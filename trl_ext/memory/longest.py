"""The longest sequence whose training step fits: a search over a count that grows with the length."""

from collections.abc import Callable


def longest_that_fits(bytes_of: Callable[[int], int], limit: int, first: int, most: int, step: int = 64) -> int:
    """The largest multiple of `step`, up to `most`, of which `bytes_of` is at most `limit`; 0 where there is none.

    Memory is nearly a straight line in the length, so the line through what is known is followed, and halved where it
    leads nowhere new.

    Args:
        bytes_of (`Callable`): grows with its argument, a length.
        first (`int`): where to begin.
    """
    fits: tuple[int, int] = (0, 0)
    exceeds: tuple[int, int] | None = None
    counts: dict[int, int] = {}
    count = max(1, min(first, most) // step)
    while exceeds is None or exceeds[0] - fits[0] > 1:
        if count not in counts:
            counts[count] = bytes_of(count * step)
        if counts[count] <= limit:
            fits = (count, counts[count])
            if (count + 1) * step > most:
                break
        else:
            exceeds = (count, counts[count])
        count = _next(fits, exceeds, counts, limit, most // step)
    return fits[0] * step


def _next(fits: tuple[int, int], exceeds: tuple[int, int] | None, counts: dict[int, int], limit: int, most: int) -> int:
    """The count that the line through two known ones says, strictly between what fits and what does not."""
    low, high = fits[0] + 1, most if exceeds is None else exceeds[0] - 1
    if len(counts) < 2:
        guess = fits[0] * 2 if exceeds is None else exceeds[0] // 2
    else:
        (x0, y0), *_, (x1, y1) = sorted(counts.items())
        guess = int(x0 + (limit - y0) * (x1 - x0) / max(1, y1 - y0))
        if len(counts) > 4:  # it is no line
            guess = (low + high) // 2
    return min(max(guess, low), max(high, low))
