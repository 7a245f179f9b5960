"""GRPO: TRL's trainer and config, with our scoring forward."""

import functools
from dataclasses import dataclass
from typing import Any

import trl

from .exact_head import ExactHeadMixin
from .head_arguments import HeadArguments
from .hosted_reference import HostedReferenceMixin
from .reference_arguments import ReferenceArguments


@dataclass
class GRPOConfig(HeadArguments, ReferenceArguments, trl.GRPOConfig):
    # docstyle-ignore
    """
    TRL's [`~trl.GRPOConfig`], with every argument and default of it, and the fields below.

    Args:
        head (`str`, *optional*, defaults to `"tiled"`):
            How log-probs are computed from hidden states: `"tiled"` never builds the logits, `"dense"` is the plain
            definition.
        head_chunk_size (`int`, *optional*):
            Tokens in a tile of the head. `None` chooses it.
        reference_device (`str`, *optional*):
            Where the weights of a separate reference model are kept. `"cpu"`: in pinned host memory, brought to the
            device layer by layer for each reference pass. `None`: on the device, as in TRL.
    """


class GRPOTrainer(HostedReferenceMixin, ExactHeadMixin, trl.GRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`], with per-token log-probs that are exact: same arguments, losses and metrics.

    Takes [`GRPOConfig`], or TRL's own config (then the added fields have their defaults).
    """

    _trl_trainer = trl.GRPOTrainer

    # For `help()` and editors: the signature is TRL's
    @functools.wraps(trl.GRPOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)

    def _entropy_requires_grad(self) -> bool:
        # The entropy bonus alone: the quantile of top entropies only compares them
        return bool(self._entropy_bonus_enabled)
