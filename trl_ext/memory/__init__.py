"""How much memory a training step takes, by running the model's own code on tensors that hold no numbers."""

from .longest import longest_that_fits
from .step import Engine, Step, StepMemory, memory_of_step

__all__ = ["Engine", "Step", "StepMemory", "longest_that_fits", "memory_of_step"]
