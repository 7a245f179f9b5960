"""trl_ext: TRL's DPO and GRPO trainers with exact per-token log-probs."""

from .callbacks import CurvesCallback
from .heads import LinearLogProbs, linear_log_probs
from .trainers import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from .version import __version__

__all__ = [
    "CurvesCallback",
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "LinearLogProbs",
    "__version__",
    "linear_log_probs",
]
