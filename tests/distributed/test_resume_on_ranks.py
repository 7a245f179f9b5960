"""Resuming on several ranks: finished runs, the choice of `"auto"`, and checkpoints of another engine."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import trl_ext
from engine_runs import trainer_of
from launch import LaunchedRank, launch
from ranks import Rank, run_on_ranks
from resumable_runs import build, optimizer_steps
from tiny import Workshop
from trained_weights import trained


def made(rank: Rank, name: str, output: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    output.mkdir(parents=True, exist_ok=True)
    common = {"use_cpu": rank.engine == "ddp", "lr_scheduler_type": "constant", **changes}
    return build(name, trl_ext, os.environ["TINY_MODEL"], output, **common)


def finished(rank: Rank, name: str, lora: bool) -> tuple[int, int, bool]:
    """Resume a finished run; return its optimizer steps, its step, and whether its weights are unchanged."""
    folder = rank.folder / f"finished-{name}-{lora}"
    # GRPO's second step of six, DPO's of two: the epoch goes on
    trainer = made(rank, name, folder, max_steps=2 if name == "grpo" else 1, peft_config=lora)
    trainer.train()
    ended = trained(trainer.model)
    again = made(rank, name, folder, max_steps=trainer.args.max_steps, peft_config=lora)
    with optimizer_steps() as steps:
        again.train(resume_from_checkpoint=True)
    rank.check(again)
    resumed = trained(again.model)
    return len(steps), again.state.global_step, all(torch.equal(resumed[x], ended[x]) for x in ended)


def auto(rank: Rank, who_has: int) -> int:
    """Return the optimizer steps, of two, if only one rank's folder has the checkpoint after the first step."""
    whole = rank.folder / f"auto-{who_has}"
    first = made(rank, "dpo", whole, max_steps=1)
    first.train()
    second = made(rank, "dpo", whole if rank.index == who_has else rank.folder / f"none-{who_has}", max_steps=2)
    with optimizer_steps() as steps:
        second.train(resume_from_checkpoint="auto")
    rank.check(second)
    assert second.state.global_step == 2
    return len(steps)


CASES: dict[str, Callable[[Any], Any]] = {
    f"finished-{name}-{'lora' if lora else 'full'}": partial(finished, name=name, lora=lora)
    for name in ("dpo", "grpo")
    for lora in (False, True)
}
CASES |= {f"auto-{who_has}": partial(auto, who_has=who_has) for who_has in (0, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_finished_run_resumed_on_two_ranks_trains_nothing(
    engine: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("odd_vocab"))
    cases = [x for x in CASES if x.startswith("finished")]
    for case, of_ranks in run_on_ranks(__file__, cases, engine, tmp_path).items():
        assert of_ranks == [(0, 2 if "grpo" in case else 1, True)] * 2, case


@pytest.mark.slow
def test_the_first_rank_decides_what_auto_means_for_all(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    assert run_on_ranks(__file__, ["auto-0", "auto-1"], "ddp", tmp_path) == {"auto-0": [1, 1], "auto-1": [2, 2]}


# Engines: `RUNS` is a folder that several launches share


def run_of(rank: LaunchedRank, lora: bool, name: str) -> Any:
    """Build a trainer whose checkpoints are in a folder of this name."""
    config: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    model, split = None, rank.model_arguments()
    if lora:
        base = AutoModelForCausalLM.from_pretrained(os.environ["TINY_MODEL"], **split)
        model = PeftModel.from_pretrained(base, os.environ["TINY_ADAPTER"], is_trainable=True)
    elif split:
        config["model_init_kwargs"] = split
    return trainer_of(Path(os.environ["RUNS"]) / name, model=model, **rank.training_arguments(), **config)


def saved(rank: LaunchedRank, lora: bool) -> str:
    run_of(rank, lora, rank.engine).train()
    rank.checked = True
    return ""


def resumed(rank: LaunchedRank, lora: bool, written: str) -> str:
    """Resume from a run's first checkpoint; return the error, or "" if training continues."""
    trainer = run_of(rank, lora, written)
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-1"
    rank.checked = True
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except ValueError as error:
        assert trainer.state.global_step == 0
        return str(error)
    assert trainer.state.global_step == 2
    return ""


for lora in (False, True):
    CASES[f"saved-{lora}"] = partial(saved, lora=lora)
    CASES |= {
        f"{engine}-{lora}": partial(resumed, lora=lora, written=engine)
        for engine in ("ddp", "fsdp2", "zero2", "zero3", "tp")
    }

FSDP, NONE = "FSDP with FULL_STATE_DICT", "an engine other than FSDP and DeepSpeed"
ZERO2, ZERO3, ZERO3_ON_3 = (
    f"DeepSpeed {stage} on {processes} processes"
    for stage, processes in (("ZeRO-1 or ZeRO-2", 2), ("ZeRO-3", 2), ("ZeRO-3", 3))
)
# In order: engine, number of ranks, the engine's name in errors, and for each checkpoint the format in the error, or ""
# if it resumes
LAUNCHES: list[tuple[str, int, str, dict[str, str]]] = [
    ("ddp", 2, "DDP", {"saved": ""}),
    ("fsdp2", 2, FSDP, {"saved": "", "ddp": NONE, "fsdp2": ""}),
    ("tp", 2, "tensor parallelism", {"saved": "", "tp": "", "ddp": "", "fsdp2": FSDP}),
    ("ddp", 2, "DDP", {"fsdp2": FSDP, "ddp": "", "tp": ""}),
    ("fsdp2", 3, FSDP, {"fsdp2": ""}),
    ("zero2", 2, ZERO2, {"saved": "", "zero2": ""}),
    ("zero3", 2, ZERO3, {"saved": "", "ddp": NONE, "zero2": ZERO2, "zero3": ""}),
    ("zero3", 3, ZERO3_ON_3, {"zero3": ZERO3}),
    ("zero1", 2, ZERO2, {"zero2": ""}),
    ("ddp", 2, "DDP", {"zero3": ZERO3, "zero2": ""}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "launches"), [(False, LAUNCHES), (True, LAUNCHES[:4])], ids=["full", "lora"])
def test_a_checkpoint_of_another_engine_resumes_or_is_one_error_on_every_rank(
    lora: bool,
    launches: list[tuple[str, int, str, dict[str, str]]],
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    monkeypatch.setenv("TINY_ADAPTER", workshop.adapter("untied"))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    wrong = []
    for i, (engine, processes, runs, expected) in enumerate(launches):
        folder = tmp_path / str(i)
        folder.mkdir()
        found = launch(__file__, [f"{case}-{lora}" for case in expected], engine, folder, processes)
        for case, written in expected.items():
            error = f"was written under {written}, and {runs} cannot resume from it."
            for of_rank in found[f"{case}-{lora}"]:
                right = error in of_rank if written else of_rank == ""
                wrong += [] if right else [f"{case} under {engine} on {processes}: {of_rank}"]
        # Where training continues without it, only the first rank warns, and once
        said = (folder / "launcher.output").read_text()
        lost = {("tp", "ddp"), ("ddp", "tp"), ("ddp", "zero2")} & {(engine, case) for case in expected}
        assert said.count("has no optimizer state that can be loaded here") == len(lost)
    assert wrong == []
