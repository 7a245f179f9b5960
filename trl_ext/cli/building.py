"""A trainer of ours from what the command line says: model, data sets, rewards and adapter, as TRL's scripts do it."""

import os
from typing import Any

import torch
from datasets import load_dataset
from peft import AutoPeftModelForCausalLM
from trl import get_dataset, get_peft_config, get_quantization_config

from ..trainers import DPOTrainer, GRPOTrainer
from .arguments import Parsed
from .errors import CommandError
from .rewards import rewards_of


def build(method: str, parsed: Parsed, *, most_rows: int | None = None) -> Any:
    """The trainer, ready to train.

    Args:
        most_rows (`int`, *optional*): rows that are taken of each data set, where only the plan is asked for.

    Raises:
        `CommandError`: something that a trainer needs was not given.
    """
    script, training, model_args, mixture, *_ = parsed
    rewards = {"reward_funcs": rewards_of(script)} if method == "grpo" else {}
    require_model(model_args)
    train, evaluation = _data_sets(script, training, mixture, most_rows)
    model, quantization_config = _model(training, model_args)
    trainer_class = DPOTrainer if method == "dpo" else GRPOTrainer
    trainer = trainer_class(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=evaluation,
        quantization_config=quantization_config,
        peft_config=get_peft_config(model_args),
        **rewards,
    )
    if script.ignore_bias_buffers:
        # DDP broadcasts buffers, and some backends cannot broadcast booleans
        trainer.model._ddp_params_and_buffers_to_ignore = [
            name for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool
        ]
    return trainer


def require_model(model_args: Any) -> None:
    """Raise `CommandError` where no model was named."""
    if model_args.model_name_or_path is None:
        raise CommandError("`--model_name_or_path` is not set. Give a model's name on the Hub or a folder.")


def model_init_arguments(training: Any, model_args: Any) -> dict[str, Any]:
    """What the model is loaded with, as in TRL's scripts."""
    return {
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training.trust_remote_code,
        **(training.model_init_kwargs or {}),
    }


def _model(training: Any, model_args: Any) -> tuple[Any, Any]:
    """The model or its name, and the quantization that the trainer is to load it with."""
    name, arguments = model_args.model_name_or_path, model_init_arguments(training, model_args)
    quantization_config = get_quantization_config(model_args)
    if not os.path.isfile(os.path.join(name, "adapter_config.json")):
        training.model_init_kwargs = {"revision": model_args.model_revision, **arguments}
        return name, quantization_config
    # Given the folder, the trainer would not find a PEFT model in it; PEFT loads adapters for inference unless told
    training.model_init_kwargs = None
    model = AutoPeftModelForCausalLM.from_pretrained(
        name, is_trainable=True, quantization_config=quantization_config, **arguments
    )
    return model, None


def _data_sets(script: Any, training: Any, mixture: Any, most_rows: int | None) -> tuple[Any, Any]:
    if mixture.datasets:
        data = get_dataset(mixture)
    elif script.dataset_name:
        data = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    else:
        raise CommandError(
            "`--dataset_name` is not set. Give a data set's name on the Hub or a folder of JSONL files; or "
            "`datasets`, a list, in the file of `--config`."
        )
    wanted = {"dataset_train_split": script.dataset_train_split}
    if training.eval_strategy != "no":
        wanted["dataset_test_split"] = script.dataset_test_split
    for argument, split in wanted.items():
        if split not in data:
            there = ", ".join(data)
            raise CommandError(f"`--{argument}` is `{split}`, but the data set has {there}: give one of these.")
    found = [data[split] for split in wanted.values()]
    if most_rows is not None:
        found = [x.select(range(min(most_rows, len(x)))) if hasattr(x, "select") else x for x in found]
    return found[0], found[1] if len(found) > 1 else None
