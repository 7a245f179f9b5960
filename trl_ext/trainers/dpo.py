"""DPO: TRL's trainer and config, with our scoring forward and a store of reference log-probs."""

import functools
from dataclasses import dataclass
from typing import Any

import trl

from .adapter_arguments import AdapterArguments
from .complete_checkpoints import CompleteCheckpointsMixin
from .head_arguments import HeadArguments
from .packing_arguments import PackingArguments
from .reference_arguments import ReferenceArguments
from .store_arguments import StoreArguments
from .stored_reference import StoredReferenceMixin


@dataclass
class DPOConfig(HeadArguments, PackingArguments, ReferenceArguments, StoreArguments, AdapterArguments, trl.DPOConfig):
    # docstyle-ignore
    """
    TRL's [`~trl.DPOConfig`], with every argument and default of it, and the fields below.

    Args:
        head (`str`, *optional*, defaults to `"tiled"`):
            How log-probs are computed from hidden states: `"tiled"` never builds the logits, `"dense"` is the plain
            definition.
        head_chunk_size (`int`, *optional*):
            Tokens in a tile of the head. `None` chooses it.
        padding_free (`bool`, *optional*):
            Whether rows are fed without their padding, as one row. `None`: where the model can. `True`: an error before
            training where it cannot. `False`: the padded batch, as in TRL.
        share_prompts (`bool`, *optional*):
            Whether leading tokens that several rows have in common are fed once. `None`: where that trains the same,
            which it does not while dropout is active.
        reference_store (`str`, *optional*, defaults to `"disk"`):
            Where per-token reference log-probs are kept, so that each sequence is scored once: `"disk"` for later runs
            too, `"memory"` for this one, `"off"` to run the reference on every micro-batch.
        reference_store_dir (`str`, *optional*):
            Folder of the store on disk. `None` is `trl_ext_reference_log_probs` in the cache of `datasets`.
        reference_device (`str`, *optional*):
            Where the weights of a separate reference model are kept. `"cpu"`: in pinned host memory, brought to the
            device layer by layer for each reference pass. `None`: on the device, as in TRL.
        policy_adapter_name (`str`, *optional*):
            The adapter that is trained, of a `PeftModel` that holds several. `None`: the one that is active.
        ref_adapter_name (`str`, *optional*):
            The adapter that is the reference, frozen, of a `PeftModel` that holds several. `None`: the base model for
            a fresh adapter, and the policy's adapter as it was before training for a `PeftModel`.
    """


class DPOTrainer(StoredReferenceMixin, CompleteCheckpointsMixin, trl.DPOTrainer):
    """
    TRL's [`~trl.DPOTrainer`], with per-token log-probs that are exact and a reference that scores each sequence once:
    same arguments, losses and metrics.

    Takes [`DPOConfig`], or TRL's own config (then the added fields have their defaults).
    """

    _trl_trainer = trl.DPOTrainer

    # For `help()` and editors: the signature is TRL's
    @functools.wraps(trl.DPOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
