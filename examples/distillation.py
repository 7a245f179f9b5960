"""Distills a teacher into a smaller language model, on prompts or on completions of the data set.

    python examples/distillation.py --model_name_or_path examples/demo/model --dataset_name examples/demo/data/grpo \
        --teacher_model_name_or_path examples/demo/model --teacher_model_init_kwargs '{"rms_norm_eps": 0.1}' \
        --per_device_train_batch_size 32 --max_completion_length 36 --learning_rate 3e-4 --use_cpu --bf16 false \
        --output_dir runs/distillation

The options are TRL's (`--help` lists them). Teacher and student have one vocabulary. By default, the student samples
the completions. With `--completion_column`, they come from a column of the data set, and with `--teacher_store disk`,
the teacher scores each of them once: later epochs need only its head, and so do later runs once all rows are stored.
With `--use_peft` and without a teacher, the teacher is the student's base model.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from trl_ext import DistillationConfig, DistillationTrainer

script, training, model = TrlParser((ScriptArguments, DistillationConfig, ModelConfig)).parse_args_and_config()
trainer = DistillationTrainer(
    model=model.model_name_or_path,
    teacher_model=training.teacher_model_name_or_path,
    args=training,
    train_dataset=load_dataset(script.dataset_name, split=script.dataset_train_split),
    peft_config=get_peft_config(model),
)
trainer.train()
trainer.save_model()
