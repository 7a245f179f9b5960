"""A padded batch as one row without padding or repeated prompts, and back."""

from .gather import picked
from .layout import Layout
from .packing import Packing
from .support import has_experts, trains_expert_modules

__all__ = ["Layout", "Packing", "has_experts", "picked", "trains_expert_modules"]
