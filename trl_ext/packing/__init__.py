"""A padded batch as one row without padding or repeated prompts, and back."""

from .first_batch import multiplies_fp32
from .gather import picked
from .layout import Layout
from .packing import Packing
from .support import has_experts, trains_expert_modules

__all__ = ["Layout", "Packing", "has_experts", "multiplies_fp32", "picked", "trains_expert_modules"]
