"""What may read or change TRL's micro-batches: overridden methods, callbacks and other code of the user."""

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from ..functions import closure_of, nested_codes, package_of
from .overrides import LIBRARIES, LOSS, STEP, overrides

# The names through which code that gets no micro-batch reaches one
_SOURCES = frozenset({"_buffered_inputs", "_prepare_inputs", "_generate_and_score_completions"})

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_MOST_ITEMS = 100  # of a container; more are data


def batch_reader(trainer: Any) -> str | None:
    """Return what may read or change a micro-batch, as the end of a sentence on the trainer; `None` without any."""
    method = overrides(trainer, *STEP, *LOSS)
    if method is not None:
        return f"overrides `{method}`, which may read or change a micro-batch"
    for callback in trainer.callback_handler.callbacks:
        if _reads(callback):
            return f"has the callback `{type(callback).__name__}`, which reads generation batches"
    for name, value in (x for cls in type(trainer).__mro__ for x in vars(cls).items()):
        if _reads(value):
            return f"has the method `{name}`, which reads generation batches"
    for name, value in vars(trainer).items():
        if isinstance(value, _FUNCTIONS) and _reads(value):
            return f"has `{name}`, which reads generation batches"
    for name in ("rollout_func", "reward_funcs", "data_collator", "compute_metrics"):
        if _reads(getattr(trainer, name, None)):
            return f"has `{name}`, which reads generation batches"
    if any(_Search(package="").finds(hook) for hook in _hooks(trainer)):  # not the hooks of engines
        return "has a hook that reads generation batches"
    return None


def _hooks(trainer: Any) -> Iterator[Any]:
    """Yield the hooks of the model's modules and of the optimizer."""
    for module in trainer._look_at_policy(_modules_of):
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            if hooks:
                yield from hooks.values()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate's wraps it
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        yield from getattr(optimizer, name, {}).values()


def _modules_of(model: Any) -> list[Any]:
    return list(model.modules())


def _reads(value: Any) -> bool:
    """Return whether code of the user in `value`, or a helper that it calls, names one of `_SOURCES`."""
    package = (type(value) if not isinstance(value, types.FunctionType | type) else value).__module__ or ""
    return _Search(package.partition(".")[0]).finds(value)


class _Search:
    """A search through functions, and through the objects and helpers that they hold or name.

    Args:
        package (`str`): the package of the first object, which is searched even if it is installed; empty if not.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self._seen_values: dict[int, Any] = {}  # with the object, so that its id is not given to another

    def finds(self, value: Any) -> bool:
        # Plain data first: a reward function may hold much of it, and each micro-batch asks
        if isinstance(value, None | str | bytes | int | float | types.ModuleType) or id(value) in self._seen_values:
            return False
        self._seen_values[id(value)] = value
        if isinstance(value, list | tuple | set | frozenset | dict):
            items = list(value.values() if isinstance(value, dict) else value)
            return any(self.finds(x) for x in items[:_MOST_ITEMS])
        if isinstance(value, types.FunctionType):
            if self._is_librarys(package_of(value), value.__globals__.get("__file__")):
                return False
            words = _words(value.__code__)
            reached_values = [*closure_of(value), *(value.__globals__.get(x) for x in words)]
            return not words.isdisjoint(_SOURCES) or any(self.finds(x) for x in reached_values)
        if isinstance(value, types.MethodType | functools.partial | staticmethod | classmethod | property):
            parts = ("__func__", "__self__", "func", "args", "keywords", "fget")
            return any(self.finds(getattr(value, x, None)) for x in parts)
        cls = value if isinstance(value, type) else type(value)
        if self._is_librarys(cls.__module__.partition(".")[0], _file_of(cls.__module__)):
            return False
        members = [x for base in cls.__mro__ if base is not object for x in vars(base).values()]
        return any(self.finds(x) for x in (getattr(value, "__dict__", None), *members))

    def _is_librarys(self, package: str, file: str | None) -> bool:
        if package in LIBRARIES or package in sys.stdlib_module_names:
            return True
        is_installed = any(x in (file or "") for x in ("site-packages", "dist-packages"))
        return is_installed and package != self.package


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def _words(code: types.CodeType) -> frozenset[str]:
    """Return the names and strings in a function's code, and in that of the functions defined in it."""
    names = (name for inner in nested_codes(code) for name in (*inner.co_names, *inner.co_consts))
    return frozenset(name for name in names if isinstance(name, str))
