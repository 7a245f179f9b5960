"""Counts the tokens that enter a model, where they enter: at its input embedding."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tiny import V_WORDS


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
