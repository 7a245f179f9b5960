"""The counts that all trainers log: what was skipped, and what was processed."""

from collections import Counter, defaultdict


class SkipCounts:
    """What was skipped since the last log, separately for `"train"` and `"eval"`."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = defaultdict(set)
        self._totals: dict[str, Counter[str]] = {}
        self.of_training: Counter[str] = Counter()  # since `train` was called

    def add(self, mode: str, **counts: int) -> None:
        """Add the `passes`, `rows` and `tokens` that one micro-batch skipped."""
        self._names[mode].update(counts)
        self._totals.setdefault(mode, Counter()).update(counts)
        if mode == "train":
            self.of_training.update(counts)

    def take(self, mode: str) -> dict[str, float]:
        """Return the totals by their names in the logs; absent, not zero, where nothing was counted.

        A pass that checks stored values is extra work. Where more ran than in TRL, nothing was skipped.
        """
        totals = self._totals.pop(mode, None)
        if totals is None:
            return {}
        return {f"skipped/{name}": float(max(0, totals[name])) for name in sorted(self._names[mode])}


class TokenCounts:
    """The tokens processed since the last log, separately for `"train"` and `"eval"`."""

    def __init__(self) -> None:
        self._totals: dict[str, Counter[str]] = defaultdict(Counter)
        self.of_training = 0  # tokens of all passes since `train` was called

    def add(self, mode: str, *, with_gradient: int, without_gradient: int, head: int, checks: int) -> None:
        """Add the tokens of one micro-batch: in passes with a gradient, without one, scored by the head, in checks."""
        self._totals[mode].update(
            {
                "tokens_processed/with_gradient": with_gradient,
                "tokens_processed/without_gradient": without_gradient,
                "head/tokens": head,
                "tokens_processed/checks": checks,
            }
        )
        if mode == "train":
            self.of_training += with_gradient + without_gradient

    def add_generation(self, mode: str, tokens: int, checks: int) -> None:
        """Add the tokens that the model ran in `generate`, and in checks of it."""
        self._totals[mode].update({"tokens_processed/generation": tokens, "tokens_processed/checks": checks})
        if mode == "train":
            self.of_training += tokens

    def take(self, mode: str) -> dict[str, float]:
        """Return the totals by their names in the logs, without those that are zero."""
        return {name: float(count) for name, count in self._totals.pop(mode, {}).items() if count}
