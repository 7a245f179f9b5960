"""Checks of a subclass: methods that earlier versions of TRL called, and that nothing calls now."""

import inspect
import io
import logging
import sys
import tokenize
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from ..compat.removed import REMOVED_METHODS
from ..functions import closure_of, nested_codes, package_of

logger = logging.getLogger("trl_ext")

# Packages whose functions are not the user's
_LIBRARIES = {"trl", "trl_ext", "transformers", "torch", "accelerate", "peft", "datasets"} | sys.stdlib_module_names


def check_overrides(trainer: Any, arguments: Iterable[Any]) -> None:
    """Raise `ValueError` if a method that TRL has removed is overridden, and no code of the user mentions it.

    Only warn if code of the same file, or of the script, mentions it: that code may call it.

    Args:
        arguments (`Iterable`): those of the trainer, whose functions and callbacks may call its methods.
    """
    trls = trainer._trl_trainer.__name__
    removed_methods = {name: code for name, code in methods_of_user(trainer) if name in REMOVED_METHODS[trls]}
    dead = removed_methods.keys() - _called(trainer, arguments, removed_methods)
    if dead:
        owner = type(trainer).__name__
        remedies = [f"instead of `{name}`, {REMOVED_METHODS[trls][name]}" for name in removed_methods if name in dead]
        methods = ", ".join(f"`{name}`" for name in removed_methods if name in dead)
        remedy = "; ".join(remedies)
        message = f"`{owner}` has the method {methods}, which TRL no longer calls. {remedy[0].upper()}{remedy[1:]}."
        if any(_is_mentioned_elsewhere(name, [removed_methods[x] for x in dead]) for name in dead):
            logger.warning(message)
        else:
            raise ValueError(f"{message} If your code calls it, rename it.")
    _check_batch_samples(trainer)


def _check_batch_samples(trainer: Any) -> None:
    """Raise `ValueError` if `get_batch_samples` has the meaning that it had in DPO and KTO: sampling completions."""
    try:
        inspect.signature(trainer.get_batch_samples).bind(None, 1, None)
    except TypeError:
        raise ValueError(
            f"`{type(trainer).__name__}.get_batch_samples` must take `(epoch_iterator, num_batches, device)`: "
            "transformers calls it for the batches of a step, and TRL no longer samples completions with it. Rename it."
        ) from None


def methods_of_user(trainer: Any) -> Iterator[tuple[str, list[CodeType]]]:
    """Yield name and code of the methods of `trainer` that no library has defined."""
    for attributes in (vars(trainer), *(vars(cls) for cls in type(trainer).__mro__)):
        for name, value in attributes.items():
            codes = list(code_of(value))
            if codes:
                yield name, codes


def _called(trainer: Any, arguments: Iterable[Any], removed_methods: dict[str, list[CodeType]]) -> set[str]:
    """Return the names in `removed_methods` that the user's other methods, callbacks and functions mention."""
    codes = [code for name, method in methods_of_user(trainer) if name not in removed_methods for code in method]
    for argument in arguments:
        for value in argument if isinstance(argument, list | tuple) else [argument]:
            functions = [value, *(x for cls in type(value).__mro__ for x in vars(cls).values())]
            codes += [code for function in functions for code in code_of(function)]
    called: set[str] = set()
    while codes:
        code = codes.pop()
        mentioned = {x for x in (*code.co_names, *code.co_consts) if isinstance(x, str)} & removed_methods.keys()
        codes += [further for name in mentioned - called for further in removed_methods[name]]
        called |= mentioned
    return called


def code_of(function: Any, seen_ids: set[int] | None = None) -> Iterator[CodeType]:
    """Yield the code of a function or property, of those within it and of those that it wraps; none of libraries."""
    seen_ids = set() if seen_ids is None else seen_ids
    function = getattr(function, "__func__", getattr(function, "fget", function))
    wrapped = [getattr(function, name, None) for name in ("__wrapped__", "func")]
    if isinstance(function, FunctionType) and id(function) not in seen_ids:
        seen_ids.add(id(function))
        if package_of(function) not in _LIBRARIES:
            yield from nested_codes(function.__code__)
        wrapped += closure_of(function)
    for value in wrapped:
        if isinstance(value, FunctionType) and id(value) not in seen_ids:
            yield from code_of(value, seen_ids)


def _is_mentioned_elsewhere(name: str, dead: list[list[CodeType]]) -> bool:
    """Return whether the files of `dead` methods, or the script, mention `name` outside of them, or cannot be read."""
    codes = [code for method in dead for code in method]
    files = {code.co_filename for code in codes}
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None:
        files.add(script)
    for file in files:
        lines = set()
        for code in codes:
            if code.co_filename == file:
                lines |= {line for _, _, line in code.co_lines() if line is not None} | {code.co_firstlineno}
        try:
            with tokenize.open(file) as stream:
                tokens = list(tokenize.generate_tokens(io.StringIO(stream.read()).readline))
        except (OSError, SyntaxError, tokenize.TokenError):  # such as a notebook's cell
            return True
        before = ""
        for token in tokens:
            is_name = token.type == tokenize.NAME and token.string == name
            if is_name and before != "def" and token.start[0] not in lines:
                return True
            before = token.string
    return False
