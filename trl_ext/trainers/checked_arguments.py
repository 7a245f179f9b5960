"""Values of TRL's own config fields that it would find wrong late, or never: each is one error at once."""

import logging
import math
import os
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

from ..compat import (
    ADVANTAGE_CHOICES,
    DPO_CHOICES,
    DPO_LOSS_TYPES,
    GRPO_CHOICES,
    GRPO_LOSS_TYPES,
    TRUNCATION_MODES,
)
from ..losses import PREFERENCE_LOSSES
from ..scoring import has_position_table

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
