"""What a run tells its user: messages, a section of the model card, and a progress bar with throughput."""

import logging
import os
import time
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback

logger = logging.getLogger("trl_ext")

_TOKENS = (
    "tokens_processed/with_gradient",
    "tokens_processed/without_gradient",
    "tokens_processed/generation",
)
_SKIPPED = ("skipped/tokens", "skipped/generation_tokens")


def show(message: str) -> None:
    """Log `message` at level INFO, to stderr unless the program has set up logging."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    logger.info(message)


def add_to_model_card(card: Path, args: Any, changed_fields: dict[str, Any], plan: str) -> None:
    """Add the plan, the loss and the `changed_fields` of the config to a model card, before its citations.

    The card may be published, so folders are left out. A config has only the fields of its method.
    """
    settings = {name: getattr(args, name, None) for name in ("loss_type", "loss_weights", "beta")}
    settings |= {**changed_fields, "reference_store_dir": None}
    lines = "\n".join(f"- `{name}`: `{value!r}`" for name, value in settings.items() if value is not None)
    section = f"## What ran in training\n\nTrained with {_project()} and:\n\n{lines}\n\n```\n{plan}\n```"
    text, heading, citations = card.read_text(encoding="utf-8").rstrip().partition("\n## Citations\n")
    unfinished = card.with_suffix(".unfinished")
    unfinished.write_text(f"{text.rstrip()}\n\n{section}\n{heading}{citations}".rstrip() + "\n", encoding="utf-8")
    os.replace(unfinished, card)


def _project() -> str:
    """Return name and version of this package, with a link if its metadata has one."""
    try:
        about = metadata("trl_ext")
    except PackageNotFoundError:  # it is not installed
        return "trl_ext"
    urls = dict(x.split(", ", 1) for x in about.get_all("Project-URL") or ())
    url = next((urls[name] for name in ("Homepage", "Repository", "Source") if name in urls), None)
    return f"{'trl_ext' if url is None else f'[trl_ext]({url})'} {about['Version']}"


class ThroughputProgress(ProgressCallback):  # type: ignore[misc]
    """Transformers' progress bar, followed by the speed between the last two logs."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._logged_at = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is None or not any(name in logs for name in _TOKENS):
            return
        now = time.monotonic()
        self.training_bar.set_postfix_str(throughput(logs, now - self._logged_at))
        self._logged_at = now


def throughput(logs: dict[str, float], seconds: float) -> str:
    """Return the text after the bar: tokens processed per second, and the share of TRL's tokens that was skipped.

    It counts the tokens of all processes, and `seconds` include generation and optimizer. It is short, so that the bar
    still fits into 80 columns.
    """
    skipped_tokens = sum(logs.get(name, 0.0) for name in _SKIPPED)
    processed_tokens = sum(logs.get(name, 0.0) for name in _TOKENS)
    text = f"{tqdm.format_sizeof(processed_tokens / max(seconds, 1e-9))} tok/s"
    return f"{text}, skips {skipped_tokens / (skipped_tokens + processed_tokens):.0%}" if skipped_tokens > 0 else text
