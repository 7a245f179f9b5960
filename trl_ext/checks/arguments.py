"""Checks of arguments: a mistake that TRL would report late or never is one error before training."""

import copy
import inspect
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
import trl
from huggingface_hub import is_offline_mode, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from peft import PeftMixedModel, PeftModel
from safetensors import safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..compat import FOUND
from ..compat.choices import (
    ADVANTAGE_CHOICES,
    DPO_CHOICES,
    GRPO_CHOICES,
    SFT_CHOICES,
    TRUNCATION_MODES,
    compared_values,
)
from ..compat.overrides import overrides
from ..distributed.ranks import Ranks
from ..losses.loss_types import (
    DPO_LOSS_TYPES,
    GRPO_LOSS_TYPES,
    KTO_LOSS_TYPES,
    SFT_LOSS_TYPES,
    dpo_loss_type,
    kto_loss_type,
)
from ..losses.preference import PREFERENCE_LOSSES
from ..planning.grpo import check_options
from ..reference.weights import uncompiled
from ..scoring.model_inputs import has_position_table
from .data import check_dataset
from .names import refuse_unknown
from .values import Rule, check_numbers, check_rules

logger = logging.getLogger("trl_ext")


def _limits_length(config: Any) -> bool:
    return config.max_length is not None


def _does_sync_reference(config: Any) -> bool:
    return bool(config.sync_ref_model)


def _is_sampler_option(name: str) -> Callable[[Any], bool]:
    """Return whether the sampler reads a field: not if `generation_kwargs` has its name."""
    return lambda config: name not in (config.generation_kwargs or {})


def _limits_top_k(config: Any) -> bool:
    # vLLM also takes -1 for all tokens
    return "top_k" not in (config.generation_kwargs or {}) and not (config.use_vllm and config.top_k == -1)


_ONE_TOKEN_EACH = "A prompt and a completion have at least one token each."
_REFERENCE_SYNC = (
    Rule("ref_model_sync_steps", least=1, when=_does_sync_reference),
    Rule("ref_model_mixup_alpha", least=0, most=1, when=_does_sync_reference),
)
_SAMPLING = (
    Rule("top_p", least=0, most=1, is_optional=True, read_by="generation", when=_is_sampler_option("top_p")),
    Rule("min_p", least=0, most=1, is_optional=True, read_by="generation", when=_is_sampler_option("min_p")),
    Rule(
        "repetition_penalty",
        above=0,
        hint="A value of 1 means no penalty.",
        read_by="generation",
        when=_is_sampler_option("repetition_penalty"),
    ),
    Rule(
        "top_k",
        least=0,
        hint="A value of 0 keeps all tokens.",
        is_optional=True,
        read_by="generation",
        when=_limits_top_k,
    ),
)
_TEMPERATURE = Rule("temperature", above=0, hint="For less random samples, use a small value.")
_KL_WEIGHT_HINT = "A negative value would drive the policy away from its reference."

# Method -> what its trainer, or its loss, reads. What depends on several fields is in the functions below
_RULES: dict[str, tuple[Rule, ...]] = {
    "sft": (
        *(Rule(name, choices=choices) for name, choices in SFT_CHOICES.items()),
        Rule("max_length", least=2, hint="A row of one token has nothing to predict.", is_optional=True),
    ),
    "dpo": (
        *_REFERENCE_SYNC,
        Rule("truncation_mode", choices=TRUNCATION_MODES, when=_limits_length),
        Rule("max_length", least=2, hint=_ONE_TOKEN_EACH, is_optional=True),
        *(Rule(name, choices=choices, read_by="loss") for name, choices in DPO_CHOICES.items()),
        Rule(
            "beta",
            least=0,
            hint="A negative value would train the policy to prefer rejected completions.",
            read_by="loss",
        ),
        Rule("ld_alpha", least=0, most=1, is_optional=True, read_by="loss"),
        Rule("label_smoothing", least=0, most=1, hint="It is the assumed share of wrong labels.", read_by="loss"),
    ),
    "kto": (
        *_REFERENCE_SYNC,
        Rule("max_length", least=2, hint=_ONE_TOKEN_EACH, is_optional=True),
        Rule("beta", above=0, hint="At 0, the loss does not depend on the policy.", read_by="loss"),
        Rule("desirable_weight", least=0, read_by="loss"),
        Rule("undesirable_weight", least=0, read_by="loss"),
    ),
    "reward": (
        Rule("max_length", least=1, is_optional=True),
        Rule("center_rewards_coefficient", least=0, is_optional=True, read_by="loss"),
    ),
    "grpo": (
        *_REFERENCE_SYNC,
        Rule("num_iterations", least=1),
        Rule("max_completion_length", least=1, is_optional=True),
        *(Rule(name, choices=choices, read_by="advantages") for name, choices in ADVANTAGE_CHOICES.items()),
        _TEMPERATURE,
        *_SAMPLING,
        *(Rule(name, choices=choices, read_by="loss") for name, choices in GRPO_CHOICES.items()),
        Rule("beta", least=0, hint=_KL_WEIGHT_HINT, read_by="loss"),
        Rule("epsilon", least=0, read_by="loss"),
        Rule("epsilon_high", least=0, is_optional=True, read_by="loss"),
        Rule("delta", above=0, hint="It is the upper bound of the ratio.", is_optional=True, read_by="loss"),
        Rule("top_entropy_quantile", least=0, most=1, read_by="loss"),
    ),
    "rloo": (
        *_REFERENCE_SYNC,
        Rule("num_iterations", least=1),
        Rule("max_completion_length", least=1, is_optional=True),
        _TEMPERATURE,
        Rule("beta", least=0, hint=_KL_WEIGHT_HINT),
        *_SAMPLING,
        Rule("epsilon", least=0, read_by="loss"),
        Rule("epsilon_high", least=0, is_optional=True, read_by="loss"),
    ),
    "distillation": (
        Rule("max_completion_length", least=1, is_optional=True),
        _TEMPERATURE,
        *_SAMPLING,
    ),
}


def check_dpo_arguments(config: Any, *, own_loss: bool) -> None:
    """Raise `ValueError` if a `DPOConfig`, TRL's or ours, has an invalid value.

    With `own_loss`, a subclass replaces TRL's loss: the values that only the loss reads are not checked.
    """
    _check_reference_sync(config)
    check_rules(config, _RULES["dpo"], replaced_parts={"loss"} if own_loss else ())
    if config.activation_offloading:
        check_offloading_device(config.device)
    if own_loss:
        return
    _check_loss_types(config.loss_type, (*DPO_LOSS_TYPES, *sorted(PREFERENCE_LOSSES)), trl.DPOTrainer)
    rows = {name: dpo_loss_type(name) for name in config.loss_type}
    for name, row in rows.items():
        if row.divides_by_true_labels and config.label_smoothing >= 0.5:
            raise ValueError(
                f"`label_smoothing` must be below 0.5 for the loss type {name!r}, which divides by 1 - 2 * "
                f"`label_smoothing`, got {config.label_smoothing!r}."
            )
        if row.divides_by is not None:
            Rule(row.divides_by, above=0, hint="The loss divides by it.").check(getattr(config, row.divides_by))
    if config.beta == 0 and all(row.needs_beta for row in rows.values()):
        raise ValueError(
            f"`beta=0` leaves nothing to train with `loss_type={config.loss_type}`. Set `beta` above 0. TRL's default "
            "is 0.1."
        )


def check_grpo_arguments(config: Any, *, own_loss: bool, own_advantages: bool, own_generation: bool) -> None:
    """Raise `ValueError` if a `GRPOConfig`, TRL's or ours, has an invalid value.

    With `own_loss`, `own_advantages` or `own_generation`, a subclass or a `rollout_func` replaces TRL's: the values
    that only these read are not checked.
    """
    _check_reference_sync(config)
    engine_args = getattr(config, "vllm_engine_args", None)  # TRL's own config has none
    if engine_args is not None and not (config.use_vllm and config.vllm_mode == "colocate"):
        raise ValueError(
            f"`vllm_engine_args={engine_args!r}` is for vLLM in this process. Set `use_vllm=True` and "
            '`vllm_mode="colocate"`, or give the arguments to `vllm serve`.'
        )
    is_replaced = {"loss": own_loss, "advantages": own_advantages, "generation": own_generation}
    check_rules(config, _RULES["grpo"], replaced_parts={part for part in is_replaced if is_replaced[part]})
    if not own_loss:
        _check_loss_types([config.loss_type], GRPO_LOSS_TYPES, trl.GRPOTrainer)


def check_sft_arguments(config: Any, *, own_loss: bool) -> None:
    """Raise `ValueError` if an `SFTConfig`, TRL's or ours, has an invalid value. `own_loss` as for DPO."""
    template = config.chat_template_path
    if template is not None and str(template).endswith((".jinja", ".jinja2")) and not os.path.isfile(template):
        raise ValueError(f"`chat_template_path` is {template!r}, but there is no such file. Correct the path.")
    check_rules(config, _RULES["sft"], replaced_parts={"loss"} if own_loss else ())
    if not own_loss:
        _check_loss_types([config.loss_type], SFT_LOSS_TYPES, trl.SFTTrainer)
    if config.activation_offloading:
        check_offloading_device(config.device)


def check_kto_arguments(config: Any, *, own_loss: bool) -> None:
    """Raise `ValueError` if a `KTOConfig`, TRL's or ours, has an invalid value. `own_loss` as for DPO."""
    _check_reference_sync(config)
    check_rules(config, _RULES["kto"], replaced_parts={"loss"} if own_loss else ())
    if config.activation_offloading:
        check_offloading_device(config.device)
    loss = kto_loss_type(config.loss_type)
    if loss.is_known and loss.has_kl_term and config.per_device_train_batch_size == 1:
        raise ValueError(
            "`per_device_train_batch_size` must be 2 or more, got 1: the KL term pairs each prompt with the completion "
            'of another row of the batch. Raise the batch size, or use `loss_type="apo_zero_unpaired"`, which has no '
            "KL term."
        )
    if own_loss:
        return
    _check_loss_types([config.loss_type], KTO_LOSS_TYPES, trl.KTOTrainer)
    if not (config.desirable_weight or config.undesirable_weight):
        raise ValueError(
            "`desirable_weight=0` and `undesirable_weight=0` leave nothing to train. Set at least one of them above 0."
        )


def check_reward_arguments(config: Any, *, own_loss: bool) -> None:
    """Raise `ValueError` if a `RewardConfig`, TRL's or ours, has an invalid value. `own_loss` as for DPO."""
    check_rules(config, _RULES["reward"], replaced_parts={"loss"} if own_loss else ())
    if config.activation_offloading:
        check_offloading_device(config.device)


def check_rloo_arguments(config: Any, *, own_loss: bool, own_advantages: bool, own_generation: bool) -> None:
    """Raise `ValueError` if an `RLOOConfig`, TRL's or ours, has an invalid value. The others as for GRPO."""
    _check_reference_sync(config)
    is_replaced = {"loss": own_loss, "generation": own_generation}
    check_rules(config, _RULES["rloo"], replaced_parts={part for part in is_replaced if is_replaced[part]})
    if config.reward_clip_range and not own_advantages:
        _check_clip_range(config.reward_clip_range)


def check_distillation_arguments(config: Any, *, own_loss: bool, own_generation: bool) -> None:
    """Raise `ValueError` if a `DistillationConfig`, TRL's or ours, has an invalid value. The others as for GRPO."""
    is_replaced = {"loss": own_loss, "generation": own_generation}
    check_rules(config, _RULES["distillation"], replaced_parts={part for part in is_replaced if is_replaced[part]})


def check_hidden_states(trainer: Any) -> None:
    """Raise `ValueError` for an override of the method from which TRL's distillation gets hidden states."""
    if overrides(trainer, "_get_last_hidden_state") is not None:
        raise ValueError(
            f"`{type(trainer).__name__}._get_last_hidden_state` is not called, because packed rows need another pass. "
            "Override `_compute_loss`, or train with TRL's trainer."
        )


def check_completion_column(config: Any, arguments: dict[str, Any], column: str) -> None:
    """Raise `ValueError` for an argument that has no effect on completions of a column of the data set."""
    samplers = {"use_vllm": getattr(config, "use_vllm", False), "tools": arguments.get("tools")}
    sampler = next((name for name, value in samplers.items() if value), None)
    if sampler is not None:
        raise ValueError(
            f"`completion_column={column!r}` takes completions from the data set, so nothing is sampled with "
            f"`{sampler}`. Leave one of the two out."
        )


def _check_clip_range(clip_range: Any) -> None:
    bounds = (
        [x for x in clip_range if x is not None]
        if isinstance(clip_range, list | tuple) and len(clip_range) == 2
        else [""]
    )
    if not bounds or not all(hasattr(x, "__float__") for x in bounds) or bounds[0] > bounds[-1]:
        raise ValueError(
            f"`reward_clip_range` must be the lowest and the highest reward, such as (-1.0, 1.0), got {clip_range!r}. "
            "Change it, or leave it out."
        )


def _check_schedule(config: Any) -> None:
    """Raise `ValueError` for options of GRPO that its schedule does not allow, without a trainer."""
    circumstances = {"processes": 1, "bypasses_loss": False, "has_images": False}
    gives_log_probs = config.use_vllm or config.use_transformers_continuous_batching
    check_options(SimpleNamespace(**vars(config), sampler_gives_log_probs=gives_log_probs, **circumstances))


def check_arguments_of(method: str, config: Any) -> None:
    """Raise `ValueError` if the config of a `method` such as "dpo" has a value that no trainer would take.

    Left out is what depends on the model, the data or this machine.
    """
    config = copy.copy(config)
    if hasattr(config, "activation_offloading"):  # its check is about the device
        config.activation_offloading = False
    if method in ("grpo", "rloo"):
        check = check_grpo_arguments if method == "grpo" else check_rloo_arguments
        check(config, own_loss=False, own_advantages=False, own_generation=False)
        if method == "grpo":
            _check_schedule(config)
    else:
        checks: dict[str, Callable[..., None]] = {
            "sft": check_sft_arguments,
            "dpo": check_dpo_arguments,
            "kto": check_kto_arguments,
            "reward": check_reward_arguments,
            "distillation": partial(check_distillation_arguments, own_generation=False),
        }
        checks[method](config, own_loss=False)


def check_offloading_device(device: Any) -> None:
    """Raise `ValueError` if activations would be offloaded from the CPU."""
    if device.type == "cpu":
        raise ValueError(
            "`activation_offloading=True` keeps activations in host memory, where they already are without an "
            "accelerator. Leave it off."
        )


def check_completion_length(config: Any, model: Any, name: str = "the model") -> None:
    """Raise `ValueError` if `max_completion_length` leaves no room for a prompt in the model's table of positions.

    Only warn if the model has no table: it generates beyond the length that it was made for, with unknown quality.
    Only warn also if something else may end completions in time: vLLM, or `max_new_tokens` in `generation_kwargs`.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    completion_length = config.max_completion_length
    if positions is None or completion_length is None or completion_length < positions:
        return
    ends_before = config.use_vllm or "max_new_tokens" in (config.generation_kwargs or {})
    if has_position_table(model, positions) and not ends_before:
        raise ValueError(
            f"`max_completion_length={completion_length}` leaves no room for a prompt: {name} has positions for "
            f"{positions} tokens (`max_position_embeddings`). Lower `max_completion_length`, or use a model with more "
            "positions."
        )
    logger.warning(
        f"`max_completion_length={completion_length}` is not less than the {positions} tokens that {name} was "
        "made for (`max_position_embeddings`)."
    )


def _check_reference_sync(config: Any) -> None:
    if config.sync_ref_model and getattr(config, "precompute_ref_log_probs", False):
        raise ValueError(
            "`precompute_ref_log_probs=True`, but the reference cannot be precomputed: `sync_ref_model` updates it "
            "during training. Set one of the two to False."
        )


def _check_loss_types(names: Collection[str], known_names: Iterable[str], trl_trainer: type) -> None:
    """Raise `ValueError` for a loss type that neither this release knows nor the source of TRL's trainer names."""
    choices = dict.fromkeys((*known_names, *sorted(compared_values(trl_trainer, "loss_type"))))
    for name in names:
        Rule("loss_type", choices=tuple(choices)).check(name)


def warn_of_unknown_loss_types(names: Collection[str]) -> None:
    """Warn that nothing is assumed of these loss types of TRL's. The plan says what follows."""
    logger.warning(
        f"`loss_type`: this release of trl_ext does not know {' and '.join(map(repr, names))} of TRL {FOUND['trl']}. "
        "Training runs as in TRL: no row is skipped or moves to another micro-batch, and no micro-batch is split, not "
        "even with `max_tokens_per_micro_batch`. Check for a later release of trl_ext."
    )


def bound_arguments(
    name: str, trl_trainer: Any, config: type, added_fields: type, positional: tuple[Any, ...], keywords: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments by name, with paths as strings; raise `TypeError` if TRL's trainer does not take them.

    Args:
        name (`str`): the name of the user's class, for errors.
        config (`type`): TRL's config class. Its fields and those of `added_fields` are not arguments of the trainer.
    """
    signature = inspect.signature(trl_trainer)
    of_config = [x.name for x in (*fields(config), *fields(added_fields))]
    refuse_unknown(name, keywords, list(signature.parameters), config=config.__name__, of_config=of_config)
    try:
        arguments = signature.bind(*positional, **keywords).arguments
    except TypeError as error:
        raise TypeError(f"{name}.__init__() {error}.") from None
    for argument in ("model", "ref_model", "reward_funcs"):
        value = arguments.get(argument)
        if isinstance(value, os.PathLike):
            arguments[argument] = os.fspath(value)
        elif isinstance(value, list) and any(isinstance(x, os.PathLike) for x in value):
            arguments[argument] = [os.fspath(x) if isinstance(x, os.PathLike) else x for x in value]
    return arguments


def check_given(name: str, arguments: dict[str, Any], config: Any, config_class: type, task_type: str) -> None:
    """Raise `ValueError` or `TypeError` for a wrong argument of the trainer `name`.

    Args:
        config_class (`type`): the class of its config.
        task_type (`str`): PEFT's name for what its model does: "CAUSAL_LM" or "SEQ_CLS".
    """
    if config is not None and not all(hasattr(config, field.name) for field in fields(config_class)):
        got = type(config).__name__
        raise TypeError(f"`args` of `{name}` is a `{got}`. Pass a `{config_class.__name__}` with these values.")
    if config is not None:
        check_numbers(config)
    model = arguments["model"]
    peft_config = arguments.get("peft_config")
    if model is None:
        raise ValueError(f"`model` of `{name}` is None. Pass a model, its name or its folder.")
    if isinstance(uncompiled(model), PeftMixedModel):
        raise TypeError(
            f"`model` of `{name}` is a `PeftMixedModel`. TRL takes it for a model without adapters, and PEFT cannot "
            "save it. Pass a `PeftModel`."
        )
    check_model = _check_classifier if task_type == "SEQ_CLS" else _check_model
    check_model(model, config)
    rewards = arguments.get("reward_funcs")
    for reward in rewards if isinstance(rewards, list) else [rewards]:
        _check_reward_model(reward, config)
    task = getattr(peft_config, "task_type", None)
    if task not in (None, task_type):
        kind = "sequence classifier" if task_type == "SEQ_CLS" else "causal language model"
        raise ValueError(
            f"`peft_config` has `task_type={str(getattr(task, 'value', task))!r}`, but `model` is a {kind}. Set "
            f"`task_type={task_type!r}`."
        )
    ref_model = arguments.get("ref_model")
    collator = arguments.get("data_collator")
    if isinstance(ref_model, str):
        raise TypeError(
            f"`ref_model={ref_model!r}` is a name, but must be a model. Load it with "
            "`AutoModelForCausalLM.from_pretrained(...)`, or leave it out: then the model before training is the "
            "reference."
        )
    if collator is not None and not callable(collator):
        raise TypeError(f"`data_collator` must be a function or an instance of a collator class, got {collator!r}.")
    callbacks = arguments.get("callbacks")
    if callbacks is not None and not isinstance(callbacks, list):
        got = f"a `{type(callbacks).__name__}`"
        got = f"the class `{callbacks.__name__}`" if isinstance(callbacks, type) else got
        raise TypeError(f"`callbacks` must be a list, got {got}. Write `callbacks=[...]`.")
    tokenizer: Any = getattr(arguments.get("processing_class"), "tokenizer", arguments.get("processing_class"))
    pads_otherwise = getattr(config, "pad_token", None) is not None or arguments.get("data_collator") is not None
    is_tokenizer = isinstance(tokenizer, PreTrainedTokenizerBase)
    if is_tokenizer and not pads_otherwise and tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ValueError(
            "`processing_class` has neither a `pad_token` nor an `eos_token`. Set one: "
            '`processing_class.pad_token = "..."`.'
        )
    if arguments.get("train_dataset") is not None:
        check_dataset(arguments["train_dataset"], "train_dataset")


def _check_model(model: Any, config: Any) -> None:
    """Raise `ValueError` if the policy does not exist, or does not generate text."""
    architecture = _architecture("model", model, config) if isinstance(model, str) else type(model).__name__
    if isinstance(model, str):  # the class that TRL would load
        model_class = getattr(transformers, architecture or "", None)
        generates = model_class is None or model_class.can_generate()
    else:
        generates = getattr(model, "generation_config", None) is not None
    if not generates:
        raise ValueError(
            f"`model` is a `{architecture}`, which does not generate text. Pass a causal language model, such as "
            "`AutoModelForCausalLM.from_pretrained(...)`."
        )


def _check_classifier(model: Any, config: Any) -> None:
    """Raise `ValueError` if the model does not exist, or is a language model without a score head.

    TRL loads a name as a sequence classifier, with a new score head if there is none.
    """
    if isinstance(model, str):
        _architecture("model", model, config)
    elif getattr(model, "get_output_embeddings", lambda: None)() is not None:
        raise ValueError(
            f"`model` is a `{type(model).__name__}`, which has an LM head and no score head. Pass its name, or "
            "`AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)`."
        )


def _check_reward_model(reward: Any, config: Any) -> None:
    """Raise `ValueError` if a reward model does not exist, or is a language model: its head would be random."""
    if not isinstance(reward, str | PreTrainedModel):
        return
    if isinstance(reward, str):
        architecture = _architecture("reward_funcs", reward, config)
        generates = str(architecture).endswith(("ForCausalLM", "LMHeadModel")) and not _has_reward_head(Path(reward))
    else:
        architecture = type(reward).__name__
        generates = reward.get_output_embeddings() is not None
    if generates:
        raise ValueError(
            f"`reward_funcs` has a `{architecture}`{f' ({reward!r})' if isinstance(reward, str) else ''}, which has no "
            "trained reward head: its rewards would be random. Pass a sequence classifier, or a function."
        )


def _has_reward_head(folder: Path) -> bool:
    """Return whether a local model has the weights of a sequence classifier's head, whatever its config says."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            if any(name.startswith("score.") for name in weights.keys()):  # noqa: SIM118
                return True
    return False


def _architecture(argument: str, name: str, config: Any) -> str | None:
    """Return the class name of a saved model; `None` if no local file tells it.

    Raises:
        `ValueError`: there is no such model.
    """
    options = getattr(config, "model_init_kwargs", None) or {}
    folder = name
    if not os.path.exists(name):
        try:
            cache_options = {x: options[x] for x in ("revision", "cache_dir") if x in options}
            folder = snapshot_download(name, **cache_options, local_files_only=True)
        except HFValidationError:
            raise ValueError(
                f"`{argument}={name!r}` is neither a local folder nor a name on the Hub. Correct the path."
            ) from None
        except LocalEntryNotFoundError:
            if not is_offline_mode():
                return None
            raise ValueError(
                f"`{argument}={name!r}` is not a local folder, and the Hub is offline (`HF_HUB_OFFLINE`). Correct the "
                "path, or download it."
            ) from None
    try:
        saved_config = json.loads(Path(folder, "config.json").read_text())
    except (OSError, ValueError):
        return None
    return next(iter(saved_config.get("architectures") or ()), None)


def adapter_padding_reason(model: Any) -> str | None:
    """Return why an adapter of `model` needs padded batches, or None."""
    inner = uncompiled(model)
    for config in inner.peft_config.values() if isinstance(inner, PeftModel) else ():
        if config.is_prompt_learning:
            return "the adapter puts virtual tokens before each row"
        if getattr(config, "alora_invocation_tokens", None):
            return "the adapter looks for its invocation tokens in each row (`alora_invocation_tokens`)"
    return None


def padding_reason(trainer: Any) -> str | None:
    """Return why the trainer's batches stay padded; `None` if that depends on the model alone."""
    reason = adapter_padding_reason(trainer.model)
    if reason is not None:
        return reason
    if getattr(trainer, "padding_free", False):
        return "TRL's collator joins the rows of a batch into one (`packing`)"
    if trainer.neftune_noise_alpha is not None:
        return "the noise of `neftune_noise_alpha` depends on the width of the batch"
    if trainer.args.n_gpu > 1:
        return "one process uses several GPUs (`accelerate launch` starts one process per GPU)"
    return None


def check_groups(args: Any, ranks: Ranks) -> None:
    """Set GRPO's generation batch size, counting ranks that share a model or a sequence once; TRL counts every rank.

    Raises:
        `ValueError`: the sampler does not work with such groups, or `num_generations` does not divide the batch.
    """
    samplers = ("use_vllm", "use_transformers_continuous_batching")
    sampler = next((name for name in samplers if getattr(args, name, False)), None)
    if ranks.tensor_parallel is not None and sampler == "use_vllm":
        raise ValueError(
            "`use_vllm=True` does not work under tensor parallelism: TRL would load each rank's shard into vLLM as if "
            "it were the whole weight. Set `use_vllm=False`, or train with FSDP2 or DeepSpeed."
        )
    groups = [(ranks.tensor_parallel, "tensor parallelism")] if ranks.tensor_parallel is not None else []
    if ranks.sequence is not None:
        groups.append((ranks.sequence.ranks, f"`{ranks.sequence.kind}_size={ranks.sequence.size}`"))
    for group, cause in groups:
        if sampler is not None:
            raise ValueError(
                f"With {cause}, the ranks of a group would sample different completions under `{sampler}=True`. Set "
                f"`{sampler}=False`."
            )
        args.generation_batch_size = args.per_device_train_batch_size * group.copies * args.steps_per_generation
        sizes = [("train", args.generation_batch_size, args.num_generations)]
        if args.eval_strategy != "no":
            evaluated = args.per_device_eval_batch_size * group.copies
            sizes.append(("eval", evaluated, args.num_generations_eval or args.num_generations))
        for mode, rows, generations in sizes:
            if rows % generations:
                raise ValueError(
                    f"With {cause}, each group of {group.size} ranks gets the same prompts. A generation batch has "
                    f"{rows} rows (`per_device_{mode}_batch_size` x {group.copies} groups"
                    f"{' x `steps_per_generation`' * (mode == 'train')}), but must be a multiple of `num_generations`, "
                    f"which is {generations}. Multiply `per_device_{mode}_batch_size` by {group.size}."
                )
