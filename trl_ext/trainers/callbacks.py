"""The trainers' own callbacks."""

import logging
from types import SimpleNamespace
from typing import Any, Protocol

import trl
from transformers import TrainerCallback

from ..distributed.gradients import check_checkpointing, sum_gradients_once
from ..distributed.ranks import Ranks
from .checkpointing import Checkpoints
from .first_batch import FirstBatchChecks
from .non_finite import NonFiniteLoss
from .reference_weights import ReferenceOfPolicy

logger = logging.getLogger("trl_ext")


class Trainer(Protocol):
    """The trainer members that the events use."""

    model_wrapped: Any
    _ranks: Ranks
    _checkpoints: Checkpoints
    _non_finite: NonFiniteLoss
    _reference_weights: ReferenceOfPolicy
    _first_batch: FirstBatchChecks
    _step_begins: bool

    def check_engine(self, wrapped: Any = None) -> None: ...

    def _resumed(self, state: Any) -> None: ...

    def _flush_store(self) -> None: ...

    def _release_reference(self) -> None: ...

    def check_methods_called(self) -> None: ...


class Lifecycle(TrainerCallback):
    """What a trainer does at transformers' events. If the order of two actions matters, one method does both."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._is_first_step = True
        self._equal_steps: int | None = 0  # steps with equal rewards so far; `None` after others, or after the warning

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        trainer = self.trainer
        if trainer._ranks.tensor_parallel is not None:
            sum_gradients_once(model, trainer._ranks.tensor_parallel.group)
        trainer.check_engine(trainer.model_wrapped)
        check_checkpointing(trainer.model_wrapped)
        checkpoints = trainer._checkpoints
        # First, because `_resumed` computes the identity of the reference
        trainer._reference_weights.resume(checkpoints.resumes_from, is_finished=checkpoints.is_finished)
        trainer._resumed(state)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._non_finite.step_begins()
        # Its first micro-batch looks for changes, because callbacks of users may run after this one
        self.trainer._step_begins = True

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self._is_first_step:
            self._is_first_step = False
            self.trainer.check_methods_called()
            self.trainer._first_batch.record()

    def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.trainer._non_finite.before_step(model)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._reference_weights.before_move(state.global_step + 1)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._flush_store()
        if state.global_step < state.max_steps and not control.should_training_stop:
            self.trainer._release_reference()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._flush_store()

    on_predict = on_evaluate
    on_train_end = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs = logs or {}
        equal_share = logs.get("frac_reward_zero_std")  # absent in evaluation and in DPO
        reward = logs.get("reward", 0.0)
        has_none = reward is None or reward != reward  # NaN
        if equal_share is not None and self._equal_steps is not None:
            is_equal = equal_share == 1.0 or has_none
            self._equal_steps = self._equal_steps + max(1, state.logging_steps) if is_equal else None
        if self._equal_steps is not None and self._equal_steps > 1 and state.is_world_process_zero:
            self._equal_steps = None
            problem = "all completions of each prompt had equal rewards"
            remedy = "different values for different completions"
            if has_none:
                problem = "no reward function returned a number"
                remedy = "numbers"
            logger.warning(
                f"So far, {problem}, so every advantage is zero and no reward trains the policy. Check that the "
                f"reward functions return {remedy}."
            )


class MovesReference(trl.SyncRefModelCallback):
    """TRL's callback for `sync_ref_model`, which here updates the reference's copies of the policy's tensors."""

    def __init__(self, reference: Any) -> None:
        # TRL's callback reads only the parameters of a model
        copies = SimpleNamespace(parameters=lambda: [copy for _, copy in reference.pairs()])
        super().__init__(ref_model=copies, accelerator=None)
        self._policy = SimpleNamespace(parameters=lambda: [param for param, _ in reference.pairs()])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"] = self._policy
        super().on_step_end(args, state, control, **kwargs)
