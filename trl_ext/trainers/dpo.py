"""DPO: TRL's trainer and config, with our scoring forward."""

from dataclasses import dataclass
from typing import Any

import trl

from ..compat import add_precompute_key
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


class DPOTrainer(ExactHeadMixin, trl.DPOTrainer):
    """
    TRL's [`~trl.DPOTrainer`], with per-token log-probs that are exact: same arguments, losses and metrics.

    Takes [`DPOConfig`], or TRL's own config (then the added fields have their defaults).
    """

    _trl_trainer = trl.DPOTrainer

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        if not self._precompute_key_is_ours:
            # Never TRL's cache file, whose values carry its rounding, nor one made with other sequences or precision
            args = self.args
            add_precompute_key(
                self,
                *("trl_ext", self.head_arguments.head, args.bf16, args.fp16),
                *(args.max_length, args.truncation_mode, args.ld_alpha),
            )
            self._precompute_key_is_ours = True
        return super()._precompute_ref_logps(dataset, name, batch_size)

    _precompute_key_is_ours = False
