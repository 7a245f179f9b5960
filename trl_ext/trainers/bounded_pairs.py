"""DPO: TRL's loss types whose exponentials overflow are formed again, from a reference moved towards the policy."""

from collections.abc import Collection
from typing import Any

import torch

from ..compat import DPOLossInternals, Recorded
from ..passes.overflow import PairExponential, bounded_pairs


class BoundedPairsMixin(DPOLossInternals):
    """Mixed in before TRL's `DPOTrainer`.

    The metrics are those of the loss as TRL forms it first, of the log-ratios as they are.
    """

    def _trls_loss(self, model: Any, batch: dict[str, Any], return_outputs: bool, but: Collection[str]) -> Any:
        exponentials = self._exponentials(but)
        if not exponentials:
            return super()._trls_loss(model, batch, return_outputs, but)
        scored = Recorded(model)
        result = super()._trls_loss(scored, batch, return_outputs, but)
        policy_2B = torch.stack(self._policy_sums(scored.outputs, batch))
        reference_2B = torch.stack(self._reference_sums(batch))
        moved = {name: bounded_pairs(policy_2B, reference_2B, x) for name, x in exponentials.items()}
        overflows = {name: x for name, x in moved.items() if x is not None}
        if not overflows:
            return result
        loss = self._trls_loss_again(scored.outputs, batch, but={*but, *overflows})
        for name, (chosen_B, rejected_B) in overflows.items():
            others = set(self.loss_types) - {name}
            loss = loss + self._trls_loss_again(scored.outputs, batch, others, (chosen_B, rejected_B))
        return (loss, result[1]) if return_outputs else loss

    def _exponentials(self, but: Collection[str]) -> dict[str, PairExponential]:
        """Of the loss types that have one, by their names."""
        found = {}
        for name, weight in zip(self.loss_types, self.loss_weights, strict=True):
            exponential = PairExponential.of(
                name,
                self.f_divergence_type,
                alpha=self.f_alpha_divergence_coef,
                beta=self.beta,
                label_smoothing=self.label_smoothing,
                weight=weight,
            )
            if exponential is not None and name not in but:
                found[name] = exponential
        return found
