r"""GRPO with tools: the model can call a Python function and read its result.

Needs a model whose chat template supports tool calls, such as Qwen3:

    python examples/grpo_tools.py --model Qwen/Qwen3-0.6B --output_dir runs/tools

A tool is a function with type hints and a docstring with `Args:`, which describe it to the model. TRL finds the tool
calls in a completion and inserts their results, which are masked out of the loss.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from trl import TrlParser

from trl_ext import GRPOConfig, GRPOTrainer


@dataclass
class Task:
    """The model and the number of problems.

    Args:
        model (`str`, *optional*): a Hub name or a folder.
        problems (`int`, *optional*): number of problems to generate.
    """

    model: str = field(default="Qwen/Qwen3-0.6B", metadata={"help": "Hub name or folder."})
    problems: int = field(default=512, metadata={"help": "Number of problems to generate."})


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: first number
        b: second number

    Returns:
        The product.
    """
    return a * b


def right(completions: list[list[dict[str, Any]]], answer: list[int], **_: Any) -> list[float]:
    """Reward 1 if the last message contains the product, else 0."""
    said = [str(messages[-1].get("content", "")) if messages else "" for messages in completions]
    return [float(str(wanted) in text) for text, wanted in zip(said, answer, strict=True)]


def calls(completions: list[list[dict[str, Any]]], **_: Any) -> list[float]:
    """Reward 1 if a tool was called, else 0."""
    return [float(any(message["role"] == "tool" for message in messages)) for messages in completions]


def problems(count: int) -> Dataset:
    """Generate problems: products of two three-digit numbers."""
    rng = random.Random(0)
    pairs = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(count)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"How much is {a} times {b}?"}], "answer": a * b} for a, b in pairs]
    )


def main(task: Task, config: GRPOConfig) -> None:
    trainer = GRPOTrainer(
        model=task.model,
        reward_funcs=[right, calls],
        tools=[multiply],
        args=config,
        train_dataset=problems(task.problems),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    parser = TrlParser((Task, GRPOConfig))
    parser.set_defaults(
        reward_weights=[1.0, 0.2],
        learning_rate=1e-5,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=256,
        max_tool_calling_iterations=2,
        logging_steps=1,
        report_to="none",
    )
    main(*parser.parse_args_and_config())
