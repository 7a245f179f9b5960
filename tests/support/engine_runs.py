"""A short run of a trainer, for tests of its engine."""

import os
from pathlib import Path
from typing import Any

import trl_ext
from rewards import id_reward
from tiny import preferences, prompts, scripted_rollout

CONFIGS = Path(__file__).parents[2] / "examples" / "accelerate_configs"


def trainer_of(folder: Path, kind: str = "dpo", model: Any = None, **config: Any) -> Any:
    """Build a trainer for one step of `model`, by default the tiny model in the environment variable `TINY_MODEL`."""
    common = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 2,
        "max_steps": 1,
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **config,
    }
    model = model or os.environ["TINY_MODEL"]
    if kind == "dpo":
        args = trl_ext.DPOConfig(reference_store="memory", **common)
        return trl_ext.DPOTrainer(model, args=args, train_dataset=preferences(8, seed=1))
    args = trl_ext.GRPOConfig(num_generations=2, max_completion_length=4, **common)
    data = prompts(8, seed=1)
    return trl_ext.GRPOTrainer(model, id_reward, args=args, train_dataset=data, rollout_func=scripted_rollout)
