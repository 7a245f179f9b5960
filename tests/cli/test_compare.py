"""`trl-ext compare` says that ours trains as TRL does, and notices where it does not."""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiers import fast_first
from trl_ext.cli.__main__ import main
from trl_ext.cli.compare import TOLERANCES, Comparison, compare, report, run_alone
from trl_ext.cli.compared import Job, RunResult, StepCost
from trl_ext.cli.demo import demo_words

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize("adapter", fast_first(("LoRA", "full"), "LoRA"))
@pytest.mark.parametrize(
    "method", fast_first(("sft", "dpo", "kto", "grpo", "rloo", "reward", "distillation"), "dpo", "grpo")
)
def test_the_demos_model_trains_as_in_trl(method: str, adapter: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["compare", method, "--steps", "2", *(() if adapter == "LoRA" else demo_words(method, lora=False))])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.endswith("\nEqual up to rounding.\n")
    tokens = next(line.split() for line in printed.splitlines() if line.startswith("tokens in a step, median"))
    assert int(tokens[-3].replace(",", "")) > int(tokens[-2].replace(",", ""))
    assert ("calls of `generate`" in printed) == (method in ("grpo", "rloo", "distillation"))
    assert max(map(len, printed.splitlines()[:-3])) <= 200


def test_a_loss_that_differs_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "trl_ext", tmp_path / "trl_ext", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "trl_ext" / "trainers" / "dpo.py"
    source = file.read_text()
    scaled = source.replace("loss = result[0] if return_outputs else result\n", "loss = 1.001 * result\n")
    assert scaled != source
    file.write_text(scaled)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "trl_ext.cli", "compare", "dpo", "--steps", "2"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,  # which Python looks through first
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "Beyond rounding: loss" in done.stdout


def test_a_run_of_trl_imports_no_trainer_of_ours(tmp_path: Path) -> None:
    result = run_alone(Job("sft", "trl", demo_words("sft"), steps=1, rows=64), tmp_path / "run")
    assert [name for name in result.modules if name.startswith("trl_ext.trainers")] == []
    ours = run_alone(Job("sft", "trl_ext", demo_words("sft"), steps=1, rows=64), tmp_path / "ours")
    assert "trl_ext.trainers.sft" in ours.modules
    assert len(result.steps) == len(result.log) == 1


def run_of(*losses: float, samples: str = "", weights: str = "same") -> RunResult:
    log = [{"loss": loss, "entropy": 2.0} for loss in losses]
    return RunResult(log=log, samples=list(samples), initial_weights=weights, change=2.0)


def compared(stock: RunResult, ours: RunResult, folder: Path, apart: float = 0.0) -> Comparison:
    for name, value in (("stock", 1.0), ("ours", 1.0 + apart)):
        torch.save({"weight": torch.full((4,), value)}, folder / name)
    return compare(stock, ours, folder / "stock", folder / "ours")


FP32 = TOLERANCES["float32"]


def test_what_is_beyond_rounding_is_named(tmp_path: Path) -> None:
    assert compared(run_of(1.0, 2.0), run_of(1.0, 2.0 + 1e-5), tmp_path).beyond(FP32) == []
    assert compared(run_of(1.0, 2.0), run_of(1.0, 2.1), tmp_path).beyond(FP32) == ["loss"]
    # A value near 0, such as GRPO's loss at each first update, is compared with 0.01
    assert compared(run_of(0.0, 1e-9), run_of(1e-8, 0.0), tmp_path).beyond(FP32) == []
    assert compared(run_of(1.0), run_of(math.nan), tmp_path).beyond(FP32) == ["loss"]
    assert compared(run_of(1.0, 2.0), run_of(1.0 + 1e-7, math.nan), tmp_path).beyond(FP32) == ["loss"]
    assert compared(run_of(math.nan), run_of(math.nan), tmp_path).beyond(FP32) == []
    # The norms of the difference and of the change are 1 and 2
    assert compared(run_of(1.0), run_of(1.0), tmp_path, apart=0.5).weights == pytest.approx(0.5)
    assert compared(run_of(1.0), run_of(1.0), tmp_path, apart=0.5).beyond(FP32) == ["weights"]
    assert compared(run_of(1.0), run_of(1.0, weights="other"), tmp_path).beyond(FP32) == ["initial weights"]
    # Nothing was trained, as with a learning rate of 0
    unchanged = replace(run_of(1.0), change=0.0)
    assert compared(unchanged, unchanged, tmp_path).beyond(FP32) == []
    assert compared(unchanged, unchanged, tmp_path, apart=0.5).beyond(FP32) == ["weights"]
    # A metric of the other sign, in a name that has "time" in it, and only in a later entry
    for entry, value in ((0, 1.0), (1, 1.0)):
        stock, ours = run_of(1.0, 2.0), run_of(1.0, 2.0)
        stock.log[entry]["rewards/sentiment/mean"] = value
        ours.log[entry]["rewards/sentiment/mean"] = -value
        assert compared(stock, ours, tmp_path).beyond(TOLERANCES["lower precision"]) == ["metrics"]


def test_the_verdict_says_how_strict_it_is_and_what_may_differ(tmp_path: Path) -> None:
    stock = run_of(1.0)
    ours = replace(run_of(2.0), drops_out=True)
    ours.log[0]["frac_reward_zero_std"] = 0.5
    for run in (stock, ours):
        run.steps = [StepCost(1.0, 10, 0.0, 0)]
    lower = TOLERANCES["lower precision"]

    def verdict(run: RunResult, tolerances: dict[str, float]) -> str:
        return "\n".join(report("grpo", {"trl": [stock], "trl_ext": [run]}, compared(stock, run, tmp_path), tolerances))

    assert "Equal up to rounding." in verdict(stock, FP32)
    assert "No gross difference." in verdict(stock, lower)
    assert "Equal" not in verdict(stock, lower)
    text = verdict(ours, FP32)
    assert "Beyond rounding: loss." in text
    assert "--lora_dropout 0" in text
    assert "--zero_advantages_of_equal_rewards false" in text


@pytest.mark.parametrize(
    ("skips_rows", "micro_batches", "names"),
    [(False, 1, []), (True, 1, ["entropy"]), (False, 2, ["entropy", "kl"])],
)
def test_means_over_other_rows_are_not_compared(
    skips_rows: bool, micro_batches: int, names: list[str], tmp_path: Path
) -> None:
    stock, ours = run_of(1.0, samples="a"), run_of(1.0, samples="a")
    ours.micro_batches = micro_batches
    ours.log[0]["skipped/rows"] = 3.0 * skips_rows
    for run, value in ((stock, 1.0), (ours, 2.0)):
        run.log[0] |= {"kl": value, "entropy": value, "reward": 1.0}
    comparison = compared(stock, ours, tmp_path)
    assert comparison.of_other_rows == names
    assert comparison.metrics.keys() == {"kl", "entropy", "reward"} - {*names}
    assert comparison.beyond(FP32) == ["metrics"] * (len(names) < 2)


def test_after_another_sample_nothing_is_compared(tmp_path: Path) -> None:
    stock, ours = run_of(1.0, 2.0, 3.0, samples="abc"), run_of(1.0, 2.0, 9.0, samples="abx")
    comparison = compared(stock, ours, tmp_path, apart=0.5)
    assert comparison.steps == 2
    assert comparison.beyond(FP32) == ["samples"]
    # One library may call `generate` more often
    assert compared(run_of(1.0, samples="a"), run_of(1.0, samples="ab"), tmp_path).beyond(FP32) == ["samples"]
    # Several equal calls in a step: weights count
    several = run_of(1.0, samples="ab")
    assert compared(several, several, tmp_path, apart=0.5).beyond(FP32) == ["weights"]


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for words, said in (
        (["--steps", "0"], "`--steps` must be 1 or more, got 0."),
        (["--num_processes", "2"], "`--num_processes` is for `accelerate launch`, which `compare` does not run."),
        (["--learnig_rate", "1"], "`--learnig_rate` is not an argument"),
        (
            ["--dataset_name", "examples/demo/data/dpo"],
            "`--model_name_or_path` (a folder, or a name on the Hub) is not",
        ),
    ):
        assert main(["compare", "dpo", *words]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl_ext.cli.demo._CLONE", tmp_path)
    assert main(["compare", "dpo"]) == 2
    assert "Run the command in a clone of trl_ext, or set both arguments." in capsys.readouterr().err
