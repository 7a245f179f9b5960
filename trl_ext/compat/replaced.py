"""Putting something in the place of an attribute for a while: the one way in which TRL is reached into."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing

_ABSENT = object()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` (a module, a trainer, a config) for the duration of the block."""
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


def module_of(trainer_class: type) -> Any:
    """The module in which TRL's trainer looks its helper functions up."""
    return sys.modules[trainer_class.__module__]


@contextmanager
def unrecorded_pass(trainer: Any) -> Iterator[None]:
    """Within, a model of `trainer` is called without gradients, and without gradient checkpointing, as TRL does it."""
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        yield
