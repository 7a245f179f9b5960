"""Online statistics of each token's logits over vocabulary tiles, with the target separate from the other tokens.

Let m be a number near the running max and s the sum of exp(z - m) over the *other* tokens of the vocabulary. The
target's log-odds are d = z_target - m - log s, and no formula below cancels:

- log p = logsigmoid(d), which is -log1p(exp(-d)) for a dominant target, so a nearly certain token keeps its relative
  precision. It is finite where the logits are, and NaN where torch's log_softmax is NaN.
- 1 - p = sigmoid(-d), the weight of the gradient.
- entropy = H(p, 1 - p) + (1 - p) * (entropy of the others), the chain rule of entropy; no term is negative.

m is the shift. It moves to the max only if a logit exceeds it by more than `FAR`, which is rare after the first tile.
So sums in units of exp(m), such as the gradient of the hidden states, are seldom rescaled. After the last tile m moves
to the max.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .logits import LinearLogProbs

# Replaces the target's logit in its tile: far below any logit, and finite, so 0 times this number is 0
ABSENT = -1e30

# How far a logit may exceed the shift: exp(8) = 2981 does not overflow, even in fp16
FAR = 8.0


def log_odds(target_logit: Tensor, shift: Tensor, sum_exp: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the target; NaN if a logit is +inf or NaN, or if all are -inf."""
    largest = torch.maximum(target_logit, shift)
    return (target_logit - shift - sum_exp.log()).masked_fill((largest == torch.inf) | (largest <= ABSENT), torch.nan)


class Finished(NamedTuple):
    """What follows from the statistics after the last tile."""

    rescale: Tensor
    """The factor (N,) of this rank's sums in units of exp(shift), because the shift is the max now."""
    log_odds: Tensor
    """log(p / (1 - p)) of the target, (N,)."""
    results: LinearLogProbs


class RunningStatistics:
    """Statistics in `dtype` (fp32 or float64) of the tokens with `targets` (N,), updated with every tile of logits.

    `outputs` are the fields of `LinearLogProbs` that `results` returns. `partial`: other ranks process the rest of the
    vocabulary.
    """

    def __init__(
        self, targets: Tensor, vocabulary: int, outputs: tuple[str, ...], dtype: torch.dtype, *, partial: bool = False
    ) -> None:
        def full(value: float, count: int = 1) -> tuple[Tensor, ...]:
            return torch.full((count, *targets.shape), value, dtype=dtype, device=targets.device).unbind()

        self.targets = targets
        self.vocabulary = vocabulary
        self.max, self.shift = full(torch.finfo(dtype).min, 2)
        sums = (
            "entropy" in outputs,
            "log_sum_sq_probs" in outputs,
            not {"mean_logits", "mean_log_probs"}.isdisjoint(outputs),
        )
        self.sum_exp, *zeros = full(0.0, 1 + sum(sums))
        # NaN until the tile of the target: a target out of range, which is not checked on CUDA, gives NaN
        (self.target_logit,) = full(torch.nan)
        if partial:  # the target may be in the rows of another rank
            self.target_logit.masked_fill_((targets >= 0) & (targets < vocabulary), 0.0)
        self.sum_shifted_exp, self.sum_sq_exp, self.sum_logits = (
            zeros.pop() if is_needed else None for is_needed in sums
        )
        self.max_before_target = full(-torch.inf)[0] if "is_top1" in outputs else None

    def _take_target_(self, rows: slice, start: int, logits: Tensor, scratch: Tensor) -> None:
        """Store the target logits in the tile (n, v) from column `start`, and put `ABSENT` there. Uses `scratch`."""
        local = (self.targets[rows] - start)[:, None]
        inside = (local >= 0) & (local < logits.shape[1])
        column = local.clamp(0, logits.shape[1] - 1)
        if self.sum_logits is not None:
            self.sum_logits[rows] += logits.sum(-1)
        if self.max_before_target is not None:
            before = torch.arange(logits.shape[1], device=logits.device) < local
            scratch.copy_(logits).masked_fill_(~before, -torch.inf)
            self.max_before_target[rows] = torch.maximum(self.max_before_target[rows], scratch.amax(-1))
        target = logits.gather(1, column)
        self.target_logit[rows] = torch.where(inside, target, self.target_logit[rows, None])[:, 0]
        logits.scatter_(1, column, torch.where(inside, ABSENT, target))

    def fold_(self, rows: slice, start: int, logits: Tensor, exponentials: Tensor) -> Tensor:
        """Add the tile that begins at column `start`, and return the factor (n, 1) that rescales earlier sums.

        Writes exp(z - shift), 0 for the target, to `exponentials`, and overwrites `logits`.
        """
        self._take_target_(rows, start, logits, exponentials)
        largest = logits.amax(-1)
        old_shift = self.shift[rows]
        shift = torch.where(largest > old_shift + FAR, largest, old_shift)
        rescale = torch.exp(old_shift - shift)
        shifted = logits.sub_(shift[:, None])
        torch.exp(shifted, out=exponentials)
        if self.sum_shifted_exp is not None:
            # sum (z - shift) exp(z - shift): a new shift changes every earlier term
            earlier_sum = self.sum_shifted_exp[rows] + (old_shift - shift) * self.sum_exp[rows]
            self.sum_shifted_exp[rows] = earlier_sum * rescale + shifted.mul_(exponentials).sum(-1)
        if self.sum_sq_exp is not None:
            squares = torch.mul(exponentials, exponentials, out=shifted)
            self.sum_sq_exp[rows] = self.sum_sq_exp[rows] * rescale.square() + squares.sum(-1)
        self.sum_exp[rows] = self.sum_exp[rows] * rescale + exponentials.sum(-1)
        self.max[rows] = torch.maximum(self.max[rows], largest)
        self.shift[rows] = shift
        return rescale[:, None]

    def combine_(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """Move the shift to the max, sum over the ranks of `group`, and return the factor (N,) for this rank's sums."""
        has_ranks = group is not None and self.max.numel() > 0
        if has_ranks:
            maxima = torch.stack([x for x in (self.max, self.max_before_target) if x is not None])
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
            self.max = maxima[0]
            self.max_before_target = None if len(maxima) == 1 else maxima[1]
        shift_change = self.shift - self.max
        rescale = torch.exp(shift_change)
        if self.sum_shifted_exp is not None:
            self.sum_shifted_exp = (self.sum_shifted_exp + shift_change * self.sum_exp) * rescale
        if self.sum_sq_exp is not None:
            self.sum_sq_exp = self.sum_sq_exp * rescale.square()
        self.sum_exp = self.sum_exp * rescale
        self.shift = self.max
        if has_ranks:
            self.sum_over_(group)
        return rescale

    def sum_over_(self, group: dist.ProcessGroup | None) -> None:
        """Replace this rank's sums by the sums over all ranks. The maxima must be the same on all ranks."""
        names = ("sum_exp", "target_logit", "sum_shifted_exp", "sum_sq_exp", "sum_logits")
        rank_sums = {name: x for name in names if (x := getattr(self, name)) is not None}
        sums = torch.stack(list(rank_sums.values()))
        dist.all_reduce(sums, group=group)
        vars(self).update(zip(rank_sums, sums, strict=True))

    def finish_(self, outputs: tuple[str, ...], group: dist.ProcessGroup | None = None) -> Finished:
        """Combine the ranks of `group`, and return what follows. All tiles must have been added."""
        rescale = self.combine_(group)
        odds = log_odds(self.target_logit, self.shift, self.sum_exp)
        log_p = F.logsigmoid(odds)
        entropy = None
        if self.sum_shifted_exp is not None:
            log_q = F.logsigmoid(-odds)
            among_others = self.sum_exp.log() - self.sum_shifted_exp / self.sum_exp
            entropy = log_q.exp() * (among_others - log_q) - log_p.exp() * log_p
        return Finished(rescale, odds, self.results(outputs, odds, log_p, entropy))

    def results(
        self, outputs: tuple[str, ...], log_odds: Tensor, log_p: Tensor, entropy: Tensor | None
    ) -> LinearLogProbs:
        """Return the results, after `combine_`."""
        results: dict[str, Tensor] = {}
        if "log_probs" in outputs:
            results["log_probs"] = log_p
        if entropy is not None:
            results["entropy"] = entropy
        if self.sum_sq_exp is not None:
            nontarget = 2 * F.logsigmoid(-log_odds) + self.sum_sq_exp.log() - 2 * self.sum_exp.log()
            results["log_sum_sq_probs"] = torch.logaddexp(2 * log_p, nontarget)
        if self.sum_logits is not None:
            mean = self.sum_logits / self.vocabulary
            if "mean_logits" in outputs:
                results["mean_logits"] = mean
            if "mean_log_probs" in outputs:
                log_sum_exp = torch.logaddexp(self.target_logit, self.shift + self.sum_exp.log())
                results["mean_log_probs"] = (mean - log_sum_exp).masked_fill(log_p.isnan(), torch.nan)
        if self.max_before_target is not None:
            first = self.target_logit > self.max_before_target
            results["is_top1"] = first & (self.target_logit >= self.max) & ~log_p.isnan()
        return LinearLogProbs(**results)
