"""Names of arguments: what earlier versions and other libraries called them, and what a mistyped one can mean.

This file imports nothing heavy, so that the command line can use it before torch is loaded.
"""

import reprlib
from collections.abc import Collection, Iterable
from typing import Any

_LEFT_OUT = "Leave it out."

# What other libraries and users call a field of a config, or an argument of the command line
OTHER_NAMES = {
    **dict.fromkeys(("model", "model_id", "model_path", "base_model"), "model_name_or_path"),
    **dict.fromkeys(("data", "dataset", "dataset_path"), "dataset_name"),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "micro_batch_size", "per_device_batch_size"),
        "per_device_train_batch_size",
    ),
    **dict.fromkeys(("accumulation_steps", "grad_accum", "grad_accumulation_steps"), "gradient_accumulation_steps"),
    **dict.fromkeys(("epochs", "num_epochs"), "num_train_epochs"),
    **dict.fromkeys(("lora", "use_lora"), "use_peft"),
    **dict.fromkeys(("target_modules", "lora_targets"), "lora_target_modules"),
    "eval_batch_size": "per_device_eval_batch_size",
    "kl_coef": "beta",
    "lora_rank": "lora_r",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "torch_dtype": "dtype",
}
_OF_TEXTS = {**dict.fromkeys(("max_seq_length", "max_seq_len"), "max_length"), "num_proc": "dataset_num_proc"}
_OF_GROUPS = {"group_size": "num_generations"}
OTHER_NAMES_OF = {
    **dict.fromkeys(("sft", "dpo", "kto", "reward"), _OF_TEXTS),
    **dict.fromkeys(("grpo", "rloo"), _OF_GROUPS),
    "distillation": dict.fromkeys(("teacher", "teacher_model", "teacher_name_or_path"), "teacher_model_name_or_path"),
}

# Fields of a config that have another name now
_RENAMED = {
    **OTHER_NAMES,
    **_OF_TEXTS,
    **_OF_GROUPS,
    # RLOO in earlier versions
    "cliprange": "epsilon",
    "normalize_reward": "normalize_advantages",
    "num_ppo_epochs": "num_iterations",
    "response_length": "max_completion_length",
    "rloo_k": "num_generations",
    "evaluation_strategy": "eval_strategy",
    "max_new_tokens": "max_completion_length",
    "model_adapter_name": "policy_adapter_name",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_max_model_len": "vllm_max_model_length",
    "wandb_log_unique_prompts": "log_unique_prompts",
}

# Fields of a config that were removed; `{value}` is the value given
_REMOVED = {
    "force_use_ref_model": f"{_LEFT_OUT} A `ref_model` that you pass is always used.",
    "generate_during_eval": "Add `trl.LogCompletionsCallback` to `callbacks` after building the trainer.",
    "group_by_length": 'Use `train_sampling_strategy="group_by_length"`.',
    "is_encoder_decoder": f"{_LEFT_OUT} Encoder-decoder models are not supported.",
    "label_pad_token_id": f"{_LEFT_OUT} The label of padding is -100.",
    "logging_dir": "Set the environment variable `TENSORBOARD_LOGGING_DIR` to {value}.",
    "max_prompt_length": "Prompts are no longer truncated. Remove rows with long prompts from the data set.",
    **dict.fromkeys(
        ("max_completion_length", "max_target_length"), "Use `max_length`, which limits prompt and completion together."
    ),
    "padding_value": "Use `pad_token`, which takes the token and not its id.",
    "ref_model_init_kwargs": "Load the reference model with these arguments, and pass it as `ref_model`.",
    "reference_free": "The loss needs a reference. For a loss without a reference, see `trl.experimental.cpo`.",
    "rpo_alpha": 'Use `loss_type=["sigmoid", "sft"]` and `loss_weights=[1.0, {value}]`.',
    "tools": "Add a column `tools` to the data set.",
    "truncation_mode": f"{_LEFT_OUT} `max_length` keeps the beginning of a row.",
    "use_liger_loss": f"{_LEFT_OUT} By default, a batch's logits are never built.",
    "vllm_device": 'Use `vllm_mode="colocate"`, or `"server"` with a server on another device.',
    "warmup_ratio": "Use `warmup_steps={value}`: a number below 1 is a ratio.",
    **dict.fromkeys(("use_logits_to_keep", "use_num_logits_to_keep"), f"{_LEFT_OUT} Only completions are scored."),
    **dict.fromkeys(
        (
            "fp16_backend",
            "half_precision_backend",
            "include_tokens_per_second",
            "jit_mode_eval",
            "overwrite_output_dir",
            "past_index",
            "save_safetensors",
            "use_ipex",
            "use_mps_device",
        ),
        _LEFT_OUT,
    ),
}

# Those that only configs with `max_length` had
_OF_LENGTH = ("max_completion_length", "max_target_length", "tools", "truncation_mode")

# Arguments of a trainer
_RENAMED_OF_TRAINERS = {
    **dict.fromkeys(("config", "training_args"), "args"),
    **dict.fromkeys(("reward_fn", "reward_func", "reward_function", "reward_model", "rewards"), "reward_funcs"),
    "lora_config": "peft_config",
    "policy": "model",
    "dataset": "train_dataset",
    "tokenizer": "processing_class",
}
_REMOVED_OF_TRAINERS = {
    "model_init": "Pass a `model`.",
    "preprocess_logits_for_metrics": f"{_LEFT_OUT} By default, a batch's logits are never built.",
    **dict.fromkeys(
        ("ref_model", "ref_policy"),
        f"{_LEFT_OUT} The reference is the model before training, and is used if `beta` is above 0.",
    ),
}


def refuse_unknown(
    owner: str,
    arguments: dict[str, Any],
    known_names: Collection[str],
    *,
    config: str = "",
    of_config: Collection[str] = (),
) -> None:
    """Raise `TypeError` for the first argument of `arguments` that is not in `known_names`, with what to use instead.

    Args:
        owner (`str`): the class whose arguments have the `known_names`.
        config (`str`): for a trainer, the name of its config, whose fields are `of_config`.
    """
    for name, value in arguments.items():
        if name in known_names:
            continue
        shown_value = reprlib.repr(value)
        if name in of_config:
            raise TypeError(
                f"`{name}` is an argument of `{config}`, not of `{owner}`. Pass `args={config}({name}={shown_value}, "
                "...)`."
            )
        remedy = former_name(name, known_names, shown_value, of_trainer=of_config)
        remedy = remedy or former_name(name, of_config, shown_value, config)
        if remedy is not None:
            raise TypeError(f"`{name}` is not an argument of `{owner}`. {remedy}")
        raise TypeError(
            f"{owner}.__init__() got an unexpected keyword argument '{name}'.{did_you_mean(name, known_names)}"
        )


def former_name(
    name: str, known_names: Collection[str], value: str = "...", config: str = "", *, of_trainer: Collection[str] = ()
) -> str | None:
    """Return what to use instead of an argument of an earlier version or another library; `None` for other names.

    Args:
        known (`Collection[str]`): the present arguments of the trainer, or of its config.
        value (`str`): the value given, as it is shown.
        config (`str`): for a field that was given to a trainer, the name of its config.
        of_trainer (`Collection[str]`): for an argument of a trainer, the fields of its config.
    """
    new_names, remedies = (_RENAMED_OF_TRAINERS, _REMOVED_OF_TRAINERS) if of_trainer else (_RENAMED, _REMOVED)
    if new_names.get(name) in known_names:
        return f"Pass `args={config}({new_names[name]}={value}, ...)`." if config else f"Use `{new_names[name]}`."
    has_length = "max_length" in known_names
    if not known_names or name not in remedies or (name in _OF_LENGTH and not has_length):
        return None
    if name in ("ref_model", "ref_policy") and "beta" not in of_trainer:
        return f"{_LEFT_OUT} This method has no reference."
    more = " `max_length` limits prompt and completion together."
    return remedies[name].format(value=value) + more * (name == "max_prompt_length" and has_length)


def did_you_mean(name: str, known_names: Iterable[str], mark: str = "") -> str:
    """Return ` Did you mean ...?` if `name` can mean exactly one known name, else "".

    This is the only name that begins with `name`, or else the only one that differs from it by one typo: a letter
    more, less or changed, or two letters swapped, after the first letter. Names that are merely similar do not
    count, such as `lora_rank` and `local_rank`.
    """
    unique_names = set(known_names)
    candidates = [x for x in unique_names if len(name) >= 4 and x.startswith(name)]
    candidates = candidates if len(candidates) == 1 else [x for x in unique_names if _one_slip(name, x)]
    return f" Did you mean `{mark}{candidates[0]}`?" if len(candidates) == 1 else ""


def _one_slip(name: str, known_name: str) -> bool:
    pairs = enumerate(zip(name, known_name, strict=False))
    equal_letters = next((place for place, (a, b) in pairs if a != b), min(len(name), len(known_name)))
    a, b = name[equal_letters:], known_name[equal_letters:]
    swapped = a[:2] == b[1::-1] and a[2:] == b[2:]
    return equal_letters > 0 and (a[1:] == b or a == b[1:] or a[1:] == b[1:] or swapped)
