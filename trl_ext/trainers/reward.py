"""Reward modeling: TRL's trainer with a forward that scores both rows of a pair without padding, their prompt once.

The methods of TRL's trainer that only this one overrides are here; the others are in `base.py`.
"""

from typing import Any

import torch
import trl
from torch import Tensor

from ..checks.arguments import check_reward_arguments
from ..checks.data import check_margins, check_pairs_are_left, checked_rows, named, reward_columns
from ..config import AddedCommonFields
from ..config import RewardConfig as RewardConfig  # `training_args.bin` files refer to it here
from ..planning.non_finite import not_finite_rows
from ..planning.plan import Decision, Plan
from ..scoring.classifier import ClassifierScorer
from .base import ExactTrainer


class RewardTrainer(ExactTrainer, trl.RewardTrainer):
    """
    TRL's [`~trl.RewardTrainer`] without computing padding, and with the prompt of a pair computed once.

    Arguments, losses and metrics are the same. Pass a [`RewardConfig`], or TRL's for the defaults of the added fields.
    """

    _trl_trainer = trl.RewardTrainer
    _config_class = trl.RewardConfig
    _added_fields = AddedCommonFields
    _scorer_class = ClassifierScorer
    _task_type = "SEQ_CLS"

    def _check(self, arguments: dict[str, Any], config: Any) -> dict[str, Any]:
        self._features.require("classifiers")
        if config is not None:
            check_reward_arguments(config, own_loss=self._replaces("loss"))
        return {}

    def _has_reference(self) -> bool:
        return False

    def _on_accelerator(self) -> None:
        """Attach the model, for which TRL calls nothing of ours, before an engine shards the weights."""
        self._refuse_groups()
        if not self._scorer.forwards:  # a search of hyperparameters makes another accelerator for the same model
            self._attach_model(self.model)

    def _refuse_groups(self) -> None:
        """Raise `ValueError` if ranks split the layers or the tokens of a model: TRL's metrics would be wrong."""
        sequence = self._ranks.sequence
        if sequence is not None:
            raise ValueError(
                f"`{sequence.kind}_size={sequence.size}` is not supported by `RewardTrainer`: a row's score needs all "
                "its tokens. Leave it out of `parallelism_config`."
            )
        if self._ranks.tensor_parallel is not None:
            raise ValueError(
                f"`distributed_config` splits the model over {self._ranks.tensor_parallel.size} ranks, which "
                "`RewardTrainer` does not support. Load the model without it, and train with FSDP2, DeepSpeed or DDP."
            )

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        """Check the rows, then prepare them as TRL does."""
        has_end = processing_class.eos_token is not None
        dataset = checked_rows(dataset, dataset_name, processing_class, reward_columns, has_end=has_end)
        check_margins(dataset, named(dataset_name))
        prepared = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if dataset_name == "train":
            check_pairs_are_left(prepared, args)
        return prepared

    def _ready(self, callbacks: Any) -> None:
        self._tokenizer = self.processing_class  # as TRL's other trainers do, for their processors of images
        super()._ready(callbacks)

    # The plan

    def _make_plan(self) -> Plan:
        return Plan(decisions=(Decision("policy", "run", "Scores both rows of every pair, as in TRL.", routine=True),))

    # Training

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return TRL's loss of a micro-batch, a scalar. It reads nothing but the logits, which our forward returns."""
        self._loss_begins(inputs)
        with (
            self._policy_scored(self._users_loss, return_outputs=return_outputs),
            self._non_finite.recorded(model, _logits_of) as policy_forwards,
        ):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def not_finite_pairs() -> dict[int, list[str]] | None:
            if not policy_forwards:
                return None
            chosen_logits, rejected_logits = policy_forwards[0].chunk(2)
            all_pairs = torch.ones(len(chosen_logits), 1, dtype=torch.bool, device=chosen_logits.device)
            return not_finite_rows({"chosen": chosen_logits, "rejected": rejected_logits}, all_pairs)

        self._non_finite.watch(loss, not_finite_pairs, lambda row: _prompt_of(inputs, row))
        self._count_tokens()
        return loss


def _logits_of(inputs: dict[str, Any], outputs: Any) -> Tensor | None:
    logits: Tensor = outputs["logits"]
    return logits


def _prompt_of(inputs: dict[str, Tensor], pair: int) -> list[int]:
    """Return the token ids with which both rows of a pair begin."""
    chosen_S, rejected_S = (ids_BS[pair] for ids_BS in inputs["input_ids"].chunk(2))
    is_same_S = (chosen_S == rejected_S).int().cumprod(0).bool()
    ids: list[int] = chosen_S[is_same_S].tolist()
    return ids
