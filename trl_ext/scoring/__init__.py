"""The model's scoring forward: batch in, per-token log-probs out."""

from .forward import ScoringForward, ScoringOptions, attach_scoring_forward

__all__ = ["ScoringForward", "ScoringOptions", "attach_scoring_forward"]
