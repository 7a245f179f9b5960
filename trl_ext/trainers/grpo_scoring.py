"""GRPO's log-prob passes: the rows and tokens of each pass, its number of forwards, and the log-probs that it keeps."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..compat import grpo as internals
from ..compat.overrides import PASS
from ..compat.replaced import logged_times, unrecorded_pass
from ..distributed.ranks import Ranks
from ..packing.packing import LastResult
from ..planning.grpo import GRPOPlan
from ..planning.loss_inputs import (
    LossInputs,
    MicroBatchTotals,
    has_old_policy,
    kept_log_probs,
    not_finite_in,
    sampler_log_probs,
    totals_of_rank,
    trusted_log_probs,
    with_padding,
)
from ..planning.micro_batches import RowTokens
from ..planning.parts import Parts
from ..planning.plan import PackingPlan, SkipCounts, TokenCounts, changes_of
from ..planning.rows import KEPT_CLASSES, ScoredTokens, every_token, loss_mask, scored_tokens, tokens_of
from ..planning.sampler_ratio import TRL_SAMPLER_METRICS, SamplerRatio, largest_difference, sampler_metrics
from ..sampler.check import SamplerCheck
from ..scoring.scorer import Scorer
from .non_finite import NonFiniteLoss, Rows
from .part_training import PartTraining

_DIFFERENCE = "sampling/sampling_logp_difference/mean"


class Trainer(internals.GRPOInternals, Protocol):
    """The trainer members that scoring reads."""

    ref_model: Any
    aux_loss_enabled: bool
    rollout_func: Any
    skipped: SkipCounts
    fed: TokenCounts
    _non_finite: NonFiniteLoss

    @property
    def plan(self) -> GRPOPlan: ...

    def _packing_plan(self) -> PackingPlan: ...

    def reference_pass(self) -> AbstractContextManager[None]: ...

    def _policy_scored(self, by: str | None = None) -> AbstractContextManager[None]: ...

    def _loss_scores(self) -> str: ...

    def _count_tokens(self, counts: list[int] | None = None) -> None: ...


class GRPOScoring:
    """Runs the log-prob passes of one trainer. `of_micro_batch` computes TRL's loss from them."""

    def __init__(self, trainer: Trainer, ranks: Ranks, scorer: Scorer, buffer: internals.Buffer) -> None:
        self.trainer, self.ranks, self.scorer, self.buffer = trainer, ranks, scorer, buffer
        self._check = SamplerCheck(trainer)
        self.part_training = PartTraining(trainer, ranks)
        self.sampled_at_step = 0
        self.plan_at_generation: GRPOPlan | None = None  # of the buffer; None after a checkpoint, until it is filled
        self._skipped_tokens = 0  # on this rank, since the last loss
        self._scored: Any = WeakTensorKeyDictionary()  # keyed by `completion_mask`

    @property
    def _mode(self) -> str:
        return "train" if self.trainer.model.training else "eval"

    # A micro-batch

    def of_micro_batch(
        self, model: Any, inputs: Any, num_items: Any, trl_loss: Callable[..., Tensor]
    ) -> tuple[Tensor, Rows]:
        """Return the loss, and a function that finds the rows with values that are not finite."""
        trainer, plan = self.trainer, self.trainer.plan
        self._trl_loss = trl_loss
        self.part_training.start_micro_batch()
        if plan.facts.has_own_loss:
            return self._overridden_loss(model, inputs)
        scored = self.policy_tokens(inputs)
        own_pass = f"`{type(trainer).__name__}.{PASS}`" if plan.facts.has_own_pass else None
        with trainer._policy_scored(own_pass):
            policy_RC, entropies_RC, aux_loss = self._policy_pass(model, inputs, scored, num_items)
        if self._scores_before_step and not has_old_policy(inputs):
            self._count_skipped_pass(inputs)
        loss_inputs = LossInputs.of(inputs, scored, policy_RC, entropies_RC, plan)
        with logged_times(internals.mode_metrics(trainer), self.buffer.merged_in(inputs)):
            loss = self._loss_of(model, inputs, loss_inputs, aux_loss)
            if trainer.model.training and self._scores_before_step:
                self.buffer.keep(inputs, loss_inputs.kept)
            self._measure(loss_inputs)
        self.part_training.check_last_part(loss)
        return loss, partial(loss_inputs.not_finite, inputs)

    def _overridden_loss(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Rows]:
        """Compute the loss of an overridden method, which gets TRL's batch and runs its own passes."""
        trainer, plan = self.trainer, self.trainer.plan
        every = every_token(batch, of_tools=True)
        given = batch
        if plan.facts.trust_sampling_log_probs:
            with unrecorded_pass(trainer):
                policy_BC = every.spread(self._unrecorded_log_probs(model, batch, every))
            given = {**batch, "old_per_token_logps": trusted_log_probs(batch, policy_BC, loss_mask(batch))}
        elif plan.facts.force_on_policy_ratio:
            # Without them, the ratio of TRL's loss is exactly 1
            given = {name: x for name, x in batch.items() if name != "old_per_token_logps"}
        over_sampled: AbstractContextManager[Any] = nullcontext()
        if plan.keeps_sampling_mask:
            sampled = partial(every.labelled, model, ("log_probs", "entropy"), self._kept_classes(batch))
            over_sampled = internals.model_replaced(trainer, model, batch, sampled)
        merged = self.buffer.merged_in(batch)
        with (
            trainer._policy_scored(trainer._loss_scores()),
            trainer._non_finite.recorded(model) as passes,
            over_sampled,
            logged_times(internals.mode_metrics(trainer), merged),
            internals.as_one_micro_batch(trainer, merged),
        ):
            loss = self._trl_loss(given)
        packed_away, *ran = self.scorer.take_counts()
        trainer._count_tokens(self.ranks.sum_counts([self._skipped_tokens + packed_away, *ran]))
        self._skipped_tokens = 0
        return loss, partial(not_finite_in, given, passes, every)

    @property
    def _plan_of_buffer(self) -> GRPOPlan:
        """The plan when the micro-batch was generated, since when a user may have changed the schedule."""
        plan = self.trainer.plan
        if not self.trainer.model.training or self.plan_at_generation is None:
            return plan
        return self.plan_at_generation

    @property
    def _scores_before_step(self) -> bool:
        """Whether the old policy is scored where stock TRL has done it at generation."""
        plan = self._plan_of_buffer
        return plan.trl_scores_old_policy and not plan.gives_trls_batches

    def _loss_of(self, model: Any, inputs: Any, loss_inputs: LossInputs, aux_loss: Any) -> Tensor:
        given, scored = loss_inputs.given_to_loss(inputs), [loss_inputs.policy_BC, loss_inputs.entropies_BC]
        if loss_inputs.policy_BC.size(1) == 1:
            given, scored = with_padding(given, *scored)
        answered = internals.answered_by(self.trainer, model, (*scored, aux_loss))
        with answered, internals.as_one_micro_batch(self.trainer, self.buffer.merged_in(inputs)):
            return self._trl_loss(given)

    def _measure(self, loss_inputs: LossInputs) -> None:
        trainer = self.trainer
        packed_away, *ran = self.scorer.take_counts()
        of_rank = totals_of_rank(loss_inputs, self._skipped_tokens + packed_away, ran)
        totals = MicroBatchTotals(*self.ranks.reduce(of_rank).tolist())
        self._skipped_tokens = 0
        trainer.fed.add(self._mode, [int(x) for x in (totals.with_gradient, totals.without_gradient, totals.head)])
        trainer.skipped.add(self._mode, passes=0, rows=int(totals.skipped_rows), tokens=int(totals.skipped_tokens))
        if trainer.model.training:
            totals.correct(internals.mode_metrics(trainer))
        if loss_inputs.formed is not None:
            self._measure_sampler(loss_inputs.formed)

    def measure_sampler_of(self, batch: dict[str, Any]) -> None:
        """Measure the ratio to the sampler for a generation batch that TRL's own passes have scored."""
        rule, old_BC = self.trainer.plan.facts.sampler_ratio, batch.get("old_per_token_logps")
        if rule is not None and old_BC is not None:
            formed = SamplerRatio.of(old_BC, sampler_log_probs(batch), loss_mask(batch), rule)
            self._measure_sampler(formed, logged_by_trl=True)

    def _measure_sampler(self, formed: SamplerRatio, *, logged_by_trl: bool = False) -> None:
        gathered = self.ranks.accelerator.gather(formed.statistics().unsqueeze(0))
        metrics = sampler_metrics(gathered)
        for name, value in metrics.items():
            if not (logged_by_trl and name in TRL_SAMPLER_METRICS):
                internals.mode_metrics(self.trainer)[name].append(value)
        plan, training = self.trainer.plan, self.trainer.model.training
        one_distribution = plan.keeps_sampling_mask or not plan.facts.truncated_sampling
        one_distribution = one_distribution and self.trainer.args.repetition_penalty == 1.0
        if _DIFFERENCE in metrics and training and one_distribution and plan.facts.randomness is None:
            self._check.observe(largest_difference(gathered), self.sampled_at_step)

    def policy_tokens(self, inputs: dict[str, Any]) -> ScoredTokens:
        plan = self.trainer.plan
        is_overridden = plan.facts.has_own_loss or plan.facts.has_own_pass
        if not self.trainer.model.training or internals.has_images(inputs) or is_overridden:
            return every_token(inputs, of_tools=is_overridden)  # they may read the tokens of tool calls
        # The passes of a micro-batch share the result, so the host waits for the device only once
        given = [inputs.get(name) for name in ("completion_mask", "tool_mask", "advantages", "prompt_mask")]
        skips = {"skip_masked": plan.skips_masked, "skip_zero_advantages": plan.skips_zero_advantages}
        found = self._scored.setdefault(given[0], defaultdict(LastResult))[tuple(skips.values())]
        return found.of(*given, make=partial(scored_tokens, inputs, **skips))  # type: ignore[no-any-return]

    def row_tokens(self, inputs: dict[str, Any]) -> RowTokens:
        """Return the tokens of each row in the policy's pass."""
        packing = self.trainer._packing_plan()
        scored = self.policy_tokens(inputs)
        return RowTokens.of(inputs, scored, packed=packing.padding_free, shared=packing.share_in_training)

    # The passes

    def _policy_pass(self, model: Any, inputs: Any, scored: ScoredTokens, num_items: Any) -> tuple[Any, Any, Any]:
        budget = self.trainer.plan.facts.max_tokens_per_micro_batch
        if budget is None or not self.part_training.is_possible:
            options = {"compute_entropy": True, "compute_aux_loss": self.trainer.aux_loss_enabled}
            return self._pass(model, inputs, scored, **options)
        parts = self._parts(inputs, scored, budget)
        passes = [
            self._run(model, inputs, part, compute_entropy=True)[:2]
            if number == len(parts)
            else self._trained_part(model, inputs, part, num_items)
            for number, part in enumerate(parts, 1)
        ]
        log_probs_RC, entropies_RC = (parts.joined([found[i] for found in passes]) for i in range(2))
        return log_probs_RC, entropies_RC, None

    def _trained_part(self, model: Any, inputs: Any, part: ScoredTokens, num_items: Any) -> tuple[Tensor, Tensor]:
        """Run forward, loss and backward for a part of a micro-batch. Returns its log-probs and entropies, `(R, C)`."""
        scores: list[tuple[Tensor, Tensor]] = []

        def loss_of_part() -> Tensor:
            log_probs_RC, entropies_RC, aux_loss = self._run(model, inputs, part, compute_entropy=True)
            scores.append((log_probs_RC.detach(), entropies_RC.detach()))
            loss_inputs = LossInputs.of(inputs, part, log_probs_RC, entropies_RC, self.trainer.plan)
            return self._loss_of(model, inputs, loss_inputs, aux_loss)

        self.part_training.train_part(model, inputs, num_items, loss_of_part, internals.metrics_set_aside(self.trainer))
        return scores[0]

    def before_micro_batch(self, *, is_new: bool) -> None:
        """Score new slices with the reference and, before an optimizer step, the slices after it with the policy.

        Args:
            is_new (`bool`): whether the buffer has just been filled.
        """
        trainer, facts = self.trainer, self.trainer.plan.facts
        present, *others = self.buffer.to_come()
        if is_new:
            self.plan_at_generation = trainer.plan
        if self._plan_of_buffer.gives_trls_batches:
            # A reader of generation batches already has the log-probs, and may have removed them
            for batch in [present, *others] if is_new and not trainer.plan.scores_at_generation else ():
                self.score_as_trl(batch)
            return
        self.score_reference([present, *others])
        if facts.trust_sampling_log_probs or not self._scores_before_step:
            return
        waiting = [x for x in others if x is not present and not has_old_policy(x)]
        ends = 0 < trainer.state.max_steps <= trainer.state.global_step + 1
        needed = [present] if ends else [present, *waiting]
        if self.sampled_at_step != trainer.state.global_step and not all(has_old_policy(x) for x in needed):
            changes = changes_of(self._plan_of_buffer, trainer.plan)
            if changes is not None:
                raise RuntimeError(
                    f"{changes} during training, and completions that were sampled before the change have no "
                    "old-policy log-probs: the weights that sampled them have changed. Make the change before "
                    "training, or when all completions of a generation batch are trained on."
                )
            raise RuntimeError(
                "A micro-batch has no old-policy log-probs, and the weights that sampled it have changed. Something "
                "put rows into `_buffered_inputs`: override `_prepare_inputs` to do that."
            )
        if not trainer.accelerator.sync_gradients:
            return
        if ends:
            for inputs in waiting:
                self._count_skipped_pass(inputs)
            return
        with unrecorded_pass(trainer):
            for inputs in waiting:
                scored = self.policy_tokens(inputs)
                log_probs_RC = self._unrecorded_log_probs(trainer.model, inputs, scored)
                inputs.update(kept_log_probs(scored.spread(log_probs_RC), scored.tokens_BC))

    def score_reference(self, batches: list[dict[str, Any]]) -> None:
        """Add reference log-probs to the batches that lack them.

        The reference gets the same rows in the same layout as the policy. Equal weights then give bitwise equal
        log-probs and a KL gradient of exactly 0; AdamW would turn a rounding error into full-size steps.
        """
        if not self.trainer.plan.facts.beta:
            return
        for batch in batches:
            if "ref_per_token_logps" not in batch:
                scored = self.policy_tokens(batch)
                with self.trainer.reference_pass():
                    log_probs_RC = self._unrecorded_log_probs(self._reference_model(), batch, scored)
                batch["ref_per_token_logps"] = scored.spread(log_probs_RC)

    def score_as_trl(self, batch: dict[str, Any]) -> None:
        """Add the log-probs that stock TRL would add to a batch, of every row and token."""
        trainer, plan = self.trainer, self.trainer.plan
        every = every_token(batch, of_tools=True)
        scores_old = plan.trl_scores_old_policy and not plan.facts.trust_sampling_log_probs
        if scores_old and "old_per_token_logps" not in batch:
            with unrecorded_pass(trainer):
                old_BC = self._log_probs_at_generation(trainer.model, batch, every)
            batch["old_per_token_logps"] = old_BC
            rule = plan.facts.sampler_ratio
            if rule is not None:
                formed = SamplerRatio.of(old_BC, sampler_log_probs(batch), loss_mask(batch), rule)
                batch["importance_sampling_ratio"] = formed.ratio
                self._measure_sampler(formed)
        if plan.facts.beta and "ref_per_token_logps" not in batch:
            with trainer.reference_pass():
                batch["ref_per_token_logps"] = self._log_probs_at_generation(self._reference_model(), batch, every)

    def _log_probs_at_generation(self, model: Any, batch: dict[str, Any], every: ScoredTokens) -> Tensor:
        if self.trainer.plan.facts.max_tokens_per_micro_batch is not None:
            return self._unrecorded_log_probs(model, batch, every)
        args, in_training = self.trainer.args, self.trainer.model.training
        size = args.per_device_train_batch_size if in_training else args.per_device_eval_batch_size
        log_probs: Tensor = self._pass(model, batch, every, batch_size=size)[0]
        return log_probs

    def _reference_model(self) -> Any:
        return self.trainer.model if self.trainer.ref_model is None else self.trainer.ref_model

    def _unrecorded_log_probs(self, model: Any, inputs: dict[str, Any], scored: ScoredTokens) -> Tensor:
        """Return log-probs `(R, C)` of the old policy or the reference, with as many forwards as the policy's pass."""
        budget = self.trainer.plan.facts.max_tokens_per_micro_batch
        if budget is None or not self.trainer.model.training:
            return self._pass(model, inputs, scored)[0]
        parts = self._parts(inputs, scored, budget)
        return parts.joined([self._run(model, inputs, part)[0] for part in parts])

    def _pass(self, model: Any, batch: dict[str, Any], scored: ScoredTokens, **options: Any) -> tuple[Any, Any, Any]:
        self._skipped_tokens += scored.tokens_left_out(batch)
        return self._run(model, batch, scored, **options)

    def _run(self, model: Any, batch: dict[str, Any], scored: ScoredTokens, **options: Any) -> tuple[Any, Any, Any]:
        if not self.trainer.plan.facts.has_own_pass:
            outputs = ("log_probs", "entropy") if options.get("compute_entropy") else ("log_probs",)
            model = scored.labelled(model, outputs, self._kept_classes(batch))
        return internals.completion_log_probs(self.trainer, model, scored.fed(batch), **options)

    def _kept_classes(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        if not self.trainer.plan.keeps_sampling_mask:
            return ()
        if not batch.keys() >= {*KEPT_CLASSES}:
            raise RuntimeError(
                f"`keep_sampling_mask=True` needs {' and '.join(map(repr, KEPT_CLASSES))} of a micro-batch, but they "
                f"are gone: this trainer {self.trainer.plan.facts.batch_reader}. Pass every entry of the batch on."
            )
        return tuple(batch[name] for name in KEPT_CLASSES)

    def _parts(self, inputs: dict[str, Any], scored: ScoredTokens, budget: int) -> Parts:
        packing, accelerator = self.trainer._packing_plan(), self.trainer.accelerator
        parts = Parts.of(inputs, scored, budget, packed=packing.padding_free, shared=packing.share_in_training)
        counts = accelerator.gather(torch.tensor([len(parts)], device=accelerator.device))
        parts = parts.at_least(int(counts.max()))
        self._skipped_tokens += parts.tokens_left_out(inputs)
        return parts

    def _count_skipped_pass(self, inputs: dict[str, Any]) -> None:
        self.trainer.skipped.add(self._mode, passes=1)
        self._skipped_tokens += tokens_of(inputs)
