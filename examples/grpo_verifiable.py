r"""GRPO with LoRA and a verifiable reward: a number that is right or not, and a small reward for saying where it is.

On the demo's model and data, on a CPU, a minute:

    python examples/grpo_verifiable.py --output_dir runs/verifiable

A reward function gets lists, a value for each completion: `prompts`, `completions`, and each column of the data set
by its name. So `answer` below is the data set's column. It returns a number for each completion; rewards of several
functions are weighted by `reward_weights` and summed. A group whose completions are all right, or all wrong, teaches
nothing: its rows are not fed (`skipped/rows` in the logs).
"""

import re
from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from trl import TrlParser

from trl_ext import CurvesCallback, GRPOConfig, GRPOTrainer


@dataclass
class Problem:
    """What is trained on what.

    Args:
        model (`str`, *optional*): a name on the Hub or a folder.
        data (`str`, *optional*): a data set with the columns `prompt` and `answer`.
    """

    model: str = field(default="examples/demo/model", metadata={"help": "A name on the Hub or a folder."})
    data: str = field(default="examples/demo/data/grpo", metadata={"help": "With columns `prompt` and `answer`."})


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the number after `so`, at the end, is the answer."""
    found = [re.search(r"so (\d+)$", text) for text in completions]
    return [float(x is not None and x[1] == wanted) for x, wanted in zip(found, answer, strict=True)]


def says_so(completions: list[str], **_: Any) -> list[float]:
    """1 where there is a number after `so` at all: reached early, it keeps groups from being all alike."""
    return [float(re.search(r"so \d+$", text) is not None) for text in completions]


def main(problem: Problem, config: GRPOConfig) -> None:
    trainer = GRPOTrainer(
        model=problem.model,
        reward_funcs=[right, says_so],
        args=config,
        train_dataset=load_dataset(problem.data, split="train"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[CurvesCallback()],
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
