"""What TRL's DPO loss reads in place of passes, the terms that it lacks, and those whose exponentials overflow.

Dimensions: B pairs, so 2B rows, the chosen ones first; S tokens of the longest row.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compat import dpo as internals
from ..config import AddedDPOFields
from ..losses.preference import PREFERENCE_LOSSES, READ_REWARDS, LossOptions, Pairs, pairs_of, smoothing_term
from ..planning.non_finite import PairExponential, bounded_pairs
from ..scoring.output import FusedCausalLMOutput
from .dpo_metrics import DPOMetrics

Terms = list[tuple[str, float]]  # loss types with their weights


@dataclass(frozen=True)
class LossInputs:
    """What TRL's loss of a batch reads in place of the passes of policy and reference."""

    batch: dict[str, Any]
    scores: FusedCausalLMOutput  # of the policy, `(2B, S - 1)` each
    reference: Tensor | None  # its log-probs, `(2B, S - 1)`; None if the batch has their sums over each completion

    @property
    def pairs(self) -> int:
        return len(self.batch["completion_mask"]) // 2

    def of_pairs(self, pairs: int) -> "LossInputs":
        """Return the inputs of the first `pairs`."""
        first = list(range(pairs))
        rows = internals.rows_of_pairs(self.batch, first)
        return LossInputs(
            internals.select_pairs(self.batch, first),
            internals.select_scores(self.scores, rows),
            None if self.reference is None else self.reference[rows],
        )

    def with_reference_sums(self, sums_2B: Tensor) -> "LossInputs":
        sums = {"ref_chosen_logps": sums_2B[0], "ref_rejected_logps": sums_2B[1]}
        return replace(self, batch={**self.batch, **sums}, reference=None)


@dataclass(frozen=True)
class LossTerms:
    """The terms of a loss, by who computes them."""

    of_trl: Terms
    bounded: list[tuple[str, float, Tensor]]  # TRL's that overflow, with sums of the reference, `(2, B)`, that do not
    added_terms: Terms


class Trainer(internals.DPOInternals, Protocol):
    """The trainer members that the terms read."""

    beta: float
    label_smoothing: float
    f_divergence_type: str
    f_alpha_divergence_coef: float


class DPOTerms:
    """Divides the terms of the loss into TRL's and ours, and computes ours."""

    def __init__(self, trainer: Trainer, metrics: DPOMetrics) -> None:
        self.trainer = trainer
        self.metrics = metrics
        self.vocabulary = 0
        self.columns: tuple[str, ...] = ()  # of the data set: the rewards, if a term reads them

    @property
    def options(self) -> AddedDPOFields:
        """The added fields, read at each use because a user may change `trainer.args`."""
        return AddedDPOFields.of(self.trainer.args)

    @property
    def of_trl(self) -> Terms:
        return [(name, weight) for name, weight in self._weights() if name not in PREFERENCE_LOSSES]

    def of(self, loss_inputs: LossInputs) -> LossTerms:
        exponentials = self.exponentials()
        if not exponentials:
            return LossTerms(self.of_trl, [], self.added_terms)
        log_probs = loss_inputs.scores.log_probs
        assert log_probs is not None
        policy_2B = internals.completion_sums(self.trainer, log_probs, loss_inputs.batch).detach()
        reference_2B = self._reference_sums(loss_inputs)
        of_trl: Terms = []
        bounded: list[tuple[str, float, Tensor]] = []
        for name, weight in self.of_trl:
            exponential = exponentials.get(name)
            sums_2B = None if exponential is None else bounded_pairs(policy_2B, reference_2B, exponential)
            if sums_2B is None:
                of_trl.append((name, weight))
            else:
                bounded.append((name, weight, sums_2B))
        return LossTerms(of_trl, bounded, self.added_terms)

    def _weights(self) -> Terms:
        return list(zip(self.trainer.loss_types, self.trainer.loss_weights, strict=True))

    @property
    def added_terms(self) -> Terms:
        """The terms that TRL lacks; with "sft" its label smoothing."""
        added_terms = [(name, weight) for name, weight in self._weights() if name in PREFERENCE_LOSSES]
        if self.options.sft_label_smoothing:
            added_terms += [(name, weight) for name, weight in self._weights() if name == "sft"]
        return added_terms

    @property
    def reads_sums(self) -> bool:
        """Whether a term reads the sums of the log-probs over each completion."""
        return bool(self.exponentials()) or any(name in PREFERENCE_LOSSES for name, _ in self._weights())

    def exponentials(self) -> dict[str, PairExponential]:
        """Return the terms of TRL's that may overflow."""
        trainer = self.trainer
        exponentials = {}
        for name, weight in self.of_trl:
            exponential = PairExponential.of(
                name,
                trainer.f_divergence_type,
                alpha=trainer.f_alpha_divergence_coef,
                beta=trainer.beta,
                label_smoothing=trainer.label_smoothing,
                weight=weight,
            )
            if exponential is not None:
                exponentials[name] = exponential
        return exponentials

    def _reference_sums(self, loss_inputs: LossInputs) -> Tensor:
        if loss_inputs.reference is None:
            batch = loss_inputs.batch
            return torch.stack([batch["ref_chosen_logps"], batch["ref_rejected_logps"]])
        return internals.completion_sums(self.trainer, loss_inputs.reference, loss_inputs.batch)

    def add(
        self, loss: Any, added_terms: Terms, loss_inputs: LossInputs, rank_metrics: dict[str, list[float]] | None
    ) -> Any:
        """Return TRL's loss plus the terms that TRL lacks, and log their metrics, perhaps in `rank_metrics`."""
        preferences = [(name, weight) for name, weight in added_terms if name in PREFERENCE_LOSSES]
        if preferences:
            loss = loss + self._of_preferences(preferences, loss_inputs, rank_metrics)
        for name, weight in added_terms:
            if name == "sft":
                loss = loss + weight * self._of_smoothing(loss_inputs)
        return loss

    def _of_preferences(
        self, terms: Terms, loss_inputs: LossInputs, rank_metrics: dict[str, list[float]] | None
    ) -> Tensor:
        completion_mask = loss_inputs.batch["completion_mask"]
        log_probs = loss_inputs.scores.log_probs
        assert log_probs is not None
        pairs = pairs_of(
            # Prompt tuning puts virtual tokens before those of the batch
            log_probs[:, 1 - completion_mask.shape[1] :],
            completion_mask,
            self._reference_sums(loss_inputs),
            tuple(loss_inputs.batch[name] for name in self.columns),
        )
        options = LossOptions(
            beta=self.trainer.beta,
            label_smoothing=self.trainer.label_smoothing,
            reward_scale=self.options.reward_scale,
            rpo_average_log_probs=self.options.rpo_average_log_probs,
        )
        if not READ_REWARDS.isdisjoint(name for name, _ in terms):
            self.metrics.record_margins(pairs, options, rank_metrics)
        return torch.stack([weight * _mean_loss(name, pairs, options) for name, weight in terms]).sum()

    def _of_smoothing(self, loss_inputs: LossInputs) -> Tensor:
        mask_BS = loss_inputs.batch["completion_mask"][:, 1:].chunk(2)[0]
        pairs, tokens = mask_BS.shape
        scores = loss_inputs.scores
        assert scores.log_probs is not None
        assert scores.mean_log_probs is not None
        return smoothing_term(
            scores.log_probs[:pairs, -tokens:],
            scores.mean_log_probs[:pairs, -tokens:],
            mask_BS,
            smoothing=self.options.sft_label_smoothing,
            convention=self.options.sft_label_smoothing_convention,
            vocabulary=self.vocabulary,
        )


def _mean_loss(name: str, pairs: Pairs, options: LossOptions) -> Tensor:
    return PREFERENCE_LOSSES[name](pairs, options).mean()
