"""A run whose memory is predicted: its arguments, as parsed, and the devices on which it is to run."""

import copy
from dataclasses import dataclass, replace
from typing import Any


class ArgumentError(ValueError):
    """An argument that this package does not take. The message names it as the command line does."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of one method. This machine need not have its devices."""

    method: str  # "sft", "dpo", "kto", "grpo", "rloo", "reward" or "distillation"
    training: Any  # the trainer's config
    model: Any  # TRL's `ModelConfig`
    device: str = "cuda"
    engine: str = "one_process"
    devices: int = 1  # with one process each; all other values are for one of them
    prompt_length: int = 0  # of the longest prompt, in tokens

    @property
    def samples(self) -> bool:
        """Whether the method samples completions, so that an argument bounds their length."""
        return self.method in ("grpo", "rloo", "distillation")

    @property
    def mixed_precision(self) -> str:
        """The precision in which the run computes, by Accelerate's name."""
        return "bf16" if self.training.bf16 else "fp16" if self.training.fp16 else "no"

    @property
    def longest_row(self) -> int:
        """The tokens of the longest row that the arguments allow."""
        if self.samples:
            longest = self.training.max_completion_length
            if longest < 1:
                raise ArgumentError(f"`--max_completion_length` must be 1 or more, got {longest}.")
            return int(self.prompt_length + longest)
        if self.training.max_length is None:
            raise ArgumentError("`--max_length` is None, so the longest row is unknown. Set it to a number.")
        return int(self.training.max_length)

    def with_training(self, **values: Any) -> "Run":
        """Return the run with other values of the trainer's config, without the fields that the method lacks."""
        training = copy.copy(self.training)
        for name, value in values.items():
            if hasattr(training, name):
                setattr(training, name, value)
        return replace(self, training=training)
