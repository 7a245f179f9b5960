"""The model's scoring forward: batch in, per-token log-probs out."""

from .forward import ScoringForward, ScoringOptions, attach_scoring_forward
from .head_rows import WHOLE_HERE

__all__ = ["WHOLE_HERE", "ScoringForward", "ScoringOptions", "attach_scoring_forward"]
