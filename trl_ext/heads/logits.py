"""The map from the head's matrix product to logits, and the per-token results."""

from dataclasses import dataclass
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """The map from the head's product x = h W^T + b to the logits z, and its derivative."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def __call__(self, product: Tensor) -> Tensor:
        """Return the logits, differentiable."""
        if self.softcap is None:
            return product * (self.logit_scale / self.temperature)
        return torch.tanh(product * (self.logit_scale / self.softcap)) * (self.softcap / self.temperature)

    def apply_(self, product: Tensor) -> Tensor:
        """Overwrite the product with the logits."""
        if self.softcap is not None:
            product.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        elif self.logit_scale != self.temperature:
            product.mul_(self.logit_scale / self.temperature)
        return product

    @property
    def description(self) -> str:
        """The transform in words, without the temperature."""
        softcap = "no softcap" if self.softcap is None else f"a softcap of {self.softcap:.6g}"
        return f"{self.logit_scale:.6g} with {softcap}"

    def is_close(self, other: "LogitTransform") -> bool:
        """Whether both give the same logits to fp32 rounding."""
        if (self.softcap is None) != (other.softcap is None):
            return False
        pairs = (
            (self.temperature, other.temperature),
            (self.logit_scale, other.logit_scale),
            (self.softcap or 1.0, other.softcap or 1.0),
        )
        return all(isclose(x, y, rel_tol=1e-5) for x, y in pairs)

    @property
    def slope(self) -> float:
        """dz/dx without a softcap, or at z = 0 with one."""
        return self.logit_scale / self.temperature

    def softcap_derivative(self, logits: Tensor) -> Tensor | None:
        """Return 1 - tanh^2 at `logits`, the factor that a softcap gives to the slope; None without a softcap."""
        if self.softcap is None:
            return None
        tanh = logits * (self.temperature / self.softcap)
        return tanh.square_().neg_().add_(1)

    def derivative(self, logits: Tensor) -> Tensor | float:
        """Return dz/dx at `logits`: a tensor of their shape with a softcap, one number without."""
        softcap_derivative = self.softcap_derivative(logits)
        return self.slope if softcap_derivative is None else softcap_derivative.mul_(self.slope)


class LinearLogProbs(NamedTuple):
    """Per-token results of the head, each with the shape of the targets; None if not requested.

    Fields have the same meaning as those of the same name in TRL's `FusedCausalLMOutput`. All are fp32 (float64 for
    float64 operands) except `is_top1`, which is bool. Below, p is the softmax of the logits z over the vocabulary.
    """

    log_probs: Tensor | None = None
    """log p of the target. Finite if all logits are; NaN if one is NaN or +inf, or if all are -inf."""
    entropy: Tensor | None = None
    """-sum_v p_v log p_v, in nats."""
    log_sum_sq_probs: Tensor | None = None
    """log sum_v p_v^2, without gradient."""
    mean_logits: Tensor | None = None
    """Mean of z over the vocabulary, without gradient."""
    is_top1: Tensor | None = None
    """Whether the target has the largest logit, the first of equals. False if its log-prob is NaN."""
    mean_log_probs: Tensor | None = None
    """Mean of log p over the vocabulary, for label smoothing."""


OUTPUTS = LinearLogProbs._fields


def without_gradient(results: LinearLogProbs, *, entropy_grad: bool) -> list[Tensor]:
    """Return the results that have no gradient."""
    differentiable = {"log_probs", "mean_log_probs", *(["entropy"] if entropy_grad else [])}
    return [x for name, x in results._asdict().items() if x is not None and name not in differentiable]
