"""TRL's training scripts run with only the imports of the trainer and its config changed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tiny import Workshop, preferences, prompts
from trl_ext.cli.line import class_name

REWARD_MODULE = '''
"""The user's own reward function, named on the command line."""


def mean_of_hashes(completion_ids, **kwargs):
    return [sum(token * 37 % 101 for token in ids) / (101 * len(ids)) for ids in completion_ids]
'''

_SAMPLES = [
    *("--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "6"),
    *("--reward_funcs", "my_rewards.mean_of_hashes"),
]
ARGUMENTS: dict[str, list[str]] = {
    **{name: ["--per_device_train_batch_size", "2"] for name in ("sft", "dpo", "kto", "reward")},
    **dict.fromkeys(("grpo", "rloo"), _SAMPLES),
    "distillation": ["--per_device_train_batch_size", "2", "--max_completion_length", "6"],
}


def _with_our_trainer(script: str, trainer: str) -> str:
    """Return `script` with the trainer and its config imported from trl_ext, and nothing else changed."""
    names = {class_name(trainer, "Trainer"), class_name(trainer, "Config")}
    moved: set[str] = set()

    def move(match: re.Match[str]) -> str:
        indent, imported = match["indent"], [name.strip() for name in match["names"].split(",")]
        ours = [name for name in imported if name in names]
        if not ours:
            return match[0]
        moved.update(ours)
        stock = ", ".join(name for name in imported if name not in names)
        return f"{indent}from trl import {stock}\n{indent}from trl_ext import {', '.join(ours)}\n"

    changed = re.sub(r"^(?P<indent> *)from trl import (?P<names>[\w, ]+)\n", move, script, flags=re.MULTILINE)
    assert moved == names, f"TRL's script no longer imports {names - moved} as it did"
    return changed


def _data(trainer: str, folder: Path) -> Path:
    folder.mkdir()
    rows: Dataset = prompts(8, seed=3) if trainer in ("grpo", "rloo", "distillation") else preferences(8, seed=3)
    if trainer == "sft":
        rows = rows.rename_column("chosen", "completion").remove_columns("rejected")
    rows.to_json(folder / "train.jsonl")
    return folder


@pytest.mark.parametrize(
    ("trainer", "use_peft"),
    [
        pytest.param("dpo", False, id="dpo-full"),
        pytest.param("dpo", True, id="dpo-peft", marks=pytest.mark.slow),
        pytest.param("grpo", False, id="grpo-full", marks=pytest.mark.slow),
        pytest.param("grpo", True, id="grpo-peft", marks=pytest.mark.slow),
        *(
            pytest.param(trainer, use_peft, id=f"{trainer}-{('full', 'peft')[use_peft]}", marks=pytest.mark.slow)
            for trainer in ("sft", "kto", "rloo", "reward", "distillation")
            for use_peft in (False, True)
        ),
    ],
)
def test_trl_script_runs_with_only_the_import_changed(
    trainer: str, use_peft: bool, workshop: Workshop, tmp_path: Path
) -> None:
    spec = importlib.util.find_spec(f"trl.scripts.{trainer}")
    assert spec is not None
    assert spec.origin is not None
    script = tmp_path / f"{trainer}.py"
    script.write_text(_with_our_trainer(Path(spec.origin).read_text(), trainer))
    (tmp_path / "my_rewards.py").write_text(REWARD_MODULE)
    out = tmp_path / "out"
    command = [
        *(sys.executable, str(script)),
        *("--model_name_or_path", workshop.model("tied"), "--dtype", "float32"),
        *("--dataset_name", str(_data(trainer, tmp_path / "data"))),
        *("--output_dir", str(out), "--max_steps", "2", "--logging_steps", "1", "--learning_rate", "0.01"),
        *("--report_to", "none", "--save_strategy", "no", "--use_cpu", "--bf16", "False", "--no_dataloader_pin_memory"),
        *ARGUMENTS[trainer],
        *(("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj") if use_peft else ()),
        *(("--lora_task_type", "SEQ_CLS") if use_peft and trainer == "reward" else ()),
        *(("--teacher_model_name_or_path", workshop.model("untied")) if trainer == "distillation" else ()),
    ]
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf")}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    assert run.returncode == 0, run.stderr[-4000:]
    assert "Model saved to" in run.stdout
    auto_class, options = AutoModelForCausalLM, {}
    if trainer == "reward":
        auto_class, options = AutoModelForSequenceClassification, {"num_labels": 1}
    adapted_class = AutoPeftModelForSequenceClassification if trainer == "reward" else AutoPeftModelForCausalLM
    trained = (adapted_class if use_peft else auto_class).from_pretrained(out, **options).state_dict()
    start = auto_class.from_pretrained(workshop.model("tied"), **options).state_dict()
    if use_peft:
        assert any(weight.abs().max() > 0 for name, weight in trained.items() if "lora_B" in name)
    else:
        assert any(not weight.equal(start[name]) for name, weight in trained.items())
