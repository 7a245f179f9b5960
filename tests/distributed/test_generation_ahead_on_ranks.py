"""`generation_lag=1` on two ranks: each samples its own rows, and training is that of stock TRL on the same samples."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import AutoModelForCausalLM

import trl_ext
from lagged_sampling import Logs, OwnSampler, delayed_trainer, even_tokens, rows, short_text, whole_weights
from launch import LaunchedRank, launch
from tiny import Workshop


def train(rank: LaunchedRank, subject: str, **options: Any) -> dict[str, Any]:
    """Train; return the losses and the weights.

    Args:
        subject (`str`): "ours", "stock", or "undelayed", which is stock TRL with the current weights.
    """
    config = {
        "output_dir": str(rank.folder / subject),
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 10,
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam's step is nearly a sign, which turns rounding into a full update
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "seed": 5,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": rank.engine in ("ddp", "fsdp2_native"),
        "model_init_kwargs": {"dtype": "float32", **rank.model_arguments()},
        **rank.training_arguments(),
        **options,
    }
    path = str(rank.folder / "model")
    sampler = OwnSampler(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    logs = Logs()
    common = {
        "model": path,
        "reward_funcs": [even_tokens, short_text],
        "train_dataset": rows(),
        "callbacks": [logs],
    }
    if subject == "ours":
        args = trl_ext.GRPOConfig(generation_lag=1, **config)
        trainer = trl_ext.GRPOTrainer(rollout_func=sampler, args=args, **common)
    else:
        lag = int(subject == "stock")
        trainer = delayed_trainer(sampler, lag=lag, args=trl.GRPOConfig(**config), **common)
    start = {name: x.clone() for name, x in whole_weights(trainer).items()}
    trainer.train()
    rank.check(trainer)
    changes = {name: x - start[name] for name, x in whole_weights(trainer).items()}
    return {"losses": [log["loss"] for log in logs.logs], "change": torch.cat([x.flatten() for x in changes.values()])}


CASES = {
    f"{subject}-{name}": partial(train, subject=subject, **options)
    for name, options in {"plain": {}, "iterations": {"num_iterations": 2, "steps_per_generation": 4}}.items()
    for subject in ("ours", "stock", "undelayed")
}


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_ranks_train_as_stock_trl_does_on_older_samples(engine: str, workshop: Workshop, tmp_path: Path) -> None:
    shutil.copytree(workshop.model("untied"), tmp_path / "model")
    results = launch(__file__, list(CASES), engine, tmp_path)
    for name in ("plain", "iterations"):
        for ours, stock in zip(results[f"ours-{name}"], results[f"stock-{name}"], strict=True):
            assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-5)
            assert len(ours["losses"]) == 5
            assert (ours["change"] - stock["change"]).abs().max() < 1e-4 * stock["change"].abs().max()
    control = results["undelayed-plain"][0]["change"]
    assert (results["ours-plain"][0]["change"] - control).abs().max() > 0.1 * control.abs().max()
