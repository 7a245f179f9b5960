"""The arguments of a short training of the demo's model, which a clone holds."""

from pathlib import Path

from . import CommandError

_FOLDER = Path("examples/demo")
_CLONE = Path(__file__).resolve().parents[2]
_COMMON = """
    --use_cpu --bf16 false --gradient_checkpointing false --dataloader_pin_memory false
    --learning_rate 3e-4 --lr_scheduler_type constant
"""
_LORA = "--use_peft --lora_r 16 --lora_alpha 32 --lora_dropout 0.0 --lora_target_modules all-linear"
_PREFERENCES = "--per_device_train_batch_size 32 --max_length 64"
_SAMPLES = "--per_device_train_batch_size 64 --num_generations 8 --max_completion_length 36"
_DISTILLATION = "--per_device_train_batch_size 64 --max_completion_length 36 --beta 0.5"
_OF_METHOD = {
    "sft": ("sft", _PREFERENCES),
    "dpo": ("dpo", f"{_PREFERENCES} --beta 1.0"),
    "kto": ("dpo", _PREFERENCES),
    "grpo": ("grpo", f"{_SAMPLES} --beta 0.04"),
    "rloo": ("grpo", _SAMPLES),
    "reward": ("dpo", _PREFERENCES),
    "distillation": ("grpo", _DISTILLATION),
}


def demo_words(method: str, *, lora: bool = True) -> list[str]:
    """Return the arguments of the training, on the CPU.

    Raises:
        `CommandError`: there is no clone in the current folder, and this package is not installed from one with `-e`.
    """
    folder = next((x for x in (_FOLDER, _CLONE / _FOLDER) if (x / "model").is_dir()), None)
    if folder is None:
        raise CommandError(
            "Without `--model_name_or_path` and `--dataset_name`, `compare` needs the model in `examples/demo`, which "
            "is not here. Run the command in a clone of trl_ext, or set both arguments."
        )
    data, words = _OF_METHOD[method]
    paths = ["--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "data" / data)]
    further_words = ["--reward_funcs", f"{folder / 'task.py'}:right_answer"] if data == "grpo" else []
    if method == "distillation":
        # The demo has one model, so a constant makes a teacher of it
        further_words = ["--teacher_model_name_or_path", str(folder / "model")]
        further_words += ["--teacher_model_init_kwargs", '{"rms_norm_eps": 0.1}']
    return [*_COMMON.split(), *(_LORA.split() if lora else ()), *words.split(), *paths, *further_words]
