"""GRPO: TRL's trainer and config, with our scoring forward and no pass, row or token that changes nothing."""

import functools
from dataclasses import dataclass
from typing import Any

import trl

from ..compat import sequence_parallelism_hidden
from .adapter_arguments import AdapterArguments
from .checked_start import CheckedGRPOMixin
from .complete_checkpoints import CompleteCheckpointsMixin
from .grpo_micro_batches import MicroBatchesMixin
from .grpo_pass_arguments import GRPOPassArguments
from .grpo_tensor_parallel import SameCompletionsMixin
from .head_arguments import HeadArguments
from .hosted_reference import HostedReferenceMixin
from .moved_reference import MovedReferenceMixin
from .non_finite_arguments import NonFiniteArguments
from .offloaded_activations import OffloadedActivationsMixin
from .offloading_arguments import OffloadingArguments
from .packing_arguments import PackingArguments
from .reference_arguments import ReferenceArguments
from .resumed_generation import ResumedGenerationMixin
from .shown import ShownMixin


@dataclass
class GRPOConfig(
    GRPOPassArguments,
    HeadArguments,
    PackingArguments,
    ReferenceArguments,
    AdapterArguments,
    NonFiniteArguments,
    OffloadingArguments,
    trl.GRPOConfig,
):
    # docstyle-ignore
    """
    TRL's [`~trl.GRPOConfig`], with every argument and default of it, and the fields below.

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
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Whether activations are kept in host memory between the forward and the backward of a micro-batch.
        reference_device (`str`, *optional*):
            Where the weights of a separate reference model are kept. `"cpu"`: in pinned host memory, brought to the
            device layer by layer for each reference pass. `None`: on the device, as in TRL.
        policy_adapter_name (`str`, *optional*):
            The adapter that is trained, of a `PeftModel` that holds several. `None`: the one that is active.
        ref_adapter_name (`str`, *optional*):
            The adapter that is the reference, frozen, of a `PeftModel` that holds several. `None`: the base model for
            a fresh adapter, and the policy's adapter as it was before training for a `PeftModel`.
        force_on_policy_ratio (`bool`, *optional*, defaults to `False`):
            Demand that the ratio of the policy to the old policy is exactly 1; an error before training where rollout
            and training batch differ.
        trust_sampling_log_probs (`bool`, *optional*, defaults to `False`):
            Take the sampler's log-probs for the old policy's. An approximation.
        zero_advantages_of_equal_rewards (`bool`, *optional*, defaults to `True`):
            Set the advantages of a group whose completions were rewarded alike to 0, where TRL leaves rounding noise.
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Replace groups without advantage by drawing further prompts, as DAPO does.
        dynamic_sampling_max_draws (`int`, *optional*, defaults to `10`):
            The most generation batches to draw for one, the first included.
        keep_groups_together (`bool`, *optional*):
            Whether the completions of a prompt share a micro-batch as far as there is room. `None`: where that changes
            no gradient; `True`: also where a subclass replaces `compute_loss`, `_prepare_inputs` or `training_step`;
            `False`: TRL's order.
        max_tokens_per_micro_batch (`int`, *optional*):
            The most tokens that one forward of the policy feeds in training. The rows of a micro-batch are fed in as
            many forwards and backwards as that takes; the gradient is the same.
    """

    def __post_init__(self) -> None:
        with sequence_parallelism_hidden(self):
            super().__post_init__()


class GRPOTrainer(
    CheckedGRPOMixin,
    ShownMixin,
    ResumedGenerationMixin,
    HostedReferenceMixin,
    MicroBatchesMixin,
    SameCompletionsMixin,
    OffloadedActivationsMixin,
    MovedReferenceMixin,
    CompleteCheckpointsMixin,
    trl.GRPOTrainer,
):
    """
    TRL's [`~trl.GRPOTrainer`], with per-token log-probs that are exact, and without the passes, rows and tokens that
    change nothing: same arguments, losses and metrics.

    Takes [`GRPOConfig`], or TRL's own config (then the added fields have their defaults).
    """

    _trl_trainer = trl.GRPOTrainer

    # For `help()` and editors: the signature is TRL's
    @functools.wraps(trl.GRPOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)

    def _has_reference(self) -> bool:
        return bool(self.args.beta != 0)

    def _entropy_requires_grad(self) -> bool:
        # The entropy bonus alone: the quantile of top entropies only compares them
        return bool(self._entropy_bonus_enabled)
