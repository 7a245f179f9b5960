"""GRPO: activations are kept on the host between forward and backward, as TRL's DPO trainer can."""

from typing import Any

from torch import Tensor

from ..engines.offloaded_activations import activations_on_host


class OffloadedActivationsMixin:
    """Mixed in before TRL's `GRPOTrainer`."""

    accelerator: Any
    args: Any
    model: Any

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        if self._offloads and self.accelerator.device.type == "cpu":
            raise ValueError(
                "`activation_offloading=True` keeps activations in host memory, and here the model is there: there is "
                "no accelerator. Leave it off."
            )

    @property
    def _offloads(self) -> bool:
        return bool(getattr(self.args, "activation_offloading", False))

    def training_step(self, *positional: Any, **keywords: Any) -> Tensor:
        """TRL's own. Passes without a gradient save nothing."""
        step = super().training_step  # type: ignore[misc]
        if not self._offloads:
            return step(*positional, **keywords)
        with activations_on_host(self.model, self.accelerator.device):
            return step(*positional, **keywords)
