"""Every mistake in `mistakes.txt` is the one line that stands there, before anything trains."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers
from accelerate.commands.launch import launch_command_parser
from tqdm.auto import tqdm

from command_lines import LONG, fill, words_of
from stock_command import stock_says
from tiny import Workshop
from trl_ext.checks.names import OTHER_NAMES, OTHER_NAMES_OF
from trl_ext.cli.__main__ import main
from trl_ext.cli.arguments import OneLineParser, dataclasses_of
from trl_ext.cli.commands import COMMANDS
from trl_ext.cli.line import METHODS

ROOT = Path(__file__).parents[2]
# What `datasets` and transformers print while they read files and rows
PROGRESS = ("Generating ", "Failed to load JSON", "Loading weights:", "Dropping fully truncated")


class Mistake(NamedTuple):
    line: str
    ours: str
    trls: str | None  # TRL's command has no `explain`, `estimate`, `plan` and `doctor`
    section: str


def _table() -> dict[str, Mistake]:
    found, section = {}, ""
    for block in (ROOT / "tests" / "cli" / "mistakes.txt").read_text().split("\n\n")[1:]:
        name, *lines = block.strip().splitlines()
        if name.startswith("== "):
            section = name[3:]
            continue
        line, ours, *trls = lines
        trl = trls[0].removeprefix("TRL: ") if trls else None
        found[name.removeprefix("# ")] = Mistake(line.removeprefix("$ trl-ext "), ours, trl, section)
    return found


MISTAKES = _table()
LIGHT = [mistake for mistake in MISTAKES.values() if mistake.section == "Seen before torch is imported"]


@pytest.fixture(autouse=True)
def folder(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, on a machine without a GPU, where training is an error."""

    def train(*args, **kwargs):
        raise AssertionError("it trains")

    fill(tmp_path, workshop)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(transformers.Trainer, "train", train)
    return tmp_path


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_the_line_that_stands_in_the_table(name: str, workshop, folder, capsys: pytest.CaptureFixture):
    status = main(words_of(MISTAKES[name].line, workshop))
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.strip() and not line.startswith(PROGRESS)]
    assert lines == [MISTAKES[name].ours.replace("FOLDER", str(folder)).replace("LONG", LONG)]
    assert (status, printed.out) == (2, "")


@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if mistake.trls])
def test_trls_own_command_says_what_stands_beside_it(name: str, workshop, monkeypatch, capsys: pytest.CaptureFixture):
    said = stock_says(words_of(MISTAKES[name].line, workshop), monkeypatch, capsys)
    assert str(MISTAKES[name].trls) in said


def test_these_mistakes_version_and_help_import_no_library(workshop, folder):
    lines = [(words_of(mistake.line, workshop), 2) for mistake in LIGHT]
    helps = [[], *([command, "--help"] for command in COMMANDS if command not in METHODS)]
    lines += [(words, 0) for words in (["--version"], ["-h"], *helps)]
    code = """if True:
        import json, sys
        from trl_ext.cli.__main__ import main
        import trl_ext
        heavy = {"accelerate", "datasets", "numpy", "pandas", "peft", "torch", "transformers", "trl"}
        for words, status in json.loads(sys.argv[1]):
            assert main(words) == status, words
            assert heavy.isdisjoint(sys.modules), (words, heavy & {*sys.modules})
        print("modules", len(sys.modules))
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, json.dumps(lines)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(LIGHT) > 20
    assert int(run.stdout.split()[-1]) < 300  # 1,900 with torch


@pytest.mark.parametrize("method", ["dpo", "kto", "grpo", "rloo"])
def test_names_of_others_are_no_arguments_and_lead_to_one(method: str):
    flags = {x.lstrip("-") for x in OneLineParser(dataclasses_of(method))._option_string_actions}
    names = OTHER_NAMES | OTHER_NAMES_OF[method]
    assert flags.isdisjoint(names)
    assert flags >= {*names.values()}
    assert {x.lstrip("-") for x in launch_command_parser()._option_string_actions}.isdisjoint(names)


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.csv", "pairs.parquet", "pairs"])
def test_a_data_set_is_a_file_or_a_folder(name: str, workshop, capsys: pytest.CaptureFixture):
    assert main(["explain", *words_of(f"dpo $DPO --dataset-name={name}", workshop)]) == 0
    assert "packing" in capsys.readouterr().out


@pytest.mark.parametrize("function", ["my_rewards.py:brevity", "./my_rewards.py:brevity", "my_rewards.brevity"])
def test_a_reward_is_a_function_of_a_file_or_of_a_module(function: str, workshop, capsys: pytest.CaptureFixture):
    assert main(["explain", *words_of(f"grpo $GRPO --reward_funcs {function}", workshop)]) == 0
    assert "packing" in capsys.readouterr().out


# What looks like a mistake, but is none
RIGHT = (
    "dpo $DPO --padding_free None --share_prompts none --reference_device None --tf32 None",
    "dpo $DPO --bf16",
    "dpo $DPO --bf16 --no_balance --show_plan false",
    "dpo $DPO --beta 0.1 --beta 0.2 --max_steps -1",
    "dpo $DPO --output_dir new/folder --reference_store_dir another/new/folder",
    "dpo $DPO --eval_strategy steps --dataset_test_split train --load_best_model_at_end --save_strategy steps",
    "dpo $DPO --use_peft --lora_target_modules all-linear",
    "rloo $RLOO --reward_clip_range -1 1",
    "reward $REWARD --use_peft --lora_target_modules all-linear --center_rewards_coefficient 0.01",
    "distillation $SELF_DISTILLATION --use_peft --lora_target_modules all-linear --bf16",
    "rloo $RLOO --reward_clip_range -1e0 None",
    "grpo $GRPO --reward_weights -1 --generation_kwargs '{\"top_k\": 5}'",
    'sft $SFT --model_init_kwargs \'{"dtype": "float32"}\' --report_to none',
)


@pytest.mark.parametrize("line", RIGHT)
def test_what_is_right_is_no_mistake(line: str, workshop, folder, capsys: pytest.CaptureFixture):
    assert main(["explain", *words_of(line, workshop)]) == 0, capsys.readouterr().err
    assert "packing" in capsys.readouterr().out
    assert not (folder / "new").exists()


def test_what_is_right_for_other_methods_trains(workshop, capsys: pytest.CaptureFixture):
    """Rewards that read messages take messages, and a full store may be on a disk that cannot be written to."""
    line = "grpo $GRPO --dataset_name said --model_name_or_path $CHAT --reward_funcs think_format_reward"
    assert main(["explain", *words_of(line, workshop)]) == 0, capsys.readouterr().err


def test_a_value_of_the_environment_is_named(workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "fastest")
    assert main(words_of("dpo $DPO", workshop)) == 2
    assert "(environment: `ACCELERATE_DYNAMO_BACKEND=fastest`)" in capsys.readouterr().err


def test_help_says_what_turns_an_argument_off(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        main(["dpo", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for name in ("balance", "show_plan", "disable_dropout"):
        assert f"--no_{name} The same as `--{name} false`. --" in out, name  # without a default of its own
    assert "--reference_device {cpu}" in out


def test_a_yaml_file_is_read_and_the_line_overrides_it(workshop, capsys: pytest.CaptureFixture):
    assert main(["explain", *words_of("dpo --config beta.yaml --beta 0.1 --bf16 false", workshop)]) == 0
    assert "packing" in capsys.readouterr().out


def test_a_reader_of_the_help_may_stop_reading():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = f"{sys.executable} -m trl_ext.cli grpo --help | head -1"
    run = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.startswith("usage: trl-ext grpo")
    assert "roken pipe" not in run.stderr


def test_an_error_closes_the_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    def run():
        run.bar = tqdm(total=2, disable=False)
        raise ValueError("no more room")

    monkeypatch.setattr("trl_ext.cli.doctor.run", run)
    assert main(["doctor"]) == 2
    assert "\ntrl-ext doctor: error: no more room" in capsys.readouterr().err
