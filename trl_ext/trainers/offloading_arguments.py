"""GRPO's config field of where activations are kept; TRL's DPO config has it."""

from dataclasses import dataclass, field

from .added_fields import AddedFields


@dataclass
class OffloadingArguments(AddedFields):
    """Field that changes memory and speed, not results."""

    activation_offloading: bool = field(
        default=False,
        metadata={
            "help": "Whether activations are kept in host memory between the forward and the backward of a "
            "micro-batch. It needs an accelerator."
        },
    )
