r"""RPO: pairs with a reward of each completion, of which the policy learns by how much the chosen one is better.

On the demo's model and data, on a CPU, half a minute:

    python examples/dpo_rpo.py --output_dir runs/rpo

The data set needs the columns `chosen_reward` and `rejected_reward`; here the rewards of the demo's pairs are made
up: 1 for a right answer, and for a wrong one less the further it is off. `reward_scale` is what they are multiplied
by before beta times the log-ratios is compared with them. A term `sft` beside it keeps the chosen completions likely,
with smoothed labels.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from trl import TrlParser

from trl_ext import DPOConfig, DPOTrainer


@dataclass
class Task:
    """What is trained on what.

    Args:
        model (`str`, *optional*): a name on the Hub or a folder.
        data (`str`, *optional*): a data set of pairs of worked answers.
    """

    model: str = field(default="examples/demo/model", metadata={"help": "A name on the Hub or a folder."})
    data: str = field(default="examples/demo/data/dpo", metadata={"help": "Pairs of worked answers."})


def with_rewards(pair: dict[str, Any]) -> dict[str, Any]:
    """The pair, and a reward of each completion by how far off its number is."""
    right, wrong = (int(re.search(r"so (\d+)", pair[name])[1]) for name in ("chosen", "rejected"))
    return {**pair, "chosen_reward": 1.0, "rejected_reward": -min(abs(right - wrong) / 100, 2.0)}


def main(task: Task, config: DPOConfig) -> None:
    trainer = DPOTrainer(
        model=task.model,
        args=config,
        train_dataset=load_dataset(task.data, split="train").map(with_rewards),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    parser = TrlParser((Task, DPOConfig))
    parser.set_defaults(
        loss_type=["rpo_backward_kl", "sft"],
        loss_weights=[1.0, 0.1],
        sft_label_smoothing=0.05,
        reward_scale=2.0,
        beta=1.0,
        learning_rate=3e-4,
        max_steps=40,
        per_device_train_batch_size=16,
        logging_steps=4,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    main(*parser.parse_args_and_config())
