"""The trainers a user imports: compute_loss hands on to TRL's own loss. No arithmetic lives here."""

from .dpo import DPOConfig, DPOTrainer
from .grpo import GRPOConfig, GRPOTrainer

__all__ = ["DPOConfig", "DPOTrainer", "GRPOConfig", "GRPOTrainer"]
