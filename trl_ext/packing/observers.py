"""Which hooks only observe: by their source, each statement reads, prints, counts, or stores a number or detached copy.

What has another shape than those listed here may change what it is given. The hook then costs savings, not results.
"""

import ast
import builtins
import collections
import dataclasses
import inspect
import linecache
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..functions import plain_function
from .hooks import is_known

# What an expression is, in ascending order; a variable is the highest of all that is bound to it.
# `_DETACHED` may share memory with what the hook is given, so it may be stored, and not written to
_NONE, _NUMBER, _DETACHED, _GIVEN = range(4)

_OWN_CONTAINERS = (list, dict, set, collections.deque)
_NUMBERS = int | float | complex | str | bytes | torch.dtype | torch.device | None
_GIVE_NUMBERS = {
    "item",
    "numel",
    "nelement",
    "tolist",
    "size",
    "dim",
    "element_size",
    "data_ptr",
    "stride",
    "get_device",
    "is_floating_point",
    "is_contiguous",
    "format",
    "join",
    "startswith",
    "endswith",
}
_ATTRIBUTES_OF_NUMBERS = {
    "shape",
    "ndim",
    "dtype",
    "device",
    "requires_grad",
    "training",
    "is_cuda",
    "__name__",
}
# Functions of torch, and methods of tensors and dicts, that write to nothing
_ONLY_READ = {
    *_GIVE_NUMBERS,
    "detach",
    "clone",
    "cpu",
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "numpy",
    "contiguous",
    "abs",
    "all",
    "any",
    "amax",
    "amin",
    "argmax",
    "argmin",
    "max",
    "mean",
    "median",
    "min",
    "norm",
    "quantile",
    "std",
    "sum",
    "topk",
    "var",
    "vector_norm",
    "pow",
    "sqrt",
    "square",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "exp",
    "flatten",
    "reshape",
    "squeeze",
    "unsqueeze",
    "transpose",
    "unbind",
    "view",
    "cat",
    "stack",
    "equal",
    "allclose",
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_tensor",
    "no_grad",
    "memory_allocated",
    "max_memory_allocated",
    "get",
    "items",
    "keys",
    "values",
    "copy",
}
_BUILTINS_OF_NUMBERS = {
    "len",
    "int",
    "float",
    "bool",
    "round",
    "str",
    "repr",
    "id",
    "isinstance",
    "hasattr",
    "range",
}
_BUILTINS = {
    *_BUILTINS_OF_NUMBERS,
    "print",
    "type",
    "tuple",
    "list",
    "dict",
    "set",
    "zip",
    "enumerate",
    "reversed",
    "abs",
    "sum",
    "min",
    "max",
    "any",
    "all",
    "sorted",
    "getattr",
}
_ADD_ENTRIES = {"append", "appendleft", "add", "extend"}
_LOG = {"debug", "info", "warning", "error"}
_UNKNOWN: Any = object()


def only_observes(hook: FunctionType | MethodType) -> bool:
    """Whether a hook, by its source, returns None and changes nothing that it is given. Without source, it does not."""
    try:
        return _kind_of_result(hook, (), is_hook=True) == _NONE
    except _MayChangeError:
        return False


class _MayChangeError(Exception):
    """A statement is not one of those that only observe."""


def _kind_of_result(function: FunctionType | MethodType, callers: tuple[Any, ...], *, is_hook: bool = False) -> int:
    """Return what `function`, called by the functions `callers`, returns: the highest of its sources."""
    plain = plain_function(function)
    sources = _sources_of(plain.__code__)
    if not sources or plain in callers:
        raise _MayChangeError
    return max(_Reader(node, function, (*callers, plain), is_hook=is_hook).kind_of_result() for node in sources)


@cache
def _sources_of(code: CodeType) -> list[ast.FunctionDef | ast.Lambda]:
    """Return what can be the source of `code`: all lambdas in its line."""
    return [
        node
        for node in _functions_in(code.co_filename)
        if _first_line(node) == code.co_firstlineno and getattr(node, "name", "<lambda>") == code.co_name
    ]


@cache
def _functions_in(file: str) -> list[ast.FunctionDef | ast.Lambda]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]


def _first_line(node: ast.FunctionDef | ast.Lambda) -> int:
    return min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))])


class _Reader:
    """Reads the source of a function. It raises `_MayChangeError` at what is not known to observe only."""

    def __init__(
        self, node: ast.FunctionDef | ast.Lambda, function: FunctionType | MethodType, callers: Any, *, is_hook: bool
    ) -> None:
        plain: Any = plain_function(function)
        self._node = node
        self._callers = callers
        # Values of the variables that are not the function's own
        self._values = {**vars(builtins), **plain.__globals__}
        for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
            with suppress(ValueError):  # empty until the name is bound
                self._values[name] = cell.cell_contents
        arguments = node.args
        parameters = [x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        parameters += [x.arg for x in (arguments.vararg, arguments.kwarg) if x is not None]
        bound_values: dict[str, Any] = {}
        if isinstance(function, MethodType) and parameters:
            bound_values[parameters[0]] = function.__self__
        if is_hook:  # called without the parameters that have a default
            defaults = plain.__defaults__ or ()
            names = [x.arg for x in (*arguments.posonlyargs, *arguments.args)]
            bound_values |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
            bound_values |= plain.__kwdefaults__ or {}
            bound_values = {name: x for name, x in bound_values.items() if x is not None}
        self._values |= bound_values
        # Variables of the function -> what they are
        self._kinds = {name: _GIVEN for name in parameters if name not in bound_values}
        parts = list(ast.walk(node))
        self._outer = {name for x in parts if isinstance(x, ast.Nonlocal | ast.Global) for name in x.names}
        stored_names = {x.id for x in parts if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)} - self._outer
        self._kinds = dict.fromkeys(stored_names, _NONE) | self._kinds
        # Names, attributes and containers outside of the function -> the highest kind that it stores there
        self._stored_kinds: dict[str, int] = {}
        self._result = _NONE

    def kind_of_result(self) -> int:
        """Read until the kinds of all variables are known: each round can only raise them."""
        before = None
        while before != (self._kinds, self._stored_kinds):
            before = dict(self._kinds), dict(self._stored_kinds)
            if isinstance(self._node, ast.Lambda):
                self._result = self._kind(self._node.body)
            else:
                self._statements(self._node.body)
        return self._result

    # 1. Statements

    def _statements(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Global() | ast.Nonlocal() | ast.Raise(exc=None):
                pass
            case ast.Expr(value=value):
                self._kind(value)
            case ast.Raise(exc=ast.Name() | ast.Call(func=ast.Name()) as error):
                raised = self._value(error.func if isinstance(error, ast.Call) else error)
                if not (isinstance(raised, type) and raised.__module__ == "builtins"):
                    raise _MayChangeError
            case ast.Return(value=value):
                self._result = max(self._result, _NONE if value is None else self._kind(value))
            case ast.If(test=test) | ast.While(test=test):
                self._kind(test)
                self._statements([*statement.body, *statement.orelse])
            case ast.For():
                self._store(statement.target, self._kind(statement.iter))
                self._statements([*statement.body, *statement.orelse])
            case ast.With():
                for item in statement.items:
                    self._kind(item.context_expr)
                    if item.optional_vars is not None:
                        raise _MayChangeError
                self._statements(statement.body)
            case ast.Assert():
                self._kind(statement.test)
            case ast.Assign():
                for target in statement.targets:
                    self._assign(target, statement.value)
            case ast.AnnAssign(value=ast.expr() as value):
                self._assign(statement.target, value)
            case ast.AugAssign():
                self._augment(statement.target, self._kind(statement.value))
            case _:
                raise _MayChangeError

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for part, of_part in zip(target.elts, value.elts, strict=True):
                self._assign(part, of_part)
        else:
            self._store(target, self._kind(value))

    def _store(self, target: ast.expr, kind: int) -> None:
        match target:
            case ast.Name(id=name) if name not in self._outer:
                self._kinds[name] = max(self._kinds.get(name, _NONE), kind)
            case ast.Tuple() | ast.List():
                for part in target.elts:
                    self._store(part, kind)
            case ast.Starred(value=value):
                self._store(value, kind)
            case ast.Subscript(value=ast.Name(id=name), slice=index) if self._kinds.get(name, _GIVEN) <= _NUMBER:
                self._kind(index)
                self._kinds[name] = max(self._kinds[name], kind)
            case _:
                self._store_outside(self._place(target), kind)

    def _store_outside(self, place: str, kind: int) -> None:
        # A tensor with a gradient may become a part of the loss
        if kind > _DETACHED:
            raise _MayChangeError
        self._stored_kinds[place] = max(self._stored_kinds.get(place, _NONE), kind)

    def _place(self, target: ast.expr) -> str:
        """Return a name for a variable outside of the function, an entry of a container there, or an attribute."""
        match target:
            case ast.Name(id=name) if name in self._outer:
                return name
            case ast.Subscript(value=value, slice=index):
                self._kind(index)
                if isinstance(self._value(value), _OWN_CONTAINERS):
                    return f"{ast.unparse(value)}[]"
            case ast.Attribute(value=ast.Name() as value, attr=name):
                # Not of modules, tensors and configs, which a forward reads
                owner = self._value(value)
                if not is_known(type(owner).__module__) and not isinstance(owner, nn.Module | Tensor | type):
                    return f"{ast.unparse(value)}.{name}"
        raise _MayChangeError

    def _augment(self, target: ast.expr, kind: int) -> None:
        """Allow `+=` of numbers, and of lists to a list. That of a tensor writes to the tensor."""
        if isinstance(target, ast.Name) and target.id in self._kinds:
            if self._kinds[target.id] > _NUMBER:
                raise _MayChangeError
            self._kinds[target.id] = max(self._kinds[target.id], kind)
            return
        place = self._place(target)
        self._store_outside(place, kind)
        value = self._value(target.value if isinstance(target, ast.Subscript) else target)
        if isinstance(target, ast.Subscript):
            entries = list(value.values()) if isinstance(value, dict) else list(value)
            has_numbers = isinstance(value, collections.Counter) or getattr(value, "default_factory", 0) in (int, float)
            if not all(isinstance(x, _NUMBERS) for x in entries) or not (entries or has_numbers):
                raise _MayChangeError
        elif isinstance(value, list):
            return
        elif not isinstance(value, _NUMBERS):
            raise _MayChangeError
        if self._stored_kinds[place] > _NUMBER:
            raise _MayChangeError

    # 2. Expressions

    def _kind(self, value: ast.AST | None) -> int:
        match value:
            case None | ast.Constant(value=None):
                return _NONE
            case ast.Constant():
                return _NUMBER
            case ast.Name(id=name):
                return self._kinds[name] if name in self._kinds else self._kind_outside(value)
            case ast.Attribute():
                kind = self._kind(value.value)
                return _NUMBER if value.attr in _ATTRIBUTES_OF_NUMBERS else min(kind, self._kind_outside(value))
            case ast.Subscript():
                self._kind(value.slice)
                return self._kind(value.value)
            case ast.Compare(ops=ops):
                kind = max(map(self._kind, (value.left, *value.comparators)))
                are_bools = all(isinstance(x, ast.Is | ast.IsNot | ast.In | ast.NotIn) for x in ops)
                return _NUMBER if are_bools else max(min(kind, _DETACHED), _NUMBER)
            case ast.IfExp():
                self._kind(value.test)
                return max(self._kind(value.body), self._kind(value.orelse))
            case ast.BinOp() | ast.UnaryOp():
                return max(_NUMBER, *(self._kind(x) for x in ast.iter_child_nodes(value)))
            case ast.JoinedStr() | ast.FormattedValue():
                for part in ast.iter_child_nodes(value):
                    self._kind(part)
                return _NUMBER
            case ast.BoolOp() | ast.Slice() | ast.Starred():
                return max((self._kind(x) for x in ast.iter_child_nodes(value)), default=_NUMBER)
            case ast.operator() | ast.unaryop() | ast.boolop() | ast.expr_context():
                return _NONE
            case ast.Tuple() | ast.List() | ast.Set() | ast.Dict():
                return max((self._kind(x) for x in ast.iter_child_nodes(value)), default=_NUMBER) or _NUMBER
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for part in value.generators:
                    self._store(part.target, self._kind(part.iter))
                    for condition in part.ifs:
                        self._kind(condition)
                results = (value.key, value.value) if isinstance(value, ast.DictComp) else (value.elt,)
                return max(_NUMBER, *(self._kind(x) for x in results))
            case ast.Call():
                return self._kind_of_call(value)
            case _:
                raise _MayChangeError

    def _kind_outside(self, value: ast.expr) -> int:
        return _NUMBER if isinstance(self._value(value), _NUMBERS | type) else _GIVEN

    def _value(self, value: ast.expr) -> Any:
        """Return the value of a variable outside of the function, or of an attribute or entry of it."""
        match value:
            case ast.Name(id=name) if name not in self._kinds:
                return self._values.get(name, _UNKNOWN)
            case ast.Attribute():
                return _attribute(self._value(value.value), value.attr)
            case ast.Subscript(slice=ast.Constant() as entry):
                owner: Any = self._value(value.value)
                index: Any = entry.value
                with suppress(LookupError, TypeError):
                    return owner[index] if isinstance(owner, list | dict | tuple) else _UNKNOWN
        return _UNKNOWN

    def _kind_of_call(self, call: ast.Call) -> int:
        kinds = [self._kind(x) for x in (*call.args, *(x.value for x in call.keywords))]
        highest = max(kinds, default=_NUMBER)
        function = self._value(call.func)
        if isinstance(function, FunctionType | MethodType) and not self._is_of_torch(call.func):
            return _NONE if self._is_logger(call.func) else _kind_of_result(function, self._callers)
        if isinstance(call.func, ast.Attribute):
            return self._kind_of_method(call, call.func, highest)
        if isinstance(call.func, ast.Name) and function is getattr(builtins, call.func.id, _UNKNOWN):
            if call.func.id not in _BUILTINS:
                raise _MayChangeError
            is_number = call.func.id in _BUILTINS_OF_NUMBERS
            return _NONE if function is print else _NUMBER if is_number else max(_NUMBER, highest)
        # Such a class runs no code of a user
        if isinstance(function, type) and dataclasses.is_dataclass(function) and not hasattr(function, "__post_init__"):
            return max(_NUMBER, highest)
        raise _MayChangeError

    def _kind_of_method(self, call: ast.Call, method: ast.Attribute, highest: int) -> int:
        """Return what a method of something gives, or a function of a module, if it is known not to write."""
        name = method.attr
        owner = self._value(method.value)
        if self._is_logger(method):
            return _NONE
        if getattr(owner, "__name__", None) in ("math", "time"):
            return _NUMBER
        if isinstance(owner, _OWN_CONTAINERS) and name in _ADD_ENTRIES | {"clear"}:
            self._store_outside(f"{ast.unparse(method.value)}[]", highest)
            return _NONE
        if (
            isinstance(method.value, ast.Name)
            and name in _ADD_ENTRIES
            and self._kinds.get(method.value.id, 9) <= _NUMBER
        ):
            self._store(method.value, highest)
            return _NONE
        kind = self._kind(method.value)
        if name in ("requires_grad_", "retain_grad"):  # as done to train adapters
            return kind
        # `dropout(x, 0.1, True, True)` and `torch.mul(x, 2, out=x)` write
        is_in_place = any(x.arg in (None, "out", "inplace") for x in call.keywords)
        is_in_place |= any(isinstance(x, ast.Constant) and x.value is True for x in call.args)
        if name not in _ONLY_READ or is_in_place:
            raise _MayChangeError
        if name in _GIVE_NUMBERS:
            return _NUMBER
        if self._is_of_torch(method):
            return max(_NUMBER, highest)
        return min(max(kind, highest), _DETACHED) if name == "detach" else max(kind, highest)

    def _is_logger(self, method: ast.expr) -> bool:
        if not isinstance(method, ast.Attribute) or method.attr not in _LOG:
            return False
        of = method.value
        owner = self._value(of)
        is_made_here = isinstance(of, ast.Call) and self._value(of.func) is logging.getLogger
        return is_made_here or owner is logging or isinstance(owner, logging.Logger)

    def _is_of_torch(self, function: ast.expr) -> bool:
        while isinstance(function, ast.Attribute):
            function = function.value
        return isinstance(function, ast.Name) and self._value(function) is torch


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute, without running code of properties."""
    value = inspect.getattr_static(owner, name, _UNKNOWN)
    if isinstance(value, FunctionType) and not isinstance(owner, type | ModuleType):
        return MethodType(value, owner)
    return value
