"""Putting something in the place of an attribute for a while: the one way in which TRL is reached into."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import transformers
import trl
from trl.models.utils import disable_gradient_checkpointing

_ABSENT = object()
_OF_BOTH = ("add_fused_lm_head", "BaseTunerLayer", "get_peft_model", "is_peft_model")


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` (a module, a trainer, a config) for the duration of the block."""
    before = {name: vars(owner).get(name, _ABSENT) for name in values} if values else {}
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


# The names of a trainer's module that are replaced
REPLACED: dict[type, tuple[str, ...]] = {
    trl.DPOTrainer: (*_OF_BOTH, "create_model_from_path", "hash_module"),
    trl.GRPOTrainer: (*_OF_BOTH, "gather", "gather_object", "shuffle_sequence_dict", "use_adapter"),
    transformers.Trainer: ("rotate_checkpoints",),
}


def names_replaced(trainer_class: type, **names: Any) -> AbstractContextManager[None]:
    """Within, a trainer finds these in the place of names of its module, which `REPLACED` lists.

    The names are put back on the way out, so stock trainers keep their own.
    """
    assert names.keys() <= set(REPLACED[trainer_class]), names.keys()
    return replaced(module_of(trainer_class), **names)


def module_of(trainer_class: type) -> Any:
    """The module in which a trainer looks its helper functions up."""
    return sys.modules[trainer_class.__module__]


@contextmanager
def unrecorded_pass(trainer: Any) -> Iterator[None]:
    """Within, a model of `trainer` is called without gradients, and without gradient checkpointing, as TRL does it."""
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        yield
