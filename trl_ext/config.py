"""`DPOConfig` and `GRPOConfig`: TRL's, and the fields that trl_ext adds.

Each added field is stated here alone. `--help` and the reference show the words of these docstrings.
"""

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import datasets
import trl

from .compat.grpo import sequence_parallelism_hidden
from .heads.kernels.work import KERNELS
from .heads.linear_log_probs import HEADS
from .losses.preference import CONVENTIONS, PREFERENCE_LOSSES, READ_REWARDS
from .planning.non_finite import ON_NON_FINITE_LOSS

_STORES = ("disk", "memory", "off")
_DEVICES = ("cpu",)
# On the command line the bare flag is True, as that of any bool
_FLAG: dict[str, Any] = {"nargs": "?", "const": True}
# TRL's loss types that read `label_smoothing`, and ours
_READ_SMOOTHING = frozenset({"exo_pair", "robust", "aot", "aot_unpaired", "cdpo"})
_REFUSE_SMOOTHING = frozenset({"hinge", "ipo", "ipo_sum"})
Fields = TypeVar("Fields", bound="AddedFields")
_ENTRY = re.compile(r"^ {8}(\w+) \(.*\):\n((?: {12}.*\n)+)", re.MULTILINE)


def _with_help(cls: Any) -> Any:
    """Give each field of a dataclass its words in the docstring as `help`."""
    words = {name: " ".join(text.split()) for name, text in _ENTRY.findall(cls.__doc__ or "")}
    for of_class in fields(cls):
        if of_class.name in words:
            of_class.metadata = MappingProxyType({**of_class.metadata, "help": words[of_class.name]})
    return cls


@_with_help
@dataclass
class AddedFields:
    """The fields that trl_ext adds to both configs.

    Args:
        head (`str`, *optional*, defaults to `"tiled"`):
            How log-probs are computed from hidden states. `"tiled"` never builds the logits. `"dense"` is the plain
            definition, which holds all logits of a batch in memory.
        head_chunk_size (`int`, *optional*):
            Tokens in a tile of the head. `None` chooses it. It changes memory and speed, not results.
        head_kernels (`str`, *optional*):
            What runs on a tile of the head between the matrix products: `"triton"` or `"torch"`. `None`: Triton's
            kernels on a device that it compiles for, torch elsewhere. They differ by fp32 rounding.
        padding_free (`bool`, *optional*):
            Whether a batch is processed as one row without padding. `None`: where the model can. `True`: an error
            before training where it cannot. `False`: the padded batch, as in TRL.
        share_prompts (`bool`, *optional*):
            Whether leading tokens that several rows have in common are processed once. `None`: where training stays
            the same, which it does not while dropout is active. `True`: an error before training where it does not.
        reference_device (`str`, *optional*):
            Where the weights of a separate reference model are kept. `"cpu"`: in pinned host memory, brought to the
            device layer by layer for each reference pass. `None`: on the device, as in TRL.
        policy_adapter_name (`str`, *optional*):
            The adapter to train, of a `PeftModel` that holds several. `None`: the one that is active. Without
            `ref_adapter_name` the reference is this adapter as it is when the trainer is built.
        ref_adapter_name (`str`, *optional*):
            The adapter that is the reference, frozen, of a `PeftModel` that holds several. `None`: as in TRL, the base
            model for a fresh adapter, and a copy of the adapter as it was for a `PeftModel`.
        on_non_finite_loss (`str`, *optional*):
            What to do where a training loss is NaN or infinite, on any rank. `"stop"`: an error on all ranks that names
            the rows and the pass. `"skip"`: a warning that names them, and no rank takes this optimizer step. `None`:
            as in TRL, where the gradients reach the weights. Unless `None`, the ranks exchange one number for each
            micro-batch.
    """

    head: str = field(default="tiled", metadata={"choices": list(HEADS)})
    head_chunk_size: int | None = None
    head_kernels: str | None = field(default=None, metadata={"choices": list(KERNELS)})
    padding_free: bool | None = field(default=None, metadata=_FLAG)
    share_prompts: bool | None = field(default=None, metadata=_FLAG)
    reference_device: str | None = field(default=None, metadata={"choices": list(_DEVICES)})
    policy_adapter_name: str | None = None
    ref_adapter_name: str | None = None
    on_non_finite_loss: str | None = field(default=None, metadata={"choices": list(ON_NON_FINITE_LOSS)})

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"`head` must be one of {list(HEADS)}, got {self.head!r}.")
        _check_count(self, "head_chunk_size")
        if self.head_kernels is not None and self.head_kernels not in KERNELS:
            raise ValueError(f"`head_kernels` must be None or one of {list(KERNELS)}, got {self.head_kernels!r}.")
        if self.head_kernels is not None and self.head == "dense":
            raise ValueError(
                f"`head_kernels={self.head_kernels!r}` is for the tiled head, but `head` is 'dense'. Set one of them."
            )
        for name in ("padding_free", "share_prompts"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ValueError(f"`{name}` must be None, True or False, got {value!r}.")
        for name, choices in (("reference_device", _DEVICES), ("on_non_finite_loss", ON_NON_FINITE_LOSS)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ValueError(f"`{name}` must be None or one of {choices}, got {value!r}.")
        if self.policy_adapter_name is not None and self.policy_adapter_name == self.ref_adapter_name:
            raise ValueError(
                f"`policy_adapter_name` and `ref_adapter_name` are both {self.ref_adapter_name!r}: the reference "
                "would be trained. Leave `ref_adapter_name` unset, and the reference is the adapter as it was before "
                "training."
            )
        of_trl = getattr(super(), "__post_init__", None)
        if of_trl is not None:
            of_trl()

    @classmethod
    def of(cls, args: Any) -> Self:
        """A copy of the added fields of a trainer's arguments; the defaults where those are TRL's own config, or None.

        TRL's `DPOConfig` has a `padding_free` of its own, whose default False says nothing.
        """
        if isinstance(args, cls):
            return _copied(cls, args)
        return cls(padding_free=getattr(args, "padding_free", None) or None)

    @classmethod
    def changed(cls, args: Any) -> dict[str, Any]:
        """The added fields whose value is not the default."""
        added = {x.name: x.default for x in fields(cls)}
        values = {name: getattr(args, name, unset) for name, unset in added.items()}
        return {name: value for name, value in values.items() if value != added[name]}


@_with_help
@dataclass
class AddedDPOFields(AddedFields):
    """The fields that trl_ext adds to TRL's `DPOConfig`, beside those of [`AddedFields`].

    Args:
        reference_store (`str`, *optional*, defaults to `"disk"`):
            Where per-token reference log-probs are kept, so that each sequence is scored once. `"disk"`: later runs
            with the same reference use them too. `"memory"`: in this process. `"off"`: the reference runs on every
            micro-batch, as in TRL.
        reference_store_dir (`str`, *optional*):
            Folder of the store on disk. `None`: `trl_ext_reference_log_probs` in the cache of `datasets`
            (`HF_DATASETS_CACHE`).
        reward_scale (`float`, *optional*, defaults to `1.0`):
            η of the loss types `"rpo_forward_kl"`, `"rpo_backward_kl"` and `"rpo_squared"`: what the rewards in the
            columns `chosen_reward` and `rejected_reward` are multiplied by.
        rpo_average_log_probs (`bool`, *optional*, defaults to `False`):
            Whether these loss types read log-ratios averaged over the tokens of a completion, not summed.
        sft_label_smoothing (`float`, *optional*, defaults to `0.0`):
            Label smoothing over the vocabulary in the loss type `"sft"`, in [0, 1). `label_smoothing` is about which
            completion was chosen.
        sft_label_smoothing_convention (`str`, *optional*, defaults to `"pytorch"`):
            What a smoothing of a means with K tokens in the vocabulary. `"pytorch"`: a / K for every token and 1 - a
            more for the target. `"megatron"`: 1 - a for the target and a / (K - 1) for every other.
    """

    reference_store: str = field(default="disk", metadata={"choices": list(_STORES)})
    reference_store_dir: str | None = None
    reward_scale: float = 1.0
    rpo_average_log_probs: bool = False
    sft_label_smoothing: float = 0.0
    sft_label_smoothing_convention: str = field(default="pytorch", metadata={"choices": list(CONVENTIONS)})

    def __post_init__(self) -> None:
        if self.reference_store not in _STORES:
            raise ValueError(f"`reference_store` must be one of {list(_STORES)}, got {self.reference_store!r}.")
        if self.reference_store_dir is not None and self.reference_store != "disk":
            raise ValueError(
                f'`reference_store_dir={self.reference_store_dir!r}` needs `reference_store="disk"`, got '
                f"{self.reference_store!r}. Remove one of the two."
            )
        if self.reference_store == "off" and getattr(self, "precompute_ref_log_probs", False):
            raise ValueError(
                "`precompute_ref_log_probs=True` fills the store, so `reference_store` must be 'disk' or 'memory', got "
                "'off'."
            )
        for name in ("reward_scale", "sft_label_smoothing"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"`{name}` must be a finite number, got {value!r}.")
        if self.reward_scale <= 0:
            raise ValueError(
                f"`reward_scale` must be above 0, got {self.reward_scale!r}: the rejected completion would be "
                "preferred, or none. Set it to what the rewards are to be multiplied by."
            )
        if not 0 <= self.sft_label_smoothing < 1:
            raise ValueError(f"`sft_label_smoothing` must lie in [0, 1), got {self.sft_label_smoothing!r}.")
        if self.sft_label_smoothing_convention not in CONVENTIONS:
            raise ValueError(
                f"`sft_label_smoothing_convention` must be one of {list(CONVENTIONS)}, got "
                f"{self.sft_label_smoothing_convention!r}."
            )
        super().__post_init__()
        if hasattr(self, "loss_type"):
            check_loss_types(self)

    @property
    def folder(self) -> Path:
        """The folder of the store on disk, with one folder for each reference in it."""
        if self.reference_store_dir is not None:
            return Path(self.reference_store_dir).expanduser()
        return Path(datasets.config.HF_DATASETS_CACHE) / "trl_ext_reference_log_probs"


@_with_help
@dataclass
class AddedGRPOFields(AddedFields):
    """The fields that trl_ext adds to TRL's `GRPOConfig`, beside those of [`AddedFields`].

    Args:
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Whether activations are kept in host memory between the forward and the backward of a micro-batch. It needs
            an accelerator.
        force_on_policy_ratio (`bool`, *optional*, defaults to `False`):
            Demand that the ratio of the policy to the old policy is exactly 1: every completion is trained on with the
            weights that it was sampled with. An error before training where rollout and training batch differ.
        trust_sampling_log_probs (`bool`, *optional*, defaults to `False`):
            Take the sampler's log-probs (vLLM's, or those of a `rollout_func`) for the old policy's. An approximation:
            the sampler's distance from the policy becomes a bias of the ratio.
        zero_advantages_of_equal_rewards (`bool`, *optional*, defaults to `True`):
            Set the advantages of a group to 0 where all its rewards are equal, bit for bit. In fp32 TRL gives them
            rounding noise of about 6e-4, on which AdamW moves the weights by the full learning rate. It acts where
            zero-advantage completions can be skipped.
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Replace zero-advantage groups by drawing further prompts, as DAPO does. It changes which prompts are trained
            on.
        dynamic_sampling_max_draws (`int`, *optional*, defaults to `10`):
            With `dynamic_sampling`, the most generation batches to draw for one, the first included. Zero-advantage
            groups of the last draw stay.
        keep_groups_together (`bool`, *optional*):
            Whether the completions of a prompt share a micro-batch as far as there is room, within one optimizer step.
            `None`: where that changes no gradient. `True`: an error before training where it would, or would save
            nothing; a subclass's overrides are then taken not to look at a micro-batch as a whole. `False`: TRL's
            order.
        max_tokens_per_micro_batch (`int`, *optional*):
            The most tokens that one forward of the policy processes in training; a longer row is alone. A micro-batch
            takes as many forwards and backwards as it needs, which changes no gradient. `None`: one forward.
    """

    activation_offloading: bool = False
    force_on_policy_ratio: bool = False
    trust_sampling_log_probs: bool = False
    zero_advantages_of_equal_rewards: bool = True
    dynamic_sampling: bool = False
    dynamic_sampling_max_draws: int = 10
    keep_groups_together: bool | None = None
    max_tokens_per_micro_batch: int | None = None

    def __post_init__(self) -> None:
        _check_count(self, "dynamic_sampling_max_draws")
        _check_count(self, "max_tokens_per_micro_batch")
        super().__post_init__()


@dataclass
class DPOConfig(AddedDPOFields, trl.DPOConfig):
    # docstyle-ignore
    """
    TRL's [`~trl.DPOConfig`] with every argument and default of it, and the fields of
    [`~trl_ext.config.AddedFields`] and [`~trl_ext.config.AddedDPOFields`].

    `loss_type` takes `"rpo_forward_kl"`, `"rpo_backward_kl"`, `"rpo_squared"`, `"ipo_sum"` and `"cdpo"` beside TRL's;
    `"cdpo"` reads `label_smoothing`.
    """


@dataclass
class GRPOConfig(AddedGRPOFields, trl.GRPOConfig):
    # docstyle-ignore
    """
    TRL's [`~trl.GRPOConfig`] with every argument and default of it, and the fields of
    [`~trl_ext.config.AddedFields`] and [`~trl_ext.config.AddedGRPOFields`].
    """

    def __post_init__(self) -> None:
        with sequence_parallelism_hidden(self):
            super().__post_init__()


def _copied(cls: "type[Fields]", args: Any) -> "Fields":
    """The fields as they are, without the checks: while TRL's `__init__` runs, some of the config are hidden."""
    copy = object.__new__(cls)
    vars(copy).update({x.name: getattr(args, x.name) for x in fields(cls)})
    return copy


def _check_count(config: Any, name: str) -> None:
    value, unset = getattr(config, name), next(x.default for x in fields(config) if x.name == name)
    if value is None and unset is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        wanted = "None or an integer" if unset is None else "an integer"
        raise ValueError(f"`{name}` must be {wanted} of at least 1, got {value!r}.")


def check_loss_types(config: Any) -> None:
    """Raise `ValueError` where a `DPOConfig`, TRL's or ours, asks a loss type of ours for what it does not have.

    Loss types that are all TRL's are never refused.
    """
    fields = AddedDPOFields.of(config)
    if fields.sft_label_smoothing and "sft" not in config.loss_type:
        raise ValueError(
            f"`sft_label_smoothing={fields.sft_label_smoothing!r}` smooths the labels of the loss type 'sft', which is "
            f"not in `loss_type={config.loss_type}`. Add it, or leave the field at 0."
        )
    if not config.loss_type:
        raise ValueError("`loss_type` is empty: name at least one loss type.")
    if READ_REWARDS.isdisjoint(config.loss_type):
        for name, unset in (("reward_scale", 1.0), ("rpo_average_log_probs", False)):
            if getattr(fields, name) != unset:
                raise ValueError(
                    f"`{name}={getattr(fields, name)!r}` is read by RPO alone, which is not in "
                    f"`loss_type={config.loss_type}`. Add one of {sorted(READ_REWARDS)}, or leave the field out."
                )
    own = [name for name in config.loss_type if name in PREFERENCE_LOSSES]
    if not own:
        return
    for name, default in (("ld_alpha", None), ("f_divergence_type", "reverse_kl"), ("use_weighting", False)):
        value = getattr(config, name)
        if value != default:
            raise ValueError(
                f"`{name}={value!r}` is not defined for {own[0]!r}, a loss type that TRL does not have. Set "
                f"`{name}={default!r}`, or use TRL's loss types alone."
            )
    _check_smoothing(config.label_smoothing, config.loss_type, own)


def _check_smoothing(smoothing: float, loss_types: list[str], own: list[str]) -> None:
    if "cdpo" in own and not 0 <= smoothing < 0.5:
        raise ValueError(
            "`label_smoothing` is the probability that a pair's label is flipped, and must lie in [0, 0.5) for 'cdpo'; "
            f"got {smoothing!r}."
        )
    if not smoothing:
        return
    refusing = [name for name in loss_types if name in _REFUSE_SMOOTHING]
    if refusing:
        raise ValueError(
            f"`label_smoothing={smoothing!r}` has no meaning for {refusing[0]!r}, whose loss is no log-likelihood of a "
            f"label. Remove {refusing[0]!r} from `loss_type={loss_types}`, or set `label_smoothing=0.0`."
        )
    if _READ_SMOOTHING.isdisjoint(loss_types):
        raise ValueError(
            f"`label_smoothing={smoothing!r}` is not read by {own[0]!r}: its soft labels come from the rewards. Set "
            "`label_smoothing=0.0`."
        )


def ignored_smoothing(config: Any) -> str | None:
    """A warning where a loss type of TRL's does not read the `label_smoothing` that is given."""
    ignoring = [x for x in config.loss_type if x not in _READ_SMOOTHING and x not in READ_REWARDS and x != "sft"]
    if not config.label_smoothing or not ignoring:
        return None
    return (
        f"`label_smoothing={config.label_smoothing}` is ignored by the loss type {' and '.join(map(repr, ignoring))}, "
        "as in TRL. The loss type 'cdpo' is 'sigmoid' with label smoothing (conservative DPO)."
    )
