"""The config field of what happens at a loss that is not finite, which both trainers' configs have."""

from dataclasses import dataclass, field

from ..passes.non_finite import ON_NON_FINITE_LOSS
from .added_fields import AddedFields


@dataclass
class NonFiniteArguments(AddedFields):
    """Field that is looked at where a loss of training is NaN or infinite, on whichever rank."""

    on_non_finite_loss: str | None = field(
        default=None,
        metadata={
            "help": "What to do where a loss of training is NaN or infinite. `'stop'`: an error on all ranks that "
            "names the rows and the pass it came from. `'skip'`: a warning that names them, and no rank takes this "
            "optimizer step. `None`: as in TRL, where the gradients reach the weights. Unless `None`, one small "
            "exchange between ranks for each micro-batch.",
            "choices": list(ON_NON_FINITE_LOSS),
        },
    )

    def __post_init__(self) -> None:
        asked = self.on_non_finite_loss
        if asked is not None and asked not in ON_NON_FINITE_LOSS:
            raise ValueError(f"`on_non_finite_loss` must be None or one of {ON_NON_FINITE_LOSS}, got {asked!r}.")
        super().__post_init__()
