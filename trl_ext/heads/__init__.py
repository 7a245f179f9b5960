"""Hidden states to per-token log-probs and statistics of the logits. Knows torch only."""

from .linear_log_probs import HEADS, linear_log_probs, run_head
from .logits import LogitTransform
from .outputs import OUTPUTS, LinearLogProbs

__all__ = ["HEADS", "OUTPUTS", "LinearLogProbs", "LogitTransform", "linear_log_probs", "run_head"]
