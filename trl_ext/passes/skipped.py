"""How much work did not run: passes, rows and tokens that stock TRL would have fed, as totals between two logs."""

from collections import defaultdict


class Skipped:
    """Totals for `"train"` and `"eval"` apart."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = defaultdict(set)
        self._totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, mode: str, *, passes: int | None = None, rows: int | None = None, tokens: int | None = None) -> None:
        """Count what one micro-batch left out; a quantity that is `None` is not spoken of."""
        for name, count in (("passes", passes), ("rows", rows), ("tokens", tokens)):
            if count is not None:
                self._known[mode].add(name)
                self._totals[mode][name] += count

    def take(self, mode: str) -> dict[str, float]:
        """Totals since the last call, as `skipped/passes`, `skipped/rows` and `skipped/tokens`.

        Empty where nothing was counted since: an absent total is not a total of zero.
        """
        totals = self._totals.pop(mode, None)
        if totals is None:
            return {}
        return {f"skipped/{name}": float(totals[name]) for name in sorted(self._known[mode])}
