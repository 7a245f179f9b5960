"""What a run tells its user: messages, a section of the model card, and a progress bar with throughput."""

import logging
import os
import time
from pathlib import Path
from typing import Any

from transformers import ProgressCallback

logger = logging.getLogger("trl_ext")

_TOKENS = ("tokens_fed/with_gradient", "tokens_fed/without_gradient")
_SINGULAR = {"rows": "row", "passes": "pass"}


def show(message: str) -> None:
    """Log `message` at level INFO, to stderr unless the program has set up logging."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    logger.info(message)


def add_to_model_card(card: Path, args: Any, changed: dict[str, Any], plan: Any) -> None:
    """Append a section with the plan, the loss and the `changed` fields of the config to a model card."""
    settings = {"loss_type": args.loss_type, "loss_weights": getattr(args, "loss_weights", None)}
    settings |= {"beta": args.beta, **changed}
    lines = "\n".join(f"- `{name}`: `{value!r}`" for name, value in settings.items() if value is not None)
    section = (
        f"## What ran in training\n\nWith trl_ext's trainers, and these settings:\n\n{lines}\n\n```\n{plan}\n```\n"
    )
    unfinished = card.with_suffix(".unfinished")
    unfinished.write_text(f"{card.read_text(encoding='utf-8').rstrip()}\n\n{section}", encoding="utf-8")
    os.replace(unfinished, card)


class ThroughputProgress(ProgressCallback):  # type: ignore[misc]
    """Transformers' progress bar, followed by the throughput between the last two logs."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._logged_at = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is None or not any(name in logs for name in _TOKENS):
            return
        now = time.monotonic()
        self.training_bar.set_postfix_str(with_throughput(logs, now - self._logged_at))
        self._logged_at = now


def with_throughput(logs: dict[str, float], seconds: float) -> str:
    """The text after the bar: tokens are those of all processes, and `seconds` include generation and optimizer."""
    fed = sum(logs.get(name, 0.0) for name in _TOKENS)
    skipped = {name: logs[f"skipped/{name}"] for name in ("tokens", "rows", "passes") if logs.get(f"skipped/{name}")}
    text = f"{fed / max(seconds, 1e-9):,.0f} tokens/s"
    if "tokens" in skipped:
        text += f", {skipped['tokens'] / (skipped['tokens'] + fed):.0%} of TRL's tokens skipped"
    rest = [f"{n:.0f} {_SINGULAR[name] if n == 1 else name}" for name, n in skipped.items() if name in _SINGULAR]
    return text + (f" ({', '.join(rest)})" if rest else "")
