"""A micro-batch in parts: forward, loss and backward of each, before the gradients of the step are synchronized."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compat import parts as internals
from ..distributed.ranks import Ranks

_LOSS_CHANGED = (
    "This trainer's `compute_loss` changed the loss after it was computed. With `max_tokens_per_micro_batch`, the "
    "change affects only the last of several forward passes. Override `_compute_loss` instead, and set "
    "`max_tokens_per_micro_batch` to None."
)


class PartTraining:
    """Trains all parts of a micro-batch but the last, which TRL's training step trains.

    A factor that is applied to the loss after `compute_loss` would reach the last part only. So the gradient that each
    part's loss receives is recorded, and the last one must receive the same.
    """

    def __init__(self, trainer: Any, ranks: Ranks) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.divides_loss = True  # by the number of micro-batches; not if the next one has the rows of all
        self._until_step_ends = ExitStack()
        self._loss_gradients: list[Tensor] = []  # of the parts of this micro-batch so far
        self._unchecked_micro_batches = 0  # whose last part has had no backward yet
        self._in_training_step = False

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Let micro-batches run in parts in the `with` block, because only there a backward follows the loss."""
        self._in_training_step = True
        self._unchecked_micro_batches = 0
        try:
            with ExitStack() as self._until_step_ends:
                if not self.divides_loss:
                    self._until_step_ends.enter_context(internals.undivided_loss(self.trainer))
                yield
        finally:
            self._in_training_step = False
        if self._unchecked_micro_batches:
            raise RuntimeError(_LOSS_CHANGED)

    @property
    def is_possible(self) -> bool:
        return self._in_training_step and torch.is_grad_enabled()

    def loss_without_backward(self) -> Tensor:
        """Return the loss, 0, of a micro-batch whose rows run with a later one; its backward does nothing."""
        self._until_step_ends.enter_context(internals.no_backward(self.ranks.world))
        return torch.zeros((), device=self.ranks.device)

    def start_micro_batch(self) -> None:
        self._loss_gradients = []

    def train_part(self, model: Any, batch: Any, num_items: Any, part_loss: Callable[[], Tensor]) -> None:
        """Run forward, loss and backward for a part.

        Args:
            part_loss (`Callable`): runs the part's forward and returns its loss, a scalar.
        """

        def watched_loss() -> Tensor:
            loss = part_loss()
            loss.register_hook(self._loss_gradients.append)
            return loss

        internals.train_part(self.trainer, model, batch, num_items, watched_loss)

    def check_last_part(self, loss: Tensor) -> None:
        """Check, once the backward of the last part runs, that its loss gets the same gradient as those before."""
        if self._loss_gradients:
            self._unchecked_micro_batches += 1
            loss.register_hook(partial(self._compare_gradients, self._loss_gradients))
        self._loss_gradients = []

    def _compare_gradients(self, loss_gradients: list[Tensor], last: Tensor) -> None:
        if any(not torch.equal(gradient, last) for gradient in loss_gradients):
            raise RuntimeError(_LOSS_CHANGED)
        self._unchecked_micro_batches -= 1
