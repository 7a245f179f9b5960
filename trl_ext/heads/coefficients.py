"""The gradient of a tile's products, as half precision holds it well."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .logits import LogitTransform


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
    so that the bracket is near 1 there, and exactly 1 without an entropy. With k the row factor is the larger of
    share * s and k / V. The target's is c_t ((1 - p_t) g - e p_t (log p_t + E) + k (1 / V - p_t)), of shape (N,), and
    kept in fp32.

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
        log_odds = target_logit - maximum - sum_exp.log()
        log_p, log_q = F.logsigmoid(log_odds), F.logsigmoid(-log_odds)
        share = log_q.exp() / sum_exp
        g = torch.zeros_like(maximum) if upstream.log_probs is None else upstream.log_probs
        target = g * log_q.exp()
        in_proportion = -g  # to p_v
        if upstream.mean_log_probs is not None:
            in_proportion = in_proportion - upstream.mean_log_probs
        self.offset: Tensor | None = None
        self.slope_of_surprise: Tensor | None = None
        if upstream.entropy is None or entropy is None:
            row_factor = in_proportion
        else:
            at_maximum = in_proportion - upstream.entropy * (log_q - sum_exp.log() + entropy)
            row_factor = torch.where(at_maximum.abs() >= upstream.entropy.abs(), at_maximum, -upstream.entropy)
            nonzero = _nonzero(row_factor)
            self.offset, self.slope_of_surprise = at_maximum / nonzero, -upstream.entropy / nonzero
            target = target - upstream.entropy * log_p.exp() * (log_p + entropy)
        self.row_factor = row_factor * share
        self.scale: Tensor | None = None
        self.same_for_all: Tensor | None = None
        if upstream.mean_log_probs is not None:
            of_each = upstream.mean_log_probs / vocabulary
            target = target + of_each - upstream.mean_log_probs * log_p.exp()
            larger = torch.where(self.row_factor.abs() >= of_each.abs(), self.row_factor, of_each)
            self.scale, self.same_for_all = self.row_factor / _nonzero(larger), of_each / _nonzero(larger)
            self.row_factor = larger
        self.target = target * transform.derivative(target_logit)

    def of_others_(self, rows: slice, local: Tensor, logits: Tensor, scratch: Tensor) -> Tensor:
        """The bracket for this tile, 0 in the target's column; both buffers are overwritten."""
        slope = self.transform.derivative(logits)
        shifted = logits.sub_(self.maximum[rows, None])
        bracket = torch.exp(shifted, out=scratch)
        if self.slope_of_surprise is not None and self.offset is not None:
            bracket.mul_(shifted.mul_(self.slope_of_surprise[rows, None]).add_(self.offset[rows, None]))
        if self.same_for_all is not None and self.scale is not None:
            bracket.mul_(self.scale[rows, None]).add_(self.same_for_all[rows, None])
        bracket.mul_(slope)
        return _put(bracket, local, torch.zeros_like(self.maximum[rows]))

    def with_target_(self, rows: slice, local: Tensor, bracket: Tensor, unit: Tensor) -> Tensor:
        """The whole gradient of this tile's products in units of `unit`, in the place of the bracket."""
        return _put(bracket.mul_((self.row_factor / unit)[rows, None]), local, (self.target / unit)[rows])

    def unit(self) -> Tensor:
        """A power of two near the largest coefficient, so that fp16 does not lose them where the loss is small."""
        largest = torch.cat([self.row_factor, self.target, self.target.new_zeros(1)]).abs().amax()
        return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


def _nonzero(x: Tensor) -> Tensor:
    """To divide by: 1 in the place of 0."""
    return torch.where(x == 0, 1.0, x)


def _put(tile: Tensor, local: Tensor, value: Tensor) -> Tensor:
    """Write `value` (n,) into the columns `local` of the tile (n, v), where they lie in it."""
    inside = ((local >= 0) & (local < tile.shape[1]))[:, None]
    column = local[:, None].clamp(0, tile.shape[1] - 1)
    return tile.scatter_(1, column, torch.where(inside, value[:, None], tile.gather(1, column)))
