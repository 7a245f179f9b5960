"""A micro-batch in parts: forward, loss and backward of each, before the gradients of the step are synchronized."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import transformers
from accelerate.utils import DistributedType
from torch import Tensor

from ..compat.replaced import replaced
from ..distributed.ranks import Ranks

_LOSS_CHANGED = (
    "This trainer's `compute_loss` changed the loss after it was computed. With `max_tokens_per_micro_batch`, the "
    "change affects only the last of several forward passes. Override `_compute_loss` instead, and set "
    "`max_tokens_per_micro_batch` to None."
)


class Trainer(Protocol):
    """The trainer members that the parts read."""

    accelerator: Any


class InParts:
    """Runs all parts of a micro-batch but the last, which TRL's training step runs."""

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self.trainer, self.ranks = trainer, ranks
        self.divides_loss = True  # by the number of micro-batches; not if the next one has the rows of all
        self._step_ends = ExitStack()
        self._gradients: list[Tensor] = []  # with respect to the loss of each part
        self._last_parts_to_come = 0
        self._in_training_step = False

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Let micro-batches run in parts in the `with` block, because only there a backward follows the loss."""
        self._in_training_step, self._last_parts_to_come = True, 0
        try:
            with ExitStack() as self._step_ends:
                if not self.divides_loss:
                    self._step_ends.enter_context(replaced(self.trainer, current_gradient_accumulation_steps=1))
                yield
        finally:
            self._in_training_step = False
        if self._last_parts_to_come:
            raise RuntimeError(_LOSS_CHANGED)

    @property
    def may_run(self) -> bool:
        return self._in_training_step and torch.is_grad_enabled()

    def nothing(self) -> Tensor:
        """Return the loss of a micro-batch whose rows run with a later one. It has no backward."""
        self._step_ends.enter_context(replaced(self.ranks.every, backward=lambda *_, **__: None))
        return torch.zeros((), device=self.ranks.device)

    def begins(self) -> None:
        """Called before a micro-batch."""
        self._gradients = []

    def train(
        self,
        model: Any,
        inputs: Any,
        num_items: Any,
        loss_of_part: Callable[[], Tensor],
        aside: AbstractContextManager[Any],
    ) -> None:
        """Run forward, loss and backward for a part. `aside`: a context in which TRL's metrics are not logged."""

        def with_hook(*_: Any, **__: Any) -> Tensor:
            loss = loss_of_part()
            loss.register_hook(self._gradients.append)
            return loss

        step = {"_prepare_inputs": lambda inputs: inputs, "compute_loss": with_hook}
        with self._window_goes_on(model), aside, replaced(self.trainer, **step):
            transformers.Trainer.training_step(self.trainer, model, inputs, num_items)

    def last(self, loss: Tensor) -> None:
        """Check, once the backward of the last part runs, that its loss has the same factor as those before."""
        if self._gradients:
            self._last_parts_to_come += 1
            loss.register_hook(partial(self._last_part_trained, self._gradients))

    def _last_part_trained(self, of_others: list[Tensor], gradient: Tensor) -> None:
        if any(not torch.equal(other, gradient) for other in of_others):
            raise RuntimeError(_LOSS_CHANGED)
        self._last_parts_to_come -= 1

    @contextmanager
    def _window_goes_on(self, model: Any) -> Iterator[None]:
        """Prevent gradient synchronization and engine steps in the `with` block, as if more micro-batches followed."""
        accelerator = self.trainer.accelerator
        if not accelerator.sync_gradients:
            yield
            return
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        accelerator.gradient_state._set_sync_gradients(False)
        try:
            with nullcontext() if is_deepspeed else accelerator.no_sync(model):
                yield
        finally:
            accelerator.gradient_state._set_sync_gradients(True)
