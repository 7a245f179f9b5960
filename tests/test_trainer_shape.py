"""A trainer is one file over one base class: limits on what a reader must open."""

import ast
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import transformers
import trl

import trl_ext
from tiny import Workshop, lora_config, preferences, prompts

PACKAGE = Path(trl_ext.__file__).parent
TRAINERS = [(trl_ext.DPOTrainer, trl.DPOTrainer), (trl_ext.GRPOTrainer, trl.GRPOTrainer)]
# Our hooks that both classes define
OWN_HOOKS = {"_in_step", "_make_plan", "_has_reference", "_entropy_has_gradient", "_on_accelerator", "_before_training"}
OWN_HOOKS |= {"_loss_bypassed", "_attach_model", "_resumed", "_flush_store", "_release_reference"}


def ours(trainer: type) -> list[type]:
    return [cls for cls in trainer.__mro__ if cls.__module__.startswith("trl_ext")]


@pytest.mark.parametrize(("trainer", "of_trl"), TRAINERS)
def test_a_trainer_is_two_classes_and_each_method_is_defined_once(trainer: type, of_trl: type):
    first, second = ours(trainer)
    twice = {name for name in vars(first).keys() & vars(second).keys() if inspect.isfunction(vars(first)[name])}
    assert twice <= OWN_HOOKS
    assert not any(hasattr(cls, name) for name in twice for cls in (of_trl, transformers.Trainer))


def test_there_are_no_mixins():
    names = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name in names if name.endswith("Mixin")]


def test_sizes():
    lines = {path.name: len(path.read_text().splitlines()) for path in (PACKAGE / "trainers").glob("*.py")}
    assert len(lines) <= 21
    assert lines.pop("base.py") <= 480  # of five trainers
    assert max(lines.values()) <= 420
    assert max(lines[f"{name}.py"] for name in ("sft", "dpo", "kto", "grpo", "rloo")) <= 250
    ignores = sum(
        path.read_text().count("type: ignore")
        for package in ("trainers", "compat")
        for path in (PACKAGE / package).glob("*.py")
    )
    assert ignores <= 15


def test_the_package_stays_small():
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) <= 133
    assert sum(len(path.read_text().splitlines()) for path in files) <= 21_700


def test_protocols_of_parts_are_small():
    for path in (PACKAGE / "trainers").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(x, ast.Name) and x.id == "Protocol" for x in node.bases
            ):
                members = [x for x in node.body if isinstance(x, ast.AnnAssign | ast.FunctionDef)]
                assert len(members) <= 10, f"{path.name} {node.name}"


class Way:
    """Records the calls within trl_ext: the classes of trainers/ and compat/ they enter, and changes of file."""

    def __init__(self) -> None:
        self.classes: set[str] = set()
        self.hops = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)) or code.co_name.startswith("<"):
            return
        package, *inner = Path(code.co_filename).relative_to(PACKAGE).parts
        owner, *member = code.co_qualname.split(".")
        if inner and package in ("trainers", "compat") and member and member[0] != "<locals>":
            self.classes.add(owner)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(PACKAGE)):
            caller = caller.f_back
        self.hops += caller is not None and caller.f_code.co_filename != code.co_filename


def of_dpo(workshop: Workshop, trainer: type, config: dict[str, Any]) -> Any:
    args = trl_ext.DPOConfig(per_device_train_batch_size=2, num_train_epochs=2, **config)  # reads the store
    return trainer(
        model=workshop.model("tied"), args=args, train_dataset=preferences(4, seed=1), peft_config=lora_config()
    )


def of_grpo(workshop: Workshop, trainer: type, config: dict[str, Any]) -> Any:
    args = trl_ext.GRPOConfig(
        **{"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "beta": 0.1},
        **{"num_iterations": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 4},
        **config,
    )
    return trainer(
        model=workshop.model("tied"),
        reward_funcs=lambda completion_ids, **_: [float(ids[0] % 7) for ids in completion_ids],
        args=args,
        train_dataset=prompts(4, seed=1),
        peft_config=lora_config(),
    )


@pytest.mark.parametrize(
    ("of_ours", "build", "step", "most_hops"),
    # Before this design: 150 and 151 changes of file, 15 and 10 classes
    [(trl_ext.DPOTrainer, of_dpo, 3, 110), (trl_ext.GRPOTrainer, of_grpo, 4, 100)],
    ids=["dpo", "grpo"],
)
def test_a_micro_batch_enters_few_classes_and_files(
    workshop: Workshop, tmp_path: Path, of_ours: type, build: Callable[..., Any], step: int, most_hops: int
):
    way, steps = Way(), iter(range(1, 100))

    class Traced(of_ours):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if next(steps) != step:
                return super().training_step(*args, **kwargs)
            before = sys.getprofile()
            sys.setprofile(way)
            try:
                return super().training_step(*args, **kwargs)
            finally:
                sys.setprofile(before)

    config = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "save_strategy": "no", "bf16": False}
    build(workshop, Traced, config).train()
    assert way.classes
    assert len(way.classes) <= 7
    assert way.hops <= most_hops
