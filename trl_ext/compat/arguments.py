"""Checks of the arguments of TRL's trainers and configs: unknown names, names of earlier versions, and numbers.

This file imports nothing heavy, so that the command line can use it before torch is loaded.
"""

import difflib
import inspect
import reprlib
from collections.abc import Collection, Iterable
from dataclasses import fields
from numbers import Real
from types import UnionType
from typing import Any, Union, get_args, get_origin

_LEFT_OUT = "Leave it out."

# Fields that TRL annotates as integers, but for which it also takes floats, or text
_TAKE_FLOATS = frozenset(
    {
        *("dataloader_num_workers", "ddp_bucket_cap_mb", "ddp_timeout", "eval_accumulation_steps", "local_rank"),
        *("max_completion_length", "max_tool_calling_iterations", "num_completions_to_print"),
        *("num_generations_eval", "precompute_ref_batch_size", "ref_model_sync_steps", "save_total_limit"),
        *("vllm_group_port", "vllm_max_model_length", "vllm_tensor_parallel_size"),
    }
)
_TAKE_TEXT = frozenset({"vllm_server_port"})

# Fields of TRL's configs that serve as divisors, and the minimum of each
_LEAST = {
    **{"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1},
    **{"num_generations": 2, "steps_per_generation": 1, "generation_batch_size": 1},
}

# Fields of a config that have another name now
_RENAMED = {
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
    "max_prompt_length": "Prompts are no longer truncated. Remove rows with long prompts from the data set. In DPO, "
    "`max_length` limits prompt and completion together.",
    **dict.fromkeys(
        ("max_completion_length", "max_target_length"), "Use `max_length`, which limits prompt and completion together."
    ),
    "padding_value": "Use `pad_token`, which takes the token and not its id.",
    "ref_model_init_kwargs": "Load the reference with them, and pass it to the trainer as `ref_model`.",
    "reference_free": "DPO needs a reference. For a loss without one, see `trl.experimental.cpo`.",
    "rpo_alpha": 'Use `loss_type=["sigmoid", "sft"]` and `loss_weights=[1.0, {value}]`.',
    "tools": "Add a column `tools` to the data set.",
    "use_liger_loss": f"{_LEFT_OUT} The logits of a batch are never built.",
    "vllm_device": 'Use `vllm_mode="colocate"`, or `"server"` with a server on another device.',
    "warmup_ratio": "Use `warmup_steps={value}`: a number below 1 is a ratio.",
    **dict.fromkeys(("use_logits_to_keep", "use_num_logits_to_keep"), f"{_LEFT_OUT} Only completions are scored."),
    **dict.fromkeys(
        (
            *("fp16_backend", "half_precision_backend", "include_tokens_per_second", "jit_mode_eval"),
            *("overwrite_output_dir", "past_index", "save_safetensors", "use_ipex", "use_mps_device"),
        ),
        _LEFT_OUT,
    ),
}

# Arguments of a trainer
_RENAMED_OF_TRAINERS = {
    **dict.fromkeys(("config", "training_args"), "args"),
    **dict.fromkeys(("reward_fn", "reward_func", "reward_function", "reward_model", "rewards"), "reward_funcs"),
    "lora_config": "peft_config",
    "dataset": "train_dataset",
    "tokenizer": "processing_class",
}
_REMOVED_OF_TRAINERS = {
    "model_init": "Pass a `model`.",
    "preprocess_logits_for_metrics": f"{_LEFT_OUT} The logits of a batch are never built.",
    "ref_model": f"{_LEFT_OUT} The reference is the model before training, and is used if `beta` is above 0.",
}


def refuse_unknown(
    owner: str, given: dict[str, Any], known: Collection[str], *, config: str = "", of_config: Collection[str] = ()
) -> None:
    """Raise `TypeError` for the first argument of `given` that is not `known`, with what to use instead.

    Args:
        owner (`str`): the class whose arguments are `known`.
        config (`str`): for a trainer, the name of its config, whose fields are `of_config`.
    """
    for name, value in given.items():
        if name in known:
            continue
        shown = reprlib.repr(value)
        if name in of_config:
            raise TypeError(
                f"`{name}` is an argument of `{config}`, not of `{owner}`. Pass `args={config}({name}={shown}, ...)`."
            )
        remedy = former_name(name, known, shown, of_trainer=bool(config)) or former_name(name, of_config, shown)
        if remedy is not None:
            raise TypeError(f"`{name}` is not an argument of `{owner}`. {remedy}")
        raise TypeError(f"{owner}.__init__() got an unexpected keyword argument '{name}'.{_did_you_mean(name, known)}")


def former_name(name: str, known: Collection[str], value: str = "...", *, of_trainer: bool = False) -> str | None:
    """Return what to use instead of an argument of an earlier version; `None` for other names.

    Args:
        known (`Collection[str]`): the present arguments of the trainer, or of its config.
        value (`str`): the value given, as it is shown.
    """
    renamed, removed = (_RENAMED_OF_TRAINERS, _REMOVED_OF_TRAINERS) if of_trainer else (_RENAMED, _REMOVED)
    if renamed.get(name) in known:
        return f"Use `{renamed[name]}`."
    return removed[name].format(value=value) if known and name in removed else None


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.9)  # not `local_rank` for `lora_rank`
    return f" Did you mean `{close[0]}`?" if close else ""


def check_numbers(config: Any) -> None:
    """Raise `TypeError` if a numeric field of a config, TRL's or ours, has no number; `ValueError` if it is too low.

    The types are those in the annotations. None, and fields that also take text, are left to TRL.
    """
    kinds: dict[str, Any] = {}
    for cls in reversed(type(config).__mro__):
        if cls.__module__.split(".")[0] in ("trl", "trl_ext", "transformers"):  # not fields of a user's subclass
            kinds |= inspect.get_annotations(cls)
    for x in fields(config):
        kind, value = kinds.get(x.name), getattr(config, x.name, None)
        allowed = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
        if value is None or str in allowed or x.name in _TAKE_TEXT:
            continue
        if list[float] in allowed:
            if isinstance(value, Real | str) or any(isinstance(one, str) for one in value):
                raise TypeError(f"`{x.name}` must be a list of numbers such as [1.0, 0.5], got {value!r}.")
        elif float in allowed or int in allowed:
            takes_floats = float in allowed or x.name in _TAKE_FLOATS
            # Numbers of numpy and torch have these methods too
            if not hasattr(value, "__float__" if takes_floats else "__index__"):
                kind, text = "a number" if takes_floats else "an integer", "the string " * isinstance(value, str)
                hint = _number_to_write(value, takes_floats) or f"Give {kind}."
                raise TypeError(f"`{x.name}` must be {kind}, got {text}{value!r}. {hint}")
            if x.name in _LEAST and value < _LEAST[x.name]:
                raise ValueError(f"`{x.name}` must be {_LEAST[x.name]} or more, got {value!r}.")


def _number_to_write(value: Any, takes_floats: bool) -> str | None:
    """Return the spelling of a number without quotes, or of a whole number without a decimal point; else `None`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if not takes_floats and not number.is_integer():
        return None
    return f"Write {value if takes_floats else int(number)}{' without quotes' * isinstance(value, str)}."
