"""What TRL's scoring forward gives back."""

from dataclasses import dataclass

import torch
from trl.trainer.utils import FusedCausalLMOutput as TRLFusedCausalLMOutput


@dataclass
class FusedCausalLMOutput(TRLFusedCausalLMOutput):
    """TRL's output of the scoring forward, and a field that it lacks.

    Args:
        mean_log_probs (`torch.Tensor`, same shape as `log_probs`):
            Mean of the log-probs over the vocabulary, of each next-token distribution.
    """

    mean_log_probs: torch.Tensor | None = None
