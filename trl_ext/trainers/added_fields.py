"""What the groups of added config fields have in common."""

from dataclasses import dataclass
from typing import Any, Self


@dataclass
class AddedFields:
    """Mixed in before TRL's config; also by itself, with the defaults of the fields."""

    def __post_init__(self) -> None:
        inherited = getattr(super(), "__post_init__", None)
        if inherited is not None:
            inherited()

    @classmethod
    def of(cls, args: Any) -> Self:
        """The fields of a trainer's arguments; the defaults where those are TRL's own config, or None."""
        return args if isinstance(args, cls) else cls()
