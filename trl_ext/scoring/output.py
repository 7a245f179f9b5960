"""The output of the scoring forward: per-token values of a padded batch."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class FusedCausalLMOutput(ModelOutput):
    """What `model(**inputs, labels=labels, fused_lm_head=True)` returns.

    It has the fields of TRL's class of the same name, which TRL's losses read, and `mean_log_probs`. Per-token fields
    have shape `(B, S - 1)`, or `(B, S)` with labels that are shifted already. They are 0 where the label is -100, and
    None if they were not asked for.

    Args:
        loss (`Tensor`): minus the sum of `log_probs`, divided by their number, plus the router loss with its weight.
        log_probs (`Tensor`): log-probs of the labels, fp32.
        entropy (`Tensor`): entropy of the next token's distribution, fp32.
        log_sum_sq_probs (`Tensor`): logarithm of the sum of the squared probabilities, fp32, without gradient.
        mean_logits (`Tensor`): mean logit over the vocabulary, fp32, without gradient.
        is_top1 (`Tensor`): whether the label is the most likely next token, bool.
        label_mask (`Tensor`): whether there is a label, bool.
        aux_loss (`Tensor`, *optional*): the load-balancing loss of the experts' router, if it was asked for.
        mean_log_probs (`Tensor`): mean log-prob over the vocabulary, fp32.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None
    mean_log_probs: Tensor | None = None
