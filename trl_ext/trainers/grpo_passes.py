"""GRPO's log-prob passes: when each pass runs, in how many forwards, and with which model.

Dimensions: B rows of a batch, R rows that run, C completion tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compat import sampled as internals
from ..compat.replaced import unrecorded_pass
from ..planning.batch_keys import (
    SAMPLING_MASK_KEYS,
    has_old_policy,
    old_policy_entries,
    sampler_log_probs,
)
from ..planning.grpo import GRPOPlan
from ..planning.loss_inputs import LossInputs, trusted_log_probs
from ..planning.parts import Parts
from ..planning.plan import changes_of
from ..planning.rows import PolicyScores, ScoredTokens, all_tokens, loss_mask
from ..planning.sampler_ratio import SamplerRatio
from .part_training import PartTraining
from .route_replay import RouteReplay
from .sampled_metrics import SampledMetrics
from .sampled_passes import Batch, SampledPasses


class GRPOPasses(SampledPasses[GRPOPlan]):
    """Runs the passes of policy, old policy and reference of one trainer.

    Args:
        trainer (`GRPOTrainer`): its plan decides which passes run; its models and its log-prob pass run them.
    """

    def __init__(
        self,
        trainer: Any,
        buffer: internals.Buffer,
        metrics: SampledMetrics,
        routes: RouteReplay,
        part_training: PartTraining,
    ) -> None:
        super().__init__(trainer, metrics, routes)
        self.buffer = buffer
        self.part_training = part_training
        self.plan_at_generation: GRPOPlan | None = None  # of the buffer; None after a checkpoint, until it is filled

    @property
    def _plan_of_buffer(self) -> GRPOPlan:
        """The plan when the micro-batch was generated, since when a user may have changed the schedule."""
        if not self.trainer.model.training or self.plan_at_generation is None:
            return self._plan
        return self.plan_at_generation

    @property
    def scores_before_step(self) -> bool:
        """Whether the old policy is scored where stock TRL has done it at generation."""
        plan = self._plan_of_buffer
        return plan.trl_scores_old_policy and not plan.gives_trls_batches

    # The policy, in `compute_loss`

    def score_policy(
        self, model: Any, batch: Batch, num_items: Any, trl_loss: Callable[[LossInputs], Tensor]
    ) -> PolicyScores:
        """Run the policy's pass over `batch`, with a graph.

        With `max_tokens_per_micro_batch` it runs in parts. All but the last have their loss and backward here, and
        their scores come back without a graph. So the loss of the whole micro-batch sees the scores of all rows, and
        its backward reaches the rows of the last part.

        Args:
            model (`Any`): the policy in its engine's wrapper.
            num_items (`Any`): transformers' `num_items_in_batch`.
            trl_loss (`Callable`): returns TRL's loss of `batch`, a scalar. Only parts use it.
        """
        self.metrics.count_padding(batch)
        budget = self._plan.facts.max_tokens_per_micro_batch
        # Later iterations read them
        is_read_again = self.scores_before_step and self.trainer.model.training
        with self.routes.recorded(batch, is_read_again=is_read_again) as route_entries:
            if budget is not None and self.part_training.is_possible:
                scores = self._score_in_parts(model, batch, budget, num_items, trl_loss)
            else:
                scores = self.score_micro_batch(model, batch)
        if route_entries:
            self.buffer.store(batch, route_entries)
        if self.scores_before_step and not has_old_policy(batch):
            self.metrics.count_skipped_pass(batch)  # these scores are the old policy's, too
        return scores

    def _score_in_parts(
        self,
        model: Any,
        batch: Batch,
        budget: int,
        num_items: Any,
        trl_loss: Callable[[LossInputs], Tensor],
    ) -> PolicyScores:
        scored_tokens = self.tokens_to_score(batch)
        parts = self._parts(batch, scored_tokens, budget)
        scores = []
        with self._policy_scored():
            for number, part in enumerate(parts, 1):
                if number < len(parts):
                    scores.append(self._train_part(model, batch, part, num_items, trl_loss))
                else:
                    scores.append(self._score(model, batch, part))
        return PolicyScores(
            scored_tokens=scored_tokens,
            log_probs_RC=parts.join([part.log_probs_RC for part in scores]),
            entropies_RC=parts.join([part.entropies_RC for part in scores]),
        )

    def _train_part(
        self, model: Any, batch: Batch, part: ScoredTokens, num_items: Any, trl_loss: Callable[[LossInputs], Tensor]
    ) -> PolicyScores:
        """Run forward, loss and backward for a part. Returns its scores, without the graph that the backward freed."""
        detached: list[PolicyScores] = []

        def part_loss() -> Tensor:
            # The loss of the whole micro-batch with the other rows unscored: right for any loss that is a sum over rows
            scores = self._score(model, batch, part)
            detached.append(scores.detach())
            return trl_loss(LossInputs.of(batch, scores, self._plan))

        # TRL's metrics of the whole micro-batch come with the loss of the last part
        with internals.metrics_set_aside(self.trainer):
            self.part_training.train_part(model, batch, num_items, part_loss)
        return detached[0]

    # A subclass's loss, which runs its own passes

    def batch_for_subclass(self, model: Any, batch: Batch, scored_tokens: ScoredTokens) -> Batch:
        """Return the batch that a subclass's loss gets: TRL's, with the old policy that the plan asks for."""
        facts = self._plan.facts
        if facts.trust_sampling_log_probs:
            with unrecorded_pass(self.trainer):
                policy_BC = scored_tokens.scatter(self._log_probs(model, batch, scored_tokens))
            return {**batch, "old_per_token_logps": trusted_log_probs(batch, policy_BC, loss_mask(batch))}
        if facts.force_on_policy_ratio:
            # Without them, the ratio of TRL's loss is exactly 1
            return {key: x for key, x in batch.items() if key != "old_per_token_logps"}
        return batch

    def sampling_mask_applied(
        self, model: Any, batch: Batch, scored_tokens: ScoredTokens
    ) -> AbstractContextManager[None]:
        """Make passes over `batch` normalise over the tokens that the sampler could choose, if the plan says so."""
        if not self._plan.keeps_sampling_mask:
            return nullcontext()
        limited = partial(scored_tokens.limit_scoring, model, ("log_probs", "entropy"), self._sampling_mask(batch))
        return internals.model_replaced(self.trainer, model, batch, limited)

    # Old policy and reference, before `compute_loss`

    def score_buffer(self, *, is_new: bool) -> None:
        """Score buffered micro-batches with the reference, and with the old policy before its weights change.

        Called before each micro-batch. The reference scores new ones. If an optimizer step follows, the old policy
        scores those that train after it.

        Args:
            is_new (`bool`): whether the buffer has just been filled.
        """
        trainer = self.trainer
        current, *later = self.buffer.remaining()  # `current` is in `later` too, if it is trained on again
        if is_new:
            self.plan_at_generation = trainer.plan
        if self._plan_of_buffer.gives_trls_batches:
            # A reader of generation batches already has the log-probs, and may have removed them
            if is_new and not self._plan.scores_at_generation:
                for batch in [current, *later]:
                    self.score_as_trl(batch)
            return
        self.score_reference([current, *later])
        if self._plan.facts.trust_sampling_log_probs or not self.scores_before_step:
            return
        batches_to_score = [x for x in later if x is not current and not has_old_policy(x)]
        training_ends = 0 < trainer.state.max_steps <= trainer.state.global_step + 1
        self._check_weights_sampled([current] if training_ends else [current, *batches_to_score])
        if not trainer.accelerator.sync_gradients:
            return
        if training_ends:
            for batch in batches_to_score:
                self.metrics.count_skipped_pass(batch)
            return
        with unrecorded_pass(trainer):
            for batch in batches_to_score:
                scored_tokens = self.tokens_to_score(batch)
                with self.routes.recorded(batch) as route_entries:
                    log_probs_RC = self._log_probs(trainer.model, batch, scored_tokens)
                old_BC = scored_tokens.scatter(log_probs_RC)
                batch.update(old_policy_entries(old_BC, scored_tokens.tokens_BC) | route_entries)

    def _check_weights_sampled(self, batches: list[Batch]) -> None:
        """Raise `RuntimeError` if a batch lacks the old policy's log-probs and the weights that sampled it are gone."""
        trainer = self.trainer
        if self.buffer.sampled_at_step == trainer.state.global_step or all(has_old_policy(x) for x in batches):
            return
        changes = changes_of(self._plan_of_buffer, self._plan)
        if changes is not None:
            raise RuntimeError(
                f"{changes} during training, and completions that were sampled before the change have no "
                "old-policy log-probs: the weights that sampled them have changed. Make the change before "
                "training, or after all completions of a generation batch have been trained on."
            )
        raise RuntimeError(
            "A micro-batch has no old-policy log-probs, and the weights that sampled its completions have changed. "
            "Something put rows into `_buffered_inputs`: override `_prepare_inputs` to do that."
        )

    def score_reference(self, batches: list[Batch]) -> None:
        """Add reference log-probs to the batches that lack them.

        The reference gets the same rows in the same layout as the policy. Equal weights then give bitwise equal
        log-probs and a KL gradient of exactly 0; AdamW would turn a rounding error into full-size steps.
        """
        if not self._plan.facts.beta:
            return
        for batch in batches:
            if "ref_per_token_logps" not in batch:
                scored_tokens = self.tokens_to_score(batch)
                with self.trainer.reference_pass():
                    log_probs_RC = self._log_probs(self._reference_model(), batch, scored_tokens)
                batch["ref_per_token_logps"] = scored_tokens.scatter(log_probs_RC)

    def _reference_model(self) -> Any:
        return self.trainer.model if self.trainer.ref_model is None else self.trainer.ref_model

    def _log_probs(self, model: Any, batch: Batch, scored_tokens: ScoredTokens) -> Tensor:
        """Return log-probs `(R, C)` of old policy or reference, in as many forwards as the policy's pass takes."""
        self.metrics.count_padding(batch)
        budget = self._plan.facts.max_tokens_per_micro_batch
        with self.trainer._phase_times.measured("passes"):
            if budget is not None and self.trainer.model.training:
                parts = self._parts(batch, scored_tokens, budget)
                return parts.join([self._forward(model, batch, part)[0] for part in parts])
            self.metrics.skipped_tokens += scored_tokens.skipped_tokens(batch)
            log_probs_RC: Tensor = self._forward(model, batch, scored_tokens)[0]
        return log_probs_RC

    # All rows and tokens, as code of the user may read them

    def score_as_trl(self, batch: Batch) -> None:
        """Add the log-probs that stock TRL would add to a batch, of every row and token."""
        trainer = self.trainer
        facts = self._plan.facts
        scored_tokens = all_tokens(batch, of_tools=True)
        scores_old_policy = self._plan.trl_scores_old_policy and not facts.trust_sampling_log_probs
        if scores_old_policy and "old_per_token_logps" not in batch:
            with unrecorded_pass(trainer), self.routes.recorded(batch) as route_entries:
                old_BC = self._log_probs_at_generation(trainer.model, batch, scored_tokens)
            batch.update({"old_per_token_logps": old_BC, **route_entries})
            if facts.sampler_ratio is not None:
                ratio = SamplerRatio.of(old_BC, sampler_log_probs(batch), loss_mask(batch), facts.sampler_ratio)
                batch["importance_sampling_ratio"] = ratio.ratio
                self.metrics.record_sampler_ratio(ratio)
        if facts.beta and "ref_per_token_logps" not in batch:
            with trainer.reference_pass():
                batch["ref_per_token_logps"] = self._log_probs_at_generation(
                    self._reference_model(), batch, scored_tokens
                )

    def _log_probs_at_generation(self, model: Any, batch: Batch, scored_tokens: ScoredTokens) -> Tensor:
        """Return log-probs `(B, C)`, in chunks of TRL's size or in parts."""
        trainer = self.trainer
        if self._plan.facts.max_tokens_per_micro_batch is not None:
            return self._log_probs(model, batch, scored_tokens)
        chunk_size = trainer.args.per_device_eval_batch_size
        if trainer.model.training:
            chunk_size = trainer.args.per_device_train_batch_size
        with trainer._phase_times.measured("passes"):
            log_probs_BC: Tensor = self._forward(model, batch, scored_tokens, batch_size=chunk_size)[0]
        return log_probs_BC

    def _sampling_mask(self, batch: Batch) -> tuple[Tensor, ...]:
        if not self._plan.keeps_sampling_mask:
            return ()
        if not batch.keys() >= {*SAMPLING_MASK_KEYS}:
            raise RuntimeError(
                f"`keep_sampling_mask=True` needs {' and '.join(map(repr, SAMPLING_MASK_KEYS))} of a micro-batch, but "
                f"they are gone: this trainer {self._plan.facts.batch_reader}. Pass every entry of the batch on."
            )
        return tuple(batch[key] for key in SAMPLING_MASK_KEYS)

    def _parts(self, batch: Batch, scored_tokens: ScoredTokens, budget: int) -> Parts:
        """Return the parts of a micro-batch: as many on each rank, because each forward may run collectives."""
        packing = self.trainer._packing_plan()
        accelerator = self.trainer.accelerator
        parts = Parts.of(batch, scored_tokens, budget, packed=packing.padding_free, shared=packing.share_in_training)
        counts = accelerator.gather(torch.tensor([len(parts)], device=accelerator.device))
        parts = parts.at_least(int(counts.max()))
        self.metrics.skipped_tokens += parts.skipped_tokens(batch)
        return parts
