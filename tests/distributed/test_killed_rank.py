"""If a rank ends in the middle of a step, the others end, and a resumed run ends with the same weights."""

import os
import re
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_ext
from launch import launch
from ranks import End, Rank, ends_of_ranks, run_on_ranks
from rewards import id_reward
from tiny import Workshop, preferences, prompts, scripted_rollout
from trained_weights import far, trained

STEPS = 4
TIMEOUT = 60  # of the process group, in seconds: more than a loaded machine needs to notice a closed connection
HANGS = 20  # for ranks that hang: a rank must reach its collective within this time


class Ends:
    """Calls a function once, between the forward and the backward of a training step."""

    def __init__(self, at_step: int, does: Any):
        self.at_step, self.does, self.trainer = at_step, does, None

    def hang_on(self, trainer: Any) -> None:
        backward = trainer.accelerator.backward

        # Not a hook on the model: a resumed run without it would have to sample its completions again
        def before(*args: Any, **kwargs: Any) -> None:
            if trainer.state.global_step == self.at_step:
                self.does()
            backward(*args, **kwargs)

        trainer.accelerator.backward = before


def raises(*_: Any) -> None:
    raise ValueError("this rank's reward is out of order")


def send_self(number: int) -> None:
    os.kill(os.getpid(), number)


def sleeps() -> None:
    time.sleep(600)


ENDS = {
    "killed": partial(send_self, signal.SIGKILL),
    "stopped": partial(send_self, signal.SIGSTOP),
    "raises": raises,
    "sleeps": sleeps,
}


def train(
    rank: Rank,
    trainer_name: str,
    ends: str | None = None,
    ending_rank: int = 1,
    resumes: bool = False,
    timeout: int = TIMEOUT,
    **config: Any,
) -> dict[str, torch.Tensor]:
    """Train four steps, saving after each; return the change of the weights. `ends` ends the rank in the third."""
    if not torch.distributed.is_initialized():
        # Transformers ignores `ddp_timeout` if ACCELERATE_USE_CPU is set
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    torch.manual_seed(0)
    common = {
        "output_dir": str(rank.folder / trainer_name),
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "steps" if ends else "no",
        "save_steps": 1,
        "save_total_limit": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "ddp_timeout": timeout,
        **config,
    }
    if trainer_name == "dpo":
        trainer = trl_ext.DPOTrainer(
            model=os.environ["TINY_MODEL"],
            args=trl_ext.DPOConfig(per_device_train_batch_size=2, gradient_accumulation_steps=2, **common),
            train_dataset=preferences(24, seed=1),
        )
    else:
        trainer = trl_ext.GRPOTrainer(
            model=os.environ["TINY_MODEL"],
            reward_funcs=id_reward,
            rollout_func=scripted_rollout,
            args=trl_ext.GRPOConfig(
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=8,
                beta=0.1,
                steps_per_generation=2,
                num_iterations=2,  # one generation for all steps, so training resumes within its cycle
                **common,
            ),
            train_dataset=prompts(2 * STEPS, seed=1),
        )
    initial = trained(trainer.model)
    if ends and rank.index == ending_rank:
        Ends(2, ENDS[ends]).hang_on(trainer)
    trainer.train(resume_from_checkpoint=resumes)
    rank.check(trainer)
    return {name: weight - initial[name] for name, weight in trained(trainer.model).items()}


CASES = {
    f"{trainer}-{name}": partial(train, trainer_name=trainer, **options)
    for trainer in ("dpo", "grpo")
    for name, options in {
        "whole": {},
        "resumed": {"resumes": True},
        "killed": {"ends": "killed"},
        "0-killed": {"ends": "killed", "ending_rank": 0},
        "raises": {"ends": "raises"},
        "stopped": {"ends": "stopped", "timeout": HANGS},
        "0-stopped": {"ends": "stopped", "ending_rank": 0, "timeout": HANGS},
        "sleeps": {"ends": "sleeps", "timeout": HANGS},
    }.items()
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "trainers"),
    [
        pytest.param("ddp", ["dpo"], id="ddp"),
        pytest.param("ddp", ["grpo"], id="ddp-grpo"),
        pytest.param("fsdp2", ["dpo", "grpo"], id="fsdp2"),
    ],
)
def test_the_others_end_and_training_resumes_to_the_same_weights(
    engine: str, trainers: list[str], workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    for trainer in trainers:
        survivor, killed = ends_of_ranks(__file__, f"{trainer}-killed", engine, tmp_path)
        assert killed.status == -signal.SIGKILL
        check_ended_by_gloo(survivor)
        assert sorted(path.name for path in (tmp_path / trainer).glob("checkpoint-*")) == ["checkpoint-2"]
    results = run_on_ranks(
        __file__, [f"{trainer}-{what}" for trainer in trainers for what in ("resumed", "whole")], engine, tmp_path
    )
    for trainer in trainers:
        resumed, whole = results[f"{trainer}-resumed"], results[f"{trainer}-whole"]
        print(engine, trainer, far(resumed[0], whole[0]), far(resumed[1], whole[1]))
        assert far(resumed[0], whole[0]) <= 1e-6


# In gloo's ring, rank 2 is between ranks 0 and 1: it notices, and rank 0 then notices that rank 2 has ended
@pytest.mark.slow
@pytest.mark.parametrize("ending_rank", [0, 1])
def test_every_survivor_of_a_killed_rank_ends(
    ending_rank: int, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    case = "grpo-killed" if ending_rank else "grpo-0-killed"
    ends = ends_of_ranks(__file__, case, "ddp", tmp_path, processes=3)
    assert ends.pop(ending_rank).status == -signal.SIGKILL
    for end in ends:
        check_ended_by_gloo(end)


@pytest.mark.slow
def test_accelerate_launch_ends_and_names_the_killed_rank(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The agent ends the other ranks when it notices, so the report may be its own or theirs."""
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank +: 1 \(local_rank: 1\)\s+exitcode +: -9") as ended:
        launch(__file__, ["dpo-killed"], "ddp", tmp_path)
    assert "The ranks hang" not in str(ended.value)
    assert time.monotonic() - began < 290


@pytest.mark.slow
def test_a_rank_raises_its_own_error_and_the_others_end(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    survivor, failed = ends_of_ranks(__file__, "grpo-raises", "ddp", tmp_path)
    assert failed.failure.rstrip().endswith("ValueError: this rank's reward is out of order")
    check_ended_by_gloo(survivor)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["stopped", "0-stopped", "sleeps"])
def test_the_others_end_after_the_timeout_if_a_rank_hangs(
    case: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    hanging = 0 if case.startswith("0") else 1
    (survivor,) = ends_of_ranks(__file__, f"dpo-{case}", "ddp", tmp_path, stopped=hanging)
    check_ended_by_gloo(survivor)


def check_ended_by_gloo(end: End) -> None:
    """Check that a rank ended with the error of a collective, in time."""
    assert end.status == 1
    assert end.seconds < TIMEOUT
    assert re.search("gloo|Application timeout caused pair closure", end.failure), end.failure
