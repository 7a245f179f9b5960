"""Checks of the arguments of TRL's trainers and configs: unknown names, names of earlier versions, and numbers.

This file imports nothing heavy, so that the command line can use it before torch is loaded.
"""

import base64
import difflib
import inspect
import json
import math
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping
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

# The minimum of fields of TRL's configs: of divisors, and of what an optimizer or a loader refuses in the first step
_LEAST = {
    **{"gradient_accumulation_steps": 1, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1},
    **{"num_generations": 2, "steps_per_generation": 1, "generation_batch_size": 1},
    **{"learning_rate": 0, "weight_decay": 0, "adam_epsilon": 0, "adam_beta1": 0, "adam_beta2": 0, "warmup_steps": 0},
    **{"seed": 0, "dataloader_num_workers": 0, "dataset_num_proc": 0, "precompute_ref_batch_size": 0},
}
_MOST = {"seed": 2**32 - 1}
_BELOW = {"adam_beta1": 1, "adam_beta2": 1}
# Where infinity makes every weight NaN. Elsewhere it may mean "no bound", such as for `max_grad_norm`
_FINITE = frozenset({"learning_rate", "weight_decay", "adam_epsilon", "beta", "temperature", "num_train_epochs"})

# Fields with a dictionary, for which transformers also takes the path of a JSON file
_DICTIONARIES_IN_FILES = frozenset({"accelerator_config", "deepspeed", "fsdp_config"})

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
    **{"eval_batch_size": "per_device_eval_batch_size", "kl_coef": "beta", "lora_rank": "lora_r"},
    **{"lr": "learning_rate", "lr_scheduler": "lr_scheduler_type", "torch_dtype": "dtype"},
}
_OF_TEXTS = {**dict.fromkeys(("max_seq_length", "max_seq_len"), "max_length"), "num_proc": "dataset_num_proc"}
_OF_GROUPS = {"group_size": "num_generations"}
OTHER_NAMES_OF = {**dict.fromkeys(("sft", "dpo", "kto"), _OF_TEXTS), **dict.fromkeys(("grpo", "rloo"), _OF_GROUPS)}

# Fields of a config that have another name now
_RENAMED = {
    **OTHER_NAMES,
    **_OF_TEXTS,
    **_OF_GROUPS,
    # RLOO in earlier versions
    **{"cliprange": "epsilon", "normalize_reward": "normalize_advantages", "num_ppo_epochs": "num_iterations"},
    **{"response_length": "max_completion_length", "rloo_k": "num_generations"},
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
    "ref_model_init_kwargs": "Load the reference with them, and pass it to the trainer as `ref_model`.",
    "reference_free": "The loss needs a reference. For one without, see `trl.experimental.cpo`.",
    "rpo_alpha": 'Use `loss_type=["sigmoid", "sft"]` and `loss_weights=[1.0, {value}]`.',
    "tools": "Add a column `tools` to the data set.",
    "truncation_mode": f"{_LEFT_OUT} `max_length` keeps the beginning of a row.",
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

# Those that only configs with `max_length` had
_OF_LENGTH = ("max_completion_length", "max_target_length", "tools", "truncation_mode")

# Arguments of a trainer
_RENAMED_OF_TRAINERS = {
    **dict.fromkeys(("config", "training_args"), "args"),
    **dict.fromkeys(("reward_fn", "reward_func", "reward_function", "reward_model", "rewards"), "reward_funcs"),
    **{"lora_config": "peft_config", "policy": "model"},
    "dataset": "train_dataset",
    "tokenizer": "processing_class",
}
_REMOVED_OF_TRAINERS = {
    "model_init": "Pass a `model`.",
    "preprocess_logits_for_metrics": f"{_LEFT_OUT} The logits of a batch are never built.",
    **dict.fromkeys(
        ("ref_model", "ref_policy"),
        f"{_LEFT_OUT} The reference is the model before training, and is used if `beta` is above 0.",
    ),
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
        remedy = former_name(name, known, shown, of_trainer=of_config) or former_name(name, of_config, shown, config)
        if remedy is not None:
            raise TypeError(f"`{name}` is not an argument of `{owner}`. {remedy}")
        raise TypeError(f"{owner}.__init__() got an unexpected keyword argument '{name}'.{_did_you_mean(name, known)}")


def former_name(
    name: str, known: Collection[str], value: str = "...", config: str = "", *, of_trainer: Collection[str] = ()
) -> str | None:
    """Return what to use instead of an argument of an earlier version or another library; `None` for other names.

    Args:
        known (`Collection[str]`): the present arguments of the trainer, or of its config.
        value (`str`): the value given, as it is shown.
        config (`str`): for a field that was given to a trainer, the name of its config.
        of_trainer (`Collection[str]`): for an argument of a trainer, the fields of its config.
    """
    renamed, removed = (_RENAMED_OF_TRAINERS, _REMOVED_OF_TRAINERS) if of_trainer else (_RENAMED, _REMOVED)
    if renamed.get(name) in known:
        return f"Pass `args={config}({renamed[name]}={value}, ...)`." if config else f"Use `{renamed[name]}`."
    has_length = "max_length" in known
    if not known or name not in removed or (name in _OF_LENGTH and not has_length):
        return None
    if name in ("ref_model", "ref_policy") and "beta" not in of_trainer:
        return f"{_LEFT_OUT} This method has no reference."
    more = " `max_length` limits prompt and completion together."
    return removed[name].format(value=value) + more * (name == "max_prompt_length" and has_length)


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
            _check_each_finite(x.name, value)
        elif float in allowed or int in allowed:
            takes_floats = float in allowed or x.name in _TAKE_FLOATS
            # Numbers of numpy and torch have these methods too
            if not hasattr(value, "__float__" if takes_floats else "__index__"):
                kind, text = "a number" if takes_floats else "an integer", "the string " * isinstance(value, str)
                hint = _number_to_write(value, takes_floats) or f"Give {kind}."
                raise TypeError(f"`{x.name}` must be {kind}, got {text}{value!r}. {hint}")
            _check_range(x.name, value)
    epochs, steps = getattr(config, "num_train_epochs", None), getattr(config, "max_steps", None)
    # With `max_steps`, some write -1 for epochs
    if isinstance(epochs, Real) and epochs < 0 and isinstance(steps, Real) and steps <= 0:
        raise ValueError(f"`num_train_epochs` must be 0 or more, got {epochs!r}. Or set `max_steps`.")


def _check_range(name: str, value: Any) -> None:
    """Raise `ValueError` if the number `value` is not in the range of the field `name`."""
    least, most, below = _LEAST.get(name), _MOST.get(name), _BELOW.get(name)
    if least is not None and value < least:
        raise ValueError(f"`{name}` must be {least} or more, got {value!r}.")
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be {most} or less, got {value!r}.")
    if below is not None and value >= below:
        raise ValueError(f"`{name}` must be below {below}, got {value!r}.")
    if not isinstance(value, Real):  # a tensor, of which the host would wait for the device
        return
    if math.isnan(value) or (math.isinf(value) and name in _FINITE):
        raise ValueError(f"`{name}` must be a finite number, got {value!r}.")


def _check_each_finite(name: str, values: Iterable[Any]) -> None:
    if any(isinstance(value, Real) and not math.isfinite(value) for value in values):
        raise ValueError(f"`{name}` must be a list of finite numbers, got {values!r}.")


def check_dictionaries(config: Any) -> None:
    """Raise `ValueError` if a field of a config that takes a dictionary, perhaps as JSON or in a file, has none."""
    for name in getattr(config, "_VALID_DICT_FIELDS", ()):
        value = getattr(config, name, None)
        if value is None or isinstance(value, Mapping):
            continue
        in_file = name in _DICTIONARIES_IN_FILES
        if isinstance(value, str) and in_file and not value.lstrip().startswith("{"):
            if value and not os.path.isfile(value) and not (name == "deepspeed" and _is_base64(value)):
                raise ValueError(f"`{name}` is {value!r}, but there is no such file. Correct the path.")
        elif isinstance(value, str) and not isinstance(_json(value), dict):
            or_file = ", or the path of a JSON file" if in_file else ""
            raise ValueError(
                f"`{name}` must be a dictionary, got {value!r}. On the command line, give JSON"
                f"""{or_file}: '{{"name": "value"}}'."""
            )
        elif not isinstance(value, str) and not in_file:
            raise ValueError(f"`{name}` must be a dictionary, got {value!r}.")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_base64(text: str) -> bool:
    """Return whether `text` is a dictionary as DeepSpeed also takes it: JSON in base 64."""
    try:
        return isinstance(_json(base64.urlsafe_b64decode(text).decode()), dict)
    except ValueError:
        return False


def _number_to_write(value: Any, takes_floats: bool) -> str | None:
    """Return the spelling of a number without quotes, or of a whole number without a decimal point; else `None`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if not takes_floats and not number.is_integer():
        return None
    return f"Write {value if takes_floats else int(number)}{' without quotes' * isinstance(value, str)}."
