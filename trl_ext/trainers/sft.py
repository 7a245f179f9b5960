"""SFT: TRL's trainer with our scoring forward.

The methods of TRL's trainer that only SFT overrides are here; the others are in `base.py`.
"""

import copy
import dataclasses
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import trl
from datasets import Dataset

from ..checks.arguments import check_sft_arguments
from ..checks.data import check_rows_are_left, checked_rows, formatted, named, named_datasets, sft_columns
from ..checks.sampled_rows import columns_of
from ..checks.tokens import (
    check_completion_ends,
    check_completion_only,
    check_formatting,
    check_label_column,
    check_labels,
    check_token_ends,
    has_label,
    refuse_unlabeled,
)
from ..compat import sft as internals
from ..config import AddedFields
from ..config import SFTConfig as SFTConfig  # `training_args.bin` files refer to it here
from ..losses.loss_types import sft_loss_type
from ..planning.non_finite import not_finite_rows
from ..planning.plan import Decision, PackingFacts, PackingPlan, Plan
from .base import ExactTrainer

_ROWS_PREPARED_AGAIN = 8


class SFTTrainer(ExactTrainer, trl.SFTTrainer):
    """
    TRL's [`~trl.SFTTrainer`] with exact per-token log-probs, and without computing padding.

    Arguments, losses and metrics are the same. Pass a [`SFTConfig`], or TRL's for the defaults of the added fields.
    """

    _trl_trainer = trl.SFTTrainer
    _config_class = trl.SFTConfig
    _added_fields = AddedFields
    _splits_rows = False

    def _check(self, arguments: dict[str, Any], config: Any) -> dict[str, Any]:
        self._makes_labels = arguments.get("data_collator") is not None
        if config is not None:
            check_sft_arguments(config, own_loss=self._replaces("loss"))
        self._scorer.smoothed = bool(getattr(config, "label_smoothing_factor", 0.0))
        if self._packed_by_trl(config):
            self._scorer.options.padding_free = None  # TRL's packing implies it
        return {}

    def _has_reference(self) -> bool:
        return False

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        """Check the rows, then prepare them as TRL does."""
        if packing and args.max_length is None:
            raise ValueError(
                "`packing=True` needs `max_length`, the length of packed rows, got None. Set it, or `packing=False`."
            )
        read_columns = partial(sft_columns, text_field=None if formatting_func else args.dataset_text_field)
        has_end = self._tokenizer.eos_token is not None
        dataset = checked_rows(dataset, dataset_name, processing_class, read_columns, has_end=has_end)
        columns = columns_of(dataset)
        if columns is not None and not self._makes_labels:
            evaluates = dataset_name != "train"
            check_completion_only(
                set(columns),
                named(dataset_name),
                args.completion_only_loss,
                assistant_only=args.assistant_only_loss,
                evaluates=evaluates,
            )
            check_label_column(set(columns), named(dataset_name))
        if formatting_func is None:
            check_completion_ends(dataset, named(dataset_name), args.dataset_text_field, self._tokenizer.eos_token)
        else:
            check_formatting(dataset, named(dataset_name), args.dataset_text_field)
            formatting_func = partial(formatted, formatting_func)
        prepare = partial(super()._prepare_dataset, processing_class=processing_class, formatting_func=formatting_func)
        prepared = prepare(dataset, args=args, packing=packing, dataset_name=dataset_name)
        if formatting_func is not None and not packing:
            check_token_ends(prepared, named(dataset_name), self._tokenizer)
        if dataset_name == "train" and isinstance(prepared, Dataset) and not len(prepared):
            # TRL drops rows without a label if there is a `max_length`, so see if they have one without it
            unlimited = copy.copy(args)
            unlimited.max_length = None
            few = dataset.select(range(min(_ROWS_PREPARED_AGAIN, len(dataset))))
            unlimited_rows = prepare(few, args=unlimited, packing=False, dataset_name=dataset_name)
            if not any(has_label(row["labels"]) for row in unlimited_rows):
                refuse_unlabeled("train_dataset")
            check_rows_are_left(prepared, args)
        if not self._makes_labels:
            check_labels(prepared, named(dataset_name), evaluates=dataset_name != "train")
        return prepared

    def _ready(self, callbacks: Any) -> None:
        super()._ready(callbacks)
        # TRL has not called `_prepare_dataset`. A collator may make other labels of the column
        if (self.args.dataset_kwargs or {}).get("skip_prepare_dataset") and not self._makes_labels:
            for name, dataset in named_datasets(self.train_dataset, self.eval_dataset):
                check_labels(dataset, name, evaluates=name != "train_dataset")

    # The plan

    def _make_plan(self) -> Plan:
        logits = self._needs_logits()
        reason = "Scores every token with a label, as in TRL."
        if logits is not None:
            reason = f"Runs twice for each batch: {logits} needs all logits, so log-probs are rounded as in TRL."
        return Plan(decisions=(Decision("policy", "run", reason, routine=logits is None),))

    def _needs_logits(self) -> str | None:
        """Return the argument for which TRL's loss reads the logits, rounded as in TRL; `None` if there is none."""
        if self.compute_loss_func is not None:
            return "`compute_loss_func`"
        smooths_labels = self.label_smoother is not None and sft_loss_type(self.args.loss_type).smooths_labels
        if smooths_labels and not self._smooths_with_head:
            return f"`label_smoothing_factor={self.args.label_smoothing_factor}`"
        return None

    def _packing_facts(self) -> PackingFacts:
        return dataclasses.replace(super()._packing_facts(), has_prompts=False)

    def _packing_plan(self) -> PackingPlan:
        plan = super()._packing_plan()
        if not self._packed_by_trl(self.args):
            return plan
        reason = "Batches have no padding: TRL's `packing` joins rows before training."
        return dataclasses.replace(plan, decision=Decision("packing", "run", reason))

    @staticmethod
    def _packed_by_trl(config: Any) -> bool:
        """Return whether TRL's collator joins the rows of a batch into one, as it does only with best-fit packing."""
        return bool(getattr(config, "packing", False)) and config.packing_strategy != "wrapped"

    # Training

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return TRL's loss of a micro-batch, a scalar.

        The policy's pass is left to TRL's loss, which calls the model in one of four ways, and nothing of ours reads
        its scores before.
        """
        self._loss_begins(inputs)
        self._ranks.check_same(inputs["input_ids"])
        with (
            self._policy_scored(self._users_loss, return_outputs=return_outputs),
            self._non_finite.recorded(model) as policy_forwards,
            self._smoothed(model, inputs) as trl_model,
        ):
            loss = super().compute_loss(trl_model, inputs, return_outputs, num_items_in_batch)

        def rows() -> dict[int, list[str]] | None:
            if not policy_forwards:  # a loss of the user has scored the policy without our head
                return None
            return not_finite_rows({"policy": policy_forwards[0]}, inputs["labels"][:, 1:] != -100)

        self._non_finite.watch(loss, rows, lambda row: inputs["input_ids"][row].tolist())
        self._count_tokens()
        return loss

    @property
    def _smooths_with_head(self) -> bool:
        return self._users_loss is None and internals.smooths_labels(self)

    def _smoothed(self, model: Any, batch: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return a context with the model for TRL's loss, which runs it once if it smooths labels, not twice."""
        if not self._smooths_with_head:
            return nullcontext(model)
        return internals.smoothed_by_head(self, model, batch["labels"])
