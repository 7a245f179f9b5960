"""The code that a model's forward runs: its classes, the settings of its modules, and functions attached to them."""

import hashlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

# Packages whose versions are part of the identity
_VERSIONED = {"torch", "transformers", "peft", "trl_ext", *sys.stdlib_module_names} - {"__main__"}
# Packages whose hooks and forwards on modules do not change results
_ENGINES = {"accelerate", "deepspeed", "trl"}
# Public attributes of modules that do not change log-probs. A bitsandbytes layer sets the last one in its first forward
_NOT_IN_LOGITS = {"training", "gradient_checkpointing", "name_or_path", "compute_type_is_set"}


def code_of(model: nn.Module) -> list[str]:
    """Return the name of `model`'s class, then the classes of its modules, and their bases, that have no known version.

    Each of the latter comes with a hash of its source file, or `"unknown"` if the file cannot be read.
    """
    parts: set[Any] = {type(module) for module in model.modules()}
    names = {name for part in parts for name in _unversioned(part)}
    return [f"{type(model).__module__}.{type(model).__qualname__}", *sorted(names)]


def without_source(model: nn.Module) -> str | None:
    """Return the name of a class of `model` whose source file cannot be read, or None."""
    return next((name.split()[0] for name in code_of(model)[1:] if name.endswith(" unknown")), None)


@cache
def _unversioned(part: Any) -> tuple[str, ...]:
    return tuple(
        f"{x.__module__}.{x.__qualname__} {_source_hash(x)}"
        for x in part.__mro__
        if x.__module__.split(".")[0] not in _VERSIONED
    )


def _source_hash(part: type) -> str:
    try:
        file = inspect.getsourcefile(part)
        return hashlib.blake2b(Path(file or "").read_bytes(), digest_size=16).hexdigest()
    except (OSError, TypeError):
        return "unknown"


def state_of(module: nn.Module) -> list[Any]:
    """Return the class of `module`, its attributes that are plain values, and the code of foreign functions on it.

    Foreign functions are attributes and hooks that another package defines, for example replaced methods.
    """
    attributes = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _NOT_IN_LOGITS and value is not None and _is_plain(value)
    }
    if isinstance(module, nn.modules.dropout._DropoutNd):
        attributes.clear()  # log-probs are stored only if dropout is off
    seen: set[int] = set()
    held = (*vars(module).values(), *module._forward_pre_hooks.values(), *module._forward_hooks.values())
    code = sorted({line for value in held for line in _foreign_code(value, seen)})
    return [f"{type(module).__module__}.{type(module).__qualname__}", attributes, code]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    # No strings, because the name of a run would change the identity
    return value is None or isinstance(value, bool | int | float)


def _foreign_code(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield a hash of the code of each foreign function that `value` is or contains, and the numbers in it."""
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: list[Any] = []
    own: list[str] = []
    if isinstance(value, MethodType):
        parts = [value.__func__]
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        parts = [*_cells(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if _is_foreign(value.__globals__.get("__name__", "")):
            own = [_code_hash(value.__code__)]
    elif callable(value) and not isinstance(value, nn.Module | type) and _is_foreign(type(value).__module__):
        kind: Any = type(value)
        own = list(_unversioned(kind))
    inner = [line for part in parts for line in _foreign_code(part, seen)]
    if own or (inner and isinstance(value, partial)):
        yield "\n".join([*own, *(repr(part) for part in parts if isinstance(part, bool | int | float))])
    yield from inner


def _is_foreign(module: str) -> bool:
    return module.split(".")[0] not in _VERSIONED | _ENGINES


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty until the name is bound
            yield cell.cell_contents


def _code_hash(code: CodeType) -> str:
    constants = [
        _code_hash(x) if isinstance(x, CodeType) else sorted(map(repr, x)) if isinstance(x, frozenset) else repr(x)
        for x in code.co_consts
    ]
    return hashlib.blake2b(repr((code.co_code, code.co_names, constants)).encode(), digest_size=16).hexdigest()
