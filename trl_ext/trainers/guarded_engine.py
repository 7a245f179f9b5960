"""What both trainers share of the engine: a guard against a silent fallback to another, and its row of the plan."""

import os
from typing import Any

from transformers import TrainerCallback

from ..engines.asked import Asked, asked
from ..engines.fallback import fallback
from ..engines.reentrant import check_checkpointing
from ..engines.running import running
from ..passes import Decision


class GuardedEngineMixin:
    """Mixed in before a TRL trainer: it stops where another engine runs than was asked for."""

    _asked: Asked
    accelerator: Any

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self.add_callback(_EngineCallback(self))  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' own, called first of all when the trainer is built; then the guard.

        Raises:
            `ValueError`: what runs is not what was asked for.
        """
        self._asked = asked(os.environ, self.args)  # type: ignore[attr-defined]
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.check_engine()

    def check_engine(self, wrapped: Any = None) -> None:
        """Raise `ValueError` if another engine runs than was asked for, as far as that is known now.

        Args:
            wrapped (`torch.nn.Module`, *optional*): the policy as `accelerator.prepare` returned it.
        """
        reason = fallback(self._asked, running(self.accelerator, self.model, wrapped))  # type: ignore[attr-defined]
        if reason is not None:
            raise ValueError(reason)

    def _engine_decision(self) -> Decision:
        """The row `engine` of the plan."""
        runs = running(self.accelerator, self.model)  # type: ignore[attr-defined]
        by = [wish.by for wish in self._asked.wishes]
        if not by and self._asked.processes_by is not None:
            by = [self._asked.processes_by]
        return Decision("engine", "run", f"{runs}{', asked for by ' + ' and '.join(by) if by else ''}.")


class _EngineCallback(TrainerCallback):
    """Looks at the engine once the model is wrapped, before the first step."""

    def __init__(self, trainer: GuardedEngineMixin) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wrapped = self.trainer.model_wrapped  # type: ignore[attr-defined]
        self.trainer.check_engine(wrapped)
        check_checkpointing(wrapped)
