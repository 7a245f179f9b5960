"""Trainings of the demo's model by axolotl, from a config as its YAML file has it to weights."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from accelerate.state import AcceleratorState
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import TrainDatasetMeta
from axolotl.integrations.base import BasePlugin
from axolotl.train import setup_model_and_trainer
from axolotl.utils.dict import DictDefault
from datasets import Dataset
from transformers import set_seed

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
PLUGIN = "trl_ext.axolotl.TrlExtPlugin"
# What a user's file has besides the recipe, for a CPU and the demo's model
CONFIG = {
    "base_model": str(DEMO / "model"),
    "datasets": [{"path": str(DEMO / "data" / "dpo" / "train.jsonl"), "ds_type": "json", "type": "passthrough"}],
    "sequence_len": 64,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "num_epochs": 2,
    "learning_rate": 0.1,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "optimizer": "sgd",
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "val_set_size": 0,
    "seed": 7,
}
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}


class MoreArguments(BasePlugin):
    """Sets fields of TRL's DPOConfig that no key of axolotl's config sets, as a user's plugin may."""

    values: ClassVar[dict[str, Any]] = {}

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return self.values


def recipe() -> dict[str, Any]:
    """Return the config that docs/own-loop.md shows."""
    page = (ROOT / "docs" / "own-loop.md").read_text()
    block: dict[str, Any] = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    return block


def run(
    folder: Path,
    options: dict[str, Any],
    *,
    plugin: bool,
    arguments: dict[str, Any] | None = None,
    rows: int = 12,
    eval_rows: int = 0,
    bf16: bool = False,
) -> dict[str, Any]:
    """Train, and return the trainer, log, weights, tokens at the embeddings and the plugin's log lines."""
    AcceleratorState._reset_state(reset_partial_state="RANK" not in os.environ)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    plugins = [f"{__name__}.MoreArguments"] if arguments else []
    plugins += [PLUGIN] if plugin else []
    MoreArguments.values = arguments or {}
    evaluation = {"val_set_size": 0.1} if eval_rows else {}
    config = recipe() | CONFIG | {"output_dir": str(folder)} | evaluation | options
    config.pop("plugins")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trl_ext").addHandler(handler)
    cfg = load_cfg(DictDefault(config | ({"plugins": plugins} if plugins else {})))
    cfg.bf16 = bf16  # axolotl refuses it on a CPU
    if "RANK" in os.environ:
        cfg.device_map = None  # axolotl gives each rank a GPU
    pairs = [json.loads(line) for line in (DEMO / "data" / "dpo" / "train.jsonl").read_text().splitlines()]
    set_seed(0)
    trainer = setup_model_and_trainer(
        cfg,
        TrainDatasetMeta(
            train_dataset=Dataset.from_list(pairs[:rows]),
            eval_dataset=Dataset.from_list(pairs[-eval_rows:]) if eval_rows else None,
            total_num_steps=0,
        ),
    )[0]
    tokens = 0

    def count(_: Any, args: tuple[Any, ...], output: Any) -> None:
        nonlocal tokens
        tokens += args[0].numel()

    for model in filter(None, (trainer.model, trainer.ref_model)):
        model.get_input_embeddings().register_forward_hook(count)
    before = {name: x.detach().clone() for name, x in trainer.model.named_parameters() if x.requires_grad}
    trainer.train()
    logging.getLogger("trl_ext").removeHandler(handler)
    weights = {name: x.detach() for name, x in trainer.model.named_parameters() if x.requires_grad}
    return {
        "trainer": trainer,
        "log": [
            {k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k}
            for entry in trainer.state.log_history
        ],
        "weights": weights,
        "moved": max(float((weights[name] - before[name]).abs().max()) for name in before),
        "tokens": tokens,
        "lines": lines,
    }


if __name__ == "__main__":  # on each rank: FOLDER PLUGIN
    sys.modules["axolotl_runs"] = sys.modules["__main__"]
    of_rank = run(
        Path(sys.argv[1]),
        LORA | {"micro_batch_size": 2, "eval_steps": 3},
        plugin=sys.argv[2] == "plugin",
        arguments={"use_cpu": True},
        eval_rows=5,
    )
    if of_rank["trainer"].accelerator.is_main_process:
        assert type(of_rank["trainer"].model_wrapped).__name__ == "DistributedDataParallel"
        saved = {name: of_rank[name] for name in ("log", "weights", "tokens", "lines", "moved")}
        torch.save(saved, Path(sys.argv[1]) / "run.pt")
