"""The configs of the trainers: TRL's, with the fields that trl_ext adds.

This file declares each added field once: name, type, default, help (the string below it) and checks. `--help` and the
docstrings of the configs are made from it. A test compares docs/arguments.md with it.
"""

import ast
import functools
import inspect
import logging
import os
import textwrap
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import datasets

from .checks.names import refuse_unknown
from .checks.values import Rule, check_declared, check_dictionaries, check_numbers, check_rules
from .compat.features import config_of_trl
from .compat.sampled import sequence_parallelism_hidden
from .heads.kernels.work import KERNELS
from .heads.linear_log_probs import HEADS
from .losses.loss_types import dpo_loss_type
from .losses.preference import CONVENTIONS, PREFERENCE_LOSSES, READ_REWARDS
from .planning.non_finite import ON_NON_FINITE_LOSS

logger = logging.getLogger("trl_ext")

_REWARD_RULES = (
    Rule("reward_scale", above=0, hint="It multiplies the rewards."),
    Rule("sft_label_smoothing", least=0, below=1, hint=""),
)

# The fields that change what is trained. The others change what runs for it, its speed or its memory
_FEATURES = {
    "policy_adapter_name",
    "ref_adapter_name",
    "on_non_finite_loss",
    "reward_scale",
    "rpo_average_log_probs",
    "sft_label_smoothing",
    "trust_sampling_log_probs",
    "keep_sampling_mask",
    "replay_routes",
    "generation_lag",
    "dynamic_sampling",
    "vllm_engine_args",
    "completion_column",
}


def with_help(cls: Any) -> Any:
    """Make the string below each field of a dataclass its `help` on the command line."""
    by_name = {x.name: x for x in fields(cls)}
    try:
        class_source: Any = ast.parse(inspect.getsource(cls)).body[0]
    except OSError:  # installed without sources: the fields have no help
        return cls
    for declaration, text in pairwise(class_source.body):
        if isinstance(declaration, ast.AnnAssign) and isinstance(text, ast.Expr):
            field_of_class = by_name[ast.unparse(declaration.target)]
            help_text = " ".join(ast.literal_eval(text.value).split())
            # A bare flag means True, as for any bool of TRL's
            flag = {"nargs": "?", "const": True} if field_of_class.type == bool | None else {}
            field_of_class.metadata = MappingProxyType({**field_of_class.metadata, **flag, "help": help_text})
    return cls


@with_help
@dataclass
class AddedCommonFields:
    """The fields that trl_ext adds to every config."""

    padding_free: bool | None = None
    """Process a batch as one row without padding. `None`: if possible. `True`: an error if a rule forbids it. `False`:
    keep the padded batch, as in TRL."""

    share_prompts: bool | None = None
    """Process leading tokens once for all rows that share them. `None`: unless this changes training, as with active
    dropout. `True`: an error if it is not possible."""

    policy_adapter_name: str | None = None
    """The adapter of a `PeftModel` to train. `None`: the active one. Without `ref_adapter_name`, the reference is the
    named adapter as it was before training."""

    on_non_finite_loss: str | None = field(default=None, metadata={"choices": list(ON_NON_FINITE_LOSS)})
    """What to do if a training loss is NaN or infinite on any rank. `"stop"`: raise an error that names the rows and
    the pass. `"skip"`: warn about them, and skip the optimizer step. `None`: continue, as in TRL."""

    show_plan: bool = True
    """Log the plan when training starts: what runs, what is skipped, and why. When training ends, log tokens and times,
    and where the model is."""

    as_trl: bool = False
    """Train exactly as stock TRL, to see if trl_ext causes a problem: nothing is skipped, and TRL's LM head runs. Added
    fields for features that TRL lacks are an error; the others have no effect."""

    def __post_init__(self) -> None:
        check_declared(self, AddedCommonFields)
        check_numbers(self)
        check_dictionaries(self)
        if getattr(self, "bf16", None) and getattr(self, "fp16", None):
            raise ValueError("`bf16=True` and `fp16=True` contradict each other. Set one of the two to False.")
        if self.as_trl:
            self._check_trl_has_all()
        getattr(super(), "__post_init__", lambda: None)()  # TRL's; the added fields alone have none

    def _check_trl_has_all(self) -> None:
        """Raise `ValueError` if a field asks for a feature that TRL lacks, so that it would train something else."""
        names = [x.name for x in fields(self) if x.name in _FEATURES and getattr(self, x.name) != x.default]
        if names:
            values = ", ".join(f"`{name}={getattr(self, name)!r}`" for name in names)
            them = "it" if len(names) == 1 else "them"
            raise ValueError(f"`as_trl=True` trains as stock TRL, which has no {values}. Leave {them} unset.")

    @classmethod
    def of(cls, args: Any) -> Self:
        """Return a copy of the added fields of `args`; their defaults if `args` is None or TRL's own config."""
        if not isinstance(args, cls):
            # TRL's own `padding_free` is False by default, so False is not a request
            return cls(padding_free=getattr(args, "padding_free", None) or None)
        # Skips the checks: while TRL's `__init__` runs, some fields have other values
        copied = object.__new__(cls)
        vars(copied).update({x.name: getattr(args, x.name) for x in fields(cls)})
        return copied

    @classmethod
    def changed(cls, args: Any) -> dict[str, Any]:
        """Return the added fields whose value is not the default; none for TRL's own config."""
        if not isinstance(args, cls):
            return {}
        values = {x.name: (getattr(args, x.name), x.default) for x in fields(cls)}
        return {name: value for name, (value, default) in values.items() if value != default}


@with_help
@dataclass
class AddedFields(AddedCommonFields):
    """The fields that trl_ext adds to the configs of language models, in addition to [`AddedCommonFields`]."""

    head: str = field(default="tiled", metadata={"choices": list(HEADS)})
    """How log-probs are computed. `"tiled"` never builds the logits, `"dense"` builds those of a whole batch."""

    head_chunk_size: int | None = None
    """Tokens in a tile of the head. Changes memory and speed, and results only by rounding. `None`: chosen
    automatically."""

    head_kernels: str | None = field(default=None, metadata={"choices": list(KERNELS)})
    """Kernels between the head's matrix products. Their results differ by fp32 rounding. `None`: Triton where it
    compiles."""

    def __post_init__(self) -> None:
        check_declared(self, AddedFields)
        if self.head_kernels is not None and self.head == "dense":
            raise ValueError(
                f"`head_kernels={self.head_kernels!r}` is for the tiled head, but `head` is 'dense'. Remove one of the "
                "two."
            )
        super().__post_init__()


@with_help
@dataclass
class AddedReferenceFields(AddedFields):
    """The fields that trl_ext adds to the configs of trainers with a reference, in addition to [`AddedFields`]."""

    reference_device: str | None = field(default=None, metadata={"choices": ["cpu"]})
    """Where to keep a separate reference model. `"cpu"`: in host memory, copied to the device layer by layer in each
    pass. `None`: on the device, as in TRL."""

    ref_adapter_name: str | None = None
    """The adapter of a `PeftModel` that is the frozen reference. `None`: as in TRL, the base model for a fresh adapter,
    else the adapter as it was before training."""

    def __post_init__(self) -> None:
        check_declared(self, AddedReferenceFields)
        if self.policy_adapter_name is not None and self.policy_adapter_name == self.ref_adapter_name:
            raise ValueError(
                f"`policy_adapter_name` and `ref_adapter_name` are both {self.ref_adapter_name!r}: the reference "
                "would be trained. Leave `ref_adapter_name` unset: then the adapter before training is the reference."
            )
        super().__post_init__()


@with_help
@dataclass
class AddedStoreFields(AddedReferenceFields):
    """The fields of trainers with a store of reference log-probs, in addition to [`AddedReferenceFields`]."""

    reference_store: str = field(default="disk", metadata={"choices": ["disk", "memory", "off"]})
    """Where to keep reference log-probs, so that each sequence is scored once. `"disk"`: for this and later runs.
    `"memory"`: for this run. `"off"`: the reference scores every micro-batch, as in TRL."""

    reference_store_dir: str | None = None
    """Folder of the store on disk. `None`: `trl_ext_reference_log_probs` in the cache of `datasets`
    (`HF_DATASETS_CACHE`)."""

    def __post_init__(self) -> None:
        check_declared(self, AddedStoreFields)
        if self.reference_store_dir is not None and self.reference_store != "disk":
            raise ValueError(
                f'`reference_store_dir={self.reference_store_dir!r}` needs `reference_store="disk"`, got '
                f"{self.reference_store!r}. Remove one of the two."
            )
        if self.reference_store_dir is not None and self.folder.exists() and not self.folder.is_dir():
            raise ValueError(
                f"`reference_store_dir={self.reference_store_dir!r}` is a file. Pass a folder, which is created if it "
                "does not exist."
            )
        if self.reference_store == "off" and getattr(self, "precompute_ref_log_probs", False):
            raise ValueError(
                "`precompute_ref_log_probs=True` fills the store, so `reference_store` must be 'disk' or 'memory', got "
                "'off'."
            )
        super().__post_init__()

    @property
    def folder(self) -> Path:
        """The folder of the store on disk, with one folder for each reference in it."""
        if self.reference_store_dir is not None:
            # `Path.expanduser` raises for an unknown user, and if there is no home
            return Path(os.path.expanduser(self.reference_store_dir))
        return Path(datasets.config.HF_DATASETS_CACHE) / "trl_ext_reference_log_probs"


@with_help
@dataclass
class AddedStepFields(AddedReferenceFields):
    """The fields of trainers that rearrange an optimizer step, in addition to [`AddedReferenceFields`]."""

    balance: bool = True
    """Where this changes no gradient, move completions (pairs in DPO) between ranks and micro-batches of an optimizer
    step, so that these take about the same time. `False`: each rank trains on its own rows."""

    max_tokens_per_micro_batch: int | None = None
    """The most tokens in one forward pass of the policy in training; a longer row runs alone. Where this changes no
    gradient, the rows of an optimizer step run together in few passes."""

    def __post_init__(self) -> None:
        check_declared(self, AddedStepFields)
        super().__post_init__()


@with_help
@dataclass
class AddedGroupFields(AddedReferenceFields):
    """The fields of trainers that sample groups of completions, in addition to [`AddedReferenceFields`]."""

    zero_advantages_of_equal_rewards: bool = True
    """In GRPO, and in RLOO with `beta=0`, set a group's advantages to 0 if all its rewards are bitwise equal and
    zero-advantage completions can be skipped. `False`: keep TRL's advantages, which may be rounding noise."""

    generate_fewer_rows: bool = True
    """Run `generate` on each distinct prompt once and without finished completions, where this changes no sample.
    `False`: on all rows, as in TRL."""

    sampler_check: str = field(default="warn", metadata={"choices": ["warn", "stop", "off"]})
    """What to do if the sampler's log-probs suddenly differ from the policy's by more than rounding. `"warn"`: log one
    warning. `"stop"`: raise an error on all ranks. `"off"`: no check."""

    keep_groups_together: bool | None = None
    """Put the completions of a prompt into one micro-batch, within one optimizer step. `None`: if this changes no
    gradient. `True`: an error if this would change a gradient or save nothing. A subclass's overrides must then work on
    any rows and, with `max_tokens_per_micro_batch`, on no rows. `False`: TRL's order."""

    replay_routes: str | None = field(default=None, metadata={"choices": ["sampler", "old_policy"]})
    """In a mixture of experts, train on experts that routers have chosen before. `"sampler"`: those that sampled a
    completion. `"old_policy"` (GRPO): in later iterations, those of the first. `None`: each pass chooses, as in TRL."""

    def __post_init__(self) -> None:
        check_declared(self, AddedGroupFields)
        super().__post_init__()


@with_help
@dataclass
class AddedDPOFields(AddedStepFields, AddedStoreFields):
    """The fields that trl_ext adds to TRL's `DPOConfig`, in addition to those above."""

    reward_scale: float = 1.0
    """The factor η by which the loss types `"rpo_forward_kl"`, `"rpo_backward_kl"` and `"rpo_squared"` multiply the
    columns `chosen_reward` and `rejected_reward`."""

    rpo_average_log_probs: bool = False
    """In the RPO loss types, average the log-ratios of a completion's tokens instead of summing them."""

    sft_label_smoothing: float = 0.0
    """Label smoothing over the vocabulary in the loss type `"sft"`, in [0, 1)."""

    sft_label_smoothing_convention: str = field(default="pytorch", metadata={"choices": list(CONVENTIONS)})
    """How `sft_label_smoothing=a` spreads over a vocabulary of K tokens. `"pytorch"`: `a / K` for each and `1 - a` more
    for the target. `"megatron"`: `1 - a` for the target and `a / (K - 1)` for each other token."""

    def __post_init__(self) -> None:
        check_declared(self, AddedDPOFields)
        check_rules(self, _REWARD_RULES)
        super().__post_init__()
        if isinstance(self, config_of_trl("DPOConfig")):
            check_loss_types(self)


@with_help
@dataclass
class AddedGRPOFields(AddedGroupFields, AddedStepFields):
    """The fields that trl_ext adds to TRL's `GRPOConfig`, in addition to those above."""

    activation_offloading: bool = False
    """Keep activations in host memory between forward and backward. Needs an accelerator."""

    force_on_policy_ratio: bool = False
    """Require that the ratio of policy to old policy is exactly 1. An error unless each generation batch trains one
    optimizer step, once."""

    trust_sampling_log_probs: bool = False
    """Use the log-probs of the sampler (vLLM, continuous batching or a `rollout_func`) as the old policy's. The
    difference between the two then biases the ratio."""

    keep_sampling_mask: bool = False
    """With `top_k`, `top_p` or `min_p`, normalise log-probs and entropy over the tokens that the sampler could choose
    (arXiv:2512.02556). With vLLM, `top_k` must be set. `False`: over the whole vocabulary, as in TRL."""

    generation_lag: int = field(default=0, metadata={"choices": [0, 1]})
    """Generation batches by which the sampler's weights are older than TRL's. `1`: while a generation batch trains, the
    next one is sampled and rewarded, with the weights from before."""

    sample_ahead: bool | None = None
    """Sample and reward the next generation batch in a thread while one trains, where it gets the same weights. `None`:
    with vLLM's server. `True`: also with a `rollout_func` that has a method `sync_weights(trainer)`. `False`: never."""

    dynamic_sampling: bool = False
    """Replace zero-advantage groups by groups of other prompts. This changes which prompts are trained on."""

    dynamic_sampling_max_draws: int = 10
    """With `dynamic_sampling`, the most generation batches to draw until one is full, including the first."""

    vllm_engine_args: dict | str | None = None  # type: ignore[type-arg]  # the parser's own form
    """Arguments of vLLM's engine in colocated mode, such as `{"dtype": "float32"}`. They override those that TRL
    passes."""

    def __post_init__(self) -> None:
        check_declared(self, AddedGRPOFields)
        super().__post_init__()


@with_help
@dataclass
class AddedDistillationFields(AddedCommonFields):
    """The fields that trl_ext adds to TRL's `DistillationConfig`, in addition to [`AddedCommonFields`]."""

    head_chunk_size: int | None = None
    """Tokens in a tile of the two heads. Changes memory and speed, and results only by rounding. `None`: chosen
    automatically."""

    completion_column: str | None = None
    """Column of completions, text or messages, on which to distill. `None`: the student samples, as in TRL."""

    teacher_device: str | None = field(default=None, metadata={"choices": ["cpu"]})
    """Where to keep the teacher. `"cpu"`: in host memory, copied to the device layer by layer in each pass. `None`: on
    the device, as in TRL."""

    teacher_store: str = field(default="off", metadata={"choices": ["off", "disk"]})
    """With `completion_column`, whether to keep the teacher's last hidden states, so that it scores each row once.
    `"disk"`: for this and later runs, which load only the teacher's head. `"off"`: the teacher scores every batch."""

    teacher_store_dir: str | None = None
    """Folder of the store. `None`: `trl_ext_teacher_states` in the cache of `datasets` (`HF_DATASETS_CACHE`)."""

    def __post_init__(self) -> None:
        check_declared(self, AddedDistillationFields)
        if self.teacher_store != "off" and self.completion_column is None:
            raise ValueError(
                f"`teacher_store={self.teacher_store!r}` needs `completion_column`, because sampled completions "
                "change. Set it, or leave `teacher_store` out."
            )
        if self.teacher_store_dir is not None and self.teacher_store == "off":
            raise ValueError(
                f'`teacher_store_dir={self.teacher_store_dir!r}` needs `teacher_store="disk"`. Set it, or remove '
                "`teacher_store_dir`."
            )
        if self.teacher_store_dir is not None and self.teacher_folder.exists() and not self.teacher_folder.is_dir():
            raise ValueError(
                f"`teacher_store_dir={self.teacher_store_dir!r}` is a file. Pass a folder, which is created if it does "
                "not exist."
            )
        super().__post_init__()

    @property
    def teacher_folder(self) -> Path:
        """The folder of the store, with one folder for each teacher in it."""
        if self.teacher_store_dir is not None:
            return Path(os.path.expanduser(self.teacher_store_dir))
        return Path(datasets.config.HF_DATASETS_CACHE) / "trl_ext_teacher_states"


def _names_unknown(cls: Any) -> Any:
    """Make the error of `cls(...)` for an unknown argument name what replaces it."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: Any, *positional: Any, **keywords: Any) -> None:
        refuse_unknown(type(self).__name__, keywords, [x.name for x in fields(cls)])
        init(self, *positional, **keywords)

    cls.__init__ = checked
    return cls


@_names_unknown
@dataclass
class DPOConfig(AddedDPOFields, config_of_trl("DPOConfig")):  # type: ignore[misc]
    # docstyle-ignore
    """
    TRL's [`~trl.DPOConfig`] with all its arguments and defaults, and the fields below.

    `loss_type` also takes `"rpo_forward_kl"`, `"rpo_backward_kl"`, `"rpo_squared"`, `"ipo_sum"` and `"cdpo"`, of which
    `"cdpo"` reads `label_smoothing`.
    """


@_names_unknown
@dataclass
class GRPOConfig(AddedGRPOFields, config_of_trl("GRPOConfig")):  # type: ignore[misc]
    # docstyle-ignore
    """
    TRL's [`~trl.GRPOConfig`] with all its arguments and defaults, and the fields below.
    """

    _VALID_DICT_FIELDS = getattr(config_of_trl("GRPOConfig"), "_VALID_DICT_FIELDS", []) + ["vllm_engine_args"]

    def __post_init__(self) -> None:
        with nullcontext() if self.as_trl else sequence_parallelism_hidden(self):
            super().__post_init__()


@_names_unknown
@dataclass
class SFTConfig(AddedFields, config_of_trl("SFTConfig")):  # type: ignore[misc]
    # docstyle-ignore
    """
    TRL's [`~trl.SFTConfig`] with all its arguments and defaults, and the fields below.
    """


@_names_unknown
@dataclass
class KTOConfig(AddedStoreFields, config_of_trl("KTOConfig")):  # type: ignore[misc]
    # docstyle-ignore
    """
    TRL's [`~trl.KTOConfig`] with all its arguments and defaults, and the fields below.
    """


@_names_unknown
@dataclass
class RLOOConfig(AddedGroupFields, config_of_trl("RLOOConfig")):  # type: ignore[misc]
    # docstyle-ignore
    """
    TRL's [`~trl.RLOOConfig`] with all its arguments and defaults, and the fields below.
    """


@_names_unknown
@dataclass
class DistillationConfig(AddedDistillationFields, config_of_trl("DistillationConfig")):  # type: ignore[misc]
    # docstyle-ignore
    """
    TRL's [`~trl.DistillationConfig`] with all its arguments and defaults, and the fields below.
    """


@_names_unknown
@dataclass
class RewardConfig(AddedCommonFields, config_of_trl("RewardConfig")):  # type: ignore[misc]
    # docstyle-ignore
    """
    TRL's [`~trl.RewardConfig`] with all its arguments and defaults, and the fields below.
    """


def _arguments_of(added_fields: Any) -> str:
    """Return the `Args:` section of a docstring, in TRL's form."""
    lines = ["    Args:"]
    for x in fields(added_fields):
        type_name = x.type.__name__ if isinstance(x.type, type) else str(x.type).removesuffix(" | None")
        default_text = f'"{x.default}"' if isinstance(x.default, str) else x.default
        default = "" if x.default is None else f", defaults to `{default_text}`"
        lines.append(f"        {x.name} (`{type_name}`, *optional*{default}):")
        lines.append(textwrap.indent(textwrap.fill(x.metadata.get("help", ""), 107, break_on_hyphens=False), " " * 12))
    return "\n".join([*lines, "    "])


ADDED_FIELDS: dict[Any, type[AddedCommonFields]] = {
    SFTConfig: AddedFields,
    DPOConfig: AddedDPOFields,
    KTOConfig: AddedStoreFields,
    GRPOConfig: AddedGRPOFields,
    RLOOConfig: AddedGroupFields,
    DistillationConfig: AddedDistillationFields,
    RewardConfig: AddedCommonFields,
}
for _config, _added_fields in ADDED_FIELDS.items():
    _config.__doc__ = f"{_config.__doc__}\n{_arguments_of(_added_fields)}"


def check_loss_types(config: Any) -> None:
    """Raise `ValueError` if a `DPOConfig`, TRL's or ours, sets an option that its loss types do not use or define."""
    loss_types = config.loss_type
    smoothing = config.label_smoothing
    options = AddedDPOFields.of(config)
    if options.sft_label_smoothing and "sft" not in loss_types:
        raise ValueError(
            f"`sft_label_smoothing={options.sft_label_smoothing!r}` smooths the labels of the loss type 'sft', which "
            f"is not in `loss_type={loss_types}`. Add 'sft', or set `sft_label_smoothing` to 0."
        )
    if not loss_types:
        raise ValueError("`loss_type` is empty: name at least one loss type.")
    if READ_REWARDS.isdisjoint(loss_types):
        for name, value in AddedDPOFields.changed(options).items():
            if name in ("reward_scale", "rpo_average_log_probs"):
                raise ValueError(
                    f"Only the RPO loss types use `{name}={value!r}`, and `loss_type={loss_types}` has none of them. "
                    f"Add one of {sorted(READ_REWARDS)}, or leave `{name}` out."
                )
    our_loss_types = [name for name in loss_types if name in PREFERENCE_LOSSES]
    if not our_loss_types:
        return
    if options.as_trl:
        raise ValueError(
            f"`as_trl=True` trains as stock TRL, which has no loss type {our_loss_types[0]!r}. Remove one of the two."
        )
    for name, default in (("ld_alpha", None), ("f_divergence_type", "reverse_kl"), ("use_weighting", False)):
        value = getattr(config, name)
        if value != default:
            raise ValueError(
                f"`{name}={value!r}` is not defined for {our_loss_types[0]!r}, a loss type that TRL does not have. Set "
                f"`{name}={default!r}`, or use only TRL's loss types."
            )
    if "cdpo" in our_loss_types and not 0 <= smoothing < 0.5:
        raise ValueError(
            f"`label_smoothing` is the share of flipped labels: for 'cdpo' it must be in [0, 0.5), got {smoothing!r}."
        )
    refusing_loss_type = next((name for name in loss_types if dpo_loss_type(name).label_smoothing == "refused"), None)
    if smoothing and refusing_loss_type:
        raise ValueError(
            f"`label_smoothing={smoothing!r}` does not apply to {refusing_loss_type!r}: its loss is not the "
            f"log-likelihood of a label. Remove {refusing_loss_type!r} from `loss_type={loss_types}`, or set "
            "`label_smoothing=0.0`."
        )
    rewarded = [name for name in our_loss_types if name in READ_REWARDS]
    if smoothing and rewarded and not any(dpo_loss_type(name).label_smoothing == "read" for name in loss_types):
        raise ValueError(
            f"{rewarded[0]!r} does not read `label_smoothing={smoothing!r}`: its targets come from the rewards. Set "
            "`label_smoothing=0.0`."
        )


def warn_of_ignored_smoothing(config: Any) -> None:
    """Warn if `label_smoothing` is set but a loss type ignores it."""
    ignoring = [name for name in config.loss_type if dpo_loss_type(name).label_smoothing in ("ignored", "refused")]
    if config.label_smoothing and ignoring:
        as_in_trl = ", as in TRL" if PREFERENCE_LOSSES.keys().isdisjoint(ignoring) else ""
        logger.warning(
            f"`label_smoothing={config.label_smoothing}` is ignored by the loss type "
            f"{' and '.join(map(repr, ignoring))}{as_in_trl}. The loss type 'cdpo' is 'sigmoid' with label smoothing "
            "(conservative DPO)."
        )
