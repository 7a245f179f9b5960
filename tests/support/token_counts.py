"""Counts the tokens that enter models, by hooks on their input embeddings."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tiny import V_WORDS


@dataclass(frozen=True)
class Feed:
    """One forward, as the input embedding met it."""

    model: str  # "policy", or "reference" where that is a model of its own
    grad: bool
    training: bool
    rows: int
    tokens: int  # padding included
    log: int  # how many log entries there were before it
    step: int  # optimizer steps before it

    forwards = 1  # so that forwards are summed as rows and tokens are


def count_feeds(trainer: Any, feeds: list[Feed], log: Callable[[], int] = lambda: 0) -> None:
    """Append to `feeds` every forward that `trainer` runs from now on, in training and in evaluation."""

    def watch(name: str, model: torch.nn.Module) -> None:
        def fed(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            ids = args[0]
            grad, training = torch.is_grad_enabled(), trainer.model.training
            feeds.append(Feed(name, grad, training, len(ids), ids.numel(), log(), trainer.state.global_step))

        model.get_input_embeddings().register_forward_hook(fed)

    watch("policy", trainer.model)
    # The check of the first batch feeds a few rows more
    for scoring in getattr(trainer, "scoring_forwards", ()):
        scoring.packing.checked = True
    if trainer.ref_model is not None:
        watch("reference", trainer.ref_model)


@dataclass
class Tokens:
    """Shapes `(rows, width)` of what was embedded, in order: with a gradient, and without one."""

    with_gradient: list[tuple[int, int]] = field(default_factory=list)
    without: list[tuple[int, int]] = field(default_factory=list)


def total(shapes: list[tuple[int, int]]) -> int:
    """Tokens, padding among them."""
    return sum(rows * width for rows, width in shapes)


@contextmanager
def counted() -> Iterator[Tokens]:
    """Within, every call of a word embedding is counted, of whatever model, however it is wrapped."""
    tokens = Tokens()

    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == V_WORDS:
            (tokens.with_gradient if torch.is_grad_enabled() else tokens.without).append(tuple(inputs[0].shape))

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield tokens
    finally:
        handle.remove()
