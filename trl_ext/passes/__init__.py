"""Which log-prob passes run, and why: policy, old policy, reference; and which rows and tokens of them."""

from .dpo import DPOFacts, DPOPlan, plan_dpo
from .plan import Decision, Plan
from .skipped import Skipped

__all__ = ["DPOFacts", "DPOPlan", "Decision", "Plan", "Skipped", "plan_dpo"]
