"""What is known of each loss type: one row for each, in a table for each method.

Decisions on passes, rows and metrics read these rows. A loss type without a row has the row `UNKNOWN_…` of its method,
which assumes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .preference import PREFERENCE_LOSSES, READ_LABEL_SMOOTHING, READ_REWARDS, REFUSE_LABEL_SMOOTHING


@dataclass(frozen=True, kw_only=True)
class LossType:
    """What is known of a loss type of any method."""

    is_known: bool = True
    # Why the gradient of a row depends on the other rows of its micro-batch, as the end of a sentence on the loss.
    # None: the loss is a mean or a sum over rows (pairs in DPO), so these may change micro-batches
    of_whole_batch: str | None = None


_NOT_KNOWN = "is unknown to this release of trl_ext, and may depend on the whole micro-batch"


@dataclass(frozen=True, kw_only=True)
class SFTLossType(LossType):
    """What is known of a loss type of `SFTConfig`."""

    # With `label_smoothing_factor`, TRL's loss reads the logits
    smooths_labels: bool = False


SFT_LOSS_TYPES = {
    "nll": SFTLossType(smooths_labels=True),
    "dft": SFTLossType(),
}
UNKNOWN_SFT = SFTLossType(is_known=False, of_whole_batch=_NOT_KNOWN, smooths_labels=True)


@dataclass(frozen=True, kw_only=True)
class DPOLossType(LossType):
    """What is known of a loss type of `DPOConfig`, TRL's or ours."""

    needs_reference: bool = True  # False: only the metrics `rewards/*` read the reference
    needs_beta: bool = True  # with `beta=0`, the loss does not depend on the policy
    # What the loss does with `label_smoothing`, the share of labels that are wrong. "refused": its loss is not the
    # log-likelihood of a label; "no labels": it does not ask which completion is the better one
    label_smoothing: Literal["read", "ignored", "refused", "no labels"] = "ignored"
    divides_by_true_labels: bool = False  # by 1 - 2 * `label_smoothing`
    divides_by: str | None = None  # an argument
    # What overflows (see `planning/non_finite.py`): the power to which the loss raises the scores of an f-divergence, 0
    # if it does not read them; and whether it has exp(-beta * margin)
    degree: int = 0
    exponentiates_margin: bool = False


# TRL's
DPO_LOSS_TYPES = {
    "sigmoid": DPOLossType(degree=1),
    "hinge": DPOLossType(degree=1, label_smoothing="refused"),
    "ipo": DPOLossType(degree=2, label_smoothing="refused"),
    "exo_pair": DPOLossType(degree=1, label_smoothing="read"),
    "nca_pair": DPOLossType(),
    "robust": DPOLossType(degree=1, label_smoothing="read", divides_by_true_labels=True),
    "bco_pair": DPOLossType(),
    "sppo_hard": DPOLossType(),
    "aot": DPOLossType(of_whole_batch="sorts the pairs of a micro-batch", label_smoothing="read"),
    "aot_unpaired": DPOLossType(of_whole_batch="sorts the pairs of a micro-batch", label_smoothing="read"),
    "apo_zero": DPOLossType(),
    "apo_down": DPOLossType(),
    "discopop": DPOLossType(degree=1, exponentiates_margin=True, divides_by="discopop_tau"),
    "sft": DPOLossType(
        of_whole_batch="is a mean over the tokens of a micro-batch",
        needs_reference=False,
        needs_beta=False,
        label_smoothing="no labels",
    ),
    "sigmoid_norm": DPOLossType(degree=1),
}
UNKNOWN_DPO = DPOLossType(is_known=False, of_whole_batch=_NOT_KNOWN, needs_beta=False, label_smoothing="read")


def _added(name: str) -> DPOLossType:
    if name in READ_LABEL_SMOOTHING:
        return DPOLossType(label_smoothing="read")
    if name in REFUSE_LABEL_SMOOTHING:
        return DPOLossType(label_smoothing="refused")
    return DPOLossType(label_smoothing="no labels" if name in READ_REWARDS else "ignored")


@dataclass(frozen=True, kw_only=True)
class KTOLossType(LossType):
    """What is known of a loss type of `KTOConfig`."""

    has_kl_term: bool = True  # each prompt also runs with the completion of another row of its micro-batch


KTO_LOSS_TYPES = {
    "kto": KTOLossType(),
    "apo_zero_unpaired": KTOLossType(has_kl_term=False),
}
UNKNOWN_KTO = KTOLossType(is_known=False, of_whole_batch=_NOT_KNOWN)


@dataclass(frozen=True, kw_only=True)
class GRPOLossType(LossType):
    """What is known of a loss type of `GRPOConfig`.

    The gradient of all known ones is 0 for a row whose advantage is 0, and for a token that the mask leaves out.
    """

    bounds_ratio: bool = (
        False  # the loss bounds the ratio of policy to old policy itself, and reads it without gradient
    )
    reads_token_ratios: bool = False  # even with `importance_sampling_level="sequence"`
    divides_by_completion_length: bool = False  # by `max_completion_length`
    # A metric that is a mean over rows, and is 1 for a row whose ratio is 1
    metric_of_rows: str | None = None


GRPO_LOSS_TYPES = {
    "grpo": GRPOLossType(),
    "dapo": GRPOLossType(),
    "dr_grpo": GRPOLossType(divides_by_completion_length=True),
    "bnpo": GRPOLossType(of_whole_batch="is normalised by the tokens of each micro-batch"),
    "cispo": GRPOLossType(bounds_ratio=True),
    "sapo": GRPOLossType(),
    "luspo": GRPOLossType(),
    "vespo": GRPOLossType(bounds_ratio=True, reads_token_ratios=True, metric_of_rows="vespo/phi_seq_mean"),
}
METRICS_OF_ROWS = [row.metric_of_rows for row in GRPO_LOSS_TYPES.values() if row.metric_of_rows is not None]
UNKNOWN_GRPO = GRPOLossType(is_known=False, of_whole_batch=_NOT_KNOWN)


def unknown_loss_types(method: str, names: str | Iterable[str]) -> list[str]:
    """Return which of the loss types of a `method` such as "dpo" have no row."""
    row_of = {"sft": sft_loss_type, "dpo": dpo_loss_type, "kto": kto_loss_type, "grpo": grpo_loss_type}.get(method)
    names = [names] if isinstance(names, str) else names
    return [] if row_of is None else [name for name in names if not row_of(name).is_known]


def sft_loss_type(name: str) -> SFTLossType:
    return SFT_LOSS_TYPES.get(name, UNKNOWN_SFT)


def dpo_loss_type(name: str) -> DPOLossType:
    """Return the row of a loss type, TRL's or ours."""
    return _added(name) if name in PREFERENCE_LOSSES else DPO_LOSS_TYPES.get(name, UNKNOWN_DPO)


def kto_loss_type(name: str) -> KTOLossType:
    return KTO_LOSS_TYPES.get(name, UNKNOWN_KTO)


def grpo_loss_type(name: str) -> GRPOLossType:
    return GRPO_LOSS_TYPES.get(name, UNKNOWN_GRPO)
