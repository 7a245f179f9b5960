"""Evaluation before training on several processes: where it works, training still wraps the model afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import FSDPModule

from .detect import DetectedEngine


@contextmanager
def wrapped_in_training(trainer: Any) -> Iterator[None]:
    """Undo what an evaluation in the `with` block, outside training, does to the model.

    Transformers prepares the model for evaluation alone: accelerate marks it as prepared, and does not wrap it in DDP.
    With the mark, it would not be wrapped in training either, and gradients would not be averaged.
    """
    model = trainer.model
    accelerator = trainer.accelerator
    is_prepared = trainer.is_in_train or getattr(model, "_is_accelerate_prepared", False)
    if is_prepared or not accelerator.distributed_type.value.startswith("MULTI_"):
        yield
        return
    attributes = vars(model)
    forward = attributes.get("forward")
    try:
        yield
    finally:
        if attributes.pop("_is_accelerate_prepared", False):
            # Mixed precision wraps `forward`, and would wrap it again
            attributes.pop("_original_forward", None)
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward
            accelerator._models[:] = [x for x in accelerator._models if x is not model]
            trainer.model_wrapped = model  # with `torch_compile`, it was the compiled model
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # A forward leaves the outermost weights whole, and an optimizer that is created then would train copies
                module.reshard()


def check_evaluation(trainer: Any, engine: DetectedEngine) -> None:
    """Raise `ValueError` if `trainer` cannot evaluate outside training under `engine`."""
    stage = engine.zero_stage
    is_unprepared = trainer.deepspeed is None if stage is not None else not trainer.accelerator._models
    if trainer.is_in_train or not is_unprepared:
        return
    needs_optimizer = engine.fsdp_version == 2 and not trainer.args.torch_compile
    if needs_optimizer or stage in (0, 1, 2):
        raise ValueError(
            f"`evaluate()` before `train()` does not work under {engine.name}, which needs an optimizer to shard. "
            "Set `eval_on_start=True` to evaluate before the first step, or evaluate on one process."
        )


def check_training(trainer: Any, engine: DetectedEngine) -> None:
    """Raise `ValueError` if `trainer` cannot train under `engine`, because it has evaluated before."""
    # The engine of an evaluation has no optimizer, and training would use it
    if engine.zero_stage is not None and trainer.deepspeed is not None and trainer.optimizer is None:
        raise ValueError(
            f"`train()` after `evaluate()` does not work under {engine.name}: the model was sharded without an "
            "optimizer. Set `eval_on_start=True` to evaluate before the first step, or train with another trainer."
        )
