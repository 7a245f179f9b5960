"""Functions of users that run in a forward, as hooks or in place of a `forward`, and which of them only observe."""

import ast
import linecache
from collections.abc import Iterator, Set
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

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
_RETURN_NONE = {"append", "appendleft", "extend", "print", "debug", "info", "warning"}
_GIVE_NUMBERS = {"item", "numel", "tolist", "len", "int", "float", "bool", "round", "str", "repr", "id"}
_CHANGE_NOTHING = {
    *_RETURN_NONE,
    *_GIVE_NUMBERS,
    "isinstance",
    "hasattr",
    "getattr",
    "type",
    "tuple",
    "list",
    "dict",
    "set",
    "zip",
    "enumerate",
    "iter",
    "next",
    "abs",
    "sum",
    "min",
    "max",
    "any",
    "all",
    "sorted",
}
_CHANGE_A_CONTAINER = {
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
}
_CALLED_TO_TRAIN_ADAPTERS = {"requires_grad_", "retain_grad"}
_FUNCTIONS = ast.FunctionDef | ast.Lambda


def is_known(module: str | None) -> bool:
    return (module or "").split(".")[0] in _KNOWN


def functions_of_users(value: Any, class_forwards: Set[FunctionType] = frozenset()) -> Iterator[FunctionType]:
    """Yield the functions of users that a call of `value` can run, also those under wrappers of known packages.

    Args:
        class_forwards (`set[FunctionType]`): the forward of the module's class, which wrappers of known packages call.
    """
    visited: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if id(value) in visited or isinstance(value, nn.Module | type):
            continue  # the modules of the model are looked at themselves
        visited.add(id(value))
        waiting.append(getattr(value, "__dict__", {}).get("__wrapped__"))
        if isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            waiting.append(value.__func__)
        elif not isinstance(value, FunctionType):
            method = type(value).__call__
            waiting += [method] if isinstance(method, FunctionType) else []
        elif _is_of_user(value):
            if value not in class_forwards:
                yield value
        else:
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # empty until the name is bound
                    waiting.append(cell.cell_contents)


def _is_of_user(function: FunctionType) -> bool:
    # A layer from `kernels` has its file's name in the Hub's cache as package
    from_hub = any("--" in part and "kernels" in part for part in Path(function.__code__.co_filename).parts)
    return not from_hub and not is_known(function.__globals__.get("__name__"))


def describe_function(function: FunctionType) -> str:
    return f"`{function.__name__}` in {Path(function.__code__.co_filename).name}"


def only_observes(function: FunctionType) -> bool:
    """Whether a hook, by its source, returns None and changes nothing that it is given. Without source, it does not."""
    return all(x.returns_none for x in _sources_of(function.__code__)) and _changes_nothing(function)


def _changes_nothing(function: FunctionType, within: tuple[FunctionType, ...] = ()) -> bool:
    """Whether `function`, called by the functions `within`, and what it calls leave their arguments as they are."""
    sources = _sources_of(function.__code__)
    if not sources or function in within or any(x.may_change for x in sources):
        return False
    variables = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # empty until the name is bound
            variables[name] = cell.cell_contents
    helpers = [variables.get(name) for source in sources for name in source.helpers]
    return all(
        isinstance(x, type) or (isinstance(x, FunctionType) and _changes_nothing(x, (*within, function)))
        for x in helpers
    )


@cache
def _sources_of(code: CodeType) -> list["_Source"]:
    """Return what can be the source of `code`: all lambdas in its line."""
    return [
        _Source(node)
        for node in _functions_in(code.co_filename)
        if _first_line(node) == code.co_firstlineno and getattr(node, "name", "<lambda>") == code.co_name
    ]


@cache
def _functions_in(file: str) -> list[_FUNCTIONS]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]


def _first_line(node: _FUNCTIONS) -> int:
    return min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])


class _Source:
    """The source of a function.

    Attributes:
        returns_none (`bool`): whether each call returns None.
        may_change (`bool`): whether it may change an argument, or something that it has taken out of one.
        helpers (`set[str]`): names of the functions that it gives such a thing to.
    """

    def __init__(self, node: _FUNCTIONS) -> None:
        parts = list(ast.walk(node))
        returned = [node.body] if isinstance(node, ast.Lambda) else []
        returned += [x.value for x in parts if isinstance(x, ast.Return) and x.value is not None]
        outer = {name for x in parts if isinstance(x, ast.Nonlocal | ast.Global) for name in x.names}
        numbers = {id(target) for x in parts for target in _targets_of_number(x)}
        stored = (x for x in parts if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store))
        names = {x.id for x in stored if id(x) not in numbers}
        names |= {name for x in parts if isinstance(x, ast.arguments) for name in _without_default(x)}
        self._names = names - outer - {"self"}
        self.helpers: set[str] = set()
        self.returns_none = all(map(_is_none, returned))
        changes = list(map(self._may_change, parts))  # of all parts, so that no helper is left out
        self.may_change = any(changes)

    def _may_change(self, part: ast.AST) -> bool:
        if isinstance(part, ast.Yield | ast.YieldFrom | ast.Import | ast.ImportFrom):
            return True
        if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
            return part.target.id in self._names  # in place, if it is a tensor
        if isinstance(part, ast.Attribute | ast.Subscript) and not isinstance(part.ctx, ast.Load):
            return self._is_given(part)
        return isinstance(part, ast.Call) and self._call_may_change(part)

    def _call_may_change(self, call: ast.Call) -> bool:
        function = call.func
        name = _name_of(call)
        if name in _CALLED_TO_TRAIN_ADAPTERS:
            return False
        if name.endswith("_") or name in ("setattr", "delattr", "exec", "eval"):  # in place, or `__setitem__`
            return True
        if any(x.arg in ("out", "inplace") for x in call.keywords):
            return True
        is_method = isinstance(function, ast.Attribute)
        if is_method and name in _CHANGE_A_CONTAINER and self._is_given(function):
            return True
        if name in _CHANGE_NOTHING or (is_method and _root(function) == "torch"):
            return False
        if not any(map(self._is_given, (*call.args, *(x.value for x in call.keywords)))):
            return False
        if is_method:
            return True
        self.helpers.add(name)
        return False

    def _is_given(self, value: ast.AST) -> bool:
        """Whether `value` is, or holds, something that the hook is given."""
        if isinstance(value, ast.Tuple | ast.List | ast.Set | ast.Dict):
            return any(map(self._is_given, value.values if isinstance(value, ast.Dict) else value.elts))
        return _root(value) in self._names


def _root(value: ast.AST) -> str | None:
    while isinstance(value, ast.Attribute | ast.Subscript | ast.Starred):
        value = value.value
    return value.id if isinstance(value, ast.Name) else None


def _targets_of_number(part: ast.AST) -> list[ast.expr]:
    """Return what an assignment binds, if it binds a number and not something that the hook is given."""
    if isinstance(part, ast.AugAssign):
        return [part.target]
    if not isinstance(part, ast.Assign):
        return []
    value = part.value
    is_number = isinstance(value, ast.Constant) or (isinstance(value, ast.Call) and _name_of(value) in _GIVE_NUMBERS)
    return part.targets if is_number else []


def _name_of(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _without_default(arguments: ast.arguments) -> list[str]:
    by_position = [*arguments.posonlyargs, *arguments.args]
    by_name = [x for x, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    variadic = [x for x in (arguments.vararg, arguments.kwarg) if x is not None]
    return [x.arg for x in (*by_position[: len(by_position) - len(arguments.defaults)], *by_name, *variadic)]


def _is_none(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_none(value.body) and _is_none(value.orelse)
    if isinstance(value, ast.Call):
        return _name_of(value) in _RETURN_NONE
    return isinstance(value, ast.Constant) and value.value is None
