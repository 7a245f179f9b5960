"""What a run shows on the screen: messages of the main process, and a progress bar with throughput."""

import logging
import os
import time
from pathlib import Path
from typing import Any

from transformers import ProgressCallback

logger = logging.getLogger("trl_ext")


def show(message: str) -> None:
    """Log `message` at level INFO, to stderr where the program has not set up logging."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    logger.info(message)


def section(card: Path, args: Any, changed: dict[str, Any], plan: Any) -> None:
    settings = {"loss_type": args.loss_type, "loss_weights": getattr(args, "loss_weights", None)}
    settings |= {"beta": args.beta, **changed}
    lines = [f"- `{name}`: `{value!r}`" for name, value in settings.items() if value is not None]
    text = "\n".join(
        [
            "## What ran in training",
            "",
            "With trl_ext's trainers, and these settings:",
            "",
            *lines,
            "",
            "```",
            str(plan),
            "```",
            "",
        ]
    )
    unfinished = card.with_suffix(".unfinished")
    unfinished.write_text(f"{card.read_text(encoding='utf-8').rstrip()}\n\n{text}", encoding="utf-8")
    os.replace(unfinished, card)


_FED = ("tokens_fed/with_gradient", "tokens_fed/without_gradient")

_ONE = {"rows": "row", "passes": "pass"}


class ThroughputProgress(ProgressCallback):  # type: ignore[misc]
    """Transformers' own bar; behind it, from each log on, what ran since the log before it."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._logged_at = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is None or not any(name in logs for name in _FED):
            return
        now = time.monotonic()
        self.training_bar.set_postfix_str(with_throughput(logs, now - self._logged_at))
        self._logged_at = now


def with_throughput(logs: dict[str, float], seconds: float) -> str:
    """What the bar says after `logs`, which came `seconds` after those before them.

    All that happens in that time counts, generation and the optimizer too; all processes' tokens are counted.
    """
    fed = sum(logs.get(name, 0.0) for name in _FED)
    skipped = {name: logs[f"skipped/{name}"] for name in ("tokens", "rows", "passes") if logs.get(f"skipped/{name}")}
    said = f"{fed / max(seconds, 1e-9):,.0f} tokens/s"
    if "tokens" in skipped:
        said += f", {skipped['tokens'] / (skipped['tokens'] + fed):.0%} of TRL's tokens skipped"
    rest = [f"{count:.0f} {_ONE[name] if count == 1 else name}" for name, count in skipped.items() if name in _ONE]
    return said + (f" ({', '.join(rest)})" if rest else "")
