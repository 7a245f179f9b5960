"""A training step of transformers over a part of a micro-batch, before the gradients are synchronized."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import transformers
from accelerate.utils import DistributedType
from torch import Tensor

from .replaced import replaced


def train_part(trainer: Any, model: Any, batch: Any, num_items: Any, part_loss: Callable[[], Tensor]) -> None:
    """Run transformers' training step with `part_loss` in place of `compute_loss`.

    Transformers' step scales the loss for accumulation and for the engine, so no factor of it is repeated here.
    """

    def compute_loss(*_: Any, **__: Any) -> Tensor:
        return part_loss()

    step_members = {"_prepare_inputs": lambda inputs: inputs, "compute_loss": compute_loss}
    with _without_synchronization(trainer.accelerator, model), replaced(trainer, **step_members):
        transformers.Trainer.training_step(trainer, model, batch, num_items)


def undivided_loss(trainer: Any) -> AbstractContextManager[None]:
    """Keep transformers from dividing the loss by the number of micro-batches in the `with` block."""
    return replaced(trainer, current_gradient_accumulation_steps=1)


def no_backward(accelerator: Any) -> AbstractContextManager[None]:
    """Make the backward of transformers' training step do nothing in the `with` block."""
    return replaced(accelerator, backward=lambda *_, **__: None)


@contextmanager
def _without_synchronization(accelerator: Any, model: Any) -> Iterator[None]:
    """Prevent gradient synchronization and engine steps in the `with` block, as if more micro-batches followed."""
    if not accelerator.sync_gradients:
        yield
        return
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    accelerator.gradient_state._set_sync_gradients(False)
    try:
        # accelerate passes the flag on to DeepSpeed, whose `no_sync` refuses sharded gradients
        with nullcontext() if is_deepspeed else accelerator.no_sync(model):
            yield
    finally:
        accelerator.gradient_state._set_sync_gradients(True)
