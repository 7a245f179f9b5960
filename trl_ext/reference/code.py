"""The code that a model's forward runs: its classes, the settings of its modules, and functions attached to them."""

import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache, cached_property, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from accelerate.hooks import ModelHook, SequentialHook
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..functions import closure_of, nested_codes
from ..packing.hooks import OF_COMPILER, forward_hooks, functions_of_users
from ..packing.observers import only_observes
from ..packing.randomness import functions_of_forward
from .digests import digest_of_value
from .versions import VERSIONED, UnknownCodeError, is_foreign, is_remote, module_of, name_and_version, version_of

# Settings that say where the weights came from, or that do not affect a forward pass. All others may change logits
_SETTINGS_NOT_IN_LOGITS = {"_name_or_path", "transformers_version", "use_cache"}
# Attributes of modules that do not change log-probs. A bitsandbytes layer sets the last one in its first forward
_NOT_IN_LOGITS = {"training", "gradient_checkpointing", "name_or_path", "compute_type_is_set"}
# What each module has, which the weights, or the walk over modules and hooks, cover
_OF_ALL_MODULES = {*vars(nn.Module()), "config", "forward"}

# Packages whose functions take numbers, so that a partial function of one is a setting
_OF_OPERATIONS = {"torch", "math", "operator", "_operator", "builtins"}
_UNKNOWN = "unknown"  # in place of the hash of a source file
# Names with which the code of a remote model reads the environment or files
_READS = {
    "environ",
    "environb",
    "getenv",
    "import_module",
    "open",
    "read_text",
    "read_bytes",
    "fromfile",
    "loadtxt",
    "load",
    "load_file",
}


def code_of(model: nn.Module) -> list[str]:
    """Return the name of `model`'s class, then the classes of its modules, and their bases, that have no known version.

    Each of the latter comes with a hash of its source file, or `"unknown"` if the file cannot be read.
    """
    parts: set[Any] = {type(module) for module in model.modules()}
    names = {name for part in parts for name in _unversioned(part)}
    return [f"{type(model).__module__}.{type(model).__qualname__}", *sorted(names)]


@cache
def _unversioned(part: Any) -> tuple[str, ...]:
    return tuple(
        f"{x.__module__}.{x.__qualname__} {source_hash(x)}"
        for x in part.__mro__
        if x.__module__.split(".")[0] not in VERSIONED
    )


def source_hash(part: Any) -> str:
    """Return a hash of the source file of a class or function, with the files of a remote model that it imports."""
    from transformers.dynamic_module_utils import get_relative_import_files

    try:
        file = inspect.getsourcefile(part) or ""
        imported = sorted(get_relative_import_files(file)) if is_remote(part.__module__) else []
        content = b"".join(Path(x).read_bytes() for x in (file, *imported))
        return hashlib.blake2b(content, digest_size=16).hexdigest()
    except (OSError, TypeError):
        return _UNKNOWN


def states_of(
    config: Any, modules: dict[str, nn.Module], wrappers: dict[str, nn.Module], tensor_names: dict[int, str]
) -> dict[str, Any]:
    """Return what a forward of `modules` reads, in addition to saved tensors and the model's `config`.

    This is the class of each module and its attributes, functions of installed packages on it, and numbers of
    libraries' classes. Of `wrappers`, which are PEFT's, only functions count.

    Args:
        tensor_names (`dict[int, str]`): the names of the model's tensors, by `id`.

    Raises:
        `UnknownCodeError`: code of the user takes part, other than hooks that only observe.
    """
    all_modules = [*modules.values(), *wrappers.values()]
    for module in all_modules:
        _check_classes(module)
    states: dict[str, Any] = {name: _state_of(module, config, tensor_names) for name, module in modules.items()}
    for name, module in wrappers.items():
        if code := _attached_to(module, tensor_names):
            states[f"on {name}"] = code
    if code := _in_libraries([*modules.values()], all_modules, config, tensor_names):
        states["in libraries"] = code
    return states


def _check_classes(module: nn.Module) -> None:
    """Raise `UnknownCodeError` if a class of `module`, its tensors or its config is the user's."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    kinds: set[Any] = {type(x) for x in (module, vars(module).get("config"), *tensors)}
    for part in {part for kind in kinds for part in kind.__mro__ if is_foreign(part.__module__)}:
        name_and_version(part)
        if is_remote(part.__module__) and source_hash(part) == _UNKNOWN:
            raise UnknownCodeError(f"the source file of the class `{part.__qualname__}` cannot be read")
    module_class: Any = type(module)
    for name in sorted(_names_in_forward(module_class) & _READS):
        raise UnknownCodeError(f"`{module_class.__qualname__}` calls `{name}`, and trl_ext cannot tell what that reads")


@cache
def _names_in_forward(part: Any) -> frozenset[str]:
    """Return the names in the forward of a remote model's class. What a library's does, its version says."""
    functions = functions_of_forward(part) if is_remote(part.__module__) else ()
    remote_functions = (function for function in functions if is_remote(module_of(function)))
    codes = (code for function in remote_functions for code in nested_codes(function.__code__))
    return frozenset(name for code in codes for name in code.co_names)


def _state_of(module: nn.Module, config: Any, tensor_names: dict[int, str]) -> list[Any]:
    """Return the class of `module`, its attributes, and the functions on it."""
    attributes: dict[str, Any] = {}
    module_class: Any = type(module)
    names_in_forward = _names_in_forward(module_class)
    for name, value in vars(module).items():
        if name in _OF_ALL_MODULES or name in _NOT_IN_LOGITS or value is None or isinstance(value, nn.Module):
            continue
        # In a `PreTrainedModel`, transformers keeps names, plans and warnings, and users keep the name of a run
        is_data = _is_data(value) and not isinstance(module, PreTrainedModel)
        if _is_plain(value) and not name.startswith("_"):
            attributes[name] = value
        elif name in names_in_forward and isinstance(value, PreTrainedConfig):
            attributes[name] = str(_plain_config(value))
        elif (is_data and not name.startswith("_")) or (name in names_in_forward and not inspect.isroutine(value)):
            attributes[name] = digest_of_value(value, tensor_names)
    if isinstance(module, nn.modules.dropout._DropoutNd):
        attributes.clear()  # log-probs are stored only if dropout is off
    module_config = vars(module).get("config")
    if isinstance(module_config, PreTrainedConfig) and not _is_part(module_config, config):
        attributes["config"] = str(_plain_config(module_config))
    is_of_libraries = not any(is_foreign(x.__module__) for x in module_class.__mro__)
    class_hash = [] if is_of_libraries else [digest_of_value(module_class, {})]
    name = f"{module_class.__module__}.{module_class.__qualname__}"
    return [name, attributes, _attached_to(module, tensor_names), *class_hash]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float)


def _is_data(value: Any) -> bool:
    """Whether an attribute of a module is a value that its forward may read."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(x) or _is_data(x) for x in value)
    if isinstance(value, dict):
        return all(_is_plain(x) or _is_data(x) for x in value.values())
    return isinstance(value, (str, Tensor, np.ndarray, np.generic))


def _plain_config(config: Any) -> dict[str, Any]:
    """Return what a configuration says, and the implementation of attention, which `to_dict` leaves out."""
    settings = without_origin(config.to_dict())
    settings["attention"] = config._attn_implementation
    settings["experts"] = vars(config).get("_experts_implementation")
    return settings


def without_origin(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration, and of nested ones, that can change a logit."""
    settings = ((key, value) for key, value in config.items() if key not in _SETTINGS_NOT_IN_LOGITS)
    return {key: without_origin(value) if isinstance(value, dict) else value for key, value in settings}


def _is_part(config: Any, whole: Any) -> bool:
    """Whether `config` is the model's configuration or one inside it."""
    return config is whole or any(config is x for x in vars(whole).values())


def _attached_to(module: nn.Module, tensor_names: dict[int, str]) -> list[str]:
    """Return what identifies the foreign functions among the attributes and hooks of `module`."""
    values = [value for name, value in vars(module).items() if name == "forward" or name not in _OF_ALL_MODULES]
    met: set[int] = set()
    lines = {_line_of(function, tensor_names) for value in values for function in _foreign_in(value, met)}
    of_hooks = []
    for hook in forward_hooks(module):
        functions = list(functions_of_users(hook))
        if not functions:  # of packages whose hooks do the same in each call
            of_hooks += [name_and_version(function) for function in _foreign_in(hook, set())]
        elif not all(map(only_observes, functions)):
            of_hooks += [_line_of(function, tensor_names) for function in _foreign_in(hook, set())]
    return [*sorted(lines), *of_hooks]


def _in_libraries(
    modules: list[nn.Module], all_modules: list[nn.Module], config: Any, tensor_names: dict[int, str]
) -> list[str]:
    """Return what has been replaced in the libraries that a forward runs: functions, and numbers of classes."""
    lines: dict[str, str] = {}
    kinds: set[Any] = {kind for module in all_modules for kind in type(module).__mro__} - {object}
    remote_packages = {kind.__module__.rpartition(".")[0] for kind in kinds if is_remote(kind.__module__)}
    names = {kind.__module__ for kind in kinds} | {x for x in sys.modules if x.rpartition(".")[0] in remote_packages}
    files: set[Any] = {sys.modules[name] for name in names if name in sys.modules} | {torch.nn.functional}
    owners: list[Any] = [*kinds, *files]
    for owner in owners:
        module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
        place = module if isinstance(owner, ModuleType) else f"{module}.{owner.__qualname__}"
        for name, value in vars(owner).items():
            if name.startswith(OF_COMPILER):
                continue
            if is_remote(module) and not name.startswith("__") and (_is_plain(value) or _is_data(value)):
                lines[f"{place}.{name}"] = digest_of_value(value, tensor_names)
            for function in _foreign_in(_function_in(value), set()):
                # Files of libraries also import functions of other packages, which keep their module's name
                is_import = isinstance(owner, ModuleType) and version_of(str(getattr(function, "__module__", "")))
                if is_foreign(module) or is_import:
                    name_and_version(function)
                else:
                    lines[f"{place}.{name}"] = _line_of(function, tensor_names)
    for owner in {kind for module in modules for kind in type(module).__mro__} - {object}:
        for name, value in vars(owner).items():
            if isinstance(value, bool | int | float) and not name.startswith("_") and not is_foreign(owner.__module__):
                lines[f"{owner.__module__}.{owner.__qualname__}.{name}"] = repr(value)
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = getattr(config, "_attn_implementation", None)
    for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        for function in _foreign_in(table.get(attention), set()):
            lines[f"attention {type(table).__name__}"] = _line_of(function, tensor_names)
    return [f"{name} {code}" for name, code in sorted(lines.items())]


def _function_in(value: Any) -> Any:
    """Return the function of a method or property, or a callable object; None for what is not called."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property | cached_property):
        return value.fget if isinstance(value, property) else value.func
    return value if callable(value) else None


def _line_of(function: Any, tensor_names: dict[int, str]) -> str:
    """Return what identifies what [`_foreign_in`] yields: name, version, source file, and the values that it holds."""
    if isinstance(function, partial):
        return digest_of_value(function, tensor_names)
    line = name_and_version(function)
    state = getattr(function, "__dict__", function)  # the digest of an object without attributes raises
    if isinstance(function, FunctionType):
        state = [state, closure_of(function), function.__defaults__, function.__kwdefaults__]
    if isinstance(function, type):
        return f"{line} {source_hash(function)}"
    file_hash = source_hash(function if isinstance(function, FunctionType) else type(function))
    return f"{line} {file_hash} {digest_of_value(state, tensor_names)}"


def _foreign_in(value: Any, met: set[int]) -> Iterator[Any]:
    """Yield each foreign function and object that a call of `value` may run, and partial functions of operations."""
    if id(value) in met or isinstance(value, (nn.Module, Tensor, type)):
        return
    met.add(id(value))
    parts: list[Any] = [getattr(value, "__dict__", {}).get("__wrapped__")]  # of `functools.cache`
    if isinstance(value, FunctionType):
        if is_foreign(module_of(value)):
            yield value
        parts = [*closure_of(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, MethodType):
        parts = [value.__func__]
        if isinstance(value.__self__, type) and is_foreign(module_of(value.__self__)):
            yield value.__self__  # a user's `autograd.Function`, whose `apply` is torch's
    elif isinstance(value, partial):
        module = getattr(value.func, "__module__", None) or ""
        # `checkpoint` is transformers' own
        if module.split(".")[0] in _OF_OPERATIONS and not module.startswith("torch.utils"):
            yield value
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (list, tuple, deque)):
        parts = [*value]
    elif isinstance(value, dict):
        parts = [*value.values()]
    elif isinstance(value, SequentialHook):
        parts = [*value.hooks]
    elif is_foreign(module_of(value)) and (callable(value) or isinstance(value, ModelHook)):
        yield value
    for part in parts:
        yield from _foreign_in(part, met)
