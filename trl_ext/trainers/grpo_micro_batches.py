"""GRPO's micro-batches: which rows lie together in one, and in how many forwards and backwards it is fed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType
from torch import Tensor

from ..passes.micro_batches import FedTokens, kept_together, slices_of_a_unit
from ..passes.parts import Parts, check_all_trained, check_gradients_alike
from ..passes.rows import ScoredTokens
from ..passes.visit import Visit
from .grpo_passes import GRPOPassesMixin


class MicroBatchesMixin(GRPOPassesMixin):
    """Mixed in before TRL's `GRPOTrainer`."""

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        self._gradients_of_parts: list[Tensor] = []  # what the losses of a micro-batch's parts have got
        self._last_parts_to_come = 0  # micro-batches of which the backward of all parts but the last has run
        self._in_training_step = False
        super().__init__(*positional, **keywords)

    def _shuffled(self, batch: dict[str, Any]) -> dict[str, Any]:
        if not self.plan.keep_groups_together or self._has_images(batch):
            return batch
        args: Any = self.args  # type: ignore[attr-defined]
        return kept_together(
            batch,
            FedTokens.of(batch, self._policy_tokens(batch)),
            slices=args.steps_per_generation,
            slices_of_a_unit=slices_of_a_unit(
                steps_per_generation=args.steps_per_generation,
                accumulation_steps=args.gradient_accumulation_steps,
                micro_batches_of_an_epoch=self._micro_batches_of_an_epoch(),
                window_began=self._window_began,
            ),
        )

    def training_step(self, *positional: Any, **keywords: Any) -> Tensor:
        """TRL's own; only here are micro-batches fed in parts, as only here a backward of the loss follows."""
        self._in_training_step, self._last_parts_to_come = True, 0
        try:
            loss: Tensor = super().training_step(*positional, **keywords)  # type: ignore[misc]
        finally:
            self._in_training_step = False
        check_all_trained(self._last_parts_to_come)
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """TRL's own loss, after the backward of all parts of the micro-batch but the last."""
        self._gradients_of_parts = []
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._gradients_of_parts:
            self._last_parts_to_come += 1
            loss.register_hook(partial(self._last_part_trained, self._gradients_of_parts))
        return loss

    def _last_part_trained(self, of_others: list[Tensor], gradient: Tensor) -> None:
        check_gradients_alike(of_others, gradient)
        self._last_parts_to_come -= 1

    def _policy_pass(
        self, model: Any, inputs: dict[str, Any], scored: ScoredTokens, num_items_in_batch: Any
    ) -> tuple[Tensor, Any, Any]:
        if self.plan.max_tokens is None or not self._in_training_step or not torch.is_grad_enabled():
            return super()._policy_pass(model, inputs, scored, num_items_in_batch)
        parts = self._parts(inputs, scored)
        passes = [
            self._run_pass(model, inputs, part, compute_entropy=True)[:2]
            if number == len(parts)
            else self._trained_part(model, inputs, part, num_items_in_batch)
            for number, part in enumerate(parts, 1)
        ]
        log_probs_RC, entropies_RC = (parts.joined([found[i] for found in passes]) for i in range(2))
        return log_probs_RC, entropies_RC, None

    def _trained_part(
        self, model: Any, inputs: dict[str, Any], part: ScoredTokens, num_items_in_batch: Any
    ) -> tuple[Tensor, Tensor]:
        """The part's pass, after its backward: TRL's loss of the micro-batch, in which nothing else was scored."""
        found: list[Tensor] = []

        def loss_of_part() -> Tensor:
            log_probs_RC, entropies_RC, aux_loss = self._run_pass(model, inputs, part, compute_entropy=True)
            found.extend((log_probs_RC.detach(), entropies_RC.detach()))
            visit = Visit.of(inputs, part, log_probs_RC, entropies_RC, self.plan)
            loss = self._loss_of(model, inputs, visit, aux_loss, False, num_items_in_batch)
            loss.register_hook(self._gradients_of_parts.append)
            return loss

        with self._window_goes_on(model), self._metrics_set_aside():
            self._backward_of(model, inputs, num_items_in_batch, loss_of_part)
        log_probs_RC, entropies_RC = found
        return log_probs_RC, entropies_RC

    def _unrecorded_log_probs(self, model: Any, inputs: dict[str, Any], scored: ScoredTokens) -> Tensor:
        if self.plan.max_tokens is None or self._mode == "eval":
            return super()._unrecorded_log_probs(model, inputs, scored)
        parts = self._parts(inputs, scored)
        return parts.joined([self._run_pass(model, inputs, part)[0] for part in parts])

    def _parts(self, inputs: dict[str, Any], scored: ScoredTokens) -> Parts:
        """As many on every rank: each of them runs a forward, and some models exchange weights in it."""
        packing = self._packing_plan()
        parts = Parts.of(
            inputs,
            scored,
            self.plan.max_tokens,
            packed=packing.padding_free,
            shared=packing.share_in_training,
        )
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        counts = accelerator.gather(torch.tensor([len(parts)], device=accelerator.device))
        parts = parts.at_least(int(counts.max()))
        self._skipped_tokens += parts.tokens_left_out(inputs)
        return parts

    def _backward_of(self, model: Any, inputs: Any, num_items_in_batch: Any, loss: Callable[[], Tensor]) -> None:
        """The backward of `loss()`, scaled and run as that of the loss of a micro-batch."""
        with self._in_place_of(_prepare_inputs=lambda inputs: inputs, compute_loss=lambda *_, **__: loss()):
            transformers.Trainer.training_step(self, model, inputs, num_items_in_batch)  # type: ignore[arg-type]

    @contextmanager
    def _window_goes_on(self, model: Any) -> Iterator[None]:
        """Within, no gradients are exchanged, and no engine steps, as before the last micro-batch of a window."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        if not accelerator.sync_gradients:
            # So it is. FSDP2's `no_sync` would end the one that transformers is in.
            yield
            return
        is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        accelerator.gradient_state._set_sync_gradients(False)
        try:
            with nullcontext() if is_deepspeed else accelerator.no_sync(model):
                yield
        finally:
            accelerator.gradient_state._set_sync_gradients(True)
