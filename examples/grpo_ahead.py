r"""GRPO one batch ahead: while a generation batch trains, another process samples the next one.

Takes a minute on a CPU, with the demo's model and data:

    python examples/grpo_ahead.py --output_dir runs/ahead

With `generation_lag=1`, `rollout_func` runs in a thread, so it gets a trainer without the model. It samples from a
copy, here in another process. The trainer calls `rollout_func.sync_weights(trainer)` between optimizer steps, while
the sampler is idle. The log-probs of the sampler let the loss correct for the age of its weights.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from datasets import load_dataset
from grpo_rollout import Task, sample
from grpo_verifiable import right, says_so
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import TrlParser

from trl_ext import GRPOConfig, GRPOTrainer

LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
LOADED: dict[str, Any] = {}  # model and tokenizer of the process that samples


def load(path: str, seed: int) -> None:
    torch.manual_seed(seed)
    LOADED["model"] = get_peft_model(AutoModelForCausalLM.from_pretrained(path), LORA).eval()
    LOADED["tokenizer"] = AutoTokenizer.from_pretrained(path)


def update(adapter: dict[str, Any]) -> None:
    set_peft_model_state_dict(LOADED["model"], {name: torch.from_numpy(x) for name, x in adapter.items()})


def sample_here(*arguments: Any) -> dict[str, list[Any]]:
    return sample(LOADED["model"], LOADED["tokenizer"], *arguments)


class Sampler:
    """A `rollout_func` that samples in another process."""

    def __init__(self, path: str, seed: int) -> None:
        self.process = ProcessPoolExecutor(1, get_context("spawn"), initializer=load, initargs=(path, seed))

    def sync_weights(self, trainer: GRPOTrainer) -> None:
        adapter = get_peft_model_state_dict(trainer.accelerator.unwrap_model(trainer.model))
        self.process.submit(update, {name: x.cpu().numpy() for name, x in adapter.items()}).result()

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        return self.process.submit(sample_here, prompts, trainer.temperature, trainer.max_completion_length).result()


def main(task: Task, config: GRPOConfig) -> None:
    trainer = GRPOTrainer(
        model=task.model,
        reward_funcs=[right, says_so],
        rollout_func=Sampler(task.model, config.seed),
        args=config,
        train_dataset=load_dataset(task.data, split="train"),
        peft_config=LORA,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    parser = TrlParser((Task, GRPOConfig))
    parser.set_defaults(
        generation_lag=1,
        reward_weights=[1.0, 0.1],
        learning_rate=5e-4,
        max_steps=20,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=36,
        logging_steps=2,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    main(*parser.parse_args_and_config())
