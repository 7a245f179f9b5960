"""The scoring head in TRL's trainers: where they attach it, and what it gives back."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.utils import FusedCausalLMOutput as TRLFusedCausalLMOutput


@dataclass
class FusedCausalLMOutput(TRLFusedCausalLMOutput):
    """TRL's output of the scoring forward, and a field that it lacks.

    Args:
        mean_log_probs (`torch.Tensor`, same shape as `log_probs`):
            Mean of the log-probs over the vocabulary, of each next-token distribution.
    """

    mean_log_probs: torch.Tensor | None = None


@contextmanager
def head_attached_by(attach: Callable[..., None], trainer_class: type, *, adapted: bool) -> Iterator[None]:
    """Within, `trainer_class.__init__` attaches its models' scoring head with `attach(model, **options)`.

    TRL's trainers call the `add_fused_lm_head` of their module on the policy and on the reference model, after both
    exist and before reference log-probs are precomputed; there is no method to override at that point. The name is put
    back on the way out, so stock trainers keep TRL's head.

    Args:
        adapted (`bool`): whether an adapter on the LM head is taken, which TRL's own head would not see: TRL refuses a
            head that is an instance of the class that this name stands for.
    """
    module: Any = sys.modules[trainer_class.__module__]
    original, refused = module.add_fused_lm_head, module.BaseTunerLayer
    module.add_fused_lm_head = attach
    if adapted:
        module.BaseTunerLayer = _NoHead
    try:
        yield
    finally:
        module.add_fused_lm_head, module.BaseTunerLayer = original, refused


class _NoHead:
    """No head is an instance of it."""
