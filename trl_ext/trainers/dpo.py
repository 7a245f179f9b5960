"""DPO: TRL's trainer with our scoring forward and a store of reference log-probs.

The methods of TRL's trainer that only DPO overrides are here; the others are in `base.py`.
"""

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
import trl
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import get_worker_info

from ..checks.arguments import check_dpo_arguments
from ..checks.data import check_rows_are_left, checked_rows, pair_columns
from ..compat import dpo as internals
from ..compat.replaced import logged_times
from ..config import AddedDPOFields, check_loss_types, warn_of_ignored_smoothing
from ..config import DPOConfig as DPOConfig  # earlier `training_args.bin` files refer to it here
from ..distributed.shards import parameter_of
from ..losses.preference import READ_REWARDS
from ..losses.reward_columns import REWARD_COLUMNS, RewardCollator, check_reward, check_reward_columns
from ..planning.non_finite import labelled, not_finite_rows, prompt_of
from ..reference.sequences import CheckedCollator, have_columns
from ..scoring.model_inputs import check_token_ids, missing_rows
from .base import ExactTrainer
from .dpo_batches import DPOBatches
from .dpo_loss import DPOTerms, LossInputs, Terms
from .dpo_metrics import DPOMetrics
from .dpo_passes import DPOPasses
from .dpo_reference import DPOReference
from .part_training import PartTraining

_ROWS_CHECKED = 1000  # training rows whose token ids are checked if the tokenizer has more tokens than the model


class DPOTrainer(ExactTrainer, trl.DPOTrainer):
    """
    TRL's [`~trl.DPOTrainer`] with exact per-token log-probs, and a reference that scores each sequence only once.

    Arguments, losses and metrics are the same. Pass a [`DPOConfig`], or TRL's for the defaults of the added fields.
    """

    data_collator: Any
    _signature_columns: Any
    _trl_trainer = trl.DPOTrainer
    _config_class = trl.DPOConfig
    _added_fields = AddedDPOFields
    _methods_of_step = (*ExactTrainer._methods_of_step, "_compute_loss")
    _source: DPOReference
    _reference_log_probs: Tensor | None = None  # of the last loss

    def _check(self, arguments: dict[str, Any], config: Any) -> dict[str, Any]:
        self._source = DPOReference(self, self._ranks, self._scorer, self._reference_weights)
        self._part_training = PartTraining(self, self._ranks)
        self._dpo_metrics = DPOMetrics(self, self._ranks, self._scorer, self._balance)
        self._dpo_batches = DPOBatches(self, self._ranks, self._balance, self._dpo_metrics, self._part_training)
        self._dpo_passes = DPOPasses(self, self._ranks, self._source, self._part_training)
        self._dpo_terms = DPOTerms(self, self._dpo_metrics)
        if config is not None:
            check_dpo_arguments(config, own_loss=self._replaces("loss"))
            check_loss_types(config)
            if not READ_REWARDS.isdisjoint(config.loss_type):
                self._features.require("reward losses")
                self._dpo_terms.columns = REWARD_COLUMNS
            warn_of_ignored_smoothing(config)
        self._scorer.smoothed = bool(self._added.sft_label_smoothing)
        return self._source.recorded_loads(trl.DPOTrainer)

    def _ready(self, callbacks: Any) -> None:
        with_columns = (x for name, x in self._source.datasets() if self._source.with_columns[name])
        if not all(isinstance(x, Dataset) for x in with_columns):
            self.data_collator = CheckedCollator(self.data_collator)
        if self._dpo_terms.columns:
            self.data_collator = RewardCollator(self.data_collator)
        super()._ready(callbacks)
        if self._dpo_terms.reads_sums:
            self._features.require("sums of log-probs")
        check_rows_are_left(self.train_dataset, self.args)
        tokens = len(self._tokenizer)
        for name, model in (("model", self.model), ("ref_model", self.ref_model)):
            rows = None if model is None else missing_rows(model, tokens)
            if rows is not None:
                largest = internals.largest_token_ids(self.train_dataset, _ROWS_CHECKED)
                check_token_ids(largest, rows, tokens, name)

    # Construction: datasets, then models, then precomputed log-probs

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """Check the rows, then prepare them as TRL does."""
        has_end = self._tokenizer.eos_token is not None
        dataset = checked_rows(dataset, dataset_name, processing_class, pair_columns, has_end=has_end)
        if self._dpo_terms.columns:
            dataset = _with_rewards(dataset, f"the {dataset_name} data set", self._dpo_terms.columns)
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns
        self._signature_columns = [*columns, *(x for x in self._dpo_terms.columns if x not in columns)]

    def _attach_model(self, model: Any, **options: Any) -> None:
        """Attach the exact head, and find the number of tokens in its vocabulary."""
        is_policy = not self._scorer.forwards
        super()._attach_model(model, **options)
        if is_policy:
            weight = parameter_of(model.get_output_embeddings(), "weight")
            self._dpo_terms.vocabulary = getattr(weight, "ds_shape", getattr(weight, "shape", (0,)))[0]

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        if isinstance(dataset, IterableDataset):
            return super()._precompute_ref_logps(dataset, name, batch_size)  # raises
        if not have_columns(dataset.column_names, f"The {name} data set"):
            self._source.precompute(dataset, name, batch_size)
        return dataset

    # Training: a batch

    def get_batch_samples(self, *positional: Any, **keywords: Any) -> Any:
        """Get the micro-batches of an optimizer step as transformers does, and balance them."""
        samples, items = super().get_batch_samples(*positional, **keywords)
        return self._dpo_batches.rearranged(samples), items

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Prepare as transformers does, but keep rewards in fp32, which DeepSpeed would round to half precision.

        With precomputed log-probs, code of the user finds them in the batch.
        """
        rewards = {name: inputs[name].to(self.args.device) for name in self._dpo_terms.columns if name in inputs}
        if rewards:
            inputs = super()._prepare_inputs({name: x for name, x in inputs.items() if name not in rewards}) | rewards
        else:
            inputs = super()._prepare_inputs(inputs)
        if self._source.is_read and self.plan.source == "store" and not have_columns(inputs, "A batch"):
            inputs = {**inputs, **self._source.columns_of(inputs)}
        return inputs

    def _in_step(self) -> AbstractContextManager[None]:
        return self._part_training.training_step()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a micro-batch, a scalar. TRL's method calls our `_compute_loss`, or an override."""
        self._loss_begins(inputs)
        if not len(inputs["input_ids"]):
            # Its pairs run with a later micro-batch, in parts as large as `max_tokens_per_micro_batch` allows
            return self._part_training.loss_without_backward()
        self._ranks.check_same(inputs["input_ids"])
        self._reference_log_probs = None
        self._dpo_metrics.token_counts = None
        mode = "train" if self.model.training else "eval"
        with (
            self._policy_scored(self._users_loss, return_outputs=return_outputs),
            self._non_finite.recorded(model) as policy_forwards,
            # As TRL logs as many micro-batches
            logged_times(self._metrics[mode], self._dpo_batches.merged_micro_batches if mode == "train" else 1),
        ):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not return_outputs:
            self._part_training.check_last_part(loss)

        def rows() -> dict[int, list[str]] | None:
            if not policy_forwards:  # an overridden loss has scored the policy without our head
                return None
            values = {"policy": self._dpo_passes.in_order(policy_forwards), "reference": self._reference_log_probs}
            return not_finite_rows(values, labelled(inputs))

        self._non_finite.watch(loss, rows, lambda row: prompt_of(inputs, row))
        self._count_tokens(self._dpo_metrics.token_counts)
        if self.plan.source == "nothing" and not have_columns(inputs, "A batch"):
            self._dpo_metrics.drop_rewards()
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Return the loss of 2B rows, which an override may have changed: both models score them as they are."""
        self._note_call("_compute_loss")
        if "_compute_loss" in self._overridden_below:
            return self._loss_of_override(model, inputs, return_outputs)

        def part_loss(part: LossInputs) -> Tensor:
            loss: Tensor = self._loss(part, rank_metrics=defaultdict(list))
            return loss

        # The pass takes the loss: with `max_tokens_per_micro_batch`, it trains all parts of the batch but the last
        loss_inputs = self._dpo_passes.score(model, inputs, None if return_outputs else part_loss)
        self._reference_log_probs = _reference_log_probs(inputs, loss_inputs.reference)
        if not self._dpo_metrics.combines_ranks:
            return self._loss(loss_inputs, None, model, return_outputs)
        rank_metrics: dict[str, list[float]] = defaultdict(list)
        result = self._loss(loss_inputs, rank_metrics, model, return_outputs)
        pairs = internals.pairs_not_repeated(self, loss_inputs.pairs)
        if 0 < pairs < loss_inputs.pairs:
            # Accelerate has repeated pairs to fill the last batch. They train, as in TRL, but count in no metric
            loss_inputs = loss_inputs.of_pairs(pairs)
            rank_metrics = defaultdict(list)
            with torch.no_grad():
                loss = self._loss(loss_inputs, rank_metrics)
            if not self.model.training:
                result = (loss, result[1]) if return_outputs else loss
        self._dpo_metrics.record(rank_metrics, loss_inputs.batch["completion_mask"] if pairs else None)
        return result

    def _loss(
        self,
        loss_inputs: LossInputs,
        rank_metrics: dict[str, list[float]] | None,
        model: Any = None,
        return_outputs: bool = False,
    ) -> Any:
        """Return the loss of finished scores: TRL's terms, with a bounded reference where one overflows, and ours."""
        terms = self._dpo_terms.of(loss_inputs)
        result = self._trl_loss(loss_inputs, terms.of_trl, rank_metrics, model, return_outputs)
        loss = result[0] if return_outputs else result
        for name, weight, sums_2B in terms.bounded:
            bounded_inputs = loss_inputs.with_reference_sums(sums_2B)
            loss = loss + self._trl_loss(bounded_inputs, [(name, weight)], defaultdict(list), router_loss=False)
        if terms.added_terms:
            loss = self._dpo_terms.add(loss, terms.added_terms, loss_inputs, rank_metrics)
        return (loss, result[1]) if return_outputs else loss

    def _trl_loss(
        self,
        loss_inputs: LossInputs,
        terms: Terms,
        rank_metrics: dict[str, list[float]] | None,
        model: Any = None,
        return_outputs: bool = False,
        *,
        router_loss: bool = True,
    ) -> Any:
        """Return TRL's loss of finished scores. Only the logits that `return_outputs` asks for take a forward here."""

        def policy(**inputs: Any) -> Any:
            return loss_inputs.scores if inputs.get("fused_lm_head") else model(**inputs)

        reference = loss_inputs.reference
        with internals.loss_of_scores(self, terms, reference, rank_metrics=rank_metrics, router_loss=router_loss):
            return super()._compute_loss(policy, _without_rewards(loss_inputs.batch), return_outputs)

    def _loss_of_override(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Return the loss of code between ours and TRL's, which runs the models itself, perhaps on another batch."""
        reference_model = self._source.model_in_override(inputs)
        with internals.loss_of_scores(self, self._dpo_terms.of_trl, reference_model):
            result = super()._compute_loss(model, inputs, return_outputs)
        reference = None if reference_model is None else reference_model().log_probs
        self._reference_log_probs = _reference_log_probs(inputs, reference)
        return result


def _without_rewards(batch: dict[str, Any]) -> dict[str, Any]:
    """Return what TRL's loss gets: it gives other entries of a batch to the model."""
    return {name: x for name, x in batch.items() if name not in REWARD_COLUMNS}


def _reference_log_probs(batch: dict[str, Any], reference: Tensor | None) -> Tensor:
    """Return the reference's log-probs, `(2B, S - 1)`, or their sums in the batch, `(2B,)`."""
    if reference is not None:
        return reference
    return torch.cat([batch["ref_chosen_logps"], batch["ref_rejected_logps"]])


def _with_rewards(dataset: Any, where: str, columns: tuple[str, ...]) -> Any:
    check_reward_columns(dataset.column_names or next(iter(dataset)).keys(), where)
    if not isinstance(dataset, Dataset):
        return dataset.map(_checked, with_indices=True, fn_kwargs={"where": where})
    for column in columns:
        for row, value in enumerate(dataset[column]):
            check_reward(value, column, f"row {row} of {where}")
    return dataset


def _checked(example: dict[str, Any], row: int, where: str) -> dict[str, Any]:
    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1:
        where = f"worker {worker.id}'s part of {where}"
    for column in REWARD_COLUMNS:
        check_reward(example.get(column), column, f"row {row} of {where}")
    return example
