"""The config field of where the reference model is kept, which both trainers' configs have."""

from dataclasses import dataclass, field

from .added_fields import AddedFields

DEVICES = ("cpu",)


@dataclass
class ReferenceArguments(AddedFields):
    """Field that chooses where a separate reference model is kept; it changes memory and speed, not results."""

    reference_device: str | None = field(
        default=None,
        metadata={
            "help": "Where the weights of a separate reference model are kept. `'cpu'`: in pinned host memory, brought "
            "to the device layer by layer for each reference pass. `None`: on the device, as in TRL.",
            "choices": list(DEVICES),
        },
    )

    def __post_init__(self) -> None:
        if self.reference_device is not None and self.reference_device not in DEVICES:
            raise ValueError(f"`reference_device` must be None or one of {DEVICES}, got {self.reference_device!r}.")
        super().__post_init__()
