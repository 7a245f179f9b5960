"""The gradient of a tile's products, as half precision holds it well."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .logits import LogitTransform
from .statistics import log_odds


class Upstream(NamedTuple):
    """The gradients that come in, of shape (N,); None where there is none."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_log_probs: Tensor | None = None


class Coefficients:
    """The gradient of each product x_v of a token, as a row factor times a tile that half precision holds well.

    With g, e and k the gradients of log p, of the entropy E and of the mean log-prob, and c = dz/dx, it is
    c_v (p_v (-g - k - e (log p_v + E)) + k / V) for v != t. With p_v = exp(z_v - max) * share and without k that is
    share * s * [c_v exp(z_v - max) (a + b (z_v - max))]: s is the larger of what stands at the largest logit and of e,
    so that `nontarget_grad` is near 1 there, and exactly 1 without an entropy. With k the row factor is the larger of
    share * s and k / V. Of c the row factor has the slope, and `nontarget_grad` a softcap's derivative. The target's is
    c_t ((1 - p_t) g - e p_t (log p_t + E) + k (1 / V - p_t)), of shape (N,), and kept in fp32.

    Row factor and target are in units of `size` (N,), a power of two near the largest of g, e and k, so that neither
    overflows where the gradient itself does not. Those of the whole gradient are too, until `use_unit`.

    Args:
        vocabulary (`int`): V, of all ranks' rows together.
    """

    def __init__(
        self,
        maximum: Tensor,
        sum_exp: Tensor,
        target_logit: Tensor,
        entropy: Tensor | None,
        upstream: Upstream,
        transform: LogitTransform,
        vocabulary: int,
    ) -> None:
        self.maximum, self.transform = maximum, transform
        zeros = torch.zeros_like(maximum)
        self.size = _power_of_two(torch.stack([zeros, *(x.abs() for x in upstream if x is not None)]).amax(0))
        g, e, k = (None if x is None else x / self.size for x in upstream)
        odds = log_odds(target_logit, maximum, sum_exp)
        log_p, log_q = F.logsigmoid(odds), F.logsigmoid(-odds)
        share = log_q.exp() / sum_exp
        g = zeros if g is None else g
        target = g * log_q.exp()
        in_proportion = -g if k is None else -g - k  # to p_v
        self.offset: Tensor | None = None
        self.entropy_slope: Tensor | None = None
        if e is None or entropy is None:
            row_factor = in_proportion * share
        else:
            at_maximum = in_proportion - e * (log_q - sum_exp.log() + entropy)
            larger = torch.where(at_maximum.abs() >= e.abs(), at_maximum, -e)
            self.offset, self.entropy_slope = at_maximum / _nonzero(larger), -e / _nonzero(larger)
            row_factor = larger * share
            target = target - e * log_p.exp() * (log_p + entropy)
        self.scale: Tensor | None = None
        self.uniform_grad: Tensor | None = None
        if k is not None:
            of_each = k / vocabulary
            target = target + of_each - k * log_p.exp()
            larger = torch.where(row_factor.abs() >= of_each.abs(), row_factor, of_each)
            self.scale, self.uniform_grad = row_factor / _nonzero(larger), of_each / _nonzero(larger)
            row_factor = larger
        self.row_factor = self.whole_factor = row_factor * transform.slope
        self.target = self.whole_target = target * transform.derivative(target_logit)

    def nontarget_grad_(self, rows: slice, local: Tensor, logits: Tensor, scratch: Tensor) -> Tensor:
        """`nontarget_grad` for this tile, 0 in the target's column; both buffers are overwritten."""
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
        """The whole gradient of this tile's products, in the place of `nontarget_grad`."""
        return _put(nontarget_grad.mul_(self.whole_factor[rows, None]), local, self.whole_target[rows])

    def unit(self) -> Tensor:
        """A power of two near the largest coefficient, so that fp16 does not lose them where the loss is small."""
        top = torch.cat([self.size, _power_of_two(self.size.new_zeros(1))]).amax()
        shares = torch.cat([self.row_factor, self.target]).abs() * (self.size / top).repeat(2)
        # Clamped to a normal number before `top` multiplies it: `size / unit` stays finite where all shares underflow
        return _power_of_two(_power_of_two(torch.cat([shares, shares.new_zeros(1)]).amax()) * top)

    def use_unit(self, unit: Tensor) -> None:
        """Give the whole gradient in units of `unit`, alike for all rows; `unit` is at least that of these rows."""
        of_size = self.size / unit
        self.whole_factor, self.whole_target = self.row_factor * of_size, self.target * of_size


def _power_of_two(x: Tensor) -> Tensor:
    """The largest power of two up to `x`, which is positive or 0; among the normal numbers."""
    finite = torch.finfo(x.dtype)
    x = x.clamp(finite.tiny, finite.max)
    return x / (2 * torch.frexp(x).mantissa)


def _nonzero(x: Tensor) -> Tensor:
    """To divide by: 1 in the place of 0."""
    return torch.where(x == 0, 1.0, x)


def _put(tile: Tensor, local: Tensor, value: Tensor) -> Tensor:
    """Write `value` (n,) into the columns `local` of the tile (n, v), where they lie in it."""
    inside = ((local >= 0) & (local < tile.shape[1]))[:, None]
    column = local[:, None].clamp(0, tile.shape[1] - 1)
    return tile.scatter_(1, column, torch.where(inside, value[:, None], tile.gather(1, column)))
