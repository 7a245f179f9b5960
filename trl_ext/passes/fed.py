"""How much work ran: tokens fed and tokens scored by the head, as totals between two logs."""

from collections import defaultdict


class Fed:
    """Totals for `"train"` and `"eval"` apart."""

    NAMES = ("tokens_fed/with_gradient", "tokens_fed/without_gradient", "head/tokens")

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, mode: str, counts: list[int]) -> None:
        """Count one micro-batch: the tokens of passes with a gradient, of those without, and those scored."""
        for name, count in zip(self.NAMES, counts, strict=True):
            self._totals[mode][name] += count

    def take(self, mode: str) -> dict[str, float]:
        """Totals since the last call, by their names in the logs; what is zero is left out."""
        return {name: float(count) for name, count in self._totals.pop(mode, {}).items() if count}
