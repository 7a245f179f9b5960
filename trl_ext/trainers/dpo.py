"""DPO: TRL's trainer and config, with our scoring forward."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import trl

from ..compat import OwnPrecomputeCache
from .exact_head import ExactHeadMixin
from .head_arguments import HeadArguments


@dataclass
class DPOConfig(HeadArguments, trl.DPOConfig):
    # docstyle-ignore
    """
    TRL's [`~trl.DPOConfig`], with every argument and default of it, and the fields below.

    Args:
        head (`str`, *optional*, defaults to `"tiled"`):
            How log-probs are computed from hidden states: `"tiled"` never builds the logits, `"dense"` is the plain
            definition.
        head_chunk_size (`int`, *optional*):
            Tokens in a tile of the head. `None` chooses it.
    """


class DPOTrainer(OwnPrecomputeCache, ExactHeadMixin, trl.DPOTrainer):
    """
    TRL's [`~trl.DPOTrainer`], with per-token log-probs that are exact: same arguments, losses and metrics.

    Takes [`DPOConfig`], or TRL's own config (then the added fields have their defaults).
    """

    _trl_trainer = trl.DPOTrainer

    # For `help()` and editors: the signature is TRL's
    @functools.wraps(trl.DPOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """TRL's own loss, on log-probs from our scoring forward."""
        with self._policy_scored_here():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def precompute_key(self) -> tuple[object, ...]:
        """Never TRL's files, whose values carry its rounding, nor those of other sequences or another precision."""
        args = self.args
        precision = (self.head_arguments.head, self.accelerator.mixed_precision)
        return ("trl_ext", *precision, args.max_length, args.truncation_mode, args.ld_alpha)
