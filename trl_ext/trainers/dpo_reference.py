"""DPO's reference log-probs: each batch gets them from the user's columns, the store or a forward pass."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from datasets import Dataset
from transformers.training_args import OptimizerNames

from ..compat import dpo as internals
from ..compat.overrides import STEP, overrides, overrides_below
from ..compat.reference import holds_images, labels_of, score_as_reference
from ..compat.replaced import unrecorded_pass
from ..config import AddedDPOFields
from ..packing.packing import LastResult
from ..packing.support import positions_by_length
from ..planning.dpo import DPOFacts, DPOPlan, plan_dpo
from ..planning.parts import few_parts
from ..planning.plan import PackingPlan
from ..reference.sequences import check_batch, check_column_values, have_columns
from . import reference_source
from .dpo_batches import sequence_tokens


class Host(reference_source.Host, internals.DPOInternals, Protocol):
    """The trainer members that DPO's reference reads."""

    @property
    def plan(self) -> DPOPlan: ...

    def _packing_plan(self) -> PackingPlan: ...


class DPOReference(reference_source.ReferenceSource):
    """The reference of a `DPOTrainer`."""

    host: Host

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._labels = LastResult()
        self._columns_seen: dict[str, tuple[Any, bool]] = {}

    @property
    def options(self) -> AddedDPOFields:
        return AddedDPOFields.of(self.host.args)

    def _check_own_values(self, instead: str = "") -> None:
        if not all(self.with_columns.values()):
            columns = "`ref_chosen_logps` and `ref_rejected_logps`"
            super()._check_own_values(f"Put your values into the dataset columns {columns}, or remove the override.")
        for name, dataset in self.datasets():
            if self.with_columns[name] and isinstance(dataset, Dataset):
                check_column_values(dataset, f"`{name}`")

    @property
    def with_columns(self) -> dict[str, bool]:
        for name, dataset in self.datasets():
            if self._columns_seen.get(name, (None,))[0] is not dataset:
                names = dataset.column_names or next(iter(dataset)).keys()
                self._columns_seen[name] = dataset, have_columns(names, f"`{name}`")
        return {name: self._columns_seen[name][1] for name, _ in self.datasets()}

    def plan(self) -> DPOPlan:
        args, columns = self.host.args, self.with_columns
        with_columns = tuple(name for name, there in columns.items() if there)
        if self.weights.moves and with_columns:
            raise ValueError(
                "`sync_ref_model=True` changes the reference, but the columns `ref_chosen_logps` and "
                f"`ref_rejected_logps` of {' and '.join(f'`{name}`' for name in with_columns)} fix its log-probs. "
                "Remove the columns, or set `sync_ref_model=False`."
            )
        randomness = self.host._randomness()
        noise_of_batch = None if randomness is None or randomness.of_tokens else randomness.reason
        facts = DPOFacts(
            **self.facts(),
            loss_types=tuple(self.host.loss_types),
            best_metric=args.metric_for_best_model,
            datasets=tuple(columns),
            with_columns=with_columns,
            is_packed=self.scorer.policy.packing.padded_reason is None,
            processes=self.ranks.accelerator.num_processes,
            balance=self.options.balance,
            max_tokens_per_micro_batch=self.options.max_tokens_per_micro_batch,
            optimizer=OptimizerNames(args.optim).value,
            has_images=holds_images(self.host),
            has_router_loss=self.host.aux_loss_enabled,
            overrides_loss=overrides(self.host, "_compute_loss") is not None,
            own_step=overrides(self.host, *STEP, "get_batch_samples"),
            positions_by_length=positions_by_length(self.host.model, args.max_length, args.pad_to_multiple_of),
            noise_of_batch=noise_of_batch,
        )
        return plan_dpo(self.host._for_all_ranks(facts))

    # For each batch

    def supplied(self, inputs: dict[str, Any], from_columns: bool) -> AbstractContextManager[None]:
        """Give TRL's loss the batch's reference log-probs from the planned source, in the `with` block."""
        plan = self.host.plan
        self._labels = LastResult()  # new for each batch, because a collator may reuse the same tensors
        if from_columns:
            check_batch(inputs)
        log_probs: Any
        if plan.source == "pass" and self.ranks.any(not from_columns):
            log_probs = partial(self._pass, inputs, model=self._model(prepared=True))
            # Random draws of the reference come after those of the policy, as in TRL. With columns, ranks may differ
            if plan.facts.varies is None or plan.facts.with_columns:
                log_probs = log_probs()
        else:
            log_probs = self._found(inputs, wanted=plan.source == "store" and not from_columns)
        run_if_changed = None
        if not from_columns and overrides_below(self.host, "_compute_loss") is not None and not self.is_read:
            # `super()` of our `_compute_loss` is then code of the user, which may pass another batch on to TRL
            run_if_changed = partial(self._run_if_changed, inputs, self._model(prepared=True))
        return internals.reference_given(self.host, None if from_columns else log_probs, run_if_changed)

    def _run_if_changed(self, batch: dict[str, torch.Tensor], model: Any, **inputs: Any) -> Any:
        """Return the reference's outputs for `inputs`; `None` if they are those of `batch`."""
        known = {**batch, "labels": self.labels_of(batch)}
        if all(torch.equal(inputs[name], known[name]) for name in ("input_ids", "attention_mask", "labels")):
            return None
        with unrecorded_pass(self.host), self.weights.entered():
            return model(**inputs)

    def columns_of(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the entries of `batch` that TRL precomputes."""
        with internals.reference_given(self.host, self._found(batch)):
            chosen, rejected = internals.reference_sums(self.host, batch)
        return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def _pass(self, batch: dict[str, Any], prepared: bool = True, model: Any = None) -> torch.Tensor:
        """Return the reference's log-probs of `batch`. `prepared`: whether Accelerate has prepared the policy."""
        if not prepared:
            self._labels = LastResult()
        model = self._model(prepared) if model is None else model
        labels, budget = self.labels_of(batch), self.options.max_tokens_per_micro_batch
        with unrecorded_pass(self.host), self.weights.entered():
            if budget is None or not self.host.model.training or not prepared:
                return score_as_reference(self.host, model, batch, labels)
            parts = few_parts(sequence_tokens(batch, self.host._packing_plan()), list(range(len(labels))), budget)
            most = max(count[0] for count in self.ranks.gather_counts([len(parts)]))
            log_probs = labels.new_zeros(len(labels), labels.shape[1] - 1, dtype=torch.float32)
            for rows in parts + [[0]] * (most - len(parts)):  # every rank runs the same number of passes
                part = internals.rows_of(batch, torch.tensor(rows))
                log_probs[rows] = score_as_reference(self.host, model, part, labels[rows]).float()
            return log_probs

    def labels_of(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the labels of a batch: the same tensor for the reference's and the policy's pass."""
        found: torch.Tensor = self._labels.of(
            batch["input_ids"], batch["completion_mask"], make=lambda: labels_of(batch)
        )
        return found
