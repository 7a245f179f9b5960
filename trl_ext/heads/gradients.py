"""The gradient with respect to a tile of the head's product, scaled to fit half precision."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .logits import LinearLogProbs, LogitTransform
from .statistics import log_odds


class Coefficients:
    """The gradient with respect to a token's products x_v, as a factor per row times a tile that fits half precision.

    Let g, e and k be the incoming gradients of log p, the entropy E and the mean log-prob, t the target, and c = dz/dx.
    For v != t the gradient is c_v (p_v (-g - k - e (log p_v + E)) + k / V). With p_v = exp(z_v - max) * share and
    k = 0, it equals share * s * [c_v exp(z_v - max) (a + b (z_v - max))]. The bracket is `nontarget_grad`. s is -e or
    the factor of p_v at the largest logit, whichever is larger in magnitude, so neither a nor b exceeds 1. Without an
    entropy gradient a = 1 and b = 0. With k, the row factor is the larger of share * s and k / V. The row factor
    includes the slope of c, and `nontarget_grad` the softcap's derivative. The gradient of x_t,
    c_t ((1 - p_t) g - e p_t (log p_t + E) + k (1 / V - p_t)), stays in fp32. `grad_logits` has all columns, also x_t's.

    `row_factor`, `target` and, until `use_unit`, `grad_logits` are in units of `size` (N,), a power of two near the
    largest of g, e and k. So none of them overflows unless the gradient does.
    """

    def __init__(
        self,
        maximum: Tensor,
        sum_exp: Tensor,
        target_logit: Tensor,
        entropy: Tensor | None,
        upstream: LinearLogProbs,  # the incoming gradients
        transform: LogitTransform,
        vocabulary: int,  # V, the rows of all ranks together
    ) -> None:
        self.maximum = maximum
        self.transform = transform
        zeros = torch.zeros_like(maximum)
        upstreams = (upstream.log_probs, upstream.entropy, upstream.mean_log_probs)
        self.size = _power_of_two(torch.stack([zeros, *(x.abs() for x in upstreams if x is not None)]).amax(0))
        g, e, k = (None if x is None else x / self.size for x in upstreams)
        odds = log_odds(target_logit, maximum, sum_exp)
        log_p, log_q = F.logsigmoid(odds), F.logsigmoid(-odds)
        share = log_q.exp() / sum_exp
        g = zeros if g is None else g
        target = g * log_q.exp()
        factor_of_p = -g if k is None else -g - k
        self.offset: Tensor | None = None
        self.entropy_slope: Tensor | None = None
        if e is None or entropy is None:
            row_factor = factor_of_p * share
        else:
            at_maximum = factor_of_p - e * (log_q - sum_exp.log() + entropy)
            larger = torch.where(at_maximum.abs() >= e.abs(), at_maximum, -e)
            self.offset = at_maximum / _nonzero(larger)
            self.entropy_slope = -e / _nonzero(larger)
            row_factor = larger * share
            target = target - e * log_p.exp() * (log_p + entropy)
        self.scale: Tensor | None = None
        self.uniform_grad: Tensor | None = None
        if k is not None:
            class_share = k / vocabulary
            target = target + class_share - k * log_p.exp()
            larger = torch.where(row_factor.abs() >= class_share.abs(), row_factor, class_share)
            self.scale = row_factor / _nonzero(larger)
            self.uniform_grad = class_share / _nonzero(larger)
            row_factor = larger
        self.row_factor = row_factor * transform.slope
        self.target = target * transform.derivative(target_logit)
        # In units of `size` too, until `use_unit`
        self.scaled_row_factor = self.row_factor
        self.scaled_target = self.target

    def nontarget_grad_(self, rows: slice, local: Tensor, logits: Tensor, scratch: Tensor) -> Tensor:
        """Return `nontarget_grad` of this tile, 0 in the target's column. Overwrites `logits` and `scratch`."""
        softcap_derivative = self.transform.softcap_derivative(logits)
        shifted = logits.sub_(self.maximum[rows, None])
        nontarget_grad = torch.exp(shifted, out=scratch)
        if self.entropy_slope is not None and self.offset is not None:
            nontarget_grad.mul_(shifted.mul_(self.entropy_slope[rows, None]).add_(self.offset[rows, None]))
        if self.uniform_grad is not None and self.scale is not None:
            nontarget_grad.mul_(self.scale[rows, None]).add_(self.uniform_grad[rows, None])
        if softcap_derivative is not None:
            nontarget_grad.mul_(softcap_derivative)
        return _put(nontarget_grad, local, torch.zeros_like(self.maximum[rows]))

    def add_target_grad_(self, rows: slice, local: Tensor, nontarget_grad: Tensor) -> Tensor:
        """Overwrite `nontarget_grad` with `grad_logits` of this tile."""
        return _put(nontarget_grad.mul_(self.scaled_row_factor[rows, None]), local, self.scaled_target[rows])

    def unit(self) -> Tensor:
        """Return a power of two near the largest coefficient: in this unit, fp16 can hold small gradients."""
        top = torch.cat([self.size, _power_of_two(self.size.new_zeros(1))]).amax()
        shares = torch.cat([self.row_factor, self.target]).abs() * (self.size / top).repeat(2)
        # Clamped to a normal number before the product with `top`: `size / unit` is finite even if all shares underflow
        return _power_of_two(_power_of_two(torch.cat([shares, shares.new_zeros(1)]).amax()) * top)

    def use_unit(self, unit: Tensor) -> None:
        """Scale `grad_logits` to `unit`, which is the same for all rows and at least `self.unit()`."""
        scale = self.size / unit
        self.scaled_row_factor = self.row_factor * scale
        self.scaled_target = self.target * scale


def _power_of_two(x: Tensor) -> Tensor:
    """Return the largest power of two, among the normal numbers, that is at most `x`; `x` must not be negative."""
    finite = torch.finfo(x.dtype)
    x = x.clamp(finite.tiny, finite.max)
    return x / (2 * torch.frexp(x).mantissa)


def _nonzero(x: Tensor) -> Tensor:
    """Return `x` with 1 instead of 0, as a divisor."""
    return torch.where(x == 0, 1.0, x)


def _put(tile: Tensor, local: Tensor, value: Tensor) -> Tensor:
    """Write `value` (n,) to the columns `local` of the tile (n, v), except columns outside of the tile."""
    inside = ((local >= 0) & (local < tile.shape[1]))[:, None]
    column = local[:, None].clamp(0, tile.shape[1] - 1)
    return tile.scatter_(1, column, torch.where(inside, value[:, None], tile.gather(1, column)))
