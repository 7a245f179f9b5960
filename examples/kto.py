"""Fine-tunes a language model with KTO, on completions that are labelled good or bad.

    python examples/kto.py --model_name_or_path examples/demo/model --dataset_name examples/demo/data/dpo \
        --learning_rate 3e-4 --use_peft --lora_target_modules all-linear --use_cpu --bf16 false --output_dir runs/kto

The options are TRL's (`--help` lists them). The data set has the columns `prompt`, `completion` and `label`; TRL splits
preference pairs, as in the demo, into such rows. The reference scores each row once: a second run reads its log-probs.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from trl_ext import KTOConfig, KTOTrainer

script, training, model = TrlParser((ScriptArguments, KTOConfig, ModelConfig)).parse_args_and_config()
trainer = KTOTrainer(
    model=model.model_name_or_path,
    args=training,
    train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
    peft_config=get_peft_config(model),
)
trainer.train()
trainer.save_model()
