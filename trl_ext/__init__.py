"""trl_ext: TRL's DPO and GRPO trainers with exact per-token log-probs."""

from .callbacks import CurvesCallback
from .config import DPOConfig, GRPOConfig
from .heads import LinearLogProbs, linear_log_probs
from .trainers import DPOTrainer, GRPOTrainer
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
