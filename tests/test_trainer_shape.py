"""A trainer is two classes, and each method of TRL is overridden once."""

import ast
import inspect
from pathlib import Path

import pytest
import transformers
import trl

import trl_ext

PACKAGE = Path(trl_ext.__file__).parent
TRAINERS = [(getattr(trl_ext, name), getattr(trl, name)) for name in trl_ext.__all__ if name.endswith("Trainer")]


def ours(trainer: type) -> list[type]:
    return [cls for cls in trainer.__mro__ if cls.__module__.startswith("trl_ext")]


@pytest.mark.parametrize(("trainer", "of_trl"), TRAINERS)
def test_a_trainer_is_two_classes_that_override_each_method_once(trainer: type, of_trl: type):
    first, second = ours(trainer)
    twice = {name for name in vars(first).keys() & vars(second).keys() if inspect.isfunction(vars(first)[name])}
    assert not any(hasattr(cls, name) for name in twice for cls in (of_trl, transformers.Trainer))


def test_there_are_no_mixins():
    names = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name in names if name.endswith("Mixin")]
