"""The config fields of the head, which both trainers' configs have."""

from dataclasses import dataclass, field

from ..heads import HEADS, KERNELS
from .added_fields import AddedFields


@dataclass
class HeadArguments(AddedFields):
    """Fields that choose the head; every default trains as TRL does, more exactly."""

    head: str = field(
        default="tiled",
        metadata={
            "help": "How log-probs are computed from hidden states. `'tiled'` never builds the logits; `'dense'` is "
            "the plain definition, which holds all logits of a batch in memory.",
            "choices": list(HEADS),
        },
    )
    head_chunk_size: int | None = field(
        default=None,
        metadata={"help": "Tokens in a tile of the head. `None` chooses it. It changes memory and speed, not results."},
    )

    head_kernels: str | None = field(
        default=None,
        metadata={
            "help": "What works on a tile of the head between the matrix products: `'triton'` or `'torch'`. `None` "
            "takes Triton's kernels on a device that it compiles for, and torch elsewhere. They differ by fp32 "
            "rounding.",
            "choices": list(KERNELS),
        },
    )

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"`head` must be one of {list(HEADS)}, got {self.head!r}.")
        size = self.head_chunk_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"`head_chunk_size` must be None or an integer of at least 1, got {size!r}.")
        if self.head_kernels is not None and self.head_kernels not in KERNELS:
            raise ValueError(f"`head_kernels` must be None or one of {list(KERNELS)}, got {self.head_kernels!r}.")
        if self.head_kernels is not None and self.head == "dense":
            raise ValueError(
                f"`head_kernels={self.head_kernels!r}` is for the tiled head, but `head` is 'dense'. Set one of them."
            )
        super().__post_init__()
