"""Counts the tokens that enter the policy and the reference model, by a hook on their input embeddings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


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
