"""The trainers' own callbacks."""

from typing import Any

import trl
from transformers import TrainerCallback

from ..distributed.gradients import check_checkpointing, sum_gradients_once


class Lifecycle(TrainerCallback):
    """What a trainer does at transformers' events. Where the order matters, it is the order in one method."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        trainer = self.trainer
        if trainer.ranks.tensor_parallel is not None:
            sum_gradients_once(model, trainer.ranks.tensor_parallel.group)
        trainer.check_engine(trainer.model_wrapped)
        check_checkpointing(trainer.model_wrapped)
        checkpoints = trainer.checkpoints
        # First, because `resumed` computes the identity of the reference
        trainer.reference_weights.resume(checkpoints.resumes_from, is_finished=checkpoints.is_finished)
        trainer.resumed(state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.non_finite.step_begins()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.trainer.non_finite.before_step(model)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.reference_weights.before_move(state.global_step + 1)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.flush()
        if state.global_step < state.max_steps and not control.should_training_stop:
            self.trainer.release()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.flush()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.trainer.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.flush()


class _Tensors:
    """Parameters in order: all that TRL's callback reads of a model."""

    def __init__(self, own: Any, place: int) -> None:
        self._own, self._place = own, place

    def parameters(self) -> list[Any]:
        return [pair[self._place] for pair in self._own.pairs()]


class MovesReference(trl.SyncRefModelCallback):
    """TRL's callback for `sync_ref_model`, applied to the copied tensors of the policy and to their copies."""

    def __init__(self, own: Any) -> None:
        super().__init__(ref_model=_Tensors(own, 1), accelerator=None)
        self._policy = _Tensors(own, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **{**kwargs, "model": self._policy})
