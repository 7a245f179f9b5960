"""Checkpoints where the accelerator counts copies of the model: each rank writes and reads as the rank that it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..engines.tensor_parallel import OncePerCopy


class CheckpointsOfEveryRankMixin:
    """Mixed in before a TRL trainer.

    Accelerate asks the accelerator it is handed which rank this is and how many there are, to say who writes a file
    and who is sent what was read (accelerate 1.15, utils/fsdp_utils.py). There a copy of the model is no rank.
    """

    accelerator: Any

    @contextmanager
    def _as_every_rank(self) -> Iterator[None]:
        held = self.accelerator
        if isinstance(held, OncePerCopy):
            self.accelerator = held.of_every_rank
        try:
            yield
        finally:
            self.accelerator = held

    def save_model(self, *positional: Any, **keywords: Any) -> None:
        """Transformers' own."""
        with self._as_every_rank():
            super().save_model(*positional, **keywords)  # type: ignore[misc]

    def _save_checkpoint(self, *positional: Any, **keywords: Any) -> None:
        with self._as_every_rank():
            super()._save_checkpoint(*positional, **keywords)  # type: ignore[misc]

    def _load_from_checkpoint(self, *positional: Any, **keywords: Any) -> None:
        with self._as_every_rank():
            super()._load_from_checkpoint(*positional, **keywords)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, *positional: Any, **keywords: Any) -> None:
        with self._as_every_rank():
            super()._load_optimizer_and_scheduler(*positional, **keywords)  # type: ignore[misc]

    def _load_best_model(self, *positional: Any, **keywords: Any) -> None:
        with self._as_every_rank():
            super()._load_best_model(*positional, **keywords)  # type: ignore[misc]
