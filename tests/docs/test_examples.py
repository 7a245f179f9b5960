"""Each of examples/ runs, in a short form, and ends with an adapter that was trained."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from safetensors import safe_open

from tiny import Workshop

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = EXAMPLES / "README.md"
# Arguments that make a command short. Of an argument that is repeated, the last counts
STEPS = ["--max_steps", "2", "--report_to", "none", "--save_strategy", "no", "--logging_steps", "1"]
SHORT = {
    "grpo_tools": ["--use_cpu", "--bf16", "false", "--problems", "8", "--num_generations", "4"],
    "grpo_verifiable": ["--num_generations", "4"],
    "grpo_rollout": ["--num_generations", "4"],
    "grpo_ahead": ["--num_generations", "4"],
}


def commands() -> dict[str, list[str]]:
    """Return the page's commands for this machine and for the Hub, by the name of the script."""
    found = {}
    for block in re.findall(r"each command has a test of its own -->\n```bash\n(.*?)```", PAGE.read_text(), re.DOTALL):
        lines = block.replace("\\\n", " ")
        for name, value in re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE):
            lines = lines.replace(f"${name} ", f"{value} ")
        for words in map(shlex.split, lines.splitlines()):
            if words[0] == "python":
                found[Path(words[1]).stem] = words[1:]
    return found


COMMANDS = commands()
WITH_TESTS_ELSEWHERE = {"loop_dpo", "loop_grpo", "real_model"}  # tests/core runs the loops
TRAINS = sorted(COMMANDS.keys() - WITH_TESTS_ELSEWHERE)


def run(command: list[str], tmp_path: Path, **environment: str) -> str:
    """What a program prints; it runs from the root, as the documentation has it."""
    known = os.environ | {"HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1", **environment}
    known["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(EXAMPLES / "demo"), known.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=known, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def assert_trained(folder: Path) -> None:
    """Every B of LoRA is zero before training."""
    with safe_open(next(folder.rglob("adapter_model.safetensors")), "pt") as file:
        assert any(file.get_tensor(name).abs().max() > 0 for name in file.keys() if "lora_B" in name)  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINS)
def test_the_command_of_an_example_trains_an_adapter(name: str, workshop: Workshop, tmp_path: Path) -> None:
    model = ["--model", workshop.model("chat")] if name == "grpo_tools" else []
    out = tmp_path / "out"
    said = run([*COMMANDS[name], *STEPS, *SHORT.get(name, []), *model, "--output_dir", str(out)], tmp_path)
    assert "what runs, and why" in said
    if name == "grpo_tools":  # a model of random weights calls none, and has no reward
        assert (out / "adapter_model.safetensors").exists()
    else:
        assert_trained(out)
    if name == "several_adapters":
        assert '(the frozen adapter "sums")' in said
        assert {x.name for x in out.iterdir()} >= {"sums", "both"}
    if name == "grpo_ahead":
        assert "with the weights from before (`generation_lag=1`)" in " ".join(said.split())
    if name == "grpo_rollout":
        assert re.search(r"old policy +skip|old policy +reuse", said)


CHECKPOINT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trl_ext" / "smollm2" / "model"


@pytest.mark.slow
@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="`make bench-real` makes the checkpoint")
def test_the_real_model_trains(tmp_path: Path) -> None:
    """In a short form. `make bench-real-task` has three seeds and the controls."""
    out = tmp_path / "out"
    short = ["--steps", "1", "--held_out", "4", "--model", str(CHECKPOINT), "--output_dir", str(out)]
    printed = run(["examples/real_model.py", *short], tmp_path, ACCELERATE_USE_CPU="true")
    assert "of 4 held-out questions" in printed
    assert_trained(out)
    result = json.loads((out / "result.json").read_text())
    assert result["held_out"] == 4
    assert result["seconds"] > 0


@pytest.mark.slow
def test_qlora(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    out = tmp_path / "out"
    quantized = ["--load_in_4bit", "--bnb_4bit_quant_type", "nf4", "--use_bnb_nested_quant", "--output_dir", str(out)]
    run([*COMMANDS["dpo_lora"], *STEPS, *quantized], tmp_path)
    assert_trained(out)


@pytest.mark.slow
def test_resume_from_checkpoint_true_on_the_command_line(tmp_path: Path) -> None:
    out = ["--output_dir", str(tmp_path / "out"), "--save_strategy", "steps", "--save_steps", "1"]
    run([*COMMANDS["dpo_lora"], *STEPS, *out], tmp_path)
    more = ["--max_steps", "3", "--resume_from_checkpoint", "true"]
    run([*COMMANDS["dpo_lora"], *STEPS, *out, *more], tmp_path)
    logged = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())
    assert logged["global_step"] == 3
    assert (tmp_path / "out" / "checkpoint-1").exists()


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    printed = "".join("".join(out.get("text", "")) for cell in cells for out in cell.get("outputs", []))
    assert re.search(r"after GRPO: \d+% right", printed), "save the notebook with its outputs"
    assert not [path for path in (str(Path.home()), "/tmp/", str(ROOT)) if path in printed]
    script = tmp_path / "tour.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    where = {"cwd": str(tmp_path)}
    os.symlink(EXAMPLES, tmp_path / "examples")
    known = os.environ | {"TOUR_STEPS": "2", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], env=known, capture_output=True, text=True, timeout=400, **where
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"after GRPO: \d+% right", done.stdout)
    assert re.search(r"of TRL's\n", done.stdout)


def _launches() -> list[list[str]]:
    """Return the page's commands for GPUs."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if "examples/" in line and "Qwen2.5-7B" in line]


def test_every_example_is_in_the_table_and_its_commands_parse() -> None:
    """Those for GPUs are parsed to the end, by accelerate and by the script's own parser; the engines themselves are
    launched in test_accelerate_configs.py."""
    files = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]
    assert all(f"[{x.name}]({x.name})" in PAGE.read_text() for x in files)
    assert {x.stem for x in files if x.suffix == ".py"} == COMMANDS.keys()
    launches = _launches()
    assert len(launches) == 3
    for command in launches:
        if command[:2] == ["accelerate", "launch"]:
            args, _, _ = _validate_launch_command(launch_command_parser().parse_args(command[2:]))
            assert (args.use_fsdp, args.use_deepspeed) == ("fsdp2" in command[3], "zero3" in command[3])
            command = ["python", args.training_script, *args.training_script_args]
        assert _options(command).model_name_or_path == "Qwen/Qwen2.5-7B-Instruct"


def _options(command: list[str]) -> Any:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

    from trl_ext import DPOConfig

    assert command[1] == "examples/dpo_lora.py"
    parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig, DatasetMixtureConfig))
    with contextlib.redirect_stderr(io.StringIO()):
        return parser.parse_args_and_config([*command[2:], "--use_cpu", "--bf16", "false"])[2]
