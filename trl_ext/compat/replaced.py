"""Replaces names of TRL for the duration of a `with` block, such as a call of TRL's `__init__`."""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch

_ABSENT = object()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` (a module, a trainer, a config) in the `with` block, and restore them afterwards.

    Raises:
        `AttributeError`: `owner` has no such attribute. What is set in vain would train in another way, silently.
    """
    for name in values:
        getattr(owner, name)
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


# Class -> the names of its module that may be replaced
_OFFLOADING = "get_act_offloading_ctx_manager"
_OF_ALL = ("add_fused_lm_head", "BaseTunerLayer", "get_peft_model", "is_peft_model")
REPLACED: dict[str, tuple[str, ...]] = {
    "SFTTrainer": (*_OF_ALL, _OFFLOADING),
    "DPOTrainer": (*_OF_ALL, _OFFLOADING, "create_model_from_path", "hash_module"),
    "KTOTrainer": (*_OF_ALL, _OFFLOADING, "create_model_from_path", "hash_module", "use_adapter"),
    "GRPOTrainer": (*_OF_ALL, "gather", "gather_object", "shuffle_sequence_dict", "use_adapter", "VLLMGeneration"),
    "RLOOTrainer": (*_OF_ALL, "shuffle_sequence_dict", "use_adapter"),
    "DistillationTrainer": ("get_peft_model", "create_model_from_path"),
    "RewardTrainer": ("get_peft_model", _OFFLOADING),
    "Trainer": ("rotate_checkpoints",),
}


def names_replaced(trainer_class: type, **names: Any) -> AbstractContextManager[None]:
    """Replace `names` of a trainer's module, which `REPLACED` must list, in the `with` block."""
    assert names.keys() <= set(REPLACED[trainer_class.__name__]), names.keys()
    return replaced(module_of(trainer_class), **names)


def next_of(trainer: Any) -> Any:
    """Return the methods after ours in the method resolution order: TRL's, or those of a mixin before TRL's."""
    ours = next(cls for cls in type(trainer).__mro__ if "_trl_trainer" in vars(cls))
    return super(ours, trainer)


def module_of(trainer_class: type) -> Any:
    """Return the module in which a trainer looks up its helper functions."""
    return sys.modules[trainer_class.__module__]


@contextmanager
def logged_times(metrics: dict[str, list[float]], times: int) -> Iterator[None]:
    """Log `times` times what is logged in the `with` block, as TRL does for that many micro-batches."""
    before = {name: len(values) for name, values in metrics.items()}
    yield
    for name, values in metrics.items():
        if name != "num_tokens":  # a running total, of which TRL keeps only the last
            values += values[before.get(name, 0) :] * (times - 1)


@contextmanager
def unrecorded_pass(trainer: Any) -> Iterator[None]:
    """Turn off gradients and gradient checkpointing in the `with` block, as TRL does for passes without a loss."""
    with torch.no_grad(), _without_checkpointing(trainer):
        yield


def _without_checkpointing(trainer: Any) -> AbstractContextManager[None]:
    if trainer._features.why_off("passes without checkpointing") is not None:
        return nullcontext()
    from trl.models.utils import disable_gradient_checkpointing

    return disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs)  # type: ignore[no-any-return]


@contextmanager
def built_with(
    trainer_class: type,
    config: Any,
    attach: Callable[..., None],
    make_adapter: Any,
    offloading: Callable[..., Any],
    *,
    copies: bool,
    off: Collection[str] = (),
    **others: Any,
) -> Iterator[None]:
    """Make `trainer_class.__init__` attach each model's scoring head with `attach(model, **options)` in the block.

    TRL's trainers call the `add_fused_lm_head` of their module on the policy and on the reference model, after both
    exist and before they precompute reference log-probs. They have no method to override at that point. A trainer for
    which `REPLACED` does not list that name attaches its models itself.

    Args:
        config (`Any`): the trainer's config. `padding_free=True` is hidden, because TRL rejects it.
        make_adapter (`Callable`): called with PEFT's `get_peft_model` and its arguments.
        offloading (`Callable`): called with `model`, returns the context of `activation_offloading`.
        copies (`bool`): whether TRL may copy an adapter as the reference.
        off (`Collection[str]`): features of `features.py` that are off, so that what TRL calls for them stays.
        others (`Any`): replacements for further names of the module.
    """
    module = module_of(trainer_class)
    names: dict[str, Any] = {"add_fused_lm_head": attach}
    if "adapters" in off:
        copies = True
    else:
        names["get_peft_model"] = partial(make_adapter, module.get_peft_model)
        if not (getattr(config, "cast_lm_head_to_fp32", False) or getattr(config, "use_vllm", False)):
            names["BaseTunerLayer"] = _NoAdapter
    if hasattr(module, _OFFLOADING) and "activation offloading" not in off:
        names[_OFFLOADING] = offloading
    if not copies:  # TRL copies an adapter if its first call of `is_peft_model` returns True
        answers = chain([lambda model: False], repeat(module.is_peft_model))
        names["is_peft_model"] = lambda model: next(answers)(model)
    hidden = {"padding_free": False} if getattr(config, "padding_free", None) else {}
    listed_names = {name: value for name, value in names.items() if name in REPLACED[trainer_class.__name__]}
    with names_replaced(trainer_class, **listed_names, **others), replaced(config, **hidden):
        yield


class _NoAdapter:
    """Replaces `BaseTunerLayer`, so that TRL's `isinstance` check does not refuse an adapter on the LM head."""
