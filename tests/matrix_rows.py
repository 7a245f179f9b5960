"""The rows of the launch matrix: one training run of DPO or GRPO, the same on one process and under any engine."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, TrainerCallback

import trl_ext
from rewards import id_reward
from run_losses import Trainers
from tiny import preferences, prompts

STEPS, ACCUMULATION, GENERATIONS = 5, 2, 4
MICRO_BATCH = {"dpo": 4, "grpo": 6}  # rows of all ranks together; 6 of 4 a group: some groups lie on two ranks
TRAINERS = ("dpo", "grpo")
MODES = ("full", "lora")
MODELS = ("untied", "tied", "odd")


class Engine(Protocol):
    """What a run needs to know of what it runs on; `launch.LaunchedRank` is one."""

    folder: Path
    index: int
    processes: int
    replicates_tokens: bool

    def training_arguments(self) -> dict[str, Any]: ...
    def model_arguments(self) -> dict[str, Any]: ...
    def whole(self, params: dict[str, Any]) -> dict[str, Any]: ...
    def check(self, trainer: Any) -> None: ...
    def without_gradient_sync(self, trainer: Any) -> None: ...


@dataclass
class OneProcess:
    """Training without any engine: what all engines are held against."""

    folder: Path
    index: int = 0
    processes: int = 1
    replicates_tokens: bool = False

    def training_arguments(self) -> dict[str, Any]:
        return {"use_cpu": True}

    def model_arguments(self) -> dict[str, Any]:
        return {}

    def whole(self, params: dict[str, Any]) -> dict[str, Any]:
        return {name: param.detach().clone() for name, param in params.items()}

    def check(self, trainer: Any) -> None:
        assert trainer.accelerator.num_processes == 1


@dataclass
class Seen:
    """What a run showed: of each optimizer step, and of all of them.

    Attributes:
        losses, grad_norms (`list[float]`): as logged.
        start, change (`dict[str, Tensor]`): the trained weights before, and what was added to them.
    """

    losses: list[float]
    grad_norms: list[float]
    start: dict[str, torch.Tensor]
    change: dict[str, torch.Tensor]


class _Watch(TrainerCallback):
    def __init__(self, engine: Engine, trainer: Any, synced: bool):
        self.engine, self.trainer, self.synced = engine, trainer, synced

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = self.engine.whole(trained(self.trainer))
        if not self.synced:
            self.engine.without_gradient_sync(self.trainer)


def trained(trainer: Any) -> dict[str, torch.nn.Parameter]:
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def train(engine: Engine, trainer: str, mode: str, model: str, synced: bool = True, library: Any = trl_ext) -> Seen:
    """Train one row, from the checkpoint `model` and, with LoRA, the adapter saved beside it."""
    per_device = MICRO_BATCH[trainer] // (1 if engine.replicates_tokens else engine.processes)
    trainers = Trainers.of(library)
    build = _dpo if trainer == "dpo" else _grpo
    row = build(engine, trainers, mode, Path(os.environ["MATRIX_MODELS"]) / model, per_device)
    watch = _Watch(engine, row, synced)
    row.add_callback(watch)
    row.train()
    engine.check(row)
    end = engine.whole(trained(row))
    logs = [log for log in row.state.log_history if "loss" in log]
    assert len(logs) == STEPS
    return Seen(
        losses=[log["loss"] for log in logs],
        grad_norms=[float(log["grad_norm"]) for log in logs],
        start=watch.start,
        change={name: weight - watch.start[name] for name, weight in end.items()},
    )


def _config(engine: Engine, per_device: int) -> dict[str, Any]:
    return {
        "output_dir": str(engine.folder / "run"),
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        # The change of the weights is then the sum of the gradients. Adam's is not: it forgets their scale, so a
        # gradient put in twice would pass, and makes a step of any rounding where a gradient is 0
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,  # logs the norm and never clips, which would hide a factor
        "seed": 7,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **engine.training_arguments(),
    }


def _policy(engine: Engine, mode: str, path: Path) -> Any:
    """Loaded after the config was made: ZeRO-3 then takes the weights apart as they come."""
    if mode == "full":
        return str(path)
    base = AutoModelForCausalLM.from_pretrained(path, dtype="float32", **engine.model_arguments())
    return PeftModel.from_pretrained(base, path / "adapter", is_trainable=True)


def _dpo(engine: Engine, trainers: Trainers, mode: str, path: Path, per_device: int) -> Any:
    arguments = {"dtype": "float32", **engine.model_arguments()} if mode == "full" else None
    config = trainers.dpo_config(**_config(engine, per_device), model_init_kwargs=arguments)
    return trainers.dpo_trainer(_policy(engine, mode, path), args=config, train_dataset=preferences(48, seed=1))


def _grpo(engine: Engine, trainers: Trainers, mode: str, path: Path, per_device: int) -> Any:
    arguments = {"dtype": "float32", **engine.model_arguments()} if mode == "full" else None
    config = trainers.grpo_config(
        **_config(engine, per_device),
        model_init_kwargs=arguments,
        num_generations=GENERATIONS,
        max_completion_length=8,
        beta=0.1,
    )
    return trainers.grpo_trainer(
        _policy(engine, mode, path),
        reward_funcs=id_reward,
        args=config,
        train_dataset=prompts(24, seed=1),
        rollout_func=partial(_rollout, engine),
    )


def _rollout(engine: Engine, texts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that depend on the prompt and on which of its samples one is, on nothing else."""
    tokenizer = trainer.processing_class
    first = 0 if engine.replicates_tokens else engine.index * len(texts)
    completions = []
    for row, text in enumerate(texts):
        rng = random.Random(f"{text}|{(first + row) % GENERATIONS}")
        completions.append([*(rng.randrange(3, 97) for _ in range(rng.randint(1, 7))), tokenizer.eos_token_id])
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def rows() -> Iterator[tuple[str, str, str]]:
    return ((trainer, mode, model) for trainer in TRAINERS for mode in MODES for model in MODELS)


CASES = {
    "-".join(row) + ("" if synced else "-unsynced"): partial(
        lambda rank, row, synced: vars(train(rank, *row, synced=synced)), row=row, synced=synced
    )
    for row in rows()
    for synced in (True, False)
}
