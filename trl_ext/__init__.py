"""trl_ext: TRL's DPO and GRPO trainers with exact per-token log-probs."""

__version__ = "0.1.0"  # before the imports: rooms read it

from .callbacks import CurvesCallback
from .heads import LinearLogProbs, linear_log_probs
from .trainers import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

__all__ = [
    "CurvesCallback",
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "LinearLogProbs",
    "linear_log_probs",
]
