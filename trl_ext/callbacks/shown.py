"""What runs, and what ran, for a reader: in the log and in the model card."""

import logging
import os
from pathlib import Path
from typing import Any

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
