r"""Fine-tunes a language model on rewards of its own completions with GRPO, with LoRA or all weights.

On one device:

    python examples/grpo_lora.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --dataset_name trl-lib/DeepMath-103K \
        --reward_funcs accuracy_reward \
        --learning_rate 1e-5 --num_generations 8 --max_completion_length 512 --max_steps 500 \
        --use_peft --lora_r 16 --lora_alpha 32 \
        --output_dir runs/qwen-grpo

Without a GPU, with the demo's model and data:

    python examples/grpo_lora.py --config examples/demo/grpo.yaml --model_name_or_path examples/demo/model \
        --dataset_name examples/demo/data/grpo --use_cpu --output_dir runs/grpo

On several GPUs of one machine, pass the same options to:

    accelerate launch --config_file examples/accelerate_configs/ddp.yaml --num_processes 4 examples/grpo_lora.py

The options are TRL's (`--help` lists them); `--config options.yaml` reads them from a file. `--dataset_name` takes a
Hub name or a folder of JSONL files with a column `prompt` and the columns that the rewards read. If
`--model_name_or_path` is a folder with an `adapter_config.json`, for example from `dpo_lora.py`, the script continues
to train that adapter; omit `--use_peft` then.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datasets import load_dataset
from peft import AutoPeftModelForCausalLM
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

from trl_ext import GRPOConfig, GRPOTrainer


@dataclass
class GRPOScriptArguments(ScriptArguments):
    """TRL's dataset arguments, and the rewards.

    Args:
        reward_funcs (`list[str]`, *optional*, defaults to `[]`):
            Reward functions: dotted paths, such as `my_rewards.brevity`, or names in `trl.rewards`, such as
            `accuracy_reward`. Modules are looked up in the installed packages, the folder of this script and the
            current folder.
        reward_model_name_or_path (`str`, *optional*):
            Reward model: a Hub name or a folder.
    """

    reward_funcs: list[str] = field(
        default_factory=list,
        metadata={"help": "Reward functions: dotted paths (`my_rewards.brevity`) or names in `trl.rewards`."},
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Reward model: a Hub name or a folder."}
    )


def load_reward(path: str) -> Callable:
    """Import a reward function by its dotted path, or by its name in `trl.rewards`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module or "trl.rewards"), name)


def main(
    script_args: GRPOScriptArguments,
    training_args: GRPOConfig,
    model_args: ModelConfig,
    mixture_args: DatasetMixtureConfig,
) -> None:
    if model_args.model_name_or_path is None or not (script_args.dataset_name or mixture_args.datasets):
        raise ValueError(
            "Pass a model and a dataset: `--model_name_or_path` and `--dataset_name` (or `datasets` in a config file)."
        )
    model_init_kwargs: dict[str, Any] = {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training_args.trust_remote_code,
        **(training_args.model_init_kwargs or {}),
    }
    model = model_args.model_name_or_path
    quantization_config = get_quantization_config(model_args)
    if os.path.isfile(os.path.join(model, "adapter_config.json")):
        # The trainer does not load adapters from a folder. Without `is_trainable`, PEFT loads them for inference, and
        # nothing would be trained.
        model = AutoPeftModelForCausalLM.from_pretrained(
            model, is_trainable=True, quantization_config=quantization_config, **model_init_kwargs
        )
        quantization_config = training_args.model_init_kwargs = None
    else:
        training_args.model_init_kwargs = {"revision": model_args.model_revision, **model_init_kwargs}

    # Python looks for modules in the script's folder, not in the current one, where rewards usually are.
    sys.path.append(os.getcwd())
    if mixture_args.datasets:
        dataset = get_dataset(mixture_args)
    else:
        dataset = load_dataset(
            script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
        )
    rewards: list[Any] = [load_reward(path) for path in script_args.reward_funcs]
    if script_args.reward_model_name_or_path is not None:
        rewards.append(script_args.reward_model_name_or_path)
    evaluates = training_args.eval_strategy != "no"
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        quantization_config=quantization_config,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    if hasattr(trainer, "end"):  # transformers 5.18 and later: closes the trackers and the process group
        trainer.end()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        raise SystemExit(__doc__)
    main(*TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)).parse_args_and_config())
