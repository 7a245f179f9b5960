"""`plan`: what it chooses fits when trained, what it calls unfit does not, and its file trains."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memory_estimates import saved_model
from plan_cases import CASES, ON_GPU, ON_RANKS, line_of, measured, measured_on_gpu, measured_on_ranks, planned
from tiny import Workshop, preferences, prompts
from trl_ext.cli.__main__ import main
from trl_ext.cli.plan import MARGIN, PlanArguments
from trl_ext.cli.plan_lengths import lengths_of
from trl_ext.cli.predictions import parse_for_prediction, run_of
from trl_ext.fit.lengths import Lengths
from trl_ext.fit.options import Option, Setting, Space
from trl_ext.fit.planner import Planner
from trl_ext.fit.search import Counted, Ranked, ranked, search, varied
from trl_ext.fit.speed import CPU, GPUS, gpu_named

ROOT = Path(__file__).parents[2]
FAST = {"sft-full-narrow"}


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_the_choice_fits_when_trained_and_what_was_called_unfit_does_not(case: str, tmp_path: Path):
    plan = planned(case, tmp_path)
    peak = measured(case, tmp_path, plan.planner, plan.best.option)
    print(f"{case}: bound {plan.bound}, {plan.best.option}, predicted {plan.best.peak}, measured {peak}")
    assert peak <= plan.bound
    for miss in plan.tempting:
        peak = measured(case, tmp_path, plan.planner, miss.option)
        print(f"{case}: {miss.option} called unfit, predicted {miss.peak}, measured {peak}")
        assert peak >= 0.9 * plan.bound


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the pretended GPU needs g++")
@pytest.mark.parametrize("case", ON_GPU)
def test_on_a_gpu_too_with_activations_or_the_reference_on_the_host(case: str, tmp_path: Path):
    plan = planned(case, tmp_path)
    assert plan.best.option.setting.offloads or plan.best.option.setting.hosts
    options = [plan.best, *plan.tempting]
    peak, *of_misses = measured_on_gpu(case, tmp_path, plan.planner, [x.option for x in options])
    for option, measured_peak in zip(options, (peak, *of_misses), strict=True):
        print(f"{case}: bound {plan.bound}, {option.option}, predicted {option.peak}, measured {measured_peak}")
    assert peak <= plan.bound
    assert all(x >= 0.9 * plan.bound for x in of_misses)


@pytest.mark.slow
@pytest.mark.parametrize("engine", dict.fromkeys(x.engine for x in ON_RANKS.values()))
def test_on_two_ranks_too(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]  # as pyproject.toml has it for this process
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    plans = {name: planned(name, tmp_path) for name, case in ON_RANKS.items() if case.engine == engine}
    for name, of_ranks in measured_on_ranks(plans, tmp_path).items():
        plan = plans[name]
        for option, *peaks in zip((plan.best, *plan.tempting), *of_ranks, strict=True):
            print(f"{name}: bound {plan.bound}, {option.option}, predicted {option.peak}, measured {peaks}")
            assert max(peaks) * (1 - MARGIN) <= option.peak
        assert all(best <= plan.bound for best, *_ in of_ranks), name
        assert all(max(peaks) >= 0.9 * plan.bound for peaks in zip(*(misses for _, *misses in of_ranks), strict=True))


@pytest.fixture
def words(workshop: Workshop, tmp_path: Path) -> dict[str, list[str]]:
    """The arguments of short runs, by method."""
    for method, rows in (("dpo", preferences(32, seed=3)), ("grpo", prompts(8, seed=3))):
        (tmp_path / method).mkdir()
        rows.to_json(tmp_path / method / "train.jsonl")
    common = [
        *("--model_name_or_path", workshop.model("tied"), "--output_dir", str(tmp_path / "out"), "--max_steps", "2"),
        *("--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--no_dataloader_pin_memory"),
        *("--gradient_accumulation_steps", "2", "--disable_tqdm", "true"),
    ]
    grpo = ["--num_generations", "2", "--max_completion_length", "4", "--reward_funcs", "rewards.id_reward"]
    return {
        "dpo": ["--dataset_name", str(tmp_path / "dpo"), *common, "--per_device_train_batch_size", "2"],
        "grpo": ["--dataset_name", str(tmp_path / "grpo"), *common, "--per_device_train_batch_size", "4", *grpo],
    }


def test_plan_says_what_it_read_what_fits_and_what_does_not(words, tmp_path, capsys: pytest.CaptureFixture):
    file = tmp_path / "given.yaml"
    file.write_text("beta: 0.5\nlearning_rate: 1.0e-4\n")
    given = ["--config", str(file), *words["dpo"], "--lear", "1e-3", "--device", "cpu", "--device_memory", "0.0008"]
    assert main(["plan", "dpo", *given]) == 0
    out = capsys.readouterr().out
    *lines, command = out.splitlines()  # whose path is pytest's
    assert max(map(len, lines)) <= 80
    assert re.search(r"^32 pairs read; tokens: median, 95 %, longest$", out, re.MULTILINE), out
    assert "7 % of it free" in out
    assert re.search(r"^1\. predicted peak [\d.]+ MiB, relative time 1\.00 \(fastest\)$", out, re.MULTILINE), out
    assert "Options that do not fit into" in out
    assert "predictions, not measurements" in out
    chosen = yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())
    assert chosen["beta"] == 0.5
    assert chosen["learning_rate"] == 1e-3  # the line overrides the file, also by the beginning of a name
    assert chosen["per_device_train_batch_size"] * chosen["gradient_accumulation_steps"] == 4
    assert not {"device", "device_memory", "apply", "plan_output", "lear"} & chosen.keys()
    assert command == f"trl-ext dpo --config {tmp_path / 'out' / 'plan.yaml'}"
    # The words to copy are the file's
    first = out.split("1. predicted")[1].split("\n\n")[0].split("\n", 1)[1]
    copied = shlex.split(first)
    assert [chosen[name.lstrip("-")] for name in copied if name.startswith("--max_tokens")] == [
        int(copied[i + 1]) for i, name in enumerate(copied) if name.startswith("--max_tokens")
    ]


def test_the_file_trains_as_it_is(
    words, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # restored afterwards: the run sets it
    at = tmp_path / "elsewhere" / "best.yaml"
    given = [*words["dpo"], "--device", "cpu", "--device_memory", "1", "--plan_output", str(at)]
    assert main(["plan", "dpo", *given]) == 0
    assert not (tmp_path / "out").exists()
    assert main(["dpo", "--config", str(at)]) == 0
    assert re.fullmatch(r"The (model|adapter) is in \S+(, without its base model \(\S+\))?\.", caplog.messages[-1])
    assert main(["estimate", "dpo", "--config", str(at), "--device", "cpu"]) == 0  # despite `num_processes`


@pytest.mark.slow
def test_apply_trains_at_once(words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    assert main(["plan", "grpo", *words["grpo"], "--device", "cpu", "--device_memory", "1", "--apply"]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "further", "reason"),
    [
        ("dpo", ["--loss_type", "aot"], "the loss type 'aot' sorts the pairs"),
        ("grpo", ["--loss_type", "bnpo"], "the loss `bnpo` is normalised"),
        ("grpo", ["--entropy_coef", "0.01"], "the entropy bonus is a mean"),
        ("grpo", ["--top_entropy_quantile", "0.5"], "tokens are selected within each micro-batch"),
    ],
)
def test_a_loss_of_the_micro_batch_keeps_the_batch(
    method: str, further: list[str], reason: str, words, tmp_path, capsys
):
    given = [*words[method], *further, "--device", "cpu", "--device_memory", "1"]
    assert main(["plan", method, *given]) == 0
    assert f"The batch stays as given: {reason}" in " ".join(capsys.readouterr().out.split())
    chosen = yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())
    assert chosen["per_device_train_batch_size"] == int(given[given.index("--per_device_train_batch_size") + 1])
    assert "max_tokens_per_micro_batch" not in chosen


@pytest.mark.slow
def test_several_devices_get_an_engine_and_its_launch_arguments(words, tmp_path, capsys: pytest.CaptureFixture):
    full = [*words["dpo"], "--num_devices", "4", "--gpu", "A10", "--bf16", "true"]
    assert main(["plan", "dpo", *full]) == 0
    chosen = yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())
    assert chosen["num_processes"] == 4
    assert chosen["mixed_precision"] == "bf16"
    assert chosen.get("multi_gpu") or chosen.get("use_fsdp") or chosen.get("use_deepspeed")
    assert "A10, by its data sheet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "devices", "reason"),
    [
        ({}, 2, None),
        ({"dataloader_drop_last": True}, 1, "`dataloader_drop_last` drops rows"),
        ({"average_tokens_across_devices": False}, 1, None),
        ({"average_tokens_across_devices": False}, 2, "the loss depends on the tokens of each device"),
    ],
)
def test_the_batch_of_sft_stays_where_it_would_change_the_result(
    changed: dict[str, bool], devices: int, reason: str | None, tmp_path: Path
):
    parsed = parse_for_prediction(line_of("sft-full-narrow", tmp_path), PlanArguments, "")
    for name, value in changed.items():
        setattr(parsed.training, name, value)
    run = run_of("sft", parsed, device="cpu", devices=devices)
    kept = Planner(run, CPU, partial(lengths_of, "sft", parsed)).kept_because
    assert (reason is None and kept is None) or (reason is not None and reason in str(kept))


def test_variables_of_the_file_stay(words, tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "given.yaml"
    file.write_text("env:\n  FOO: 1\n")
    options = ["--config", str(file), *words["dpo"], "--num_devices", "2", "--device", "cpu", "--device_memory", "1"]
    assert main(["plan", "dpo", *options]) == 0
    assert yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())["env"] == {
        "FOO": 1,
        "ACCELERATE_USE_CPU": "true",
    }
    assert "\nSet `ACCELERATE_USE_CPU=true` in the environment.\n" in capsys.readouterr().out


def test_what_contradicts_an_option_is_to_be_left_out(words, tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "given.yaml"
    file.write_text("generation_batch_size: 8\nactivation_offloading: true\nreference_device: cpu\nbeta: 0.1\n")
    options = ["--config", str(file), *words["grpo"], "--device", "cpu", "--device_memory", "1"]
    assert main(["plan", "grpo", *options]) == 0
    assert "Leave out `generation_batch_size` and `reference_device`, which you passed." in capsys.readouterr().out
    chosen = yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())
    assert chosen["activation_offloading"] is False
    assert not {"generation_batch_size", "reference_device"} & chosen.keys()


def test_host_memory_is_printed(words, capsys: pytest.CaptureFixture):
    assert main(["plan", "dpo", *words["dpo"], "--device_memory", "0.0007"]) == 0
    assert re.search(
        r"^\d\. predicted peak \d+\.\d MiB and \d+\.\d MiB of host memory, relative", capsys.readouterr().out, re.M
    )


@pytest.mark.slow
def test_as_many_processes_on_a_cpu_run_from_the_file_as_were_planned(
    words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # restored afterwards: TRL's parser sets it
    # The default file of `accelerate config`
    (tmp_path / "accelerate").mkdir()
    default = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}
    (tmp_path / "accelerate" / "default_config.yaml").write_text(yaml.safe_dump(default))

    def processes(file: Path) -> str:
        run = subprocess.run(
            [sys.executable, "-m", "trl_ext.cli", "explain", "dpo", "--config", str(file)],
            env={
                **os.environ,
                **{"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "HF_HOME": str(tmp_path)},
                **{"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""},
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr[-4000:]
        return run.stdout

    file, bound = tmp_path / "out" / "plan.yaml", ["--device", "cpu", "--device_memory", "1"]
    assert main(["plan", "dpo", *words["dpo"], "--num_devices", "2", *bound]) == 0
    assert "DDP, 2 processes (gloo)" in processes(file)
    # Plan again
    assert main(["plan", "dpo", "--config", str(file), *bound, "--num_devices", "2"]) == 0
    assert "DDP, 2 processes (gloo)" in processes(file)
    file.unlink()
    assert main(["plan", "dpo", *words["dpo"], *bound]) == 0
    chosen = yaml.safe_load(file.read_text())
    assert chosen.pop("num_processes") == 1
    assert not {"multi_gpu", "mixed_precision"} & chosen.keys()
    assert "processes" not in processes(file)
    file.write_text(yaml.safe_dump(chosen))
    assert "DDP, 2 processes (gloo)" in processes(file)


def test_without_a_gpu_or_a_bound_there_is_one_error(words, capsys: pytest.CaptureFixture, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["plan", "dpo", *words["dpo"]]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("trl-ext plan: error: `--device_memory` is not set, and there is no GPU to read it from.")
    assert "RTX-4090" in said


@pytest.mark.slow
def test_if_nothing_fits_the_error_names_the_smallest_peak_and_what_is_left(words, capsys: pytest.CaptureFixture):
    assert main(["plan", "dpo", *words["dpo"], "--device", "cpu", "--device_memory", "0.0001"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"Nothing fits into 0\.1 MiB.*: weights, gradients and optimizer states alone need", said), said
    assert "Train an adapter with `--use_peft`, or use a smaller model." in said
    assert "`--num_devices`" not in said  # under DDP, a device needs as much
    assert main(["plan", "dpo", *words["dpo"], "--device_memory", "0.0001"]) == 2
    assert "or pass more devices with `--num_devices`." in capsys.readouterr().err
    adapter = ["--use_peft", "--lora_target_modules", "all-linear", "--device", "cpu", "--device_memory", "0.0002"]
    assert main(["plan", "dpo", *words["dpo"], *adapter]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"Nothing fits into 0\.2 MiB.*: the smallest predicted peak is [\d.]+ MiB \(", said), said
    assert "`--max_length`" in said


def test_engines_that_are_not_covered_are_named(words, capsys: pytest.CaptureFixture):
    assert main(["plan", "dpo", *words["dpo"], "--gpu", "A10", "--num_devices", "2", "--optim", "adafactor"]) == 0
    out = capsys.readouterr().out
    assert "\n`plan` does not cover these engines with `--optim adafactor`: FSDP2, ZeRO-1,\nZeRO-2.\n" in out
    assert "do not fit into" not in out


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_gpus_are_known_by_the_name_that_the_driver_gives(name: str, known: str | None):
    assert gpu_named(name) is (known and GPUS[known])


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "grpo", "rloo", "reward", "distillation"])
def test_lengths_are_those_of_the_rows_that_train(method: str, tmp_path: Path):
    name = next(x for x, case in CASES.items() if case.method == method)
    line = line_of(name, tmp_path)
    parsed = parse_for_prediction(line, PlanArguments, "")
    prompts_U, completions_UC = lengths_of(method, parsed, saved_model(CASES[name].model, tmp_path))
    # Words are tokens; the end of a completion is one more. Two rows to score may begin with the same word by chance
    assert prompts_U.min() == 4
    assert 32 <= prompts_U.max() <= 32 + (method == "reward")
    if method in ("grpo", "rloo", "distillation"):
        assert completions_UC.shape == (64, 0)
        return
    assert completions_UC.shape == (64, 2 if method in ("dpo", "reward") else 1)
    is_scored = method == "reward"  # the last token, too
    assert (prompts_U[:, None] + completions_UC).max() == 160 + is_scored
    # Longer rows are truncated
    parsed.training.max_length = 100
    prompts_U, completions_UC = lengths_of(method, parsed, saved_model(CASES[name].model, tmp_path))
    if method == "reward":  # or left out
        assert len(prompts_U) < 64
        assert (prompts_U[:, None] + completions_UC).max() <= 100 + is_scored
        return
    assert (prompts_U[:, None] + completions_UC).max() == 100


# The search

LENGTHS = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=40)


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    group = draw(st.sampled_from((1, 1, 4)))
    completions = 1 if group > 1 else draw(st.integers(1, 2))
    rows = np.array(draw(LENGTHS))
    accumulation, batch = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    lengths = Lengths(
        *(rows[:, 0], rows[:, 1 : 1 + completions]),
        group=group,
        shares=draw(st.booleans()),
        kept_together=draw(st.booleans()),
    )
    engines = draw(st.sampled_from((("one_process",), ("ddp", "fsdp2"))))
    precompute, on_host = draw(st.sampled_from(((False,), (False, True)))), draw(st.booleans())
    settings = [Setting(x, y, z) for x in engines for y in (False, True) for z in precompute]
    settings += [replace(x, offloads=True, hosts=True) for x in settings] if on_host else []
    given = Option(setting=settings[0], batch=batch, accumulation=accumulation)
    if group > 1:
        given = replace(given, generation=draw(st.integers(1, 6)) * accumulation)
    changes = draw(st.sampled_from(("batch", "budget", "neither")))
    return Space(
        most_rows=1024,
        given_option=given,
        lengths=lengths,
        settings=tuple(settings),
        changes_batch=changes == "batch",
        changes_budget=changes == "budget",
        joined_batches=accumulation if changes == "budget" else 1,
    )


def peak_by_tokens(space: Space):
    def peak_of(option: Option) -> int:
        tokens = space.largest_tokens(option)
        of_token = (10 if option.setting.checkpointing else 40) / (1 + option.setting.offloads)
        return 1000 + int(tokens * of_token) - 200 * option.setting.precompute

    return peak_of


def seconds_by_settings(option: Option) -> float:
    setting = option.setting
    slower = 0.3 * setting.checkpointing + 0.2 * (setting.engine == "fsdp2") + 0.1 * (setting.offloads + setting.hosts)
    return (1 + slower) * (1 + 0.2 * option.accumulation)


def _of_budgets() -> Space:
    """A search that counts the smallest and the largest budget that fit, and none between them."""
    setting = Setting("one_process", checkpointing=False)
    return Space(
        most_rows=1024,
        given_option=Option(setting=setting, batch=4, accumulation=1, generation=1),
        lengths=Lengths(np.array([171]), np.array([[5]]), group=4, shares=True, kept_together=False),
        settings=(setting, replace(setting, checkpointing=True)),
        changes_batch=False,
        changes_budget=True,
        joined_batches=1,
    )


def _of_groups() -> Space:
    """Groups of unequal length, of which a larger micro-batch has parts."""
    setting = Setting("one_process", checkpointing=False)
    return Space(
        most_rows=1024,
        given_option=Option(setting=setting, batch=4, accumulation=3, generation=3),
        lengths=Lengths(np.array([1, 1]), np.array([[1], [4]]), group=4, shares=False, kept_together=False),
        settings=(setting,),
        changes_batch=True,
        changes_budget=False,
        joined_batches=1,
    )


def _of_parts_of_groups() -> Space:
    """A batch of 6 has parts of three groups, and so more tokens than a batch of 8, which has two whole ones."""
    space = _of_groups()
    lengths = Lengths(np.full(3, 100), np.full((3, 1), 2), group=4, shares=True, kept_together=True)
    return replace(space, given_option=replace(space.given_option, accumulation=6, generation=6), lengths=lengths)


@settings(deadline=None)
@example(_of_budgets(), 2834)
@example(_of_groups(), 0)
@example(_of_parts_of_groups(), 10_000)
@given(spaces(), st.integers(0, 200_000))
def test_a_search_keeps_what_is_given_and_finds_the_largest_that_fits(space: Space, bound: int):
    lengths, peak_of, ladders = space.lengths, peak_by_tokens(space), [*space.ladders()]
    found = search(ladders, peak_of, space.largest_tokens, bound, seconds_of=seconds_by_settings)
    fits, misses = found.fits, found.misses
    least_time = min((seconds_by_settings(x.option) for x in fits), default=math.inf)
    assert all(x.peak <= bound for x in fits)
    assert all(x.peak > bound for x in misses)
    counted = {x.option for x in (*fits, *misses)}
    given_option = space.given_option
    fit_whole = [x[0].setting for x in ladders if peak_of(x[-1]) <= bound]
    for ladder in ladders:
        setting = ladder[0].setting
        if any(x != setting and setting.only_slows(x) for x in fit_whole):
            assert not {*ladder} & counted
            continue
        if not {*ladder} & counted:
            # Another engine, or more in host memory, and no faster
            assert setting.engine == "fsdp2" or setting.offloads
            assert min(map(seconds_by_settings, ladder)) >= 0.9 * least_time
            continue
        sizes = [space.largest_tokens(x) for x in ladder]
        assert sizes == sorted(sizes)
        largest = max((i for i, x in enumerate(ladder) if peak_of(x) <= bound), default=-1)
        assert {*ladder[max(0, largest) : largest + 2]} <= counted
        for option in ladder:
            rows = option.batch * option.accumulation
            assert rows == given_option.batch * given_option.accumulation
            assert (option.generation or 0) * option.batch == (given_option.generation or 0) * given_option.batch
            assert option.batch == given_option.batch or space.changes_batch
            assert option.budget is None or space.changes_budget
            assert option.budget is None or option.budget >= lengths.tokens_of(lengths.most(1))
            assert option.setting in space.settings
    best = ranked(fits, lambda x: float(x.accumulation), given_option)
    times = [round(x.time, 2) for x in best]
    assert times == sorted(times)
    shown = varied(best, 3)
    assert len(shown) >= min(
        3,
        sum(peak_of(x) <= bound for ladder in ladders if {*ladder} & counted for x in ladder if not x.setting.offloads),
    )
    assert shown[:1] == best[:1]


def test_a_plain_engine_comes_first_unless_another_one_is_much_faster():
    def ladders(share: float) -> tuple[list[list[Option]], Callable[[Option], float]]:
        options = [Option(setting=Setting(x, False), batch=1, accumulation=1) for x in ("ddp", "fsdp2")]
        return [[x] for x in options], lambda option: share if option.setting.engine == "fsdp2" else 1.0

    for share, engines in ((1.0, ["ddp"]), (0.95, ["ddp"]), (0.8, ["fsdp2", "ddp"])):
        options, seconds_of = ladders(share)
        fits = search(options, lambda _: 1, lambda _: 1, 2, seconds_of=seconds_of).fits
        best = ranked(fits, seconds_of, options[1][0])
        assert [x.candidate.option.setting.engine for x in best] == engines
    # Of equal times, whatever the peaks
    fits = [Counted(ladder[0], 2 - number) for number, ladder in enumerate(ladders(1.0)[0])]
    assert ranked(fits, lambda _: 1.0, fits[1].option)[0].candidate.option.setting.engine == "ddp"


@pytest.mark.parametrize("is_known", [False, True])
def test_weights_and_states_beyond_the_bound_need_no_count(is_known: bool):
    ladder = [Option(setting=Setting("ddp", False), batch=x, accumulation=4 // x) for x in (1, 2, 4)]
    counts: list[Option] = []

    def peak_of(option: Option) -> int:
        counts.append(option)
        return 100

    def floor_of(option: Option) -> int:
        return 90 * (is_known or bool(counts))

    found = search([ladder], peak_of, lambda x: x.batch, 50, seconds_of=lambda _: 1.0, floor_of=floor_of)
    assert counts == ([] if is_known else [ladder[-1]])
    assert not found.fits
    assert [x.is_least for x in found.misses] == [is_known]


def test_further_options_save_memory_over_faster_ones():
    def option(time: float, peak: int, checkpointing: bool, offloads: bool = False) -> Ranked:
        setting = Setting("one_process", checkpointing, offloads=offloads)
        return Ranked(Counted(Option(setting=setting, batch=peak, accumulation=1), peak), time)

    fastest, saves, useless = option(1.0, 40, False), option(1.2, 10, False), option(1.3, 40, True)
    offloads, smallest = option(1.4, 9, True, offloads=True), option(1.5, 9, True)
    best = [fastest, saves, useless, offloads, smallest]
    assert varied(best, 1) == [fastest]
    assert varied(best, 3) == [fastest, offloads, smallest]
    assert varied(best, 4) == [fastest, saves, offloads, smallest]
    assert varied(best, 9) == best


@settings(deadline=None)
@given(spaces(), st.integers(1, 20))
def test_more_units_have_no_fewer_tokens(space: Space, units: int):
    lengths = space.lengths
    small, large = (lengths.most(x) for x in (units, units + 1))
    assert len(small) == units * lengths.completions_UC.shape[1]
    assert lengths.tokens_of(lengths.most(1)) == lengths.units_U.max()
    if lengths.group == 1:
        assert lengths.tokens_of(small) <= lengths.tokens_of(large)


@settings(deadline=None)
@given(spaces())
def test_a_budget_is_kept_by_the_rows_that_it_stands_for(space: Space):
    for ladder in replace(space, changes_batch=False, changes_budget=True).ladders():
        for option in ladder:
            if option.budget is not None:
                assert space.largest_tokens(option) <= option.budget
            assert space.work(option, 1, 0.0).passes >= 1


def test_of_equal_times_the_option_nearest_to_the_arguments_is_first():
    given_option = Option(setting=Setting("ddp", checkpointing=True), batch=4, accumulation=2)
    other = replace(given_option, batch=8, accumulation=1)
    best = ranked([Counted(other, 1), Counted(given_option, 2)], lambda _: 1.0, given_option)
    assert best[0].candidate.option == given_option


def test_the_table_of_gpus_is_in_the_units_of_torch():
    assert {"A10", "L4", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "MI300X"} < GPUS.keys()
    for gpu in GPUS.values():
        assert 20 * 2**30 < gpu.memory < 200 * 2**30
        assert 50e12 < gpu.flops < 3e15
        assert gpu.link < gpu.bandwidth < 1e13
    assert torch.cuda is not None
