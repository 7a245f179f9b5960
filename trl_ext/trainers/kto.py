"""KTO: TRL's trainer with our scoring forward and a store of reference log-probs.

The methods of TRL's trainer that only KTO overrides are here; the others are in `base.py`.
"""

from dataclasses import replace
from typing import Any

import torch
import trl
from datasets import IterableDataset

from ..checks.arguments import check_kto_arguments
from ..checks.data import check_rows_are_left, checked_rows, kto_columns
from ..compat.kto import (
    KL_PASS,
    has_kl_rows,
    reference_in_batch,
    reference_run_by_trl,
    sequences_of,
    tokens_of,
    with_reference,
)
from ..compat.overrides import overrides
from ..config import AddedStoreFields
from ..config import KTOConfig as KTOConfig  # `training_args.bin` files refer to it here
from ..planning.non_finite import labelled, not_finite_rows, prompt_of
from ..planning.plan import Decision
from ..planning.reference import ReferenceFacts, ReferencePlan, left_to_own_loss, plan_reference
from .base import ExactTrainer
from .reference_source import ReferenceSource


class KTOReference(ReferenceSource):
    """The reference of a `KTOTrainer`. One pass scores a batch and its rows for the KL term, which share prompts."""

    def plan(self) -> ReferencePlan:
        facts = ReferenceFacts.of(self.host.args, self.options, **self.facts())
        if overrides(self.host, KL_PASS) is not None and not facts.precompute_ref_log_probs:
            kl_pass = f"`{type(self.host).__name__}.{KL_PASS}` is called for the policy, then for the reference"
            facts = replace(facts, varies=facts.varies or kl_pass)
        facts = self.host._for_all_ranks(facts)
        source, reference, durable = plan_reference(facts)
        policy = Decision("policy", "run", "Scores every completion, and the rows for the KL term, as in TRL.", True)
        if facts.own_loss is not None:
            policy, reference = left_to_own_loss(facts.own_loss)
        return ReferencePlan(decisions=(policy, reference), facts=facts, source=source, durable=durable)

    def sequences_of(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        return sequences_of(batch)

    @property
    def is_run_by_trl(self) -> bool:
        """Whether TRL's loss runs the reference.

        Its random draws then come after those of the policy, as in TRL. And `super()` of our `_compute_loss` may be
        code of the user, which may pass another batch on to TRL.
        """
        plan = self.host.plan
        if "_compute_loss" in self.host._overridden_below:
            return not self.is_read
        return plan.source == "pass" and plan.facts.varies is not None

    def sums_of(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        """Return the reference's log-probs of each completion, then of each row for the KL term, `(B,)` each."""
        sequences = self.sequences_of(batch)
        trl_passes = 2 if has_kl_rows(batch) else 1
        if not self.host.args.precompute_ref_log_probs:
            # TRL pads the rows for the KL term apart, so it does not skip the padding that the common pass adds
            tokens = sum(x["input_ids"].numel() for x in sequences)
            self.scorer.policy.packing.skipped_tokens -= tokens - tokens_of(batch)
        sums = []
        for part in sequences:
            if self.host.plan.source == "store":
                log_probs = self._from_store(part, self.run_pass, passes=trl_passes // len(sequences))
            else:
                log_probs = self.run_pass(part)
            sums.append(log_probs.sum(dim=1))
        return sums


class KTOTrainer(ExactTrainer, trl.KTOTrainer):
    """
    TRL's [`~trl.KTOTrainer`] with exact per-token log-probs, and a reference that scores each sequence only once.

    Arguments, losses and metrics are the same. Pass a [`KTOConfig`], or TRL's for the defaults of the added fields.
    """

    _trl_trainer = trl.KTOTrainer
    _config_class = trl.KTOConfig
    _added_fields = AddedStoreFields
    _methods_of_step = (*ExactTrainer._methods_of_step, "_compute_loss")
    _source: KTOReference
    _reference_sums: torch.Tensor | None = None  # of the last loss

    def _check(self, arguments: dict[str, Any], config: Any) -> dict[str, Any]:
        if config is not None:
            check_kto_arguments(config, own_loss=self._replaces("loss"))
        self._source = KTOReference(self, self._ranks, self._scorer, self._reference_weights)
        return self._source.recorded_loads(trl.KTOTrainer)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """Check the rows, then prepare them as TRL does."""
        has_end = self._tokenizer.eos_token is not None
        dataset = checked_rows(dataset, dataset_name, processing_class, kto_columns, has_end=has_end)
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if dataset_name == "train":
            check_rows_are_left(prepared, args)
        return prepared

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        if isinstance(dataset, IterableDataset):
            return super()._precompute_ref_logps(dataset, name, batch_size)  # raises
        self._source.precompute(dataset, name, batch_size)
        return dataset

    # Training

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Prepare as transformers does. With precomputed log-probs, code of the user finds them in the batch."""
        inputs = super()._prepare_inputs(inputs)
        return with_reference(inputs, self._source.sums_of(inputs)) if self._source.is_read else inputs

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a micro-batch, a scalar. TRL's method calls our `_compute_loss`, or an override."""
        self._loss_begins(inputs)
        self._ranks.check_same(inputs["input_ids"])
        self._reference_sums = None
        with (
            self._policy_scored(self._users_loss, return_outputs=return_outputs),
            self._non_finite.recorded(model) as policy_forwards,
        ):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def rows() -> dict[int, list[str]] | None:
            if not policy_forwards:  # an overridden loss has scored the policy without our head
                return None
            # The last one: before it, TRL may score the rows for the KL term
            values = {"policy": policy_forwards[-1], "reference": self._reference_sums}
            return not_finite_rows(values, labelled(inputs))

        self._non_finite.watch(loss, rows, lambda row: prompt_of(inputs, row))
        self._count_tokens()
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Return the loss of B rows, which an override may have changed: the reference scores them as they are.

        The policy's passes are left to TRL's loss, because nothing of ours reads their scores before it.
        """
        self._note_call("_compute_loss")
        if self._source.is_run_by_trl:
            with reference_run_by_trl(self._reference_weights.entered):
                return super()._compute_loss(model, inputs, return_outputs)
        batch = inputs
        if not ("ref_logps" in inputs and self._source.is_read):
            # A copy, because TRL's batches have these entries only if they are precomputed
            batch = with_reference(inputs, self._source.sums_of(inputs))
        self._reference_sums = batch["ref_logps"]
        with reference_in_batch(self):
            return super()._compute_loss(model, batch, return_outputs)
