"""Trains a language model with RLOO, on prompts and a reward function.

    python examples/rloo.py --model_name_or_path examples/demo/model --dataset_name examples/demo/data/grpo \
        --per_device_train_batch_size 32 --num_generations 8 --max_completion_length 36 --beta 0 --learning_rate 3e-4 \
        --use_peft --lora_target_modules all-linear --lora_dropout 0 --use_cpu --bf16 false --output_dir runs/rloo

The options are TRL's (`--help` lists them). Without dropout (`--lora_dropout` is 0.05 by default), the completions of a
group share their prompt. Without a KL term (`--beta 0`), equal rewards cost no training pass, and the old policy's pass
is skipped.
"""

from typing import Any

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from trl_ext import RLOOConfig, RLOOTrainer


def brevity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Replace this with your reward. `columns` are those of the data set."""
    return [-float(len(ids)) for ids in completion_ids]


script, training, model = TrlParser((ScriptArguments, RLOOConfig, ModelConfig)).parse_args_and_config()
prompts = load_dataset(script.dataset_name, split=script.dataset_train_split)
adapter = get_peft_config(model)
trainer = RLOOTrainer(model.model_name_or_path, brevity, training, prompts, peft_config=adapter)
trainer.train()
trainer.save_model()
