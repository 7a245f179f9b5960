"""How a model family turns the head's product into logits: scale, softcap, temperature.

z = softcap * tanh(logit_scale * x / softcap) / temperature for the product x; without softcap z = logit_scale * x /
temperature.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """The map from the head's product x = h W^T + b to the logits z, and its derivative."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def __call__(self, product: Tensor) -> Tensor:
        """Logits from the product, differentiable."""
        if self.softcap is None:
            return product * (self.logit_scale / self.temperature)
        return torch.tanh(product * (self.logit_scale / self.softcap)) * (self.softcap / self.temperature)

    def apply_(self, product: Tensor) -> Tensor:
        """The same, in the place of the product."""
        if self.softcap is not None:
            product.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        elif self.logit_scale != self.temperature:
            product.mul_(self.logit_scale / self.temperature)
        return product

    @property
    def slope(self) -> float:
        """dz/dx without a softcap, or far from it."""
        return self.logit_scale / self.temperature

    def bend(self, logits: Tensor) -> Tensor | None:
        """What a softcap multiplies the slope by where the logits are `logits`: 1 - tanh^2, of their shape."""
        if self.softcap is None:
            return None
        tanh = logits * (self.temperature / self.softcap)
        return tanh.square_().neg_().add_(1)

    def derivative(self, logits: Tensor) -> Tensor | float:
        """dz/dx where the logits are `logits`: a tensor of their shape with a softcap, one number without."""
        bend = self.bend(logits)
        return self.slope if bend is None else bend.mul_(self.slope)
