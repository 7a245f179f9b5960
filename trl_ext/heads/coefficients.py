"""The gradient of a tile's products, as half precision holds it well."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .logits import LogitTransform


class Coefficients:
    """The gradient of each product x_v of a token, as a row factor times a tile that half precision holds well.

    With g and e the gradients of log p and of the entropy E, and c = dz/dx, it is c_v p_v (-g - e (log p_v + E)) for
    v != t. With p_v = exp(z_v - max) * share that is share * s * [c_v exp(z_v - max) (a + b (z_v - max))]: s is the
    larger of what stands at the largest logit and of e, so that the bracket is near 1 there, and exactly 1 without an
    entropy. The target's is c_t ((1 - p_t) g - e p_t (log p_t + E)), of shape (N,), and kept in fp32.
    """

    def __init__(
        self,
        maximum: Tensor,
        sum_exp: Tensor,
        target_logit: Tensor,
        entropy: Tensor | None,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        transform: LogitTransform,
    ) -> None:
        self.maximum, self.transform = maximum, transform
        log_odds = target_logit - maximum - sum_exp.log()
        log_p, log_q = F.logsigmoid(log_odds), F.logsigmoid(-log_odds)
        share = log_q.exp() / sum_exp
        g = torch.zeros_like(maximum) if grad_log_probs is None else grad_log_probs
        target = g * log_q.exp()
        self.slope_of_surprise: Tensor | None = None
        if grad_entropy is None or entropy is None:
            row_factor = -g
        else:
            at_maximum = -g - grad_entropy * (log_q - sum_exp.log() + entropy)
            row_factor = torch.where(at_maximum.abs() >= grad_entropy.abs(), at_maximum, -grad_entropy)
            nonzero = torch.where(row_factor == 0, 1.0, row_factor)
            self.offset, self.slope_of_surprise = at_maximum / nonzero, -grad_entropy / nonzero
            target = target - grad_entropy * log_p.exp() * (log_p + entropy)
        self.row_factor = row_factor * share
        self.target = target * transform.derivative(target_logit)

    def of_others_(self, rows: slice, local: Tensor, logits: Tensor, scratch: Tensor) -> Tensor:
        """The bracket for this tile, 0 in the target's column; both buffers are overwritten."""
        slope = self.transform.derivative(logits)
        shifted = logits.sub_(self.maximum[rows, None])
        bracket = torch.exp(shifted, out=scratch).mul_(slope)
        if self.slope_of_surprise is not None:
            bracket.mul_(shifted.mul_(self.slope_of_surprise[rows, None]).add_(self.offset[rows, None]))
        return _put(bracket, local, torch.zeros_like(self.maximum[rows]))

    def with_target_(self, rows: slice, local: Tensor, bracket: Tensor, unit: Tensor) -> Tensor:
        """The whole gradient of this tile's products in units of `unit`, in the place of the bracket."""
        return _put(bracket.mul_((self.row_factor / unit)[rows, None]), local, (self.target / unit)[rows])

    def unit(self) -> Tensor:
        """A power of two near the largest coefficient, so that fp16 does not lose them where the loss is small."""
        largest = torch.cat([self.row_factor, self.target, self.target.new_zeros(1)]).abs().amax()
        return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)


def _put(tile: Tensor, local: Tensor, value: Tensor) -> Tensor:
    """Write `value` (n,) into the columns `local` of the tile (n, v), where they lie in it."""
    inside = ((local >= 0) & (local < tile.shape[1]))[:, None]
    column = local[:, None].clamp(0, tile.shape[1] - 1)
    return tile.scatter_(1, column, torch.where(inside, value[:, None], tile.gather(1, column)))
