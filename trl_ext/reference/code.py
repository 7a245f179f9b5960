"""The code that a model's forward runs: its classes, the settings of its modules, and functions attached to them."""

import hashlib
import inspect
import sys
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .reach import VERSIONED, Reach, foreign_in, is_foreign, plain_config, version_of

# Attributes of modules that do not change log-probs. A bitsandbytes layer sets the last one in its first forward
_NOT_IN_LOGITS = {"training", "gradient_checkpointing", "name_or_path", "compute_type_is_set"}
# What each module has, which the weights, or the walk over modules and hooks, cover
_OF_ALL_MODULES = {*vars(nn.Module()), "config", "forward"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


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
        if x.__module__.split(".")[0] not in VERSIONED
    )


def _source_hash(part: type) -> str:
    try:
        file = inspect.getsourcefile(part)
        return hashlib.blake2b(Path(file or "").read_bytes(), digest_size=16).hexdigest()
    except (OSError, TypeError):
        return "unknown"


def states_of(
    config: Any, modules: dict[str, nn.Module], wrappers: dict[str, nn.Module], model_names: dict[int, str]
) -> dict[str, Any]:
    """Return what a forward of `modules` reads, in addition to saved tensors and the model's `config`.

    This is the class of each module, its attributes, and foreign functions on it, with all that these read. Foreign
    functions are attributes and hooks that another package defines, for example replaced methods. Of `wrappers`,
    which are PEFT's, only foreign functions count.

    Args:
        model_names (`dict[int, str]`): the names of the model's modules and tensors, by `id`.

    Raises:
        `UnknownReachError`: a foreign function reads something that a later run cannot compare.
    """
    reach = Reach(model_names)
    while True:
        # An attribute counts if foreign code names it, and code that is met later may name more
        known_names = len(reach.names)
        states: dict[str, Any] = {name: _state_of(module, config, reach) for name, module in modules.items()}
        for name, module in wrappers.items():
            if code := _attached_to(module, reach):
                states[f"on {name}"] = code
        if code := _in_libraries([*modules.values()], [*wrappers.values()], config, reach):
            states["in libraries"] = code
        if len(reach.names) == known_names:
            return states


def _state_of(module: nn.Module, config: Any, reach: Reach) -> list[Any]:
    """Return the class of `module`, its attributes, and hashes of the foreign functions on it."""
    attributes = {}
    for name, value in vars(module).items():
        if name in _OF_ALL_MODULES or name in _NOT_IN_LOGITS or value is None or isinstance(value, nn.Module):
            continue
        if not name.startswith("_") and _is_plain(value):
            attributes[name] = value
        elif name in reach.names or (not name.startswith("_") and _is_data(module, value)):
            attributes[name] = reach.hash_of(value)
    if isinstance(module, nn.modules.dropout._DropoutNd):
        attributes.clear()  # log-probs are stored only if dropout is off
    module_config = vars(module).get("config")
    if isinstance(module_config, PreTrainedConfig) and not _is_part(module_config, config):
        attributes["config"] = str(plain_config(module_config))
    kind = type(module)
    class_hash = [reach.hash_of(kind)] if any(is_foreign(x.__module__) for x in kind.__mro__) else []
    return [f"{kind.__module__}.{kind.__qualname__}", attributes, _attached_to(module, reach), *class_hash]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float)


def _is_data(module: nn.Module, value: Any) -> bool:
    """Whether an attribute of `module` is a value that its forward may read."""
    if isinstance(module, PreTrainedModel):
        return False  # there, transformers keeps names, plans and warnings, and users keep the name of a run
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(x) or _is_data(module, x) for x in value)
    if isinstance(value, dict):
        return all(_is_plain(x) or _is_data(module, x) for x in value.values())
    return isinstance(value, (str, Tensor, np.ndarray, np.generic))


def _is_part(config: Any, whole: Any) -> bool:
    """Whether `config` is the model's configuration or one inside it."""
    return config is whole or any(config is x for x in vars(whole).values())


def _attached_to(module: nn.Module, reach: Reach) -> list[str]:
    """Return hashes of the foreign functions among the attributes and hooks of `module`."""
    values = [value for name, value in vars(module).items() if name == "forward" or name not in _OF_ALL_MODULES]
    hooks = [hook for kind in _HOOKS for hook in vars(module)[kind].values()]
    met: set[int] = set()
    attributes = {reach.hash_of(function) for value in values for function in foreign_in(value, met)}
    in_order = [reach.hash_of(function) for hook in hooks for function in foreign_in(hook, set())]
    return [*sorted(attributes), *in_order]


def _in_libraries(modules: list[nn.Module], wrappers: list[nn.Module], config: Any, reach: Reach) -> list[str]:
    """Return what has been replaced in the libraries that a forward runs: functions, and numbers of classes."""
    replacements: dict[str, str] = {}
    kinds: set[Any] = {kind for module in (*modules, *wrappers) for kind in type(module).__mro__}
    classes = {kind for kind in kinds if not is_foreign(kind.__module__) and kind is not object}
    files: set[Any] = {sys.modules[name] for name in {kind.__module__ for kind in classes}} | {torch.nn.functional}
    owners: list[Any] = [*classes, *files]
    for owner in owners:
        place = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
        for name, value in vars(owner).items():
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(inner, FunctionType | partial):
                for function in foreign_in(inner, set()):
                    # Libraries also import functions of other packages, such as those of the Hub
                    if not version_of(getattr(function, "__module__", None) or "") or name in reach.names:
                        replacements[f"{place}.{name}"] = reach.hash_of(function)
    for owner in {kind for module in modules for kind in type(module).__mro__} & classes:
        for name, value in vars(owner).items():
            if isinstance(value, bool | int | float) and not name.startswith("_"):
                replacements[f"{owner.__module__}.{owner.__qualname__}.{name}"] = repr(value)
    attention = getattr(config, "_attn_implementation", None)
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        for function in foreign_in(table.get(attention), set()):
            replacements[f"attention {type(table).__name__}"] = reach.hash_of(function)
    return [f"{name} {code}" for name, code in sorted(replacements.items())]
