"""The longest sequence whose training step fits: a search over a count that grows with the length."""

from collections.abc import Callable

# So many counts say whether memory is a straight line; where it is none, the rest is halved
_STRAIGHT = 8


def longest_that_fits(bytes_of: Callable[[int], int], limit: int, first: int, most: int, step: int = 64) -> int:
    """The largest multiple of `step`, up to `most`, of which `bytes_of` is at most `limit`; 0 where there is none.

    Memory is nearly a straight line in the length, so the line through what is known is followed, and halved where it
    leads nowhere new.

    Args:
        bytes_of (`Callable`): grows with its argument, a length.
        first (`int`): where to begin.
    """
    fits, exceeds = 0, most // step + 1
    counts: dict[int, int] = {}
    count = max(1, min(first, most) // step)
    while exceeds - fits > 1:
        counts[count] = bytes_of(count * step)
        if counts[count] <= limit:
            fits = count
        else:
            exceeds = count
        count = _next(fits, exceeds, counts, limit)
    return fits * step


def _next(fits: int, exceeds: int, counts: dict[int, int], limit: int) -> int:
    """The count that the line through the two nearest known ones says, strictly between what fits and what does not."""
    if len(counts) < 2:
        guess = fits * 2 if fits else exceeds // 2
    elif len(counts) > _STRAIGHT:
        guess = (fits + exceeds) // 2
    else:
        (x0, y0), (x1, y1) = sorted(sorted(counts.items(), key=lambda known: abs(known[1] - limit))[:2])
        guess = int(x0 + (limit - y0) * (x1 - x0) / max(1, y1 - y0))
    return min(max(guess, fits + 1), exceeds - 1)
