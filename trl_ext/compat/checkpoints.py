"""How transformers' trainers write a checkpoint and rotate the old ones."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from transformers import Trainer


class PolicyInFolder:
    """Mixed in before a TRL trainer: transformers' checkpoints of several adapters.

    PEFT saves the adapter "default" in the checkpoint itself and any other in a folder of its name. For the best one
    transformers looks in the checkpoint alone; to resume, transformers 5.17 looks in the folders alone.
    """

    state: Any

    def policy_folder(self) -> str | None:
        """In which folder of a checkpoint the policy lies, where that is not the checkpoint itself."""
        return None

    def policy_loaded(self, checkpoint: str) -> None:
        """Called after transformers has loaded the policy of `checkpoint`, to resume from it."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        self.policy_loaded(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best, folder = self.state.best_model_checkpoint, self.policy_folder()
        inner = None if folder is None else os.path.join(best, folder)
        try:
            if inner is not None and os.path.isdir(inner):
                self.state.best_model_checkpoint = inner
            super()._load_best_model()  # type: ignore[misc]
        finally:
            self.state.best_model_checkpoint = best


@contextmanager
def rotation_put_off() -> Iterator[list[Callable[[], None]]]:
    """Within, transformers' trainers delete no old checkpoint; the list gets what they would have called."""
    module: Any = sys.modules[Trainer.__module__]
    original = module.rotate_checkpoints
    put_off: list[Callable[[], None]] = []
    module.rotate_checkpoints = lambda *positional, **keywords: put_off.append(
        partial(original, *positional, **keywords)
    )
    try:
        yield put_off
    finally:
        module.rotate_checkpoints = original
