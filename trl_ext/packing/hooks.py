"""Functions of users that run in a forward or backward, as hooks or in place of a `forward`."""

import sys
from collections.abc import Iterable, Iterator, MutableMapping, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from ..functions import closure_of, package_of, plain_function

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
    "lomo_optim",
}
# Packages from which files of transformers, PEFT and torch import functions
_IMPORTED = {
    *sys.stdlib_module_names,
    "PIL",
    "datasets",
    "einops",
    "filelock",
    "huggingface_hub",
    "jinja2",
    "numpy",
    "packaging",
    "pandas",
    "regex",
    "requests",
    "safetensors",
    "scipy",
    "sentencepiece",
    "sklearn",
    "sympy",
    "tokenizers",
    "torchvision",
    "tqdm",
    "triton",
    "typing_extensions",
    "yaml",
}
# Prefixes of the functions that `torch.compile` adds to each Python module whose functions it compiles
OF_COMPILER = ("__compiled_fn", "__resume_at")
_OF_LIBRARIES = ("transformers.", "peft.", "torch.nn.")  # not "transformers_modules", code of remote models
_OF_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_OF_GRADIENT = ("_backward_pre_hooks", "_backward_hooks")
_OF_MODULE = (*_OF_FORWARD, *_OF_GRADIENT)


def is_known(module: str | None) -> bool:
    return (module or "").split(".")[0] in _KNOWN


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
        function = plain_function(value)
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
    return not is_from_hub(function) and not is_known(function.__globals__.get("__name__"))


def is_replaced_in_libraries() -> bool:
    """Whether a function of a user stands in place of one in transformers, PEFT or `torch.nn`, or in their tables."""
    for name, module in list(sys.modules.items()):
        if module is not None and f"{name}.".startswith(_OF_LIBRARIES):
            for attribute, value in list(vars(module).items()):
                if attribute.startswith(OF_COMPILER):
                    values: Iterable[Any] = ()
                elif isinstance(value, type):
                    values = vars(value).values() if value.__module__ == name else ()
                elif isinstance(value, MutableMapping) and not isinstance(value, dict):  # of attention functions
                    values = value.values()
                else:
                    values = (value,)
                if any(_is_replacement(x) for x in values):
                    return True
    return False


def _is_replacement(value: Any) -> bool:
    """Whether a value in a file of a library runs code that is not of libraries."""
    function = value.fget if isinstance(value, property) else plain_function(value)
    if not isinstance(function, FunctionType | partial):
        call = type(value).__call__ if callable(value) else None
        return isinstance(call, FunctionType) and _is_replacement(call)  # an object of a user's class
    if isinstance(function, FunctionType):
        module = str(function.__globals__.get("__name__"))
        # Most functions end here. A wrapper of a library may hold a user's function
        if module.split(".")[0] in _IMPORTED or module.startswith("namedtuple_"):
            return False
        if is_known(module) and not function.__closure__ and "__wrapped__" not in vars(function):
            return False
    for x in functions_of_users(function):
        plain = plain_function(x)
        if not isinstance(plain, FunctionType) or package_of(plain) not in _IMPORTED:
            return True
    return False


def is_from_hub(function: FunctionType) -> bool:
    """Whether `function` is of a layer from `kernels`, whose package has its file's name in the Hub's cache."""
    file = function.__code__.co_filename
    # Splitting a path is slow, and each optimizer step asks about each module
    return "--" in file and any("--" in part and "kernels" in part for part in Path(file).parts)


def describe_function(function: FunctionType | MethodType) -> str:
    return f"`{function.__name__}` in {Path(function.__code__.co_filename).name}"


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of a forward of `module`, and then those of all modules."""
    return [
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *torch_module._global_forward_pre_hooks.values(),
        *torch_module._global_forward_hooks.values(),
    ]


def gradient_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that see or change a gradient of `module` or its parameters, and then those of all modules."""
    hooks = [*module._backward_pre_hooks.values(), *module._backward_hooks.values()]
    for parameter in module._parameters.values():
        if parameter is not None:
            hooks += (parameter._backward_hooks or {}).values()
            hooks += (parameter._post_accumulate_grad_hooks or {}).values()
    return [
        *hooks,
        *torch_module._global_backward_pre_hooks.values(),
        *torch_module._global_backward_hooks.values(),
    ]


def attached_functions(modules: Iterable[nn.Module]) -> list[Any]:
    """Return all hooks and replaced forwards of `modules`. Fast, because each scoring forward compares them."""
    functions: list[Any] = []
    for hooks in (
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_backward_pre_hooks,
        torch_module._global_backward_hooks,
    ):
        functions += hooks.values()
    for attributes in map(vars, modules):
        for name in _OF_MODULE:
            if attributes[name]:
                functions += attributes[name].values()
        if "forward" in attributes:
            functions.append(attributes["forward"])
        for parameter in attributes["_parameters"].values():
            if parameter is not None:
                if parameter._backward_hooks:
                    functions += parameter._backward_hooks.values()
                if parameter._post_accumulate_grad_hooks:
                    functions += parameter._post_accumulate_grad_hooks.values()
    return functions


@contextmanager
def without_hooks_of_users(model: nn.Module) -> Iterator[None]:
    """Set aside users' hooks in the `with` block, for forwards that stock TRL does not run. Engines' hooks stay."""
    registered = [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    registered += [getattr(module, name) for module in model.modules() for name in _OF_FORWARD]
    before = [(hooks, dict(hooks)) for hooks in registered if hooks]
    for hooks, all_hooks in before:
        for key, hook in all_hooks.items():
            if any(True for _ in functions_of_users(hook)):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, all_hooks in before:
            hooks.clear()
            hooks.update(all_hooks)
