r"""RPO: preference pairs with rewards, from which the policy learns how much better the chosen completion is.

Takes half a minute on a CPU, with the demo's model and data:

    python examples/dpo_rpo.py --output_dir runs/rpo

The dataset needs the columns `chosen_reward` and `rejected_reward`. Here the script makes them: 1 for a correct answer,
and less for a wrong one the further off it is. RPO fits beta times the log-ratio difference to `reward_scale` times the
reward difference. The second loss, `sft` with label smoothing, keeps the chosen completions likely.
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
    """The model and the data.

    Args:
        model (`str`, *optional*): a Hub name or a folder.
        data (`str`, *optional*): a dataset of preference pairs with worked answers.
    """

    model: str = field(default="examples/demo/model", metadata={"help": "Hub name or folder."})
    data: str = field(default="examples/demo/data/dpo", metadata={"help": "Preference pairs with worked answers."})


def with_rewards(pair: dict[str, Any]) -> dict[str, Any]:
    """Add rewards to the pair, which depend on how far off the rejected number is."""
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
