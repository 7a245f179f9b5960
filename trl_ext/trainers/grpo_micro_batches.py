"""GRPO's micro-batches: which rows lie together in one."""

from typing import Any

from ..passes.micro_batches import FedTokens, kept_together, slices_of_a_unit
from .grpo_passes import GRPOPassesMixin


class MicroBatchesMixin(GRPOPassesMixin):
    """Mixed in before TRL's `GRPOTrainer`."""

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
