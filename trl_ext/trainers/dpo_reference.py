"""DPO's reference log-probs: each batch gets them from the user's columns, the store or a forward pass."""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from datasets import Dataset
from torch import Tensor

from ..compat import dpo as internals
from ..compat.overrides import STEP, overrides, overrides_below
from ..compat.reference import holds_images, labels_of, score_as_reference
from ..compat.replaced import unrecorded_pass
from ..config import AddedDPOFields
from ..packing.support import positions_by_length
from ..planning.dpo import DPOFacts, DPOPlan, plan_dpo
from ..planning.parts import few_parts
from ..planning.plan import PackingPlan
from ..reference.sequences import check_batch, check_column_values, have_columns
from ..scoring.output import FusedCausalLMOutput
from . import reference_source
from .dpo_batches import sequence_tokens
from .dpo_loss import DPOTerms


class Host(reference_source.Host, internals.DPOInternals, Protocol):
    """The trainer members that DPO's reference reads."""

    @property
    def plan(self) -> DPOPlan: ...

    _dpo_terms: DPOTerms

    def _packing_plan(self) -> PackingPlan: ...


class DPOReference(reference_source.ReferenceSource):
    """The reference of a `DPOTrainer`."""

    host: Host

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
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
        self._check_added_terms()
        with_columns = tuple(name for name, has_columns in columns.items() if has_columns)
        if self.weights.moves and with_columns:
            raise ValueError(
                "`sync_ref_model=True` changes the reference, but the columns `ref_chosen_logps` and "
                f"`ref_rejected_logps` of {' and '.join(f'`{name}`' for name in with_columns)} do not change. "
                "Remove the columns, or set `sync_ref_model=False`."
            )
        randomness = self.host._randomness()
        noise_of_batch = None if randomness is None or randomness.of_tokens else randomness.reason
        facts = DPOFacts.of(
            args,
            self.options,
            **self.facts(),
            loss_types=tuple(self.host.loss_types),
            datasets=tuple(columns),
            with_columns=with_columns,
            is_packed=self.scorer.policy.packing.padded_reason is None,
            processes=self.ranks.accelerator.num_processes,
            has_images=holds_images(self.host),
            has_router_loss=self.host.aux_loss_enabled,
            overrides_loss=overrides(self.host, "_compute_loss") is not None
            or "compute_loss" in self.host._overridden_below,
            own_step=overrides(self.host, *STEP, "get_batch_samples"),
            positions_by_length=positions_by_length(self.host.model, args.max_length, args.pad_to_multiple_of),
            noise_of_batch=noise_of_batch,
        )
        return plan_dpo(self.host._for_all_ranks(facts))

    def _check_added_terms(self) -> None:
        """Raise `ValueError` if code of the user below our trainer would not reach the terms that we add."""
        terms = self.host._dpo_terms.added_terms
        if terms and overrides_below(self.host, "_compute_loss") is not None:
            names = " and ".join(f"'{name}'" for name, _ in terms)
            raise ValueError(
                f"The loss type {names} has a term that trl_ext adds to TRL's loss. The override of `_compute_loss` in "
                "a class between trl_ext's `DPOTrainer` and TRL's would not get that term. Override `_compute_loss` in "
                "a subclass of trl_ext's `DPOTrainer`."
            )

    # For each batch

    @property
    def draws_after_policy(self) -> bool:
        """Whether the reference runs after the policy, because its random draws come after those of the policy in TRL.

        Where batches may have columns, ranks would differ.
        """
        plan = self.host.plan
        return plan.source == "pass" and plan.facts.varies is not None and not plan.facts.with_columns

    def score(self, batch: dict[str, Any], labels: Tensor) -> Tensor | None:
        """Return log-probs of a batch from the planned source, `(2B, S - 1)`; None if it has their sums in columns.

        All ranks call it: if the reference runs on one of them, it runs on all.

        Args:
            labels (`Tensor`): those of the policy's pass, because packing finds its layout again by the same tensors.
        """
        has_columns = have_columns(batch, "A batch")
        if has_columns:
            check_batch(batch)

        def run_rows(rows: dict[str, Any]) -> Tensor:
            # The store runs the batch itself, or the rows of it that are missing
            return self.run_pass(rows, labels=labels if rows is batch else None)

        source = self.host.plan.source
        if source == "pass" and self.ranks.any(not has_columns):
            log_probs = run_rows(batch)
        else:
            log_probs = self._from_store(batch, run_rows, is_needed=source == "store" and not has_columns)
        return None if has_columns else log_probs

    def model_in_override(self, batch: dict[str, Any]) -> Callable[..., Any] | None:
        """Return what code of the user between ours and TRL's loss calls as the reference; None if it reads sums.

        It returns the log-probs of `batch`. If that code has passed another batch on to TRL, the reference runs.
        """
        labels = labels_of(batch)
        if have_columns(batch, "A batch"):
            return self.score(batch, labels)  # type: ignore[return-value]
        log_probs = None
        if self.draws_after_policy:
            self.ranks.any(True)  # as `score` asks on ranks whose batch has columns
        else:
            log_probs = self.score(batch, labels)
        # TRL's loss does not run the reference if its sums were precomputed
        model = None if self.is_read else self._model(prepared=True)

        @cache
        def outputs() -> FusedCausalLMOutput:
            return FusedCausalLMOutput(
                log_probs=self.run_pass(batch, labels=labels, model=model) if log_probs is None else log_probs
            )

        def run(*positional: Any, **inputs: Any) -> Any:
            is_asked_for_batch = not (positional or inputs) or _same_inputs(inputs, {**batch, "labels": labels})
            if model is None or is_asked_for_batch:
                return outputs()
            with unrecorded_pass(self.host), self.weights.entered():
                return model(*positional, **inputs)

        return _ReferenceInOverride(model, run)

    def columns_of(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the entries of `batch` that TRL precomputes."""
        chosen, rejected = internals.completion_sums(self.host, self._from_store(batch, self.run_pass), batch)
        return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def run_pass(
        self, batch: dict[str, Any], prepared: bool = True, *, labels: Tensor | None = None, model: Any = None
    ) -> Tensor:
        """Return the reference's log-probs of `batch`. `prepared`: whether Accelerate has prepared the policy."""
        model = self._model(prepared) if model is None else model
        labels = labels_of(batch) if labels is None else labels
        budget = self.host.plan.facts.max_tokens_per_micro_batch
        with unrecorded_pass(self.host), self.weights.entered():
            if budget is None or not self.host.model.training or not prepared:
                return score_as_reference(self.host, model, batch, labels)
            parts = few_parts(sequence_tokens(batch, self.host._packing_plan()), list(range(len(labels))), budget)
            most = max(count[0] for count in self.ranks.gather_counts([len(parts)]))
            log_probs = labels.new_zeros(len(labels), labels.shape[1] - 1, dtype=torch.float32)
            # Each pass has collectives, so every rank runs the same number of passes
            for rows in parts + [[0]] * (most - len(parts)):
                part = internals.select_rows(batch, torch.tensor(rows))
                log_probs[rows] = score_as_reference(self.host, model, part, labels[rows]).float()
            return log_probs


class _ReferenceInOverride:
    """The reference model, for code of the user: a scoring forward over the batch gets log-probs that are known."""

    def __init__(self, model: Any, run: Callable[..., Any]) -> None:
        self._model = model
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *positional: Any, **inputs: Any) -> Any:
        return self._run(*positional, **inputs)


def _same_inputs(inputs: dict[str, Any], of_batch: dict[str, Any]) -> bool:
    """Whether a scoring forward has the tokens and labels of a batch, and no input that the batch lacks."""

    def is_same(name: str, value: Any) -> bool:
        of_same_name = of_batch.get(name)
        if isinstance(value, Tensor) and isinstance(of_same_name, Tensor):
            return torch.equal(value, of_same_name)
        return name in ("fused_lm_head", "use_cache", "output_router_logits") or value is of_same_name

    is_whole = inputs.keys() >= {"input_ids", "attention_mask", "labels", "fused_lm_head"}
    return is_whole and all(is_same(name, value) for name, value in inputs.items())
