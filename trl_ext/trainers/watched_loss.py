"""DPO: where a loss that is not finite came from, told while the values of both passes are there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..passes.non_finite import labelled, not_finite_rows, prompt_of
from .non_finite_loss import NonFiniteLossMixin


class WatchedLossMixin(NonFiniteLossMixin):
    """Mixed in before TRL's `DPOTrainer`, and after what gives it reference log-probs."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor | tuple[Tensor, Any]:
        """TRL's own loss."""
        if self._on_non_finite_loss is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        with _log_probs_of(model) as policy:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        self._watch_loss(
            loss[0] if return_outputs else loss,
            lambda: not_finite_rows({"policy": policy[0], "reference": self._reference_of(inputs)}, labelled(inputs)),
            lambda row: prompt_of(inputs, row),
        )
        return loss

    def _reference_of(self, inputs: dict[str, Any]) -> Tensor | None:
        """What the reference said of a batch, by token, or by row where the user did."""
        if "ref_chosen_logps" in inputs:
            return torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        given: Tensor | None = self.ref_model().log_probs  # type: ignore[attr-defined]
        return given


@contextmanager
def _log_probs_of(model: Any) -> Iterator[list[Tensor]]:
    """Within, the list gets what `model` scores; prompt learning puts tokens before those of the batch."""
    scored: list[Tensor] = []

    def record(module: Any, positional: Any, inputs: dict[str, Any], outputs: Any) -> None:
        if inputs.get("fused_lm_head"):  # not for the logits that `compute_metrics` is given
            scored.append(outputs.log_probs.detach()[:, -(inputs["input_ids"].shape[1] - 1) :])

    hook = model.register_forward_hook(record, with_kwargs=True)
    try:
        yield scored
    finally:
        hook.remove()
