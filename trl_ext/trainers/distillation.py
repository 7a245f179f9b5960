"""Distillation: TRL's trainer with student and teacher on the packed row, and an exact divergence.

The methods of TRL's trainer that only distillation overrides are here; the others are in `base.py`.
"""

from functools import partial
from typing import Any

import torch
import trl
from torch import Tensor

from ..checks.arguments import (
    check_completion_column,
    check_completion_length,
    check_distillation_arguments,
    check_hidden_states,
)
from ..checks.data import check_column, check_enough_prompts, check_prompts
from ..checks.generation import check_ends, check_generation, check_images
from ..compat.distillation import DistilledRows
from ..config import AddedDistillationFields
from ..config import DistillationConfig as DistillationConfig  # `training_args.bin` files refer to it here
from ..planning.batch_keys import prompt_of
from ..planning.non_finite import not_finite_rows
from ..planning.plan import Decision, Plan
from ..reference.weights import base_of
from ..scoring.divergence import DivergenceScorer, divergence_of, scatter_tokens
from .base import ExactTrainer
from .column_completions import ColumnCompletions
from .teacher import Teacher
from .teacher_store import TeacherStore


class DistillationTrainer(ExactTrainer, trl.DistillationTrainer):
    """
    TRL's [`~trl.DistillationTrainer`] without computing padding, and with an exact divergence.

    Arguments, loss and metrics are the same. Without `teacher_model`, the teacher of a student with a PEFT adapter is
    the base model. Pass a [`DistillationConfig`], or TRL's for the defaults of the added fields.
    """

    _trl_trainer = trl.DistillationTrainer
    _config_class = trl.DistillationConfig
    _added_fields = AddedDistillationFields
    _scorer_class = DivergenceScorer
    _other_model = "teacher_model"
    _has_generation = True
    _signature_columns: Any
    _methods_of_step = (*ExactTrainer._methods_of_step, "_compute_loss")

    # Construction

    def _check(self, arguments: dict[str, Any], config: Any) -> dict[str, Any]:
        own_generation = self._replaces("generation")
        check_hidden_states(self)
        if config is not None:
            check_distillation_arguments(config, own_loss=self._replaces("loss"), own_generation=own_generation)
            if not own_generation:
                check_generation(config)
        column = self._added.completion_column
        self._completions = None if column is None else ColumnCompletions(self, column)
        if column is not None:
            check_completion_column(config, arguments, column)
        store = None
        if self._added.teacher_store == "disk":
            assert self._completions is not None  # the config has checked it
            store = TeacherStore(self, self._ranks, self._completions, config)
        device = self._added.teacher_device
        self._teacher = Teacher(self, self._scorer, self._reference_weights, store=store, device=device)
        return self._teacher.take(arguments, trl.DistillationTrainer)

    def _has_reference(self) -> bool:
        return False

    def _on_accelerator(self) -> None:
        if self._ranks.group is not None or self._ranks.sequence is not None:
            raise ValueError(
                "`DistillationTrainer` does not support tensor parallelism, `cp_size` or `sp_size`. Use FSDP2 or "
                "ZeRO-3."
            )
        # TRL calls nothing that could be replaced, because its loss reads the weights of both heads. A search of
        # hyperparameters makes another accelerator for the same models
        if not self._scorer.forwards:
            self._attach_model(self.model, temperature=self.args.temperature)
            self._scorer.policy.linear_head(base_of(self.model))  # an error now, not in the first step
            self._teacher.attach()

    def _ready(self, callbacks: Any) -> None:
        super()._ready(callbacks)
        if not self._replaces("generation"):
            if self._completions is None:  # with a column, the argument only cuts completions
                check_completion_length(self.args, self.model)
                if self.teacher_model is not None:
                    check_completion_length(self.args, self._teacher.inner_model(), "`teacher_model`")
            check_ends(self)
        if not self._replaces("batches"):
            if self._features.why_off("checks of data") is None:
                check_prompts(self, None if self._replaces("rendering") else self.processing_class)
                if self._completions is not None:
                    check_column(self.train_dataset, self.eval_dataset, self._completions.column)
            check_images(self.train_dataset, "train_dataset", self.processing_class)

        if self._completions is not None and self._is_vlm:
            raise ValueError(
                "`completion_column` is for models of text, but `processing_class` also reads images. Pass its "
                "`tokenizer`, if the data has no images."
            )
        self._teacher.complete()

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns
        if self._completions is not None and self._completions.column not in columns:
            self._signature_columns = [*columns, self._completions.column]

    # The plan

    def _make_plan(self) -> Plan:
        generation = Decision("generation", "run", "The student samples the completions, as in TRL.", routine=True)
        if self._completions is not None:
            reason = f"Completions are those of the column `{self._completions.column}` (`completion_column`)."
            generation = Decision("generation", "skip", reason)
        policy = Decision("policy", "run", "Processes every completion, as in TRL.", routine=True)
        return Plan(decisions=(generation, policy, self._teacher.decision()))

    # Generation

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._completions is not None:
            self._completions.take(inputs)
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *positional: Any, **keywords: Any) -> list[list[int]]:
        if self._completions is not None:
            return self._completions.token_ids(prompt_ids)
        return super()._generate_single_turn(prompt_ids, *positional, **keywords)

    # Training

    def _before_training(self) -> None:
        if not self._replaces("loss"):
            self._teacher.begin()
        if not self._replaces("sampler"):
            rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
            check_enough_prompts(self.train_dataset, rows * self.accelerator.num_processes, 1)

    def _flush_store(self) -> None:
        if self._teacher.store is not None:
            self._teacher.store.flush()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a micro-batch, a scalar. TRL's method calls our `_compute_loss`, or an override."""
        self._loss_begins(inputs)
        self._divergence_BS: Tensor | None = None
        with self._policy_scored(self._users_loss, return_outputs=return_outputs):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._non_finite.watch(loss, self._not_finite_rows, partial(prompt_of, inputs))
        self._count_tokens()
        return loss

    def _compute_loss(
        self, unwrapped_student: Any, inputs: dict[str, Tensor], num_items_in_batch: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the sum of the student's entropies and the number of tokens in the loss; all scalars.

        It runs in the forward of the engine's wrapper.
        """
        self._note_call("_compute_loss")
        rows = DistilledRows.of(inputs)
        # Before the student's pass, whose activations are not yet in memory then
        teacher_inputs = self._teacher.head_inputs(unwrapped_student, rows).at_temperature(self.temperature)
        student_inputs = self._scorer.policy.head_inputs(base_of(unwrapped_student), rows.labels, **rows.inputs)
        student_inputs = student_inputs.at_temperature(self.temperature)
        scores = divergence_of(student_inputs, teacher_inputs, self.beta, chunk_size=self._added.head_chunk_size)
        if self._non_finite.action is not None:
            self._divergence_BS = scatter_tokens(scores.divergence.detach(), student_inputs)
        tokens = student_inputs.mask.sum()
        items = tokens.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        if isinstance(items, Tensor):
            items = items.to(scores.divergence.device)
        return scores.divergence.sum() / items, scores.entropy.sum(), tokens

    def _not_finite_rows(self) -> dict[int, list[str]] | None:
        """Return the rows with a divergence that is not finite; `None` if code of the user has computed them."""
        divergence_BS = self._divergence_BS
        if divergence_BS is None:
            return None
        return not_finite_rows({"divergence": divergence_BS}, torch.ones_like(divergence_BS, dtype=torch.bool))
