"""What code that no library version identifies reads: its closures, globals, objects and tensors, as a hash.

Hooks, patched methods and users' modules may keep a value anywhere. A hash of the code alone would take two references
that differ in such a value for one.
"""

import dis
import enum
import hashlib
import inspect
import logging
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import cache, cached_property, partial, partialmethod
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from io import IOBase
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from ..functions import closure_of
from .digests import digest_of_tensor

# Packages whose versions are part of the identity, and packages whose functions on modules do not change results
VERSIONED = {"torch", "transformers", "peft", "trl_ext", *sys.stdlib_module_names} - {"__main__"}
ENGINES = {"accelerate", "deepspeed", "trl"}

# Settings that say where the weights came from, or that do not affect a forward pass. All others may change logits
_NOT_IN_LOGITS = {"_name_or_path", "transformers_version", "use_cache"}

_MOST_OBJECTS = 20_000
_MOST_DEPTH = 100

# Builtins, and functions and attributes of libraries, with which code reads files, the environment, or computed names
_BUILTINS_THAT_READ = {"open", "eval", "exec", "globals", "locals", "vars", "input", "__import__"}
_READS = {
    "environ",
    "environb",
    "getenv",
    "import_module",
    "read_text",
    "read_bytes",
    "fromfile",
    "loadtxt",
    "load",
    "load_file",
}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_BY_REPR = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.dtype,
    GenericAlias,
    UnionType,
    range,
    slice,
    date,
    datetime,
    time,
    timedelta,
    timezone,
    Decimal,
    Fraction,
    UUID,
    PurePath,
    re.Pattern,
    re.RegexFlag,
)
# Objects that do not change a value that code computes
_WITHOUT_VALUE = (
    logging.Logger,
    logging.LoggerAdapter,
    logging.Handler,
    logging.Filter,
    RemovableHandle,
    IOBase,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Event,
    threading.Condition,
    threading.Thread,
)
_BUILTIN = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
# Packages whose functions a user may give other arguments, and put in place of a forward
_OF_OPERATIONS = {"torch", "math", "operator", "_operator", "builtins"}
# Methods of a class that no forward runs
_NOT_RUN = {"__init__", "__new__", "__init_subclass__", "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__"}


class UnknownReachError(ValueError):
    """What some code reads cannot be hashed in the same way in each process. The message says what it reads."""


class Reach:
    """Hashes what foreign code reads. One object is used for all code of a model.

    Args:
        model_names (`dict[int, str]`):
            The names of the model's modules and tensors, by `id`. The identity has their contents.

    Attributes:
        names (`set[str]`): each attribute that the code met so far may read.
    """

    def __init__(self, model_names: dict[int, str]) -> None:
        self.model_names = model_names
        self.names = {"forward", "__call__"}
        self._tensors: dict[int, tuple[Any, str]] = {}
        self._text: list[str] = []
        self._met: dict[int, tuple[int, Any]] = {}
        self._reader = ""

    def hash_of(self, value: Any) -> str:
        """Return a hash of `value` and what it reaches.

        Raises `UnknownReachError` if another process could not compute the same.
        """
        self._text = []
        self._met = {}
        self._reader = name_of(value)
        try:
            self._walk(value, 0)
        except RecursionError:
            raise UnknownReachError(f"`{self._reader}` reaches too many objects") from None
        return hashlib.blake2b("\n".join(self._text).encode(), digest_size=16).hexdigest()

    def _put(self, text: str) -> None:
        self._text.append(text)

    def _walk(self, value: Any, depth: int) -> None:
        if type(value) in _PLAIN or isinstance(value, _BY_REPR):
            return self._put(f"{type(value).__name__} {value!r}")
        if id(value) in self.model_names:
            return self._put(f"the model's {self.model_names[id(value)]}")
        if id(value) in self._met:
            return self._put(f"met as {self._met[id(value)][0]}")  # also a cycle
        self._met[id(value)] = len(self._met), value  # holds it, so that no other object gets its id
        if len(self._met) > _MOST_OBJECTS or depth > _MOST_DEPTH:
            raise UnknownReachError(f"`{self._reader}` reaches too many objects")
        self._put(type(value).__name__)
        if isinstance(value, Tensor):
            self._put(self._tensor(value))
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            self._put(f"{value.dtype} {value.shape}")
            self._put(hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest())
        elif isinstance(value, (MethodType, FunctionType, partial, partialmethod, *_BUILTIN)):
            self._function(value, depth)
        elif isinstance(value, staticmethod | classmethod):
            self._walk(value.__func__, depth + 1)
        elif isinstance(value, property):
            self._walk(value.fget, depth + 1)
        elif isinstance(value, cached_property):
            self._walk(value.func, depth + 1)
        elif isinstance(value, ModuleType):
            self._module(value, self.names, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, enum.Enum):
            self._put(f"{type(value).__qualname__} {value.name}")
        elif isinstance(value, PreTrainedConfig):
            self._put(repr(sorted(plain_config(value).items(), key=str)))
        elif isinstance(value, nn.Module):
            self._nn_module(value, depth)
        else:
            self._object(value, depth)

    def _tensor(self, value: Tensor) -> str:
        if value.is_meta or isinstance(value, DTensor) or hasattr(value, "ds_status"):
            raise UnknownReachError(f"`{self._reader}` reads a tensor that is not in the memory of this process")
        if id(value) not in self._tensors:
            self._tensors[id(value)] = value, digest_of_tensor(value)
        return self._tensors[id(value)][1]

    def _object(self, value: Any, depth: int) -> None:
        kind: Any = type(value)
        if isinstance(value, _WITHOUT_VALUE):
            return
        if isinstance(value, weakref.ref):
            return self._walk(value(), depth + 1)
        is_container = isinstance(value, (dict, MappingProxyType, list, tuple, deque, set, frozenset))
        if isinstance(value, (dict, MappingProxyType)):
            is_sortable = all(isinstance(key, (*_PLAIN, *_BY_REPR)) for key in value)
            for key in sorted(value, key=repr) if is_sortable else value:
                self._walk(key, depth + 1)
                self._walk(value[key], depth + 1)
        elif isinstance(value, (list, tuple, deque)):
            for item in value:
                self._walk(item, depth + 1)
        elif isinstance(value, (set, frozenset)):
            if not all(isinstance(item, (*_PLAIN, *_BY_REPR, enum.Enum)) for item in value):
                raise UnknownReachError(f"`{self._reader}` reads a set, whose order differs between processes")
            self._put(repr(sorted(map(repr, value))))
        if not is_foreign(kind.__module__) and is_container:
            return
        wrapped = getattr(value, "__wrapped__", None)  # of `functools.cache`
        if callable(wrapped):
            return self._walk(wrapped, depth + 1)
        slots = [x for base in kind.__mro__ for x in _as_tuple(vars(base).get("__slots__", ()))]
        if not (hasattr(value, "__dict__") or slots or is_container) or _hides_state(kind):
            raise UnknownReachError(
                f"`{self._reader}` reads an object of the class `{kind.__module__}.{kind.__qualname__}`"
            )
        self._class(kind, depth + 1)
        attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        attributes |= getattr(value, "__dict__", {})
        for name, item in sorted(attributes.items(), key=lambda attribute: str(attribute[0])):
            if not str(name).startswith("__"):
                self._put(f".{name}")
                self._walk(item, depth + 1)

    def _nn_module(self, module: nn.Module, depth: int) -> None:
        """Walk a module that is not part of the model."""
        for name, part in module.named_modules():
            self._put(f"module {name}")
            self._class(type(part), depth + 1)
            for attribute, value in sorted(vars(part).items()):
                if not attribute.startswith("_") and attribute != "training":
                    self._put(f".{attribute}")
                    self._walk(value, depth + 1)
            for kind in ("_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks"):
                for key, value in vars(part)[kind].items():
                    self._put(f"{kind} {key if isinstance(key, str) else ''}")
                    self._walk(value, depth + 1)

    def _function(self, value: Any, depth: int) -> None:
        if isinstance(value, MethodType):
            self._walk(value.__func__, depth + 1)
            return self._walk(value.__self__, depth + 1)
        if isinstance(value, (partial, partialmethod)):
            for part in (value.func, value.args, value.keywords):
                self._walk(part, depth + 1)
            return
        if isinstance(value, _BUILTIN):
            self._put(f"{getattr(value, '__module__', '')} {getattr(value, '__qualname__', '')}")
            owner = getattr(value, "__self__", None)
            if not isinstance(owner, ModuleType):
                self._walk(owner, depth + 1)
            return
        self._python_function(value, depth)

    def _python_function(self, function: FunctionType, depth: int) -> None:
        module = function.__globals__.get("__name__", "")
        self._put(f"{version_of(module)} {module} {function.__qualname__}")
        parts = [*closure_of(function), function.__defaults__ or (), function.__kwdefaults__ or {}]
        if not is_foreign(module) and function.__name__ in _READS:
            raise UnknownReachError(f"`{self._reader}` reads what `{function.__name__}` returns")
        if not is_foreign(module):  # its version says what it does; only functions that it wraps are unknown
            for part in parts:
                for wrapped in foreign_in(part, set()):
                    self._walk(wrapped, depth + 1)
            return
        self._put(code_hash(function.__code__))
        for part in parts:
            self._walk(part, depth + 1)
        attributes = {name: value for name, value in vars(function).items() if not name.startswith("__")}
        self._walk(attributes, depth + 1)
        if version_of(module):
            return  # of an installed package
        loads = _loads_of(function.__code__)
        builtins = {name for name in loads.names & _BUILTINS_THAT_READ if name not in function.__globals__}
        for name in sorted(builtins | (loads.attributes & _READS)):
            raise UnknownReachError(f"`{name_of(function)}` calls `{name}`, and what that reads is not known")
        self.names |= loads.attributes
        for name in sorted(loads.names):
            if name in function.__globals__:
                self._put(f"global {name}")
                read = function.__globals__[name]
            elif name in loads.imported and name in sys.modules:
                self._put(f"import {name}")
                read = sys.modules[name]
            else:
                continue
            if isinstance(read, ModuleType):
                self._module(read, loads.attributes, depth)
            else:
                self._walk(read, depth + 1)

    def _module(self, module: ModuleType, names: set[str], depth: int) -> None:
        """Walk the attributes `names` of a user's module."""
        name = module.__name__
        self._put(f"module {name} {version_of(name)}")
        if not is_foreign(name) or version_of(name):
            return
        for attribute in sorted(names & vars(module).keys()):
            value = vars(module)[attribute]
            self._put(attribute)
            if isinstance(value, ModuleType):
                if id(value) not in self._met:
                    self._met[id(value)] = len(self._met), value
                    self._module(value, names, depth + 1)
            else:
                self._walk(value, depth + 1)

    def _class(self, kind: type, depth: int) -> None:
        module = kind.__module__
        self._put(f"class {version_of(module)} {module}.{kind.__qualname__}")
        if not is_foreign(module) or version_of(module) or id(kind) in self.model_names:
            return
        for base in kind.__bases__:
            self._walk(base, depth + 1)
        for name, value in sorted(vars(kind).items()):
            is_method = isinstance(value, (FunctionType, staticmethod, classmethod, property, cached_property))
            is_special = name.startswith("__") and name.endswith("__")
            is_read = name in self.names or (is_special and is_method and name not in _NOT_RUN)
            if isinstance(value, _DESCRIPTORS) or (is_special and not is_method):
                continue
            if is_read or isinstance(value, (bool, int, float)):
                self._put(name)
                self._walk(value, depth + 1)


class _Loads:
    """The names that the code of a function loads, with its nested functions."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # of globals and modules
        self.imported: set[str] = set()
        self.attributes: set[str] = set()


@cache
def _loads_of(code: CodeType) -> _Loads:
    loads = _Loads()
    for instruction in dis.get_instructions(code):
        name = str(instruction.argval)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            loads.names.add(name)
        elif instruction.opname == "IMPORT_NAME":
            loads.names.add(name)
            loads.imported.add(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            loads.attributes.add(name)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _loads_of(constant)
            loads.names |= inner.names
            loads.imported |= inner.imported
            loads.attributes |= inner.attributes
        elif isinstance(constant, str) and constant.isidentifier() and constant not in _READS:
            loads.attributes.add(constant)  # for `getattr`
    return loads


def foreign_in(value: Any, met: set[int]) -> Iterator[Any]:
    """Yield each foreign function, and each callable object of a foreign class, in what a library's object holds."""
    if id(value) in met or isinstance(value, (nn.Module, Tensor, type)):
        return
    met.add(id(value))
    if isinstance(value, MethodType):
        functions = list(foreign_in(value.__func__, met))
        yield from [value] if functions == [value.__func__] else functions  # a method is read with its object
    elif isinstance(value, partial):
        functions = [x for part in (value.func, *value.args, *value.keywords.values()) for x in foreign_in(part, met)]
        module = getattr(value.func, "__module__", None) or ""
        package = "" if module.startswith("torch.utils") else module.split(".")[0]  # `checkpoint` is transformers' own
        # Libraries make partial functions of their own, which wrap a user's function or none
        is_users = package not in {"transformers", "peft", "trl_ext", *ENGINES} and (
            functions or package in _OF_OPERATIONS
        )
        yield from [value] if is_users else functions
    elif isinstance(value, FunctionType):
        if is_foreign(value.__globals__.get("__name__", "")):
            yield value
            return
        for part in (*closure_of(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield from foreign_in(part, met)
    elif isinstance(value, (list, tuple, deque)):
        for part in list(value):
            yield from foreign_in(part, met)
    elif isinstance(value, dict):
        for part in list(value.values()):
            yield from foreign_in(part, met)
    elif is_foreign(type(value).__module__):
        if callable(value):
            yield value
    elif callable(getattr(value, "__wrapped__", None)):
        yield from foreign_in(value.__wrapped__, met)


def plain_config(config: Any) -> dict[str, Any]:
    """Return what a configuration says, and the implementation of attention, which `to_dict` leaves out."""
    settings = without_origin(config.to_dict())
    settings["attention"] = config._attn_implementation
    settings["experts"] = vars(config).get("_experts_implementation")
    return settings


def without_origin(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration, and of nested ones, that can change a logit."""
    settings = ((key, value) for key, value in config.items() if key not in _NOT_IN_LOGITS)
    return {key: without_origin(value) if isinstance(value, dict) else value for key, value in settings}


def name_of(value: Any) -> str:
    """Return a name of a function or an object, for messages."""
    inner = getattr(value, "func", value) if isinstance(value, partial) else value
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def is_foreign(module: str) -> bool:
    """Whether no version in the identity says what a module of this name does."""
    return module.split(".")[0] not in VERSIONED | ENGINES


@cache
def version_of(module: str) -> str:
    """Return name and version of the installed package of a foreign module; "" if there is none, as for a script."""
    package = module.split(".")[0]
    if not package or not is_foreign(package):
        return ""
    imported = sys.modules.get(package)
    file = getattr(imported, "__file__", None) or next(iter(getattr(imported, "__path__", ())), "")
    if {"site-packages", "dist-packages"}.isdisjoint(Path(file or "").parts):
        return ""
    with suppress(PackageNotFoundError, IndexError):
        distribution = packages_distributions().get(package, [package])[0]
        return f"{package} {version(distribution)}"
    return f"{package} {getattr(imported, '__version__', '')}"


def code_hash(code: CodeType) -> str:
    """Return a hash of a function's code and constants."""
    constants = [
        code_hash(x) if isinstance(x, CodeType) else sorted(map(repr, x)) if isinstance(x, frozenset) else repr(x)
        for x in code.co_consts
    ]
    return hashlib.blake2b(repr((code.co_code, code.co_names, constants)).encode(), digest_size=16).hexdigest()


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _hides_state(kind: type) -> bool:
    """Whether objects of a class have state that their attributes do not show, or that changes by itself."""
    hidden = {"_random.Random", "_thread._local", "os._Environ"}
    names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    return bool(names & hidden) or hasattr(kind, "__next__") or inspect.isawaitable(kind)
