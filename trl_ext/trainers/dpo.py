"""DPO: TRL's trainer with our scoring forward and a store of reference log-probs.

The methods of TRL's trainer that only DPO overrides are here; the others are in `base.py`.
"""

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
import trl
from datasets import Dataset, IterableDataset
from torch.utils.data import get_worker_info

from ..compat import dpo as internals
from ..compat.reference import recorded_loads
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
from .checked_arguments import check_dpo_arguments
from .checked_data import check_rows_are_left, checked_rows, pair_columns
from .dpo_batches import DPOBatches
from .dpo_loss import DPOLoss
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
    _source: DPOReference
    _reference_log_probs: torch.Tensor | None = None  # of the last loss

    # For `help()` and editors: the signature is TRL's
    @functools.wraps(trl.DPOTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *positional: Any, **keywords: Any) -> None:
        given = self._begin(positional, keywords)
        config = given.get("args")
        self._source = DPOReference(self, self._ranks, self._scorer, self._reference_weights)
        self._part_training = PartTraining(self, self._ranks)
        self._dpo_batches = DPOBatches(self, self._ranks, self._balance, self._part_training)
        self._dpo_loss = DPOLoss(self, self._ranks, self._scorer, self._source.labels_of, self._part_training)
        if config is not None:
            check_dpo_arguments(config, own_loss=self._replaces("loss"))
            check_loss_types(config)
            if not READ_REWARDS.isdisjoint(config.loss_type):
                self._dpo_loss.columns = REWARD_COLUMNS
            warn_of_ignored_smoothing(config)
        self._scorer.smoothed = bool(self._added.sft_label_smoothing)
        with self._built(given, **recorded_loads(trl.DPOTrainer, self._source.loaded)):
            super().__init__(**given)
        with_columns = (x for name, x in self._source.datasets() if self._source.with_columns[name])
        if not all(isinstance(x, Dataset) for x in with_columns):
            self.data_collator = CheckedCollator(self.data_collator)
        if self._dpo_loss.columns:
            self.data_collator = RewardCollator(self.data_collator)
        self._ready(given.get("callbacks"))
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
        if self._dpo_loss.columns:
            dataset = _with_rewards(dataset, f"the {dataset_name} data set", self._dpo_loss.columns)
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns
        self._signature_columns = [*columns, *(x for x in self._dpo_loss.columns if x not in columns)]

    def _attach_model(self, model: Any, **options: Any) -> None:
        """Attach the exact head, and find the number of tokens in its vocabulary."""
        is_policy = not self._scorer.forwards
        super()._attach_model(model, **options)
        if is_policy:
            weight = parameter_of(model.get_output_embeddings(), "weight")
            self._dpo_loss.classes = getattr(weight, "ds_shape", getattr(weight, "shape", (0,)))[0]

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
        rewards = {name: inputs[name].to(self.args.device) for name in self._dpo_loss.columns if name in inputs}
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
        """Compute TRL's loss with reference log-probs from the source in the plan."""
        self._loss_reached = True
        if not len(inputs["input_ids"]):  # its pairs run with a later micro-batch
            return self._part_training.loss_without_backward()
        self._ranks.check_same(inputs["input_ids"])
        self._dpo_loss.counted = None
        self._reference_log_probs = None
        mode = "train" if self.model.training else "eval"
        logged = logged_times(self._metrics[mode], self._dpo_batches.merged if mode == "train" else 1)
        with self._policy_scored(return_outputs=return_outputs), self._non_finite.recorded(model) as policy, logged:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not return_outputs:
            self._part_training.check_last_part(loss)

        def rows() -> Any:
            values = {"policy": self._dpo_loss.in_order(policy), "reference": self._reference_log_probs}
            return not_finite_rows(values, labelled(inputs))

        self._non_finite.watch(loss, rows, lambda row: prompt_of(inputs, row))
        self._count_tokens(self._dpo_loss.counted)
        if self.plan.source == "nothing" and not have_columns(inputs, "A batch"):
            internals.drop_reward_metrics(self)
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Compute TRL's loss of `inputs`, which an override may have changed: the reference scores them as they are."""
        with self._source.supplied(inputs, have_columns(inputs, "A batch")):
            result = self._dpo_loss.of_batch(model, inputs, return_outputs)
            self._reference_log_probs = self._reference_of(inputs)
        return result

    def _reference_of(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        if "ref_chosen_logps" in inputs:
            return torch.cat([inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]])
        return self.ref_model().log_probs


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
