"""DPO: TRL's trainer and config, with our scoring forward and a store of reference log-probs."""

import functools
from dataclasses import dataclass
from typing import Any

import trl

from .adapter_arguments import AdapterArguments
from .checked_start import CheckedDPOMixin
from .complete_checkpoints import CompleteCheckpointsMixin
from .head_arguments import HeadArguments
from .loss_arguments import LossArguments
from .loss_terms import LossTermsMixin
from .moved_reference import MovedReferenceMixin
from .non_finite_arguments import NonFiniteArguments
from .packing_arguments import PackingArguments
from .reference_arguments import ReferenceArguments
from .shown import ShownMixin
from .store_arguments import StoreArguments
from .stored_reference import StoredReferenceMixin
from .watched_loss import WatchedLossMixin


@dataclass
class DPOConfig(
    HeadArguments,
    PackingArguments,
    ReferenceArguments,
    StoreArguments,
    AdapterArguments,
    LossArguments,
    NonFiniteArguments,
    trl.DPOConfig,
):
    # docstyle-ignore
    """
    TRL's [`~trl.DPOConfig`], with every argument and default of it, and the fields below.

    Args:
        head (`str`, *optional*, defaults to `"tiled"`):
            How log-probs are computed from hidden states: `"tiled"` never builds the logits, `"dense"` is the plain
            definition.
        head_chunk_size (`int`, *optional*):
            Tokens in a tile of the head. `None` chooses it.
        head_kernels (`str`, *optional*):
            What works on a tile of the head between the matrix products, `"triton"` or `"torch"`. `None`: Triton's
            kernels on a device that it compiles for, torch elsewhere.
        padding_free (`bool`, *optional*):
            Whether rows are fed without their padding, as one row. `None`: where the model can. `True`: an error before
            training where it cannot. `False`: the padded batch, as in TRL.
        share_prompts (`bool`, *optional*):
            Whether leading tokens that several rows have in common are fed once. `None`: where that trains the same,
            which it does not while dropout is active.
        on_non_finite_loss (`str`, *optional*):
            What to do where a loss of training is NaN or infinite, on whichever rank. `"stop"`: an error that names the
            rows and the pass it came from. `"skip"`: a warning that names them, and the optimizer step is left out on
            all ranks. `None`: as in TRL.
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
        reward_scale (`float`, *optional*, defaults to `1.0`):
            η of the loss types `"rpo_forward_kl"`, `"rpo_backward_kl"` and `"rpo_squared"`: what the data set's columns
            `chosen_reward` and `rejected_reward` are multiplied by before β times the log-ratios is compared with them.
        rpo_average_log_probs (`bool`, *optional*, defaults to `False`):
            Whether these loss types read log-ratios averaged over the tokens of a completion, in the place of sums.
        sft_label_smoothing (`float`, *optional*, defaults to `0.0`):
            Label smoothing over the vocabulary in the loss type `"sft"`, in [0, 1).
        sft_label_smoothing_convention (`str`, *optional*, defaults to `"pytorch"`):
            What a smoothing of a means with K tokens in the vocabulary. `"pytorch"`: a / K for every token and 1 - a
            more for the target. `"megatron"`: 1 - a for the target and a / (K - 1) for every other.

    `loss_type` takes `"rpo_forward_kl"`, `"rpo_backward_kl"`, `"rpo_squared"`, `"ipo_sum"` and `"cdpo"` beside TRL's;
    `"cdpo"` reads `label_smoothing`.
    """


class DPOTrainer(
    CheckedDPOMixin,
    ShownMixin,
    LossTermsMixin,
    StoredReferenceMixin,
    MovedReferenceMixin,
    WatchedLossMixin,
    CompleteCheckpointsMixin,
    trl.DPOTrainer,
):
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
