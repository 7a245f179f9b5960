"""The names and the container of what a head returns for each token."""

from typing import NamedTuple

from torch import Tensor


class LinearLogProbs(NamedTuple):
    """Per-token results of a head, each of the targets' shape; None where not asked for.

    Means the same as the fields of the same names in TRL's `FusedCausalLMOutput`, as far as it has them. All are fp32
    (float64 for float64 operands) but `is_top1`, which is bool. Below, p is the softmax of the logits z over the
    vocabulary.
    """

    log_probs: Tensor | None = None
    """log p of the target; finite wherever the logits are, NaN where one is NaN or +inf, or all are -inf."""
    entropy: Tensor | None = None
    """-sum_v p_v log p_v, in nats."""
    log_sum_sq_probs: Tensor | None = None
    """log sum_v p_v^2, without gradient."""
    mean_logits: Tensor | None = None
    """Mean of z over the vocabulary, without gradient."""
    is_top1: Tensor | None = None
    """Whether the target is the first of the largest logits; False where its log-prob is NaN."""
    mean_log_probs: Tensor | None = None
    """Mean of log p over the vocabulary: what label smoothing adds to the log-prob of the target."""


OUTPUTS = LinearLogProbs._fields
