"""The config fields of both trainers that decide which tokens of a padded batch are fed."""

from dataclasses import dataclass, field, fields
from typing import Any, Self

from .added_fields import AddedFields

# On the command line the bare flag is True, as that of any bool
_FLAG: dict[str, Any] = {"nargs": "?", "const": True}


@dataclass
class PackingArguments(AddedFields):
    """Fields of packing; every default feeds as little as trains the same."""

    padding_free: bool | None = field(
        default=None,
        metadata={
            **_FLAG,
            "help": "Whether rows are fed without their padding, as one row. `None`: where the model can. `True`: an "
            "error before training where it cannot. `False`: the padded batch, as in TRL.",
        },
    )
    share_prompts: bool | None = field(
        default=None,
        metadata={
            **_FLAG,
            "help": "Whether leading tokens that several rows have in common are fed once. `None`: where that trains "
            "the same, which it does not while dropout is active. `True`: an error before training where it does not.",
        },
    )

    def __post_init__(self) -> None:
        for name in ("padding_free", "share_prompts"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"`{name}` must be None, True or False, got {value!r}.")
        super().__post_init__()

    @classmethod
    def of(cls, args: Any) -> Self:
        """The fields of a trainer's arguments; the defaults where those are TRL's own config.

        TRL's `DPOConfig` has a `padding_free` of its own, whose False is its default, and says nothing.
        """
        if isinstance(args, cls):
            # A copy: while TRL's `__init__` runs, `padding_free` of the config is not the user's
            return cls(**{x.name: getattr(args, x.name) for x in fields(cls)})
        return cls(padding_free=getattr(args, "padding_free", None) or None)
