"""What was skipped since the last log: passes, rows and tokens that stock TRL would have run or fed."""

from collections import defaultdict


class Skipped:
    """Totals of each mode, `"train"` and `"eval"`."""

    def __init__(self) -> None:
        self._totals: defaultdict[str, dict[str, float]] = defaultdict(dict)

    def add(self, mode: str, **counts: float) -> None:
        """Add to the totals of `mode`: `passes`, `rows`, `tokens`."""
        for name, count in counts.items():
            totals = self._totals[mode]
            totals[f"skipped/{name}"] = totals.get(f"skipped/{name}", 0) + count

    def take(self, mode: str) -> dict[str, float]:
        """The totals of `mode` since the last call, as `skipped/passes` and so on; only what was ever added."""
        totals = dict(self._totals[mode])
        for name in totals:
            self._totals[mode][name] = 0
        return totals
