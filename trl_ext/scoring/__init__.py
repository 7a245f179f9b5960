"""The model's scoring forward: batch in, per-token log-probs out."""

from .forward import ScoringForward, ScoringOptions, attach_scoring_forward
from .head_rows import WHOLE_HERE
from .token_ids import check_token_ids, has_position_table, missing_rows, watch_token_ids

__all__ = [
    "WHOLE_HERE",
    "ScoringForward",
    "ScoringOptions",
    "attach_scoring_forward",
    "check_token_ids",
    "has_position_table",
    "missing_rows",
    "watch_token_ids",
]
