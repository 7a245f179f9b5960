"""The importance ratio of the old policy to the sampler that drew the completions (vLLM), and what to log of it.

The sampler's log-probs of its own tokens differ from the training model's, by kernels and by precision. TRL multiplies
the loss by the ratio of the two, truncated or masked (TRL's documentation: "Truncated Importance Sampling" and "Masked
Importance Sampling").
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .non_finite import bounded_log_ratios


@dataclass(frozen=True)
class RatioRule:
    """How the ratio is bounded.

    Args:
        mode (`str`): TRL's `vllm_importance_sampling_mode`: `"token_truncate"`, `"token_mask"`,
            `"sequence_truncate"` or `"sequence_mask"`.
        lowest (`float`, *optional*), highest (`float`, *optional*): TRL's `vllm_importance_sampling_clip_min` and
            `_max`.
    """

    mode: str
    lowest: float | None
    highest: float | None

    @property
    def of_sequences(self) -> bool:
        """Whether one ratio is formed for a completion, instead of one for a token."""
        return self.mode.startswith("sequence")

    def bounded(self, ratio: Tensor) -> Tensor:
        """`ratio`, with what lies outside the bounds moved to them, or made 0 in the mask modes."""
        lowest = -math.inf if self.lowest is None else self.lowest
        highest = math.inf if self.highest is None else self.highest
        if self.mode.endswith("truncate"):
            return ratio.clamp(min=lowest, max=highest)
        return ratio.masked_fill((ratio < lowest) | (ratio > highest), 0.0)


@dataclass(frozen=True)
class SamplerRatio:
    """The ratio of one micro-batch.

    Args:
        ratio (`Tensor` of shape `(B, C)`, or `(B, 1)` for sequences): what the loss is multiplied by; where nothing
            was scored, or the sampler has no log-prob, that of a log-ratio of 0.
        unbounded (`Tensor`): the same before it was bounded by the rule; finite.
        counted (`Tensor`, bool): the entries of both that stand for something scored.
        log_ratio_T (`Tensor` of shape `(T,)`): old policy less sampler, of each token that both have scored.
    """

    ratio: Tensor
    unbounded: Tensor
    counted: Tensor
    log_ratio_T: Tensor

    @classmethod
    def of(cls, old_BC: Tensor, sampler_BC: Tensor, tokens_BC: Tensor, rule: RatioRule) -> "SamplerRatio":
        """From the log-probs of the tokens that are scored."""
        known_BC = tokens_BC & ~sampler_BC.isnan()
        log_ratio_BC = torch.where(known_BC, old_BC - sampler_BC, 0.0)
        if rule.of_sequences:
            unbounded = bounded_log_ratios(log_ratio_BC.sum(dim=1, keepdim=True)).exp()
            counted = tokens_BC.any(dim=1, keepdim=True)
        else:
            unbounded, counted = bounded_log_ratios(log_ratio_BC).exp(), tokens_BC
        return cls(rule.bounded(unbounded), unbounded, counted, log_ratio_BC[known_BC])

    def statistics(self) -> Tensor:
        """This rank's part of `metrics`: sums, counts and extremes, `(12,)`."""
        ratio, unbounded = self.ratio[self.counted], self.unbounded[self.counted]
        log_ratio = self.log_ratio_T
        mismatch = torch.expm1(log_ratio) - log_ratio
        return torch.stack(
            [
                *_sum_and_extremes(ratio),
                *_sum_and_extremes(unbounded),
                ratio.new_tensor(ratio.numel()),
                (ratio != unbounded).sum().to(ratio.dtype),
                mismatch.sum(),
                log_ratio.abs().sum(),
                _sum_and_extremes(log_ratio.abs())[2],
                log_ratio.new_tensor(log_ratio.numel()),
            ]
        )


def sampler_metrics(statistics: Tensor) -> dict[str, float]:
    """The metrics of all ranks; none where no rank has scored anything.

    Args:
        statistics (`Tensor` of shape `(W, 12)`): `SamplerRatio.statistics` of each rank.

    Returns:
        `sampling/importance_sampling_ratio/{min,mean,max}` as TRL has them, and the same of the ratio
        `_unclipped`; the share of entries that the bounds changed; the largest and mean distance of the log-probs;
        `sampling/mismatch_kl`, the estimate E[r - log r - 1] of KL(sampler || old policy) (the "k3" of
        http://joschu.net/blog/kl-approx.html).
    """
    sums = statistics.sum(dim=0).tolist()
    lowest, highest = statistics.amin(dim=0).tolist(), statistics.amax(dim=0).tolist()
    entries, tokens = sums[6], sums[11]
    metrics: dict[str, float] = {}
    if entries:
        for name, first in (("", 0), ("_unclipped", 3)):
            metrics[f"sampling/importance_sampling_ratio{name}/min"] = lowest[first + 1]
            metrics[f"sampling/importance_sampling_ratio{name}/mean"] = sums[first] / entries
            metrics[f"sampling/importance_sampling_ratio{name}/max"] = highest[first + 2]
        metrics["sampling/importance_sampling_ratio_clipped_share"] = sums[7] / entries
    if tokens:
        metrics["sampling/mismatch_kl"] = sums[8] / tokens
        metrics["sampling/sampling_logp_difference/mean"] = sums[9] / tokens
        metrics["sampling/sampling_logp_difference/max"] = highest[10]
    return metrics


def _sum_and_extremes(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum, minimum (+inf of nothing) and maximum (-inf of nothing)."""
    if not values.numel():
        return values.new_zeros(()), values.new_full((), math.inf), values.new_full((), -math.inf)
    return values.sum(), values.min(), values.max()
