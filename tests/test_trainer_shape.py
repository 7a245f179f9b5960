"""A trainer is one file over one base: what a reader must open, counted."""

import ast
import inspect
from pathlib import Path

import pytest
import transformers
import trl

import trl_ext

PACKAGE = Path(trl_ext.__file__).parent
TRAINERS = [(trl_ext.DPOTrainer, trl.DPOTrainer), (trl_ext.GRPOTrainer, trl.GRPOTrainer)]
# Hooks of our own that both of our classes define
OWN_HOOKS = {"_make_plan", "_has_reference", "_entropy_has_gradient", "_on_accelerator", "_before_training"}
OWN_HOOKS |= {"_loss_bypassed", "attach_model"}


def ours(trainer: type) -> list[type]:
    return [cls for cls in trainer.__mro__ if cls.__module__.startswith("trl_ext")]


@pytest.mark.parametrize(("trainer", "of_trl"), TRAINERS)
def test_a_trainer_is_two_classes_and_each_method_is_defined_once(trainer: type, of_trl: type):
    first, second = ours(trainer)
    twice = {name for name in vars(first).keys() & vars(second).keys() if inspect.isfunction(vars(first)[name])}
    assert twice <= OWN_HOOKS
    assert not any(hasattr(cls, name) for name in twice for cls in (of_trl, transformers.Trainer))


def test_no_class_is_mixed_in():
    names = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name in names if name.endswith("Mixin")]


def test_sizes():
    lines = {path.name: len(path.read_text().splitlines()) for path in (PACKAGE / "trainers").glob("*.py")}
    assert len(lines) <= 14
    assert max(lines.values()) <= 400
    assert max(lines["dpo.py"], lines["grpo.py"]) <= 250
    ignores = sum(
        path.read_text().count("type: ignore")
        for room in ("trainers", "compat")
        for path in (PACKAGE / room).glob("*.py")
    )
    assert ignores <= 15


def test_parts_ask_for_little():
    for path in (PACKAGE / "trainers").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(x, ast.Name) and x.id == "Protocol" for x in node.bases
            ):
                members = [x for x in node.body if isinstance(x, ast.AnnAssign | ast.FunctionDef)]
                assert len(members) <= 10, f"{path.name} {node.name}"
