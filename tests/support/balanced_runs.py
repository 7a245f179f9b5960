"""Training runs with completions of very different lengths, with and without `balance`, for one process or any engine.

Rows are known by their tokens, and counted where they enter the model.
"""

import os
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

import trl_ext
from drop_in_cases import GRPO_LOSSES
from matrix_rows import Engine, _policy, trained
from rewards import half_dead_reward, id_reward
from tiny import prompts
from trl_ext.losses.loss_types import DPO_LOSS_TYPES

GENERATIONS = 4
MICRO_BATCH = 12  # rows or pairs of all ranks
LONGEST = 48

GRPO_CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name, **extra} for name, extra in GRPO_LOSSES.items() if name != "bnpo"},
    "sequence": {"importance_sampling_level": "sequence", "beta": 0.1},
    "iterations": {"num_iterations": 2, "beta": 0.1},
    "dead": {"reward": half_dead_reward, "beta": 0.0},
    "budget": {"max_tokens_per_micro_batch": 120},
    "budget-iterations": {"max_tokens_per_micro_batch": 120, "num_iterations": 2, "loss_type": "grpo", "beta": 0.1},
    "slices": {"steps_per_generation": 4, "beta": 0.1},
    "budget-slices": {"steps_per_generation": 4, "beta": 0.1, "max_tokens_per_micro_batch": 120},
    "padded": {"padding_free": False, "reward": half_dead_reward, "beta": 0.0},
    "tools": {"masked": True},
    "multiple": {"pad_to_multiple_of": 8},
    "one-micro-batch": {"gradient_accumulation_steps": 1, "beta": 0.1},
    "unlike": {"unlike": True},  # the batches of the ranks have different entries
    "dynamic": {"dynamic_sampling": True, "reward": half_dead_reward, "beta": 0.0},
}

DPO_CASES: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": [name]} for name, row in DPO_LOSS_TYPES.items() if row.of_whole_batch is None},
    "exo_pair": {"loss_type": ["exo_pair"], "label_smoothing": 0.1},
    "mixed": {"loss_type": ["sigmoid", "hinge"], "loss_weights": [1.0, 0.3]},
    "rpo": {"loss_type": ["rpo_squared"], "columns": True},
    "cdpo": {"loss_type": ["cdpo"], "label_smoothing": 0.1},
    "ipo_sum": {"loss_type": ["ipo_sum"]},
    "ld": {"ld_alpha": 0.5},
    "wpo": {"use_weighting": True},
    "alpha": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
    "budget": {"max_tokens_per_micro_batch": 150},
    "budget-pass": {"max_tokens_per_micro_batch": 150, "reference_store": "off"},
    "budget-rpo": {"max_tokens_per_micro_batch": 150, "loss_type": ["rpo_squared"], "columns": True},
    "multiple": {"pad_to_multiple_of": 8},
    "precompute": {"precompute_ref_log_probs": True},
    # The last batch is filled with pairs that the metrics leave out
    "remainder": {"gradient_accumulation_steps": 1, "max_steps": 10},
    "budget-remainder": {"max_tokens_per_micro_batch": 150, "max_steps": 5},
}


@dataclass
class Seen:
    """The record of a run on one rank."""

    change: dict[str, torch.Tensor]  # of the weights
    ratios: list[tuple[float, float]]  # `balance/max_over_mean_before` and `balance/max_over_mean`
    tokens: list[int] = field(default_factory=list)  # of each forward pass in training
    plan: str = ""
    logs: list[dict[str, float]] = field(default_factory=list)


def train(
    engine: Engine,
    method: str,
    mode: str,
    case: str,
    *,
    factor: float | None = None,
    resumed: bool = False,
    **config: Any,
) -> Seen:
    """Train a few steps. `factor` multiplies the loss of the last rank.

    If `resumed`, another trainer repeats all steps but the first.
    """
    config = {**(GRPO_CASES if method == "grpo" else DPO_CASES)[case], **config}
    per_device = MICRO_BATCH // engine.processes
    base = {
        "output_dir": str(engine.folder / "run"),
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "seed": 7,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "show_plan": False,
        **engine.training_arguments(),
    }
    build = _grpo if method == "grpo" else _dpo
    if resumed:
        base |= {"save_strategy": "steps", "save_steps": 1, "output_dir": str(engine.folder / f"resumed-{case}")}
    trainer = build(engine, mode, base, dict(config), factor)
    watch = _Watch(engine, trainer)
    trainer.add_callback(watch)
    trainer.train()
    engine.check(trainer)
    if resumed:
        trainer = build(engine, mode, base, config, factor)
        trainer.train(resume_from_checkpoint=str(Path(base["output_dir"]) / "checkpoint-1"))
        engine.check(trainer)
    end = engine.whole(trained(trainer))
    logs = [log for log in trainer.state.log_history if "balance/max_over_mean" in log]
    ratios = [(log["balance/max_over_mean_before"], log["balance/max_over_mean"]) for log in logs]
    change = {name: weight - watch.start[name] for name, weight in end.items()}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return Seen(change, ratios, watch.tokens, trainer.explain(verbose=True).table(), logs)


class _Watch(TrainerCallback):
    def __init__(self, engine: Engine, trainer: Any) -> None:
        self.engine, self.trainer = engine, trainer
        self.tokens: list[int] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = self.engine.whole(trained(self.trainer))
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model_wrapped)
        policy.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled() and self.trainer.model.training:
            self.tokens.append(inputs[0].numel())


def _times(trainer: type, factor: float | None) -> type:
    if factor is None:
        return trainer

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        last = self.accelerator.process_index == self.accelerator.num_processes - 1
        return (factor if last else 1.0) * trainer.compute_loss(self, *args, **kwargs)

    return type(trainer.__name__, (trainer,), {"compute_loss": compute_loss})


def _grpo(engine: Engine, mode: str, base: dict[str, Any], config: dict[str, Any], factor: float | None) -> Any:
    reward = config.pop("reward", id_reward)
    masked, unlike = config.pop("masked", False), config.pop("unlike", False)
    arguments = {"dtype": "float32", **engine.model_arguments()} if mode == "full" else None
    args = trl_ext.GRPOConfig(
        **{**base, "num_generations": GENERATIONS, "max_completion_length": LONGEST, "beta": 0.1, **config},
        model_init_kwargs=arguments,
    )
    return _times(trl_ext.GRPOTrainer, factor)(
        _policy(engine, mode, Path(os.environ["MATRIX_MODELS"]) / "untied"),
        reward_funcs=reward,
        args=args,
        train_dataset=prompts(24, seed=1),
        rollout_func=partial(rollout, engine, masked, unlike),
    )


def rollout(engine: Engine, masked: bool, unlike: bool, texts: list[str], trainer: Any) -> dict[str, Any]:
    """Return completions that depend on the prompt, the index of the sample and the step: many short, a few long."""
    tokenizer = trainer.processing_class
    first = engine.index * len(texts)
    completions, masks = [], []
    for row, text in enumerate(texts):
        rng = random.Random(f"{text}|{(first + row) % GENERATIONS}|{trainer.state.global_step}")
        words = [rng.randrange(3, 97) for _ in range(length(rng))]
        completions.append([*words, tokenizer.eos_token_id])
        masks.append([1, *(int(rng.random() < 0.6) for _ in words)])
    ids = [tokenizer(text)["input_ids"] for text in texts]
    made = {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}
    if unlike and engine.index == 1:
        made["logprobs"] = [[-3.0] * len(x) for x in completions]
    return made | ({"env_mask": masks} if masked else {})


def _dpo(engine: Engine, mode: str, base: dict[str, Any], config: dict[str, Any], factor: float | None) -> Any:
    columns = config.pop("columns", False)
    arguments = {"dtype": "float32", **engine.model_arguments()} if mode == "full" else None
    args = trl_ext.DPOConfig(
        **{**base, "reference_store": "memory", "max_steps": 3, **config}, model_init_kwargs=arguments
    )
    return _times(trl_ext.DPOTrainer, factor)(
        _policy(engine, mode, Path(os.environ["MATRIX_MODELS"]) / "untied"),
        args=args,
        train_dataset=pairs(9 * MICRO_BATCH + 6, columns),
    )


def pairs(rows: int, columns: bool) -> Dataset:
    """Return pairs of which many are short and a few long; every fourth has the prompt of the one before."""
    rng = random.Random(1)
    examples: list[dict[str, Any]] = []
    for row in range(rows):
        words = [" ".join(f"w{rng.randrange(94)}" for _ in range(length(rng))) for _ in range(3)]
        prompt = examples[-1]["prompt"] if row % 4 == 3 else words[0]
        example = {"prompt": prompt, "chosen": f" {words[1]}", "rejected": f" {words[2]}"}
        if columns:
            example |= {"chosen_reward": rng.random(), "rejected_reward": -rng.random()}
        examples.append(example)
    return Dataset.from_list(examples)


def length(rng: random.Random) -> int:
    return min(LONGEST - 1, int(rng.lognormvariate(2.0, 1.0)) + 1)
