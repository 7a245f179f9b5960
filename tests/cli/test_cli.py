"""The command line: what `trl-ext` trains, explains, estimates and completes, and its errors of one line."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from allocations import peak_bytes
from transformers import AutoModelForCausalLM

import rewards
from launch import launch
from memory_estimates import CASES, estimated, estimated_and_measured, parsed, run_of_case
from memory_estimates_on_ranks import ON_RANKS
from tiny import REFERENCE_SEED, Workshop, preferences, prompts
from trl_ext.cli import TrainingStoppedError
from trl_ext.cli.__main__ import main
from trl_ext.cli.commands import COMMANDS
from trl_ext.cli.doctor import is_shadowed_in
from trl_ext.cli.training import build
from trl_ext.compat.moved import Moved
from trl_ext.config import AddedDPOFields, AddedGRPOFields, DPOConfig, GRPOConfig
from trl_ext.fit import step as memory_step
from trl_ext.fit.coverage import ENGINES
from trl_ext.fit.estimate import step_of
from trl_ext.fit.search import counted_near
from trl_ext.fit.step import memory_of_step
from trl_ext.heads.tiled import columns_per_tile
from trl_ext.scoring import checks as head_check

ROOT = Path(__file__).parents[2]


@pytest.fixture
def arguments(workshop: Workshop, tmp_path: Path) -> dict[str, list[str]]:
    """Of short runs, by method."""
    pairs, only_prompts = preferences(8, seed=3), prompts(8, seed=3)
    demonstrations = pairs.rename_column("chosen", "completion").remove_columns("rejected")
    labelled = demonstrations.add_column("label", [row % 2 == 0 for row in range(8)])
    rows_of = {
        "sft": demonstrations,
        "dpo": pairs,
        "kto": labelled,
        "grpo": only_prompts,
        "rloo": only_prompts,
        "reward": pairs,
        "distillation": only_prompts,
    }
    for method, rows in rows_of.items():
        (tmp_path / method).mkdir()
        rows.to_json(tmp_path / method / "train.jsonl")
    common = [
        *("--model_name_or_path", workshop.model("tied"), "--output_dir", str(tmp_path / "out"), "--use_cpu"),
        *("--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--max_steps", "2"),
        *("--learning_rate", "0.01", "--no_dataloader_pin_memory", "--disable_tqdm", "true"),
    ]
    grpo = ["--num_generations", "2", "--max_completion_length", "4", "--reward_funcs", "rewards.id_reward"]
    samples = ["--per_device_train_batch_size", "4", *grpo]
    teacher = workshop.model("untied", seed=REFERENCE_SEED)
    distillation = ["--teacher_model_name_or_path", teacher, "--max_completion_length", "4"]
    of_method = {"grpo": samples, "rloo": samples, "distillation": distillation}
    return {
        method: ["--dataset_name", str(tmp_path / method), *common, "--per_device_train_batch_size", "2"]
        + of_method.get(method, [])
        for method in rows_of
    }


def _has_moved(folder: Path, workshop: Workshop) -> bool:
    start = AutoModelForCausalLM.from_pretrained(workshop.model("tied")).state_dict()
    trained = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return any(not weight.equal(start[name]) for name, weight in trained.items())


@pytest.mark.parametrize("method", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_what_was_explained_is_what_then_trains(
    method: str, arguments, workshop, tmp_path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
):
    config = tmp_path / "options.yaml"
    config.write_text("share_prompts: false\nbeta: 5e-1\n")  # ours, and one of TRL's, which YAML reads as text
    options = ["--config", str(config), *arguments[method]]

    assert main(["explain", method, *options]) == 0
    explained = capsys.readouterr().out
    rows = [line.split()[0] for line in explained.splitlines() if not line.startswith(" ")]
    assert {"policy" if method == "grpo" else "reference", "packing"} <= set(rows)
    assert "`share_prompts=False`" in explained
    assert not (tmp_path / "out").exists()

    with caplog.at_level("INFO", logger="trl_ext"):
        assert main([method, *options]) == 0
    assert explained in f"{caplog.messages[0]}\n"
    assert caplog.messages[-1] == f"The model is in {tmp_path / 'out'}."
    assert _has_moved(tmp_path / "out", workshop)


def test_a_run_as_stock_trl(arguments, tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture):
    options = [*arguments["sft"], "--as_trl", "--head_chunk_size", "8"]
    assert main(["explain", "sft", *options]) == 0
    explained = capsys.readouterr().out
    assert " ".join(explained.split()) == (
        "training run As stock TRL, because `as_trl` is True. These arguments have no effect: `head_chunk_size`."
    )
    assert main(["sft", *options, "--resume_from_checkpoint", "auto"]) == 0
    plan, *_, last = caplog.messages
    assert f"{plan}\n".endswith(explained)
    assert last == f"The model is in {tmp_path / 'out'}."


@pytest.mark.parametrize(
    "method",
    [
        *("sft", "rloo", "reward", "distillation"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("dpo", "kto", "grpo")),
    ],
)
def test_the_same_command_begins_and_then_resumes(
    method: str, arguments, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save = ["--save_strategy", "steps", "--save_steps", "1", "--resume_from_checkpoint", "auto"]
    options = _changed("--save_strategy")(arguments[method])
    for steps, line in (("1", "no complete checkpoint"), ("2", "checkpoint-1.")):
        caplog.clear()
        with caplog.at_level("INFO", logger="trl_ext"):
            assert main([method, *_changed("--max_steps", steps)(options), *save]) == 0
        (said,) = (x for x in caplog.messages if x.startswith('`resume_from_checkpoint="auto"`'))
        assert line in said
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


@pytest.mark.slow
def test_explaining_asks_nothing_of_the_hub(arguments):  # which is offline here, so that whatever is asked is an error
    on_hub = ["--push_to_hub", "--log_completions", "--log_completions_hub_repo", "someone/completions"]
    assert main(["explain", "grpo", *arguments["grpo"], *on_hub]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-c", "-m"])
def test_launch_arguments_start_processes(how: str, arguments, tmp_path: Path):
    launch = ["--config_file", str(ROOT / "examples/accelerate_configs/ddp.yaml"), "--num_processes", "2"]
    # The batch of one process does not divide into groups
    grpo = _changed("--num_generations", "8")(arguments["grpo"])
    command = ["explain", "grpo", *launch, *grpo] if how == "-c" else ["explain", "dpo", *launch, *arguments["dpo"]]
    code = "from trl_ext.cli.__main__ import main; raise SystemExit(main())"
    run = subprocess.run(
        [sys.executable, how, code if how == "-c" else "trl_ext.cli", *command],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("engine ") == 1
    assert "DDP, 2 processes (gloo)" in run.stdout


@pytest.mark.parametrize(
    ("in_file", "launched"),
    [
        ("cpu: true\nquiet: false\nenv:\n  LAUNCHED: 1", {"cpu": True, "quiet": None, "env": None}),
        ("multi_gpu: true\nnum_processes: 2\nmixed_precision: no", {"multi_gpu": True, "mixed_precision": "no"}),
        ("gpu_ids: [0, 1]\nfsdp_offload_params: true", {"gpu_ids": "0,1", "fsdp_offload_params": "true"}),
    ],
)
def test_launch_arguments_of_a_file_are_as_accelerate_reads_them(
    in_file: str, launched: dict[str, object], arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, given = tmp_path / "options.yaml", []
    config.write_text(in_file)
    monkeypatch.setenv("LAUNCHED", "1")  # restored afterwards: TRL's parser sets it
    monkeypatch.setattr("trl_ext.cli.launch.launch_command", given.append)
    words = ["dpo", "--config", str(config), *arguments["dpo"]]
    assert main(words) == 0
    (options,) = given
    assert {name: getattr(options, name) for name in launched} == launched
    assert (options.training_script, options.training_script_args) == ("trl_ext.cli", words)


@pytest.mark.slow
def test_variables_in_a_file_are_set_before_libraries_read_them(arguments, tmp_path: Path):
    (tmp_path / "options.yaml").write_text("env:\n  HF_HUB_DOWNLOAD_TIMEOUT: 77\n")
    (tmp_path / "says.py").write_text(
        "from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT\n"
        "from rewards import id_reward\n"
        "print('timeout', HF_HUB_DOWNLOAD_TIMEOUT)\n"
    )
    options = _changed("--reward_funcs", "says.id_reward")(arguments["grpo"])
    run = subprocess.run(
        [sys.executable, "-c", "from trl_ext.cli.__main__ import main; raise SystemExit(main())"]
        + ["explain", "grpo", "--config", "options.yaml", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "timeout 77" in run.stdout
    assert run.stdout.count("\npacking ") == 1


def _changed(option: str, *values: str) -> Callable[[list[str]], list[str]]:
    def change(options: list[str]) -> list[str]:
        at = options.index(option)
        return [*options[:at], *([option, *values] if values else []), *options[at + 2 :]]

    return change


def test_the_traceback_is_shown_to_those_who_ask(arguments):
    with pytest.raises(ValueError, match="head_chunk_size"):
        main(["dpo", *arguments["dpo"], "--head_chunk_size", "0", "--traceback"])


@pytest.mark.slow
def test_an_error_after_the_first_step_keeps_its_traceback(arguments, monkeypatch):
    calls: list[int] = []

    def once(completion_ids, **_):
        calls.append(len(completion_ids))
        return rewards.id_reward(completion_ids) if len(calls) == 1 else 1 / 0

    monkeypatch.setattr(rewards, "id_reward_once", once, raising=False)
    options = _changed("--reward_funcs", "rewards.id_reward_once")(arguments["grpo"])
    with pytest.raises(TrainingStoppedError, match="after step 1") as stopped:
        main(["grpo", *options, "--steps_per_generation", "1"])
    assert isinstance(stopped.value.__cause__, ZeroDivisionError)


FAST = {"dpo-full", "sft-shared-eager", "kto-lora", "sft-adamw_torch", "sft-adamw_8bit", "sft-4bit"}


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_what_is_estimated_is_within_a_twentieth_of_what_was_allocated(case: str, tmp_path: Path):
    expected, measured = estimated_and_measured(case, tmp_path)
    print(f"{case}: {expected} bytes estimated, {measured} measured, {expected / measured:.3f}")
    assert 0.95 <= expected / measured <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("engine", ON_RANKS)
def test_what_is_estimated_of_each_device_is_within_a_tenth_of_what_it_allocated(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]  # as pyproject.toml has it for this process
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    cases, measured = ON_RANKS[engine], {}
    # accelerate reads bf16 from the environment, of which each process has one
    for number, together in enumerate(([x for x in cases if "bf16" not in x], [x for x in cases if "bf16" in x])):
        folder = tmp_path / str(number)
        folder.mkdir()
        for case in together:
            parsed(case, folder)  # writes models and data, which both ranks read
        if together:
            measured |= launch(ROOT / "tests" / "support" / "memory_estimates_on_ranks.py", together, engine, folder)
    for case in cases:
        ratios = [estimated(case, tmp_path, engine, devices=2) / peak for peak in measured[case]]
        print(f"{engine}, {case}: estimated over measured on each rank {[round(x, 3) for x in ratios]}")
        assert all(0.9 <= ratio <= 1.1 for ratio in ratios), case


def test_on_a_gpu_adamw_counts_what_its_foreach_step_allocates(tmp_path: Path):
    memory = memory_of_step(step_of(run_of_case("sft-adamw_torch", tmp_path, device="cuda", prompt_length=0)))
    model: Any = build("sft", parsed("sft-adamw_torch", tmp_path)).model
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = memory.weights + memory.gradients + memory.optimizer
    assert 0.99 <= memory.peak / (held + peak_bytes(optimizer.step)) <= 1.01
    assert memory.peak > held + 0.9 * memory.weights


def test_the_tiles_of_a_sharded_head_are_sized_for_the_whole_vocabulary(tmp_path: Path, monkeypatch):
    asked = []

    def columns(rows: int, vocabulary: int, *args: Any, weights: int) -> int:
        asked.append((vocabulary, weights))
        return columns_per_tile(rows, vocabulary, *args, weights=weights)

    monkeypatch.setattr(memory_step, "columns_per_tile", columns)
    estimated("dpo-lora", tmp_path, "fsdp2", devices=4)
    assert {*asked} == {(2048, 2048 * 128)}


@pytest.mark.parametrize(("method", "said"), [("rloo", True), ("distillation", True), ("dpo", False)])
def test_estimate_says_that_it_counts_no_prompt(method: str, said: bool, arguments, capsys: pytest.CaptureFixture):
    for given, expected in (([], said), (["--prompt_length", "3"], False)):
        assert main(["estimate", method, *arguments[method], "--device_memory", "1", *given]) == 0
        assert ("Prompts count as 0 tokens" in capsys.readouterr().out) == expected


@pytest.mark.parametrize("square", [0.0, 0.7])
@pytest.mark.parametrize("limit", [100, 6_464, 50_000, 10_000_000])
def test_the_longest_fits_and_the_next_does_not(square: float, limit: int):
    def bytes_of(tokens: int) -> int:
        return int(37 + 100 * tokens / 64 + square * (tokens / 64) ** 2)

    count = 32_768 // 64
    for first in (-1, 0, 15, count - 1):
        peaks = counted_near(limit, lambda number: bytes_of(64 * (number + 1)), count, first)
        longest = max([64 * (number + 1) for number, peak in peaks.items() if peak <= limit], default=0)
        assert longest == max([x for x in range(0, 32_769, 64) if x == 0 or bytes_of(x) <= limit])
        assert len(peaks) <= 24


def test_estimate_says_every_part_and_what_fits(arguments, capsys: pytest.CaptureFixture):
    assert main(["estimate", "dpo", *arguments["dpo"], "--max_length", "64", "--device_memory", "0.02"]) == 0
    out = capsys.readouterr().out
    for part in ("weights", "reference", "optimizer", "gradients", "activations", "head", "peak"):
        assert re.search(rf"^{part} +[\d.]+ MiB", out, re.MULTILINE), out
    assert re.search(r"^longest +rows of [1-9]\d* tokens fit into 0.02 GiB", out, re.MULTILINE), out
    assert "float32 weights, one process on cuda" in " ".join(out.split())
    assert "It leaves out" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "buckets" not in out
    for engine, words in list(ENGINES.items())[1:]:
        several = ["--max_length", "64", "--engine", engine, "--num_devices", "4"]
        assert main(["estimate", "dpo", *arguments["dpo"], *several]) == 0
        of_four = " ".join(capsys.readouterr().out.split())
        assert f"one of 4 devices under {words}" in of_four
        assert ("buckets" in of_four) == (engine != "fsdp2")
        assert ("fp32 copies" in of_four) == (engine in ("zero1", "zero2"))


def test_estimate_checks_the_batch_of_all_devices(arguments, capsys: pytest.CaptureFixture):
    grpo = _changed("--num_generations", "8")(arguments["grpo"])
    assert main(["estimate", "grpo", *grpo, "--engine", "ddp", "--num_devices", "2"]) == 0
    assert capsys.readouterr().out.startswith("4 rows of ")


def test_estimate_takes_no_longer_rows_than_the_model_has_positions(arguments, capsys: pytest.CaptureFixture):
    assert main(["estimate", "dpo", *arguments["dpo"], "--device_memory", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 rows (2 pairs) of 512 tokens per micro-batch")
    assert "rows of 512 tokens fit into 1 GiB (the model takes no longer rows)" in out
    assert "The arguments allow rows of 1,024 tokens, but the model has 512 positions" in out


def test_doctor_says_what_is_there_and_what_is_wrong(capsys: pytest.CaptureFixture, monkeypatch):
    main(["doctor"])
    out = capsys.readouterr().out
    assert re.search(r"^trl +ok +1\.1[56]", out, re.MULTILINE)
    assert re.search(r"^engine +ok +one process", out, re.MULTILINE)
    assert re.search(r"^  head +ok +agrees with its definition: bfloat16 with a frozen weight", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80
    monkeypatch.setattr(head_check, "_VALUES", 0.0)
    assert main(["doctor"]) == 1
    assert re.search(r"^  head +WRONG +The tiled LM head differs", capsys.readouterr().out, re.MULTILINE)


def test_doctor_names_what_has_moved(capsys: pytest.CaptureFixture, monkeypatch):
    names = [
        Moved("trl.trainer.grpo_trainer", "shuffle_sequence_dict", "`trl.trainer.grpo_trainer` has no `shuffle_x`"),
        Moved("trl.trainer.dpo_trainer:DPOTrainer", "beta", "`trl.trainer.dpo_trainer.DPOTrainer` has no `beta`"),
    ]
    monkeypatch.setattr("trl_ext.compat.MOVED", names)
    assert main(["doctor"]) == 1
    out = re.sub(r"\n {5,}", " ", capsys.readouterr().out)
    assert re.search(r"^  trl +ok +`trl\.trainer\.grpo_trainer` has no `shuffle_x`\. Off: balance\.", out, re.MULTILINE)
    assert re.search(r"^  trl +WRONG +`.*` has no `beta`\. Trainers that need it do not work\.", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("trl_version", "words", "status"),
    [
        (None, "ok     trl_ext's trainers need TRL.", 0),
        ("1.9.0", "WRONG  found 1.9.0. Run `pip install 'trl<2,>=1.15'`", 1),
    ],
)
def test_doctor_runs_where_the_trainers_do_not(trl_version: str | None, words: str, status: int):
    code = f"""
import sys
from importlib import metadata

plain = metadata.version

def version(name):
    if name != "trl":
        return plain(name)
    if {trl_version!r} is None:
        raise metadata.PackageNotFoundError(name)
    return {trl_version!r}

metadata.version = version
sys.modules["trl"] = None  # an import of it fails
from trl_ext.cli.__main__ import main
sys.exit(main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert words in done.stdout
    assert "agrees with its definition" in done.stdout
    assert done.returncode == status


def test_doctor_sees_a_folder_that_is_imported_in_place_of_the_package(tmp_path: Path, monkeypatch, capsys):
    """As after an editable install, whose finder comes after Python's path."""
    (tmp_path / "trl_ext" / "trl_ext").mkdir(parents=True)
    assert not is_shadowed_in(tmp_path)  # the package is on the path
    monkeypatch.setattr(sys, "path", [x for x in sys.path if not Path(x, "trl_ext", "__init__.py").exists()])
    assert is_shadowed_in(tmp_path)
    assert not is_shadowed_in(tmp_path / "trl_ext" / "trl_ext")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 1
    assert re.search(
        r"^this folder +WRONG +Scripts here would import the folder", capsys.readouterr().out, re.MULTILINE
    )


@pytest.mark.parametrize(
    "command",
    [["--help"], *([x, "--help"] for x in COMMANDS), ["estimate", "dpo", "--help"], ["plan", "dpo", "--help"]],
)
def test_help_of_every_command_fits_80_columns(command: list[str], monkeypatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("COLUMNS", "80")
    try:
        status = main(command)
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: trl-ext")
    assert [line for line in out.splitlines() if len(line.rstrip()) > 80] == []
    if command == ["--help"]:
        assert all(f"    {name}" in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("command", "added", "stocks"),
    [
        (["dpo"], (AddedDPOFields, DPOConfig), trl.DPOConfig),
        (["grpo"], (AddedGRPOFields, GRPOConfig), trl.GRPOConfig),
        (["estimate", "dpo"], (AddedDPOFields, DPOConfig), trl.DPOConfig),
    ],
)
def test_the_added_fields_have_a_group_of_their_own_in_help(
    command: list[str], added: tuple[type, type], stocks: type, capsys: pytest.CaptureFixture
):
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    before, group = capsys.readouterr().out.split("\noptions:\n")[0].split("\ntrl_ext options:\n")
    assert "--num_processes" in before
    assert "--traceback" in before
    shown = set(re.findall(r"^  --(\w+)", group, re.MULTILINE))
    names = {x.name for x in fields(added[0])}
    assert shown - {f"no_{name}" for name in names} == names
    assert names >= {x.name for x in fields(added[1])} - {x.name for x in fields(stocks)}


BLOCK = re.compile(r"```bash\n((?:trl-ext .*\n(?: .*\n)*)+)```\n(?:\n```\n((?:.*\n)*?)```)?")


def _documented() -> list[tuple[str, str]]:
    """Each command of the docs and the README, and the output that stands under it, where one does."""
    found = []
    for name in ("docs/command-line.md", "README.md"):
        for commands, output in BLOCK.findall((ROOT / name).read_text()):
            found += [(command, output) for command in commands.replace("\\\n", " ").splitlines()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("command", "output"), _documented())
def test_what_is_documented_runs_and_prints_that(
    command: str, output: str, tmp_path, monkeypatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(ROOT)
    model, data = (ROOT / "examples/demo" / x for x in ("model", "data/dpo"))
    demo = (ROOT / "examples/demo/dpo.yaml").read_text().replace("max_steps: 40", "max_steps: 1")
    options = f"{demo}model_name_or_path: {model}\ndataset_name: {data}\nuse_cpu: true\noutput_dir: {tmp_path}/out\n"
    (tmp_path / "options.yaml").write_text(options)
    replaced = {
        "options.yaml": tmp_path / "options.yaml",
        "runs/command-line": tmp_path / "out",
        "runs/dpo": tmp_path / "dpo",
        "runs/grpo": tmp_path / "grpo",
        "Qwen/Qwen2-0.5B-Instruct": model,
        "trl-lib/ultrafeedback_binarized": data,
        "runs/qwen2": f"{tmp_path}/out --use_cpu --max_steps 1",
    }
    for written, given in replaced.items():
        command = command.replace(written, str(given))
    words = shlex.split(command, comments=True)
    assert main(words[1:]) == 0
    printed = capsys.readouterr().out
    assert not output or printed.startswith(output), printed
