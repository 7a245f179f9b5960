"""Trains a reward model on pairs, of which one row is the better one.

    python examples/reward.py --model_name_or_path examples/demo/model --dataset_name examples/demo/data/dpo \\
        --learning_rate 3e-4 --use_peft --lora_target_modules all-linear --use_cpu --bf16 false --output_dir runs/reward

The options are TRL's (`--help` lists them). The data set has the columns `chosen` and `rejected`, and perhaps `prompt`
and `margin`. The model gets a score head, which PEFT trains and saves with the adapter. Without dropout
(`--lora_dropout` is 0.05 by default), the rows of a pair share their prompt.
"""

from dataclasses import replace

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from trl_ext import RewardConfig, RewardTrainer

script, training, model = TrlParser((ScriptArguments, RewardConfig, ModelConfig)).parse_args_and_config()
trainer = RewardTrainer(
    model=model.model_name_or_path,
    args=training,
    train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
    peft_config=get_peft_config(replace(model, lora_task_type="SEQ_CLS")),
)
trainer.train()
trainer.save_model()
