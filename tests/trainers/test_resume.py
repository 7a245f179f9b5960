"""A run that is killed at any moment and resumed ends with bitwise the weights of an uninterrupted run."""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

import trl_ext
from process_pool import ProcessPool
from resumable_runs import build, made_up, optimizer_steps, weights
from tiny import Workshop
from token_counts import counted
from trl_ext.checkpoints.complete import is_complete

SEED = 20


@pytest.fixture(scope="module")
def process_pool() -> Iterator[ProcessPool]:
    with ProcessPool() as started:
        yield started


def same(ours: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == whole.keys() and all(torch.equal(ours[name], whole[name]) for name in whole)


class Runs:
    """Processes that train one run; `whole` is the result of an uninterrupted run."""

    def __init__(self, process_pool: ProcessPool, trainer: str, model: str, folder: Path):
        self.process_pool, self.trainer, self.model, self.folder = process_pool, trainer, model, folder
        began = time.monotonic()
        self.run("whole")
        self.seconds = time.monotonic() - began
        self.whole = load_file(folder / "whole" / "weights.safetensors")
        self.writes = int((folder / "whole" / "writes").read_text())

    def run(self, name: str, kill_after: float | None = None, kill_at_write: int = 0) -> int:
        """Start one process; return its exit status."""
        output = self.folder / name
        output.mkdir(exist_ok=True)
        pid = self.process_pool.start(
            "resumable_runs:train_to_the_end",
            self.folder / f"{name}.log",
            self.trainer,
            self.model,
            str(output),
            str(kill_at_write or ""),
        )
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, signal.SIGKILL)  # the pool has not reaped it, so no other process has its id
        status = self.process_pool.ended(pid)
        assert status in (0, -signal.SIGKILL), (self.folder / f"{name}.log").read_text()[-4000:]
        return status

    def end(self, name: str) -> None:
        """Let the run finish, and compare it with the uninterrupted one."""
        assert self.run(name) == 0
        ended = load_file(self.folder / name / "weights.safetensors")
        assert same(ended, self.whole), name


def killed_and_resumed(runs: Runs, kills: int, seed: int) -> None:
    """Kill `kills` times, in runs of five, and every other time while a checkpoint is written or deleted."""
    draw = random.Random(seed)
    inside = 0
    for first in range(0, kills, 5):
        name = f"killed-{first}"
        for kill in range(first, min(first + 5, kills)):
            if kill % 2:
                status = runs.run(name, kill_after=draw.uniform(0, runs.seconds))
            else:
                # The rest of the run writes less, so no process reaches later numbers
                status = runs.run(name, kill_at_write=draw.randint(1, max(runs.writes // 5, 2)))
                half = [x for x in (runs.folder / name).glob("checkpoint-*") if not is_complete(x)]
                inside += bool(half)
            print(runs.trainer, "seed", seed, "kill", kill, "status", status)
        runs.end(name)
    assert inside, "no kill left a checkpoint half written"


@pytest.mark.parametrize("trainer", [pytest.param("dpo", marks=pytest.mark.slow), "grpo"])
def test_two_kills_change_nothing(trainer: str, process_pool: ProcessPool, workshop: Workshop, tmp_path: Path):
    killed_and_resumed(Runs(process_pool, trainer, workshop.model("untied"), tmp_path), 2, SEED)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["dpo", "grpo"])
def test_twenty_kills_change_nothing(trainer: str, process_pool: ProcessPool, workshop: Workshop, tmp_path: Path):
    killed_and_resumed(Runs(process_pool, trainer, workshop.model("untied"), tmp_path), 20, SEED + 1)


class Run:
    """A run in this process, uninterrupted or resumed, with the prompts that it generated for.

    Args:
        resumes (`tuple[Path, int]`, *optional*): the folder of a run and the step of the checkpoint to resume from.
    """

    def __init__(
        self, name: str, library: Any, model: str, output: Path, resumes: tuple[Path, int] | None = None, **changes: Any
    ):
        self.output = output
        output.mkdir()
        if resumes is not None:
            folder, step = resumes
            shutil.copytree(folder / f"checkpoint-{step}", output / f"checkpoint-{step}")
        trainer = build(name, library, model, output, **changes)
        self.generations: list[tuple[int, list[str]]] = []  # optimizer step, prompts
        if name in ("grpo", "rloo"):
            calculate_rewards = trainer._calculate_rewards

            def recorded(inputs: Any, *rest: Any) -> Any:
                self.generations.append((trainer.state.global_step, sorted({row["prompt"] for row in inputs})))
                return calculate_rewards(inputs, *rest)

            trainer._calculate_rewards = recorded
        trainer.train(resume_from_checkpoint=resumes is not None)
        self.weights = weights(trainer)

    def after(self, step: int) -> list[tuple[int, list[str]]]:
        return [generation for generation in self.generations if generation[0] >= step]


def _whole(name: str, workshop: Workshop, folder: Path) -> Run:
    """Return a run of two epochs of six steps, which generates at steps 0, 3, 6 and 9 for three prompts each."""
    run = Run(name, trl_ext, workshop.model("untied"), folder / "whole")
    assert [step for step, _ in run.generations] == [0, 3, 6, 9]
    return run


@pytest.fixture(scope="module")
def whole(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _whole("grpo", workshop, tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def whole_rloo(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _whole("rloo", workshop, tmp_path_factory.mktemp("rloo"))


WHOLE = {"grpo": "whole", "rloo": "whole_rloo"}


# Two steps into the first cycle, and in the second epoch, which has another order
@pytest.mark.parametrize("step", [2, 7])
@pytest.mark.parametrize("name", WHOLE)
def test_a_run_resumed_within_a_cycle_continues_with_its_completions_and_prompts(
    name: str, step: int, request: pytest.FixtureRequest, workshop: Workshop, tmp_path: Path
):
    whole = request.getfixturevalue(WHOLE[name])
    resumed = Run(name, trl_ext, workshop.model("untied"), tmp_path / "ours", (whole.output, step))
    assert resumed.generations == whole.after(step)
    assert same(resumed.weights, whole.weights)


@pytest.mark.parametrize("step", [2, 6])
@pytest.mark.parametrize("name", WHOLE)
def test_a_stock_run_resumed_trains_on_other_prompts(
    name: str, step: int, request: pytest.FixtureRequest, workshop: Workshop, tmp_path: Path
):
    """Stock TRL loses its position within a generation cycle, and in a later epoch the order of the prompts."""
    whole = request.getfixturevalue(WHOLE[name])
    resumed = Run(name, trl, workshop.model("untied"), tmp_path / "stock", (whole.output, step))
    assert resumed.generations != whole.after(step)
    assert not same(resumed.weights, whole.weights)


@pytest.mark.parametrize("name", WHOLE)
def test_a_checkpoint_of_stock_trl_resumes_with_the_same_prompts_and_a_warning(
    name: str,
    request: pytest.FixtureRequest,
    workshop: Workshop,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    whole = request.getfixturevalue(WHOLE[name])
    stock = Run(name, trl, workshop.model("untied"), tmp_path / "stock", max_steps=3)
    with caplog.at_level("WARNING", logger="trl_ext"):
        resumed = Run(name, trl_ext, workshop.model("untied"), tmp_path / "ours", (stock.output, 2))
    assert "are lost: the checkpoint lacks them, for example because stock TRL wrote it" in caplog.text
    _, prompts_of_the_cycle = whole.generations[0]
    assert resumed.generations == [(2, prompts_of_the_cycle), *whole.after(3)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps_per_generation": 6, "num_iterations": 1}, "steps_per_generation was 3 and is 6; num_iterations was 2"),
        ({"steps_per_generation": 2, "num_iterations": 1}, "num_iterations was 2"),  # where TRL would generate anyway
        ({"ignore_data_skip": True}, None),  # the epoch starts again, with a generation
    ],
)
def test_an_unusable_buffer_is_dropped_with_a_warning(
    changes: dict[str, Any],
    words: str | None,
    whole: Run,
    workshop: Workshop,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level("WARNING", logger="trl_ext"):
        resumed = Run("grpo", trl_ext, workshop.model("untied"), tmp_path / "ours", (whole.output, 2), **changes)
    assert resumed.generations[0][0] == 2
    assert (words in caplog.text) if words else ("lost" not in caplog.text)


def rewards_of_few(completions: list[str], **_: Any) -> list[float]:
    """Give most groups equal rewards, so that dynamic sampling draws further prompts."""
    return [float("w7 " in text) for text in completions]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {"dynamic_sampling": True, "dynamic_sampling_max_draws": 3, "reward_funcs": rewards_of_few}),
        ("grpo", {"streaming": True, "max_steps": 6}),
        ("grpo", {"num_iterations": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 3}),
        ("rloo", {"streaming": True, "max_steps": 6}),
        ("rloo", {"num_iterations": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 3, "beta": 0.0}),
        ("rloo", {"num_iterations": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 4, "beta": 0.0}),
        ("dpo", {"streaming": True, "max_steps": 3}),
        ("dpo", {"precompute_ref_log_probs": True}),
        ("dpo", {"reference_store": "memory", "num_train_epochs": 1}),
    ],
)
def test_a_run_resumed_from_any_checkpoint_ends_with_the_same_weights(
    name: str, changes: dict[str, Any], workshop: Workshop, tmp_path: Path
):
    model = workshop.model("untied")
    alone = Run(name, trl_ext, model, tmp_path / "alone", **changes)
    steps = sorted(int(folder.name.split("-")[1]) for folder in alone.output.glob("checkpoint-*"))
    for step in steps[:-1]:
        resumed = Run(name, trl_ext, model, tmp_path / str(step), (alone.output, step), **changes)
        assert resumed.generations == alone.after(step)
        assert same(resumed.weights, alone.weights), step


@pytest.mark.parametrize("name", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_moving_reference_is_resumed_from_the_checkpoint(
    name: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Stock TRL starts again with the initial reference."""
    # GRPO runs its reference when it generates, at step 3
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    moving["max_steps"] = {"dpo": 3, "grpo": 4}[name]
    model = workshop.model("untied")
    alone = Run(name, trl_ext, model, tmp_path / "alone", **moving)
    resumed = Run(name, trl_ext, model, tmp_path / "resumed", (alone.output, 2), **moving)
    assert same(resumed.weights, alone.weights)
    assert "starts again" not in caplog.text
    (alone.output / "checkpoint-2" / "reference_weights.safetensors").unlink()
    with caplog.at_level("WARNING", logger="trl_ext"):
        resumed = Run(name, trl_ext, model, tmp_path / "without", (alone.output, 2), **moving)
    assert "checkpoint-2 has no weights of the reference, which `sync_ref_model` updates" in caplog.text
    assert not same(resumed.weights, alone.weights)


class Heard(TrainerCallback):
    """Records the events of a user's callback."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.events.append(name)
        return super().__getattribute__(name)


def resumed_at_the_end(name: str, library: Any, model: Any, folder: Path, **changes: Any) -> tuple[Any, ...]:
    """Resume a finished run from its last checkpoint; return trainer, output, optimizer steps, events and tokens."""
    trainer = build(name, library, model, folder, **changes)
    heard = Heard()
    trainer.add_callback(heard)
    with optimizer_steps() as steps, counted() as tokens:
        output = trainer.train(resume_from_checkpoint=True)
    return trainer, output, steps, heard.events, tokens


# Training ends within an epoch except in the last case; an epoch is 3 steps in DPO and 6 in GRPO
ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {"max_steps": 2}),
    "dpo, LoRA": ("dpo", {"max_steps": 2, "peft_config": True}),
    "dpo, part of an epoch": ("dpo", {"num_train_epochs": 0.5}),
    "dpo, a stream": ("dpo", {"max_steps": 2, "streaming": True}),
    "dpo, the epoch again": ("dpo", {"max_steps": 2, "ignore_data_skip": True}),
    "dpo, in the second epoch": ("dpo", {"max_steps": 4}),
    "dpo, saved at its end": ("dpo", {"max_steps": 2, "save_steps": 500}),
    "dpo, saved by epochs": ("dpo", {"max_steps": 2, "save_strategy": "epoch"}),
    "dpo, whole epochs": ("dpo", {"num_train_epochs": 1}),
    # Completions are left that were not scored with the weights that sampled them
    "grpo": ("grpo", {"max_steps": 4}),
    "grpo, LoRA": ("grpo", {"max_steps": 4, "peft_config": True}),
    "grpo, none left over": ("grpo", {"max_steps": 5}),
    "grpo, a stream": ("grpo", {"max_steps": 5, "streaming": True}),
}
FAST_ENDS = ("dpo", "dpo, whole epochs", "grpo, LoRA")
NOTHING_LEFT = r"Training is already finished: \S*checkpoint-(\d) is at optimizer step \1 of \1\."


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] * (x not in FAST_ENDS)) for x in ENDS])
def test_a_finished_run_resumed_trains_nothing(
    case: str, workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    name, changes = ENDS[case]
    model = workshop.model("untied")
    changes = {"lr_scheduler_type": "constant", **changes}
    trainer = build(name, trl_ext, model, tmp_path, **changes)
    ended = trainer.train()
    log = len(trainer.state.log_history)
    saved = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    caplog.clear()
    with caplog.at_level("INFO", logger="trl_ext"):
        again, output, steps, events, tokens = resumed_at_the_end(name, trl_ext, model, tmp_path, **changes)
    assert steps == tokens.with_gradient == tokens.without == []
    assert same(weights(again), weights(trainer))
    assert output.global_step == again.state.global_step == ended.global_step
    assert again.state.epoch == trainer.state.epoch
    assert output.training_loss == 0.0  # of the steps of this call, as in transformers
    assert len(again.state.log_history) == log  # the summary replaces the one that came after the checkpoint
    assert [x for x in events if x != "on_init_end"] == ["on_train_begin", "on_log", "on_train_end"]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == saved
    assert len(re.findall(NOTHING_LEFT, caplog.text)) == 1
    assert not [record for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_stock_trl_takes_one_step_too_many(name: str, workshop: Workshop, tmp_path: Path):
    changes = {"lr_scheduler_type": "constant", "max_steps": 2}
    model = workshop.model("untied")
    trainer = build(name, trl, model, tmp_path, **changes)
    trainer.train()
    again, output, steps, *_ = resumed_at_the_end(name, trl, model, tmp_path, **changes)
    assert output.global_step == 3
    assert len(steps) == 1
    assert not same(weights(again), weights(trainer))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_a_finished_run_trains_on_only_if_steps_are_added(name: str, workshop: Workshop, tmp_path: Path):
    model, constant = workshop.model("untied"), {"lr_scheduler_type": "constant"}
    trainer = build(name, trl_ext, model, tmp_path / "short", max_steps=2, **constant)
    trainer.train()
    again, output, steps, *_ = resumed_at_the_end(name, trl_ext, model, tmp_path / "short", max_steps=1, **constant)
    assert steps == []
    assert output.global_step == 2
    assert same(weights(again), weights(trainer))
    longer = [{"max_steps": 3}] if name == "grpo" else [{"max_steps": 3}, {"num_train_epochs": 2}]
    for more in longer:
        alone = build(name, trl_ext, model, tmp_path / f"alone {more}", **more, **constant)
        alone.train()
        shutil.copytree(tmp_path / "short", tmp_path / f"on {more}")
        on, output, steps, *_ = resumed_at_the_end(name, trl_ext, model, tmp_path / f"on {more}", **more, **constant)
        assert len(steps) == alone.state.global_step - 2
        assert same(weights(on), weights(alone))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "grpo"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_finished_run_resumed_ends_with_its_best_model(name: str, lora: bool, workshop: Workshop, tmp_path: Path):
    best = {
        **{"max_steps": 4, "lr_scheduler_type": "constant", "load_best_model_at_end": True, "eval_strategy": "steps"},
        **{"eval_steps": 1, "metric_for_best_model": "eval_made_up", "peft_config": lora},
    }
    trainers = []
    for resumes in (False, True):
        trainer = build(name, trl_ext, workshop.model("untied"), tmp_path, **best)
        made_up(trainer, best_step=2)
        with optimizer_steps() as steps:
            trainer.train(resume_from_checkpoint=resumes)
        trainers.append(trainer)
        assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    assert steps == []
    through, resumed = map(weights, trainers)
    assert same(resumed, through)


@pytest.mark.parametrize("best", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["resumed", "best"])
def test_experts_are_those_of_the_checkpoint(best: bool, workshop: Workshop, tmp_path: Path):
    """Experts are one tensor in the model but many in the file, and transformers' trainer uses the model's names."""
    changes: dict[str, Any] = {"max_steps": 2, "lr_scheduler_type": "constant"}
    if best:
        changes |= {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
        changes["metric_for_best_model"] = "eval_made_up"
    trainer = build("dpo", trl_ext, workshop.model("experts"), tmp_path, **changes)
    at_step_1: dict[str, torch.Tensor] = {}

    class Remembers(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                at_step_1.update(weights(trainer))

    trainer.add_callback(Remembers())
    if best:
        made_up(trainer, best_step=1)
        trainer.train()
        assert same(weights(trainer), at_step_1)
        return
    trainer.train()
    assert any("experts.gate_up_proj" in name for name in at_step_1)
    resumed = build("dpo", trl_ext, workshop.model("experts"), tmp_path, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(weights(resumed), weights(trainer))


def test_an_fp32_head_keeps_its_precision(workshop: Workshop, tmp_path: Path):
    """`from_pretrained` loads the experts of a bf16 model whose head `cast_lm_head_to_fp32` keeps in fp32."""
    changes: dict[str, Any] = {"max_steps": 2, "learning_rate": 0.3, "optim": "sgd", "cast_lm_head_to_fp32": True}
    trainers = []
    for resumes in (False, True):
        policy = AutoModelForCausalLM.from_pretrained(workshop.model("experts"), dtype=torch.bfloat16)
        trainer = build("grpo", trl_ext, policy, tmp_path, **changes)
        trainer.train(resume_from_checkpoint=resumes)
        trainers.append(trainer)
    through, resumed = map(weights, trainers)
    assert {x.dtype for x in resumed.values()} == {torch.bfloat16, torch.float32}
    assert same(resumed, through)
