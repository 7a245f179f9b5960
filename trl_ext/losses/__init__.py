"""Terms of the DPO loss that TRL does not have, in plain torch, and how metrics of several ranks are combined."""

from .pairs import Pairs, pairs_of
from .preference import PREFERENCE_LOSSES, READ_REWARDS, LossOptions, margin_of
from .reward_columns import REWARD_COLUMNS, RewardCollator, check_reward, check_reward_columns
from .token_smoothing import CONVENTIONS, smoothing_term
from .weighted_metrics import Counts, counts_of, of_all_ranks, weighted

__all__ = [
    "CONVENTIONS",
    "PREFERENCE_LOSSES",
    "READ_REWARDS",
    "REWARD_COLUMNS",
    "Counts",
    "LossOptions",
    "Pairs",
    "RewardCollator",
    "check_reward",
    "check_reward_columns",
    "counts_of",
    "margin_of",
    "of_all_ranks",
    "pairs_of",
    "smoothing_term",
    "weighted",
]
