"""Hidden states to per-token log-probs and statistics of the logits. Knows torch only."""

from .dense import dense_logits, log_probs_of
from .linear_log_probs import HEADS, linear_log_probs, operand_dtype, run_head
from .logits import LogitTransform
from .outputs import OUTPUTS, LinearLogProbs
from .tiled import tiled_log_probs

__all__ = [
    "HEADS",
    "OUTPUTS",
    "LinearLogProbs",
    "LogitTransform",
    "dense_logits",
    "linear_log_probs",
    "log_probs_of",
    "operand_dtype",
    "run_head",
    "tiled_log_probs",
]
