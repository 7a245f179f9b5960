"""Both trainers: what the progress bar and the model card say of a run."""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import ProgressCallback

from ..callbacks import ThroughputProgress
from ..passes import Plan
from .added_fields import AddedFields

_BEGIN = "## What ran in training"


class ShownMixin:
    """Mixed in before a trainer that has a plan."""

    args: Any
    callback_handler: Any
    explain: Callable[[], Plan]

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        bars, given = self.callback_handler.callbacks, keywords.get("callbacks") or ()
        # A bar of the user's own, or a notebook's, is left alone
        bars[:] = [ThroughputProgress() if type(x) is ProgressCallback and x not in given else x for x in bars]

    def create_model_card(self, *positional: Any, **keywords: Any) -> None:
        """TRL's own, and a section that names the losses, the reference, and what was skipped and packed."""
        super().create_model_card(*positional, **keywords)  # type: ignore[misc]
        if not self.is_world_process_zero():  # type: ignore[attr-defined]
            return
        card = Path(self.args.output_dir) / "README.md"
        unfinished = card.with_suffix(".unfinished")
        unfinished.write_text(f"{card.read_text(encoding='utf-8').rstrip()}\n\n{self._what_ran()}", encoding="utf-8")
        os.replace(unfinished, card)

    def _what_ran(self) -> str:
        settings = {"loss_type": self.args.loss_type, "loss_weights": getattr(self.args, "loss_weights", None)}
        settings |= {"beta": self.args.beta, **changed_fields(self.args)}
        lines = [f"- `{name}`: `{value!r}`" for name, value in settings.items() if value is not None]
        return "\n".join(
            [
                _BEGIN,
                "",
                "With trl_ext's trainers, and these settings:",
                "",
                *lines,
                "",
                "```",
                str(self.explain()),
                "```",
                "",
            ]
        )


def changed_fields(config: Any) -> dict[str, Any]:
    """The fields added to TRL's config whose values are not their defaults."""
    groups = [x for x in type(config).__mro__ if x.__bases__ == (AddedFields,)]
    added = {field.name: field.default for group in groups for field in fields(group)}
    return {name: getattr(config, name) for name, unset in added.items() if getattr(config, name) != unset}
