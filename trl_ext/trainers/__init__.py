"""The trainers."""

from .dpo import DPOTrainer
from .grpo import GRPOTrainer

__all__ = ["DPOTrainer", "GRPOTrainer"]
