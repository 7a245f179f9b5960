"""The config fields of the DPO loss types that TRL does not have."""

import math
from dataclasses import dataclass, field
from typing import Any

from ..losses import CONVENTIONS, PREFERENCE_LOSSES, READ_REWARDS
from .added_fields import AddedFields

# TRL's loss types that read `label_smoothing`, and ours
_READ_SMOOTHING = frozenset({"exo_pair", "robust", "aot", "aot_unpaired", "cdpo"})
_REFUSE_SMOOTHING = frozenset({"hinge", "ipo", "ipo_sum"})


@dataclass
class LossArguments(AddedFields):
    """Fields of the loss types added to TRL's; every default trains as TRL does."""

    reward_scale: float = field(
        default=1.0,
        metadata={
            "help": "eta of the RPO loss types: what the rewards in the columns `chosen_reward` and `rejected_reward` "
            "are multiplied by before beta times the log-ratios is compared with them."
        },
    )
    rpo_average_log_probs: bool = field(
        default=False,
        metadata={
            "help": "Whether the RPO loss types read log-ratios averaged over the tokens of a completion, in the place "
            "of their sum."
        },
    )
    sft_label_smoothing: float = field(
        default=0.0,
        metadata={
            "help": "Label smoothing over the vocabulary in the `'sft'` term of the loss, in [0, 1). Not "
            "`label_smoothing`, which is about which completion was chosen."
        },
    )
    sft_label_smoothing_convention: str = field(
        default="pytorch",
        metadata={
            "help": "What `sft_label_smoothing=a` means with K tokens in the vocabulary. `'pytorch'`: a/K for every "
            "token, and 1-a more for the target. `'megatron'`: 1-a for the target, a/(K-1) for every other.",
            "choices": list(CONVENTIONS),
        },
    )

    def __post_init__(self) -> None:
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
            check_loss_arguments(self)


def check_loss_arguments(config: Any) -> None:
    """Raise `ValueError` where a `DPOConfig`, TRL's or ours, asks a loss type of ours for what it does not have.

    Loss types that are all TRL's are never refused.
    """
    fields = LossArguments.of(config)
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
