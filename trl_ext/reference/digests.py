"""Hashes of tensors, and of values that attributes of modules hold: numbers, texts, arrays, containers, operations."""

import enum
import hashlib
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .versions import UnknownCodeError, is_foreign, module_of, name_and_version

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def digest_of_tensor(tensor: Tensor) -> str:
    """Return a hash of dtype, shape and bytes."""
    tensor = tensor.detach()
    # SHA-256 is the fastest hash on processors with instructions for it
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if hasattr(tensor, "__tensor_flatten__"):  # torchao: a tensor made of several
        inner, context = tensor.__tensor_flatten__()
        digest.update("".join([repr(context), *(digest_of_tensor(getattr(tensor, name)) for name in inner)]).encode())
    elif tensor.is_meta:
        raise ValueError(
            "The reference has a tensor on the meta device, so the store cannot identify it. Load the model's weights "
            'before you build the trainer, or set `reference_store="memory"`.'
        )
    else:
        # As bytes, because numpy lacks some dtypes
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_value(value: Any, tensor_names: dict[int, str]) -> str:
    """Return a hash of `value`, equal in each process.

    Raises `UnknownCodeError` for an object that is neither a value nor a library's.

    Args:
        tensor_names (`dict[int, str]`): the names of the model's tensors, by `id`. The identity has their contents.
    """
    return digest_of_lines(_lines_of(value, tensor_names))


def digest_of_lines(lines: Iterator[str] | list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _lines_of(value: Any, tensor_names: dict[int, str]) -> Iterator[str]:
    if type(value) in _PLAIN:
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in tensor_names:
        yield f"the model's {tensor_names[id(value)]}"
        return
    yield type(value).__name__
    if is_foreign(module_of(value)) and not isinstance(value, np.ndarray | np.generic | FunctionType | type):
        yield name_and_version(value)
    parts: list[Any] = []
    if isinstance(value, Tensor):
        if value.is_meta or isinstance(value, DTensor) or hasattr(value, "ds_status"):
            raise UnknownCodeError("a tensor in an attribute is not in the memory of this process")
        yield digest_of_tensor(value)
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape}"
        yield hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    elif isinstance(value, enum.Enum):
        yield f"{type(value).__qualname__} {value.name}"
    elif isinstance(value, dict):
        keys = sorted(value, key=repr) if all(type(key) in _PLAIN for key in value) else value
        parts = [x for key in keys for x in (key, value[key])]
    elif isinstance(value, (list, tuple)):
        parts = [*value]
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value)))
    elif isinstance(value, partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, (BuiltinFunctionType, MethodDescriptorType)):
        yield f"{getattr(value, '__module__', '')} {value.__qualname__}"
        owner = getattr(value, "__self__", None)
        parts = [] if isinstance(owner, ModuleType) else [owner]
    elif isinstance(value, FunctionType | type):
        yield f"{'class' if isinstance(value, type) else 'function'} {name_and_version(value)}"
    else:
        raise UnknownCodeError(f"trl_ext cannot tell what the object of the class `{type(value).__qualname__}` holds")
    for part in parts:
        yield from _lines_of(part, tensor_names)
