"""The command line: what `trl-ext` trains, explains, estimates and completes, and its errors of one line."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import trl
from transformers import AutoConfig, AutoModelForCausalLM

import rewards
from launch import launch
from memory_estimates import CASES, estimated, estimated_and_measured, parsed
from memory_estimates_on_ranks import ON_RANKS
from tiny import Workshop, preferences, prompts
from trl_ext.cli import TrainingStoppedError
from trl_ext.cli.__main__ import COMMANDS, main
from trl_ext.cli.estimate import longest_that_fits
from trl_ext.config import AddedDPOFields, AddedGRPOFields, DPOConfig, GRPOConfig
from trl_ext.scoring import checks as head_check

ROOT = Path(__file__).parents[2]


@pytest.fixture
def arguments(workshop: Workshop, tmp_path: Path) -> dict[str, list[str]]:
    """Of short runs, by method."""
    for method, rows in (("dpo", preferences(8, seed=3)), ("grpo", prompts(8, seed=3))):
        (tmp_path / method).mkdir()
        rows.to_json(tmp_path / method / "train.jsonl")
    common = [
        *("--model_name_or_path", workshop.model("tied"), "--output_dir", str(tmp_path / "out"), "--use_cpu"),
        *("--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--max_steps", "2"),
        *("--learning_rate", "0.01", "--no_dataloader_pin_memory", "--disable_tqdm", "true"),
    ]
    grpo = ["--num_generations", "2", "--max_completion_length", "4", "--reward_funcs", "rewards.id_reward"]
    return {
        "dpo": ["--dataset_name", str(tmp_path / "dpo"), *common, "--per_device_train_batch_size", "2"],
        "grpo": ["--dataset_name", str(tmp_path / "grpo"), *common, "--per_device_train_batch_size", "4", *grpo],
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
    assert {"engine", "policy", "reference", "packing", "head"} <= set(rows)
    assert "`share_prompts=False`" in explained
    assert not (tmp_path / "out").exists()

    with caplog.at_level("INFO", logger="trl_ext"):
        assert main([method, *options]) == 0
    assert explained in f"{caplog.messages[0]}\n"
    assert "Model saved to" in capsys.readouterr().out
    assert _has_moved(tmp_path / "out", workshop)


@pytest.mark.slow
def test_the_same_command_begins_and_then_resumes(arguments, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save = ["--save_strategy", "steps", "--save_steps", "1", "--resume_from_checkpoint", "auto"]
    options = _changed("--save_strategy")(arguments["dpo"])
    for steps, line in (("1", "no complete checkpoint"), ("2", "checkpoint-1.")):
        caplog.clear()
        with caplog.at_level("INFO", logger="trl_ext"):
            assert main(["dpo", *_changed("--max_steps", steps)(options), *save]) == 0
        (said,) = (x for x in caplog.messages if x.startswith('`resume_from_checkpoint="auto"`'))
        assert line in said
    assert (tmp_path / "out" / "checkpoint-2").is_dir()


@pytest.mark.slow
def test_explaining_asks_nothing_of_the_hub(arguments):  # which is offline here, so that whatever is asked is an error
    on_hub = ["--push_to_hub", "--log_completions", "--log_completions_hub_repo", "someone/completions"]
    assert main(["explain", "grpo", *arguments["grpo"], *on_hub]) == 0


@pytest.mark.slow
def test_launch_arguments_start_processes(arguments, tmp_path: Path):
    launch = ["--config_file", str(ROOT / "examples/accelerate_configs/ddp.yaml"), "--num_processes", "2"]
    command = ["explain", "dpo", *launch, *arguments["dpo"]]
    run = subprocess.run(
        [sys.executable, "-c", "from trl_ext.cli.__main__ import main; raise SystemExit(main())", *command],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("engine ") == 1
    assert "DDP, 2 processes (gloo)" in run.stdout


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
    assert run.stdout.count("engine ") == 1


def _lines(capsys: pytest.CaptureFixture) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Generating")]


def _changed(option: str, *values: str) -> Callable[[list[str]], list[str]]:
    def change(options: list[str]) -> list[str]:
        at = options.index(option)
        return [*options[:at], *([option, *values] if values else []), *options[at + 2 :]]

    return change


def _added(*more: str) -> Callable[[list[str]], list[str]]:
    return lambda options: [*options, *more]


MISTAKES: dict[str, tuple[list[str], Callable[[list[str]], list[str]], str]] = {
    "no such command": (["dppo"], _added(), r"`dppo` is not a command.* Did you mean `dpo`\?"),
    "no such argument": (
        ["dpo"],
        _added("--learnig_rate", "1"),
        r"`--learnig_rate` is .* Did you mean `--learning_rate`",
    ),
    "no number": (["dpo"], _added("--beta", "x"), r"argument --beta: invalid float value: 'x'.* --help"),
    "out of its range": (["dpo"], _added("--head_chunk_size", "0"), r"`head_chunk_size` must be"),
    "no such file": (["dpo"], _added("--config", "no.yaml"), r"`--config` must be .* `no.yaml`, which is not a file"),
    "no file": (["dpo"], _added("--config"), r"`--config` must be followed by a YAML file, got nothing"),
    "unknown in a file": (["dpo"], _added("--config", "{bad}"), r"`--betta` is not an argument .*`--beta`"),
    "no model": (["dpo"], _changed("--model_name_or_path"), r"`--model_name_or_path` is not set\. Give "),
    "model not there": (["dpo"], _changed("--model_name_or_path", "/no/model"), r"/no/model"),
    "no data set": (["dpo"], _changed("--dataset_name"), r"`--dataset_name` is not set\. Give "),
    "no such split": (
        ["dpo"],
        _added("--dataset_train_split", "all"),
        r"`--dataset_train_split` is `all`.* has train: ",
    ),
    "no reward": (["grpo"], _changed("--reward_funcs"), r"`--reward_funcs` is not set\. Give "),
    "no such reward": (["grpo"], _changed("--reward_funcs", "acuracy_reward"), r"Did you mean `accuracy_reward`\?"),
    "no such module": (["grpo"], _changed("--reward_funcs", "nowhere.f"), r"there is no module `nowhere` in "),
    "no such function": (["grpo"], _changed("--reward_funcs", "rewards.id_rewards"), r"Did you mean `id_reward`\?"),
    "no method": (["explain"], lambda _: [], r"`explain` is followed by `dpo` or `grpo`, got nothing"),
    "another method": (["estimate", "sft"], lambda _: [], r"`estimate` is followed by .*got `sft`"),
    "no length": (["estimate", "dpo"], _added("--max_length", "None"), r"--max_length"),
    "prompt too long": (["estimate", "dpo"], _added("--prompt_length", "1024"), r"from 0 to 1023, got 1024"),
    "optimizer": (["estimate", "dpo"], _added("--optim", "adafactor"), r"`--optim adafactor` is not covered"),
    "quantized": (["estimate", "dpo"], _added("--load_in_4bit", "true"), r"`--load_in_4bit True` is not covered"),
    "one device for an engine": (
        ["estimate", "dpo"],
        _added("--engine", "fsdp2"),
        r"`--num_devices` is 1 with `--engine fsdp2`: set `--num_devices` to 2 or more, or leave `--engine` out",
    ),
    "devices without an engine": (
        ["estimate", "dpo"],
        _added("--num_devices", "4"),
        r"`--num_devices` is 4 with `--engine one_process`: set `--num_devices` to 1, or give `--engine ddp` or",
    ),
    "no device at all": (["estimate", "dpo"], _added("--num_devices", "0"), r"`--num_devices` is 0 with"),
    "GRPO's step under FSDP2": (
        ["estimate", "grpo"],
        _added("--engine", "fsdp2", "--num_devices", "2"),
        r"`--engine fsdp2` is covered by `estimate dpo` alone",
    ),
    "an engine that was not measured": (
        ["estimate", "dpo"],
        _added("--engine", "zero3", "--num_devices", "2"),
        r"`--engine zero3` is not covered by `estimate`, .*: give one of one_process, ddp, fsdp2",
    ),
    "launch in a file": (
        ["estimate", "dpo"],
        _added("--config", "{launch}"),
        r"`--num_processes` in the file of `--config`.* `--num_devices`",
    ),
    "quantized by its config": (
        ["estimate", "dpo"],
        _changed("--model_name_or_path", "{quantized}"),
        r"quantized`, whose weights are quantized, is not covered.*: name the model",
    ),
    "another way to load": (
        ["estimate", "dpo"],
        _added("--model_init_kwargs", '{"quantization_config": {"load_in_4bit": true}}'),
        r"`--model_init_kwargs .*` is not covered",
    ),
    "another kernel": (["estimate", "dpo"], _added("--use_liger_kernel"), r"`--use_liger_kernel True` is not covered"),
    "another shell": (["completion", "ksh"], lambda _: [], r"`completion` is followed by one of bash, .*got ksh"),
    "arguments for none": (["doctor", "now"], lambda _: [], r"`doctor` takes no arguments, got `now`"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_do(
    mistake: str, arguments, workshop, tmp_path, capsys: pytest.CaptureFixture
):
    words, change, expected = MISTAKES[mistake]
    (tmp_path / "bad.yaml").write_text("betta: 0.1\n")
    (tmp_path / "launch.yaml").write_text("num_processes: 4\n")
    config = AutoConfig.from_pretrained(workshop.model("tied"))
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path / "quantized")
    given = {"{bad}": "bad.yaml", "{launch}": "launch.yaml", "{quantized}": "quantized"}
    method = next((word for word in words if word in arguments), "dpo")
    options = [str(tmp_path / given[x]) if x in given else x for x in change(arguments[method])]
    status = main([*words, *options])
    lines = _lines(capsys)
    assert status == 2
    assert len(lines) == 1, lines
    assert re.match(r"trl-ext( \w+)?: error: ", lines[0])
    assert re.search(expected, lines[0]), lines[0]


def test_a_machine_without_a_gpu_is_told_what_to_give(arguments, monkeypatch, capsys: pytest.CaptureFixture):
    options = [x for x in arguments["dpo"] if x != "--use_cpu"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["dpo", *options, "--bf16", "true"]) == 2
    assert "`--use_cpu`" in capsys.readouterr().err


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


FAST = {"dpo-full"}


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_what_is_estimated_is_within_a_tenth_of_what_was_allocated(case: str, tmp_path: Path):
    expected, measured = estimated_and_measured(case, tmp_path)
    print(f"{case}: {expected} bytes estimated, {measured} measured, {expected / measured:.3f}")
    assert 0.9 <= expected / measured <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_what_is_estimated_of_each_device_is_within_a_tenth_of_what_it_allocated(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]  # as pyproject.toml has it for this process
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    cases = [case for case in ON_RANKS if engine == "ddp" or case.startswith("dpo")]
    measured = {}
    # accelerate reads bf16 from the environment, of which each process has one
    for number, together in enumerate(([x for x in cases if "bf16" not in x], [x for x in cases if "bf16" in x])):
        folder = tmp_path / str(number)
        folder.mkdir()
        for case in together:
            parsed(case, folder)  # writes models and data, which both ranks read
        measured |= launch(ROOT / "tests" / "support" / "memory_estimates_on_ranks.py", together, engine, folder)
    for case in cases:
        ratios = [estimated(case, tmp_path, engine, devices=2) / peak for peak in measured[case]]
        print(f"{engine}, {case}: estimated over measured on each rank {[round(x, 3) for x in ratios]}")
        assert all(0.9 <= ratio <= 1.1 for ratio in ratios), case


@pytest.mark.parametrize("square", [0.0, 0.7])
@pytest.mark.parametrize("limit", [100, 6_464, 50_000, 10_000_000])
def test_the_longest_fits_and_the_next_does_not(square: float, limit: int):
    def bytes_of(tokens: int) -> int:
        return int(37 + 100 * tokens / 64 + square * (tokens / 64) ** 2)

    for first in (1, 64, 1000, 100_000):
        longest = longest_that_fits(bytes_of, limit, first, 32_768)
        assert longest == max([x for x in range(0, 32_769, 64) if x == 0 or bytes_of(x) <= limit])


def test_estimate_says_every_part_and_what_fits(arguments, capsys: pytest.CaptureFixture):
    assert main(["estimate", "dpo", *arguments["dpo"], "--max_length", "64", "--device_memory", "0.02"]) == 0
    out = capsys.readouterr().out
    for part in ("weights", "reference", "optimizer", "gradients", "activations", "head", "peak"):
        assert re.search(rf"^{part} +[\d.]+ MiB", out, re.MULTILINE), out
    assert re.search(r"^longest +rows of [1-9]\d* tokens fit in 0.02 GiB", out, re.MULTILINE), out
    assert "Not covered" in out
    assert "buckets" not in out
    for engine, words in (("ddp", "DDP"), ("fsdp2", "FSDP2")):
        several = ["--max_length", "64", "--engine", engine, "--num_devices", "4"]
        assert main(["estimate", "dpo", *arguments["dpo"], *several]) == 0
        of_four = capsys.readouterr().out
        assert f"one of 4 devices under {words}" in of_four
        assert ("buckets" in of_four) == (engine == "ddp")


def test_doctor_says_what_is_there_and_what_is_wrong(capsys: pytest.CaptureFixture, monkeypatch):
    main(["doctor"])
    out = capsys.readouterr().out
    assert re.search(r"^trl +ok +1\.1[56]", out, re.MULTILINE)
    assert re.search(r"^engine +ok +one process", out, re.MULTILINE)
    assert re.search(r"^  head +ok +agrees with its definition: bfloat16 with a frozen weight", out, re.MULTILINE)
    monkeypatch.setattr(head_check, "_VALUES", 0.0)
    assert main(["doctor"]) == 1
    assert re.search(r"^  head +WRONG +The tiled head disagrees", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trl-ext", "e"], {"explain", "estimate"}),
        (["trl-ext", "dpo", "--head_c"], {"--head_chunk_size"}),
        (["trl-ext", "dpo", "--lr_scheduler_type", "cosine_with_r"], {"cosine_with_restarts"}),
        (["trl-ext", "explain", "grpo", "--reward_f"], {"--reward_funcs"}),
        (["trl-ext", "estimate", "dpo", "--device_m"], {"--device_memory"}),
    ],
)
def test_bash_completes(words: list[str], expected: set[str], completion_script: Path):
    script = f"""
        source {completion_script}
        COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
        _shtab_trl_ext trl-ext {words[-1]} {words[-2]}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) == expected


@pytest.fixture(scope="module")
def completion_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["completion", "bash"]) == 0
    path = tmp_path_factory.mktemp("completion") / "trl-ext.bash"
    path.write_text(printed.getvalue())
    return path


def test_help_names_every_command(capsys: pytest.CaptureFixture):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"    {command}" in out for command in COMMANDS)
    with pytest.raises(SystemExit, match="0"):
        main(["grpo", "--help"])
    assert "--keep_groups_together" in capsys.readouterr().out


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
    _, group = capsys.readouterr().out.split("\ntrl_ext options:\n")
    shown = set(re.findall(r"^  --(\w+)", group, re.MULTILINE))
    names = {x.name for x in fields(added[0])}
    assert shown - {f"no_{name}" for name in names} == names
    assert names >= {x.name for x in fields(added[1])} - {x.name for x in fields(stocks)}


@pytest.mark.parametrize(
    "statement",
    [
        "import trl_ext",
        "from trl_ext.cli.__main__ import main; main(['--version'])",
        "from trl_ext.cli.__main__ import main; main(['--help'])",
    ],
)
def test_what_needs_no_model_imports_no_library(statement: str):
    code = (
        f"import sys; {statement}; print('imported', *{{'torch', 'transformers', 'trl', 'numpy'}} & {{*sys.modules}})"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines()[-1] == "imported"


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
    for written, given in (("options.yaml", tmp_path / "options.yaml"), ("runs/command-line", tmp_path / "out")):
        command = command.replace(written, str(given))
    words = shlex.split(command, comments=True)
    assert main(words[1:]) == 0
    printed = capsys.readouterr().out
    assert not output or printed.startswith(output), printed
