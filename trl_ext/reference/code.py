"""The code that a model's forward runs: its classes, with a hash of their source where no version stands for it."""

import hashlib
import inspect
import sys
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

# Their versions are in the identity
_VERSIONED = {"torch", "transformers", "peft", "trl_ext", *sys.stdlib_module_names} - {"__main__"}


def code_of(model: nn.Module) -> list[str]:
    """The class of `model`, then each class of or below its modules that no version in the identity covers.

    The latter with a hash of their source file, or `"unknown"` where there is none.
    """
    parts: set[Any] = {type(module) for module in model.modules()}
    names = {name for part in parts for name in _edited(part)}
    return [f"{type(model).__module__}.{type(model).__qualname__}", *sorted(names)]


def without_source(model: nn.Module) -> str | None:
    """Name of a class of `model` whose source file cannot be read, or None."""
    return next((name.split()[0] for name in code_of(model)[1:] if name.endswith(" unknown")), None)


@cache
def _edited(part: Any) -> tuple[str, ...]:
    return tuple(
        f"{x.__module__}.{x.__qualname__} {_hash_of_source(x)}"
        for x in part.__mro__
        if x.__module__.split(".")[0] not in _VERSIONED
    )


def _hash_of_source(part: type) -> str:
    try:
        file = inspect.getsourcefile(part)
        return hashlib.blake2b(Path(file or "").read_bytes(), digest_size=16).hexdigest()
    except (OSError, TypeError):
        return "unknown"
