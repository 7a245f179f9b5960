"""Fine-tunes a language model on texts or completions with SFT.

    python examples/sft.py --model_name_or_path examples/demo/model --dataset_name examples/demo/data/dpo \
        --learning_rate 3e-4 --use_peft --lora_target_modules all-linear --use_cpu --bf16 false --output_dir runs/sft

The options are TRL's (`--help` lists them). The data set has the column `text`, `messages`, or `prompt` and
`completion`. Of preference pairs, as in the demo, the script takes the chosen completions. With `--packing`, TRL joins
several rows into one.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from trl_ext import SFTConfig, SFTTrainer

script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
data = load_dataset(script.dataset_name, split=script.dataset_train_split)
if "chosen" in data.column_names:
    data = data.rename_column("chosen", "completion").remove_columns("rejected")
trainer = SFTTrainer(model.model_name_or_path, args=training, train_dataset=data, peft_config=get_peft_config(model))
trainer.train()
trainer.save_model()
