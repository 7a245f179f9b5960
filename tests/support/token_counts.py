"""Counts the tokens that enter models, by hooks on their input embeddings."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

from tiny import V_WORDS


def as_of_a_library(hook: Any) -> Any:
    """Return `hook` as a hook of a library, for tests that must observe what hooks of users make padded."""
    assert isinstance(hook, FunctionType)
    scope = {**hook.__globals__, "__name__": "torch"}
    return FunctionType(hook.__code__, scope, hook.__name__, hook.__defaults__, hook.__closure__)


@dataclass(frozen=True)
class Feed:
    """One forward, as seen by the input embedding."""

    model: str  # "policy", or "reference" for a separate reference model
    grad: bool
    training: bool
    rows: int
    tokens: int  # including padding
    log: int  # number of log entries before it
    step: int  # optimizer steps before it

    forwards = 1  # so that forwards are summed like rows and tokens


def count_feeds(
    trainer: Any, feeds: list[Feed], log: Callable[[], int] = lambda: 0, *, with_checks: bool = False
) -> None:
    """Record every later forward of `trainer` in `feeds`, in training and in evaluation.

    Args:
        with_checks: also those of the checks of the first batch, which run in evaluation mode.
    """
    if with_checks:
        log = as_of_a_library(log)

    def watch(name: str, model: torch.nn.Module) -> None:
        def fed(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            ids = args[0]
            grad, training = torch.is_grad_enabled(), trainer.model.training
            feeds.append(Feed(name, grad, training, len(ids), ids.numel(), log(), trainer.state.global_step))

        model.get_input_embeddings().register_forward_hook(as_of_a_library(fed) if with_checks else fed)

    watch("policy", trainer.model)
    if getattr(trainer, "ref_model", None) is not None:  # SFT has none
        watch("reference", trainer.ref_model)


@dataclass
class Tokens:
    """Shapes `(rows, width)` of embedded batches, in order, with and without a gradient."""

    with_gradient: list[tuple[int, int]] = field(default_factory=list)
    without: list[tuple[int, int]] = field(default_factory=list)


def total(shapes: list[tuple[int, int]]) -> int:
    """Return the tokens, including padding."""
    return sum(rows * width for rows, width in shapes)


@contextmanager
def counted() -> Iterator[Tokens]:
    """Count the calls of every model's word embedding in the `with` block, whatever wraps the model."""
    tokens = Tokens()

    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == V_WORDS:
            if torch.is_grad_enabled():
                tokens.with_gradient.append(tuple(inputs[0].shape))
            else:
                tokens.without.append(tuple(inputs[0].shape))

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield tokens
    finally:
        handle.remove()
