"""Values of TRL's own config fields that it would find wrong late, or never: each is one error at once."""

import logging
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from ..compat.choices import (
    ADVANTAGE_CHOICES,
    DPO_CHOICES,
    DPO_LOSS_TYPES,
    GRPO_CHOICES,
    GRPO_LOSS_TYPES,
    TRUNCATION_MODES,
)
from ..distributed.ranks import Ranks
from ..distributed.tensor_parallel import TensorParallel
from ..losses.preference import PREFERENCE_LOSSES
from ..scoring.checks import has_position_table
from .checked_data import check_rows, check_type

logger = logging.getLogger("trl_ext")


def check_dpo_arguments(config: Any, *, own_loss: bool) -> None:
    """Raise `ValueError` where a `DPOConfig`, TRL's or ours, has a value that cannot train.

    Args:
        own_loss (`bool`): a subclass has replaced TRL's loss, and reads what it likes.
    """
    _check_reference_moves(config)
    if config.max_length is not None:
        _check_choice("truncation_mode", config.truncation_mode, TRUNCATION_MODES)
        _check_number(config, "max_length", 2, hint="A prompt and a completion have a token each.")
    if config.activation_offloading and config.device.type == "cpu":
        raise ValueError(
            "`activation_offloading=True` keeps activations in host memory, and here the model is there: there is no "
            "accelerator. Leave it off."
        )
    if own_loss:
        return
    _check_choices(config, DPO_CHOICES)
    _check_number(config, "beta", 0, hint="With a negative one the rejected completion would be preferred.")
    if config.ld_alpha is not None:
        _check_number(config, "ld_alpha", 0, 1)
    loss_types = (*DPO_LOSS_TYPES, *sorted(PREFERENCE_LOSSES))
    for name in config.loss_type:
        _check_choice("loss_type", name, loss_types)
    if config.beta == 0 and "sft" not in config.loss_type:
        raise ValueError(
            f"`beta=0` takes every log-ratio out of `loss_type={config.loss_type}`: nothing would be trained. Set it "
            "above 0; TRL's default is 0.1."
        )


def check_grpo_arguments(config: Any, *, own_loss: bool, own_advantages: bool) -> None:
    """Raise `ValueError` where a `GRPOConfig`, TRL's or ours, has a value that cannot train.

    Args:
        own_loss (`bool`): a subclass has replaced TRL's loss, and reads what it likes.
        own_advantages (`bool`): a subclass has replaced what makes advantages of rewards.
    """
    _check_reference_moves(config)
    _check_number(config, "num_iterations", 1)
    if config.max_completion_length is not None:
        _check_number(config, "max_completion_length", 1)
    if not own_advantages:
        _check_choices(config, ADVANTAGE_CHOICES)
    _check_number(config, "temperature", 0, above=True, hint="To sample with less noise, take a small one.")
    if own_loss:
        return
    _check_choices(config, GRPO_CHOICES)
    _check_number(config, "beta", 0, hint="A negative one would drive the policy away from its reference.")
    _check_number(config, "epsilon", 0)
    if config.epsilon_high is not None:
        _check_number(config, "epsilon_high", 0)
    _check_number(config, "top_entropy_quantile", 0, 1)
    _check_choice("loss_type", config.loss_type, GRPO_LOSS_TYPES)


def check_model_name(model: Any) -> None:
    """Raise `ValueError` if a model's name is that of no folder, and cannot be one of the hub's."""
    if isinstance(model, str) and not os.path.exists(model) and (model.count("/") > 1 or model.startswith((".", "/"))):
        raise ValueError(f"`model` is {model!r}, and there is no such folder. Mend the path, or name one of the hub.")


def check_completion_length(config: Any, model: Any) -> None:
    """Raise `ValueError` if a completion may be longer than a model's table of positions; elsewhere it is a warning.

    A model without such a table goes on beyond the length that it was trained on, with whatever result. vLLM ends a
    completion where the positions end, and `generation_kwargs` may end it before.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    asked = config.max_completion_length
    if positions is None or asked is None or asked < positions:
        return
    ends_before = config.use_vllm or "max_new_tokens" in (config.generation_kwargs or {})
    if has_position_table(model, positions) and not ends_before:
        raise ValueError(
            f"`max_completion_length={asked}` leaves no room for a prompt: the model has positions for {positions} "
            "tokens (`max_position_embeddings`). Lower it, or take a model for longer ones."
        )
    logger.warning(
        "`max_completion_length=%d` is not less than the %d tokens that the model was made for "
        "(`max_position_embeddings`).",
        asked,
        positions,
    )


def _check_reference_moves(config: Any) -> None:
    if config.sync_ref_model:
        _check_number(config, "ref_model_sync_steps", 1)
        _check_number(config, "ref_model_mixup_alpha", 0, 1)


def _check_choices(config: Any, choices: Mapping[str, Collection[str]]) -> None:
    for name, allowed in choices.items():
        _check_choice(name, getattr(config, name), allowed)


def _check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` has {value!r}, which there is not. Choose of {', '.join(map(repr, allowed))}.")


def _check_number(
    config: Any, name: str, least: float, most: float = math.inf, *, above: bool = False, hint: str = ""
) -> None:
    value = getattr(config, name)
    if isinstance(value, Real) and least <= float(value) <= most and not (above and value == least):
        return
    where = f"above {least}" if above else f"{least} or more" if most == math.inf else f"in [{least}, {most}]"
    raise ValueError(f"`{name}` must be {where}, got {value!r}. {hint or 'Change it, or leave it at its default.'}")


def check_given(name: str, given: dict[str, Any], config: Any, wanted: type) -> None:
    """Check the arguments of a trainer called `name`, whose config is a `wanted`."""
    if given["model"] is None:
        raise ValueError(f"`model` of `{name}` is None. Pass a model, or the name or folder of one.")
    check_model_name(given["model"])
    if config is not None and not all(hasattr(config, field.name) for field in fields(wanted)):
        raise TypeError(
            f"`args` of `{name}` is a `{type(config).__name__}`. Pass a `{wanted.__name__}` with these values."
        )
    tokenizer: Any = getattr(given.get("processing_class"), "tokenizer", given.get("processing_class"))
    padded_elsewhere = getattr(config, "pad_token", None) is not None or given.get("data_collator") is not None
    is_tokenizer: bool = isinstance(tokenizer, PreTrainedTokenizerBase)
    if is_tokenizer and tokenizer.pad_token is None and tokenizer.eos_token is None and not padded_elsewhere:
        raise ValueError(
            "`processing_class` has neither a `pad_token` nor an `eos_token`. Set one: "
            '`processing_class.pad_token = "..."`.'
        )
    if given.get("train_dataset") is not None:
        check_type(given["train_dataset"], "train_dataset")
        check_rows(given["train_dataset"], "train_dataset")


def why_padded(trainer: Any) -> str | None:
    for config in trainer.model.peft_config.values() if isinstance(trainer.model, PeftModel) else ():
        if config.is_prompt_learning:
            return "the adapter puts virtual tokens before each row"
        if getattr(config, "alora_invocation_tokens", None):
            return "the adapter looks for its invocation tokens in each row (`alora_invocation_tokens`)"
    if trainer.args.neftune_noise_alpha is not None:
        return "the noise of `neftune_noise_alpha` depends on the width of the batch"
    if trainer.args.n_gpu > 1:
        return "one process drives several GPUs; start one for each (`accelerate launch`)"
    return None


def check_groups(args: Any, ranks: Ranks) -> None:
    """Have GRPO's `args` count groups of ranks that hold one model, or one sequence.

    Raises:
        `ValueError`: the group's ranks would get different completions, or a generation batch does not fit.
    """
    if ranks.sequence is not None:
        name = next((x for x in ("use_vllm", "use_transformers_continuous_batching") if getattr(args, x, False)), None)
        if name is not None:
            kind = ranks.sequence.kind
            raise ValueError(
                f"`{kind}_size={ranks.sequence.size}` is not supported here: the ranks of a group would be given "
                f"other completions. Set `{name}=False`."
            )
        count_generation_batch(args, ranks.sequence.ranks, f"`{ranks.sequence.kind}_size={ranks.sequence.size}`")
    if ranks.tensor_parallel is not None:
        _refuse_other_samplers(args)
        count_generation_batch(args, ranks.tensor_parallel, "tensor parallelism")


def count_generation_batch(args: Any, ranks: TensorParallel, asked: str) -> None:
    """Have GRPO's `args` count the groups that `asked` for: TRL's config takes every rank for one with its own prompts.

    Raises:
        `ValueError`: the completions of a prompt do not fit into a generation batch.
    """
    args.generation_batch_size = args.per_device_train_batch_size * ranks.copies * args.steps_per_generation
    sizes = [("train", args.generation_batch_size, args.num_generations)]
    if args.eval_strategy != "no":
        evaluated = args.per_device_eval_batch_size * ranks.copies
        sizes.append(("eval", evaluated, args.num_generations_eval or args.num_generations))
    for mode, rows, generations in sizes:
        if rows % generations:
            raise ValueError(
                f"With {asked} each {ranks.size} ranks form a group and get the same prompts. A generation batch has "
                f"{rows} rows then (`per_device_{mode}_batch_size` on {ranks.copies} groups), and must be a multiple "
                f"of `num_generations`, which is {generations}. Multiply `per_device_{mode}_batch_size` by "
                f"{ranks.size} to have as many rows as the config asks for."
            )


def _refuse_other_samplers(args: Any) -> None:
    name = next((x for x in ("use_vllm", "use_transformers_continuous_batching") if getattr(args, x, False)), None)
    if name == "use_vllm":
        raise ValueError(
            "`use_vllm=True` under tensor parallelism: TRL would load into vLLM the part of a weight that a rank holds "
            "for the whole. Set `use_vllm=False`, or train with FSDP2 or DeepSpeed in the place of tensor parallelism."
        )
    if name is not None:
        raise ValueError(
            f"`{name}=True` under tensor parallelism: the ranks that hold one model would schedule and sample apart. "
            f"Set `{name}=False`."
        )
