"""Functions of users that run in a forward or backward, as hooks or in place of a `forward`."""

from collections.abc import Iterator, Set
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from ..functions import closure_of

# Packages whose hooks and replaced `forward` methods do the same in each call
_KNOWN = {
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "deepspeed",
    "trl",
    "trl_ext",
    "bitsandbytes",
    "torchao",
    "flash_attn",
    "kernels",
    "liger_kernel",
    "fla",
    "optimum",
    "gptqmodel",
    "hqq",
    "wandb",
    "builtins",
    "functools",
}


def is_known(module: str | None) -> bool:
    return (module or "").split(".")[0] in _KNOWN


def has_users_hook(model: nn.Module) -> bool:
    """Whether a forward hook of a user runs in `model`."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    hooks += torch_module._global_forward_hooks.values()
    return any(True for hook in hooks for _ in functions_of_users(hook))


def functions_of_users(
    value: Any, class_forwards: Set[FunctionType] = frozenset()
) -> Iterator[FunctionType | MethodType]:
    """Yield the functions and methods of users that a call of `value` can run, also under wrappers of known packages.

    Args:
        class_forwards (`set[FunctionType]`): the forward of the module's class, which wrappers of known packages call.
    """
    visited: dict[int, Any] = {}  # with the values, because ids of values that are gone are given again
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if id(value) in visited or isinstance(value, nn.Module | type):
            continue  # the modules of the model are looked at themselves
        visited[id(value)] = value
        waiting.append(getattr(value, "__dict__", {}).get("__wrapped__"))
        function = getattr(value, "__func__", value)
        if isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif not isinstance(function, FunctionType):
            method = type(value).__call__
            waiting += [MethodType(method, value)] if isinstance(method, FunctionType) else []
        elif _is_of_user(function):
            if function not in class_forwards:
                yield value
        else:
            waiting += closure_of(function)


def _is_of_user(function: FunctionType) -> bool:
    # A layer from `kernels` has its file's name in the Hub's cache as package
    from_hub = any("--" in part and "kernels" in part for part in Path(function.__code__.co_filename).parts)
    return not from_hub and not is_known(function.__globals__.get("__name__"))


def describe_function(function: FunctionType | MethodType) -> str:
    return f"`{function.__name__}` in {Path(function.__code__.co_filename).name}"
