r"""GRPO with LoRA and verifiable rewards: 1 for the correct number, and a small reward for the format of the answer.

Takes a minute on a CPU, with the demo's model and data:

    python examples/grpo_verifiable.py --output_dir runs/verifiable

A reward function gets lists with a value for each completion: `prompts`, `completions`, and each column of the dataset
by its name, such as `answer` below. It returns a number for each completion. TRL weights several functions by
`reward_weights` and adds them up. A group whose completions all get the same reward has zero advantage and is skipped
(`skipped/rows` in the logs).
"""

import re
from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from trl import TrlParser

from trl_ext import GRPOConfig, GRPOTrainer


@dataclass
class Problem:
    """The model and the data.

    Args:
        model (`str`, *optional*): a Hub name or a folder.
        data (`str`, *optional*): a dataset with the columns `prompt` and `answer`.
    """

    model: str = field(default="examples/demo/model", metadata={"help": "Hub name or folder."})
    data: str = field(default="examples/demo/data/grpo", metadata={"help": "With columns `prompt` and `answer`."})


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Reward 1 if the completion ends with `so` and the correct number, else 0."""
    found = [re.search(r"so (\d+)$", text) for text in completions]
    return [float(x is not None and x[1] == wanted) for x, wanted in zip(found, answer, strict=True)]


def says_so(completions: list[str], **_: Any) -> list[float]:
    """Reward 1 if the completion ends with `so` and any number, which is learned early and makes rewards differ."""
    return [float(re.search(r"so \d+$", text) is not None) for text in completions]


def main(problem: Problem, config: GRPOConfig) -> None:
    trainer = GRPOTrainer(
        model=problem.model,
        reward_funcs=[right, says_so],
        args=config,
        train_dataset=load_dataset(problem.data, split="train"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    print(trainer.explain())
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    parser = TrlParser((Problem, GRPOConfig))
    parser.set_defaults(
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
