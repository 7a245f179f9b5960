"""Fine-tunes a language model with KTO, on completions that are labelled good or bad.

    python examples/kto.py --model_name_or_path examples/demo/model --dataset_name examples/demo/data/dpo \
        --learning_rate 3e-4 --use_peft --lora_target_modules all-linear --use_cpu --bf16 false --output_dir runs/kto

The options are TRL's (`--help` lists them). The data set has the columns `prompt`, `completion` and `label`, or pairs,
as in the demo. KTO trains on rows in order, and TRL splits pairs in blocks of one label, so the script splits them and
shuffles the rows. The reference scores each row once: a second run reads its log-probs.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, unpair_preference_dataset

from trl_ext import KTOConfig, KTOTrainer

script, training, model = TrlParser((ScriptArguments, KTOConfig, ModelConfig)).parse_args_and_config()
data = load_dataset(script.dataset_name, split=script.dataset_train_split)
if "chosen" in data.column_names:
    data = unpair_preference_dataset(data)
trainer = KTOTrainer(
    model=model.model_name_or_path,
    args=training,
    train_dataset=data.shuffle(seed=training.seed),
    peft_config=get_peft_config(model),
)
trainer.train()
trainer.save_model()
