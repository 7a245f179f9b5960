"""Which log-prob passes run, and why: policy, old policy, reference; and which rows and tokens of them."""

from .dpo import DPOFacts, DPOPlan, plan_dpo
from .fed import Fed
from .packing import PackingFacts, PackingPlan, check_packing_options, plan_packing
from .plan import Decision, Plan
from .skipped import Skipped

__all__ = [
    "DPOFacts",
    "DPOPlan",
    "Decision",
    "Fed",
    "PackingFacts",
    "PackingPlan",
    "Plan",
    "Skipped",
    "check_packing_options",
    "plan_dpo",
    "plan_packing",
]
