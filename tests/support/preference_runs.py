"""Short DPO runs on pairs with rewards, for tests of its losses."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from tiny import REFERENCE_SEED, Workshop, lora_config, preferences


def rewarded(rows: int, seed: int) -> Dataset:
    """Return pairs with a reward for each completion; that of the chosen one is not always the higher."""
    rng = random.Random(seed)
    data = preferences(rows, seed=seed)
    for column in ("chosen_reward", "rejected_reward"):
        data = data.add_column(column, [rng.uniform(-2, 3) for _ in range(rows)])
    return data


def two_tokens(rows: int, reward_difference: float) -> Dataset:
    """Return pairs whose completions are one word and the end, so that a mean over tokens is half the sum."""
    rng = random.Random(3)
    words = [[f"w{rng.randrange(90)}" for _ in range(3)] for _ in range(rows)]
    return Dataset.from_list(
        [
            {
                "prompt": f"{x} {y}",
                "chosen": f" {y}",
                "rejected": f" {z}",
                "chosen_reward": 1.5 + reward_difference,
                "rejected_reward": 1.5,
            }
            for x, y, z in words
        ]
    )


@dataclass
class Run:
    """The results of a run: losses and gradients of each micro-batch, the logs, the final weights."""

    losses: list[float] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    weights: torch.Tensor | None = None
    trainer: Any = None

    def log(self, key: str) -> list[float]:
        """Return the values of `key` in the logs that have it."""
        return [log[key] for log in self.logs if key in log]


def run(
    library: Any,
    workshop: Workshop,
    folder: Path,
    *,
    lora: bool = False,
    watch: Callable | None = None,
    gradients: bool = True,
    **config: Any,
) -> Run:
    """Train with `config`, which may have arguments of the trainer too, such as `train_dataset`.

    Without LoRA the reference is another model, so that a log-ratio is not 0 at first.

    Args:
        watch (`Callable`, *optional*): called with the trainer and the inputs of each `compute_loss`.
        gradients (`bool`): whether to record them; False if the engine does not keep them in `param.grad`.
    """
    names = ("train_dataset", "eval_dataset", "data_collator", "ref_model", "model")
    options = {name: config.pop(name) for name in names if name in config}
    seen = Run()

    class Watched(library.DPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if watch is not None:
                watch(self, inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            if gradients:
                trained = [x for x in self.model.parameters() if x.requires_grad]
                seen.gradients.append(torch.cat([x.grad.flatten().clone() for x in trained]))
            seen.losses.append(loss.item())
            return loss

    torch.manual_seed(0)
    trainer = Watched(
        **{
            "model": workshop.model("tied"),
            "train_dataset": rewarded(8, seed=1),
            "peft_config": lora_config() if lora else None,
            "ref_model": None if lora else AutoModelForCausalLM.from_pretrained(workshop.model("tied", REFERENCE_SEED)),
            **options,
        },
        args=library.DPOConfig(
            **{
                "output_dir": str(folder),
                "per_device_train_batch_size": 4,
                "per_device_eval_batch_size": 4,
                "max_steps": 2,
                "learning_rate": 0.01,
                "lr_scheduler_type": "constant",
                "optim": "sgd",
                "max_grad_norm": 0.0,
                "gradient_checkpointing": False,
                "bf16": False,
                "use_cpu": True,
                "report_to": "none",
                "save_strategy": "no",
                "logging_steps": 1,
                "disable_tqdm": True,
                "dataloader_pin_memory": False,
                "seed": 7,
                **config,
            }
        ),
    )
    trainer.train()
    seen.logs, seen.trainer = trainer.state.log_history, trainer
    seen.weights = torch.cat([x.detach().flatten() for x in trainer.model.parameters() if x.requires_grad])
    return seen
