"""The importance ratio of the old policy to the sampler that drew the completions, and its metrics.

The sampler's log-probs differ from the training model's because of kernels and precision. TRL multiplies the loss by
the ratio of the two, truncated or masked (TRL's documentation: "Truncated Importance Sampling" and "Masked Importance
Sampling").
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .non_finite import bounded_log_ratios

TRL_SAMPLER_METRICS = frozenset(
    f"sampling/{name}"
    for name in (
        "sampling_logp_difference/mean",
        "sampling_logp_difference/max",
        "importance_sampling_ratio/min",
        "importance_sampling_ratio/mean",
        "importance_sampling_ratio/max",
    )
)


# What has metrics: the rows of `SamplerRatio.statistics`
_VALUES = ("ratio", "unbounded ratio", "is clipped", "mismatch", "difference")


@dataclass(frozen=True)
class RatioRule:
    """How the ratio is bounded."""

    mode: str  # TRL's `vllm_importance_sampling_mode`: "token_" or "sequence_", and "truncate" or "mask"
    lowest: float | None  # TRL's `vllm_importance_sampling_clip_min` and `_max`
    highest: float | None

    def bounded(self, ratio: Tensor) -> Tensor:
        """Return `ratio`, clamped to the bounds, or in the mask modes set to 0 outside of them."""
        lowest = -math.inf if self.lowest is None else self.lowest
        highest = math.inf if self.highest is None else self.highest
        if self.mode.endswith("truncate"):
            return ratio.clamp(min=lowest, max=highest)
        return ratio.masked_fill((ratio < lowest) | (ratio > highest), 0.0)


@dataclass(frozen=True)
class SamplerRatio:
    """The ratio of one micro-batch: `(B, C)`, or `(B, 1)` for sequences. T tokens have both log-probs."""

    ratio: Tensor  # computed with a log-ratio of 0 where nothing was scored or the sampler has no log-prob
    unbounded: Tensor  # the ratio before the rule bounds it; finite
    counted: Tensor  # bool: which entries of the two were scored
    log_ratio_T: Tensor  # old policy minus sampler

    @classmethod
    def of(cls, old_BC: Tensor, sampler_BC: Tensor, tokens_BC: Tensor, rule: RatioRule) -> "SamplerRatio":
        """Return the ratio, from the log-probs of the scored tokens."""
        has_both_BC = tokens_BC & ~sampler_BC.isnan()
        log_ratio_BC = torch.where(has_both_BC, old_BC - sampler_BC, 0.0)
        log_ratio = log_ratio_BC
        counted = tokens_BC
        if rule.mode.startswith("sequence"):
            log_ratio = log_ratio_BC.sum(dim=1, keepdim=True)
            counted = tokens_BC.any(dim=1, keepdim=True)
        unbounded = bounded_log_ratios(log_ratio).exp()
        return cls(rule.bounded(unbounded), unbounded, counted, log_ratio_BC[has_both_BC])

    def statistics(self) -> Tensor:
        """Return what `sampler_metrics` reads of this rank: sum, minimum, maximum and count of `_VALUES`, `(5, 4)`."""
        ratio = self.ratio[self.counted]
        unbounded = self.unbounded[self.counted]
        log_ratio_T = self.log_ratio_T
        values = {
            "ratio": ratio,
            "unbounded ratio": unbounded,
            "is clipped": (ratio != unbounded).to(ratio.dtype),
            "mismatch": torch.expm1(log_ratio_T) - log_ratio_T,
            "difference": log_ratio_T.abs(),
        }
        # Without values the minimum is inf and the maximum -inf
        highest, lowest = ratio.new_tensor([[math.inf], [-math.inf]])
        rows = []
        for name in _VALUES:
            x = values[name]
            minimum = torch.cat([x, highest]).amin()
            maximum = torch.cat([x, lowest]).amax()
            rows.append(torch.stack([x.sum(), minimum, maximum, x.new_tensor(x.numel())]))
        return torch.stack(rows)


def sampler_metrics(statistics: Tensor) -> dict[str, float]:
    """Return the metrics of all ranks; none if no rank has scored anything.

    Args:
        statistics (`Tensor` of shape `(W, 5, 4)`): `SamplerRatio.statistics` of each rank.

    Returns:
        `sampling/importance_sampling_ratio/{min,mean,max}` as in TRL, and with `_unclipped` in the name those of the
        unbounded ratio; the share of entries that the bounds changed; the largest and mean difference of the log-probs;
        `sampling/mismatch_kl`, the estimate E[r - log r - 1] of KL(sampler || old policy) (the "k3" of
        http://joschu.net/blog/kl-approx.html).
    """
    sums, minima, maxima, counts = statistics.unbind(dim=2)
    count = dict(zip(_VALUES, counts.sum(dim=0).tolist(), strict=True))
    means = sums.sum(dim=0).cpu().double() / counts.sum(dim=0).cpu().double()
    mean = dict(zip(_VALUES, means.tolist(), strict=True))
    minimum = dict(zip(_VALUES, minima.amin(dim=0).tolist(), strict=True))
    maximum = dict(zip(_VALUES, maxima.amax(dim=0).tolist(), strict=True))
    metrics: dict[str, float] = {}
    if count["ratio"]:
        for name, value in (("ratio", "ratio"), ("ratio_unclipped", "unbounded ratio")):
            metrics[f"sampling/importance_sampling_{name}/min"] = minimum[value]
            metrics[f"sampling/importance_sampling_{name}/mean"] = mean[value]
            metrics[f"sampling/importance_sampling_{name}/max"] = maximum[value]
        metrics["sampling/importance_sampling_ratio_clipped_share"] = mean["is clipped"]
    if count["difference"]:
        metrics["sampling/mismatch_kl"] = mean["mismatch"]
        metrics["sampling/sampling_logp_difference/mean"] = mean["difference"]
        metrics["sampling/sampling_logp_difference/max"] = maximum["difference"]
    return metrics


def largest_difference(statistics: Tensor) -> float | None:
    """Return the largest mean difference of the log-probs on a rank, from what `sampler_metrics` takes.

    `None` if no rank has scored a token with both log-probs.
    """
    sums, _, _, counts = statistics[:, _VALUES.index("difference")].unbind(dim=1)
    means = (sums / counts)[counts > 0]
    return float(means.amax()) if len(means) else None
