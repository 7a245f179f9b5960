"""What a Python function consists of: its package, the values in its closure, and the code nested in it."""

from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any


def package_of(function: FunctionType) -> str:
    # Not `__module__`, which `functools.wraps` copies
    return str(function.__globals__.get("__name__", "")).partition(".")[0]


def plain_function(value: Any) -> Any:
    """Return the function of a method, class method or static method; any other value as it is.

    Only those are asked for it: a lazy module of transformers imports a file for any name, and fails where it cannot.
    """
    return value.__func__ if isinstance(value, MethodType | classmethod | staticmethod) else value


def closure_of(function: FunctionType) -> list[Any]:
    """Return the values in a function's closure."""
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # empty until the name is bound
            values.append(cell.cell_contents)
    return values


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield `code`, and the code of the functions and classes that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_codes(constant)
