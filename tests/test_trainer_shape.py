"""A trainer is two classes, and each method of TRL is overridden once."""

import ast
import inspect
from pathlib import Path

import pytest
import transformers
import trl

import trl_ext
from trl_ext.compat.moved import words_of

PACKAGE = Path(trl_ext.__file__).parent
TRAINERS = [(getattr(trl_ext, name), getattr(trl, name)) for name in trl_ext.__all__ if name.endswith("Trainer")]


def ours(trainer: type) -> list[type]:
    return [cls for cls in trainer.__mro__ if cls.__module__.startswith("trl_ext")]


@pytest.mark.parametrize(("trainer", "of_trl"), TRAINERS)
def test_a_trainer_is_two_classes_that_override_each_method_once(trainer: type, of_trl: type):
    first, second = ours(trainer)
    twice = {name for name in vars(first).keys() & vars(second).keys() if inspect.isfunction(vars(first)[name])}
    assert not any(hasattr(cls, name) for name in twice for cls in (of_trl, transformers.Trainer))


@pytest.mark.parametrize(("trainer", "of_trl"), TRAINERS)
def test_no_default_of_a_class_hides_a_member_of_trls(trainer: type, of_trl: type):
    """If TRL renamed such a member, ours would be read in its place: a reference of None has no KL term."""
    defaults = {
        name
        for cls in ours(trainer)
        for name, value in vars(cls).items()
        if not callable(value) and not isinstance(value, staticmethod) and not name.startswith("__")
    }
    members = {name for cls in of_trl.__mro__[:-1] for name in words_of(cls.__module__)}
    assert defaults & members <= {"_tag_names"}
    assert "_step_begins" in defaults
    assert {"args", "_metrics"} <= members


def test_there_are_no_mixins():
    names = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name in names if name.endswith("Mixin")]
