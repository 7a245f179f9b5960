"""GRPO's passes, as its plan has them: the policy's, the old policy's, the reference's, and what is kept of them."""

import logging
from typing import Any, cast

import torch
from torch import Tensor
from transformers.training_args import OptimizerNames

from ..compat import CORRECTS_TRUNCATED_SAMPLING, GRPOInternals, unrecorded_pass
from ..dropout import has_dropout
from ..packing import trains_expert_modules
from ..passes.dynamic_sampling import FurtherPrompts, dead_groups, replaced
from ..passes.grpo import GRPOFacts, GRPOPlan, plan_grpo
from ..passes.measured import over_scored_rows, statistics
from ..passes.non_finite import check_first_rewards
from ..passes.rows import ScoredTokens, every_token, loss_mask, rows_of_equal_rewards, scored_tokens, tokens_of
from ..passes.sampler_ratio import RatioRule, SamplerRatio, sampler_metrics
from ..passes.visit import KEPT, SCORED, Visit, kept_log_probs, prompt_of, sampler_log_probs, with_padding
from .adapter_reference import AdapterReferenceMixin
from .exact_head import ExactHeadMixin
from .grpo_pass_arguments import GRPOPassArguments
from .non_finite_loss import NonFiniteLossMixin
from .planned import PlannedPassesMixin
from .sequence_split import GRPOSequenceSplitMixin

logger = logging.getLogger("trl_ext")


class GRPOPassesMixin(
    NonFiniteLossMixin,
    AdapterReferenceMixin,
    GRPOSequenceSplitMixin,
    PlannedPassesMixin,
    GRPOInternals,
    ExactHeadMixin,
):
    """Mixed in before TRL's `GRPOTrainer`."""

    _buffers_batches = False  # whether a subclass keeps what is generated in a buffer of its own

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        self._skipped_tokens = 0  # of this rank, since the last loss
        self._further_prompts: FurtherPrompts | None = None
        self._sampled_at_step = 0
        super().__init__(*positional, **keywords)
        self._make_plan()  # a wrong argument is an error here, not at the first step

    def _make_plan(self) -> GRPOPlan:
        trainer: Any = self
        args = trainer.args
        options = args if isinstance(args, GRPOPassArguments) else GRPOPassArguments()
        corrected = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        return plan_grpo(
            GRPOFacts(
                per_device_batch_size=args.per_device_train_batch_size,
                processes=trainer.accelerator.num_processes,
                gradient_accumulation_steps=args.gradient_accumulation_steps,
                steps_per_generation=args.steps_per_generation,
                num_iterations=trainer.num_iterations,
                beta=trainer.beta,
                own_reference=None if trainer.own_reference is None else trainer.own_reference.words(),
                epoch_is_known=hasattr(trainer.train_dataset, "__len__"),
                num_generations=trainer.num_generations,
                loss_type=trainer.loss_type,
                normalized_over_batch=trainer.scale_rewards == "batch"
                or trainer.multi_objective_aggregation == "normalize_then_sum",
                has_own_pass=trainer._replaces("pass"),
                has_own_batches=trainer._replaces("batches"),
                buffers_batches=self._buffers_batches,
                bypasses_loss=self._bypasses_loss,
                has_own_loss=self._has_own_loss() or self._bypasses_loss,
                own_step=self._own_step(),
                of_sequences=trainer.importance_sampling_level == "sequence",
                kl_times_ratio=args.use_bias_correction_kl,
                has_images=self._takes_images(),
                has_entropy_bonus=self._entropy_requires_grad(),
                has_router_loss=trainer.aux_loss_enabled,
                trains_expert_modules=trains_expert_modules(trainer.model),
                top_entropy_quantile=trainer.top_entropy_quantile,
                active_dropout=has_dropout(trainer.model),
                sampler_ratio=RatioRule(
                    trainer.vllm_importance_sampling_mode,
                    trainer.vllm_importance_sampling_clip_min,
                    trainer.vllm_importance_sampling_clip_max,
                )
                if corrected
                else None,
                sampler_gives_log_probs=trainer.use_vllm or trainer.rollout_func is not None,
                truncated_sampling=() if CORRECTS_TRUNCATED_SAMPLING else _truncated_sampling(args),
                max_draws=options.dynamic_sampling_max_draws if options.dynamic_sampling else 1,
                shares_prompts=self._packing_plan().share_in_training,
                optimizer=OptimizerNames(args.optim).value,
                keep_groups_together=options.keep_groups_together,
                max_tokens_per_micro_batch=options.max_tokens_per_micro_batch,
                force_on_policy_ratio=options.force_on_policy_ratio,
                trust_sampling_log_probs=options.trust_sampling_log_probs,
                zero_advantages_of_equal_rewards=options.zero_advantages_of_equal_rewards,
            )
        )

    def train(self, *positional: Any, **keywords: Any) -> Any:
        """TRL's own, after the plan was made and logged."""
        # Left by an earlier training that ended before it scored them: their weights are gone
        unscored = any("old_per_token_logps" not in inputs for inputs in self._slices_to_come())
        if unscored and not self._make_plan().trust_sampler:
            self._regenerate()
        return super().train(*positional, **keywords)

    def _generated(self, batch: dict[str, Any]) -> dict[str, Any]:
        trainer: Any = self
        if self._mode == "train":
            self._sampled_at_step = trainer.state.global_step
            if trainer.state.global_step == 0:
                check_first_rewards(
                    self._rewards_per_function,
                    self._gave_nan(),
                    trainer.reward_func_names,
                    infinite_is_watched=self._on_non_finite_loss is not None,
                )
            rewarded_alike_B = self._rewarded_alike(batch)
            if self.plan.max_draws > 1:
                batch = self._without_dead_groups(batch, rewarded_alike_B)
        if self._mode == "train" and not self._fills_buffer and not self._buffers_batches:
            self._buffers_batches = True
            self._plan = self._make_plan()
            if trainer.accelerator.is_main_process:
                logger.warning(f"The plan has changed:\n{self.explain()}")
        if self.plan.scores_at_generation:
            self._score_as_trl(batch)
        elif self._mode == "eval":
            self._score_reference([batch])
        return batch

    def _score_as_trl(self, batch: dict[str, Any]) -> None:
        """Add to a generation batch the log-probs that stock TRL adds, of every row."""
        trainer, plan = cast(Any, self), self.plan
        every = every_token(batch, of_tools=True)
        if plan.trl_scores_old_policy and not plan.trust_sampler:
            with unrecorded_pass(self):
                old_BC = every.spread(self._log_probs_at_generation(trainer.model, batch, every))
            batch["old_per_token_logps"] = old_BC
            if plan.sampler_ratio is not None:
                formed = SamplerRatio.of(old_BC, sampler_log_probs(batch), loss_mask(batch), plan.sampler_ratio)
                batch["importance_sampling_ratio"] = formed.ratio
                self._measure_sampler(formed)
        if plan["reference"].action == "run" and "ref_per_token_logps" not in batch:
            with self.reference_pass():
                log_probs_RC = self._log_probs_at_generation(self._reference_model(), batch, every)
            batch["ref_per_token_logps"] = every.spread(log_probs_RC)

    def _log_probs_at_generation(self, model: Any, batch: dict[str, Any], every: ScoredTokens) -> Tensor:
        if self.plan.max_tokens is not None:
            return self._unrecorded_log_probs(model, batch, every)
        args: Any = self.args  # type: ignore[attr-defined]
        size = args.per_device_train_batch_size if self._mode == "train" else args.per_device_eval_batch_size
        log_probs: Tensor = self._pass(model, batch, every, batch_size=size)[0]
        return log_probs

    def _loss_bypassed(self) -> None:
        super()._loss_bypassed()
        # What was scored for ours alone lacks rows
        for inputs in {id(x): x for x in self._slices_to_come()}.values():
            for name in KEPT:
                inputs.pop(name, None)
            self._score_as_trl(inputs)

    def _reference_model(self) -> Any:
        trainer: Any = self
        return trainer.model if trainer.ref_model is None else trainer.ref_model

    def _about_to_visit(self) -> None:
        """Score a new generation batch with the reference, and the slices that will meet other weights with the policy,
        while its weights are still those they were sampled with."""
        trainer: Any = self
        present, *others = self._slices_to_come()
        self._score_reference([present, *others])
        if self.plan.trust_sampler:
            return
        waiting = [x for x in others if x is not present and "old_per_token_logps" not in x]
        ends = 0 < trainer.state.max_steps <= trainer.state.global_step + 1
        needed = [present] if ends else [present, *waiting]
        if self._sampled_at_step != trainer.state.global_step and any("old_per_token_logps" not in x for x in needed):
            raise RuntimeError(
                "A micro-batch meets other weights than those it was sampled with, and its old-policy log-probs were "
                f"not kept: {self._own_loss()} did not call `super().compute_loss(...)` for it, or passed other rows "
                "on. Call it with the micro-batch that it is given, or override `_compute_loss` instead."
            )
        if not trainer.accelerator.sync_gradients:
            return
        if ends:
            for inputs in waiting:
                self._count_skipped_pass(inputs)
            return
        with unrecorded_pass(self):
            for inputs in waiting:
                scored = self._policy_tokens(inputs)
                log_probs_RC = self._unrecorded_log_probs(trainer.model, inputs, scored)
                inputs.update(kept_log_probs(scored.spread(log_probs_RC), scored.tokens_BC))

    def _score_reference(self, batches: list[dict[str, Any]]) -> None:
        """Add the reference's log-probs to the batches that lack them.

        From the rows and in the layout of the policy's own pass: equal weights then give equal bits, so the KL term has
        a gradient of exactly 0. Of one rounding error AdamW would make steps of the full learning rate.
        """
        if self.plan["reference"].action != "run":
            return
        for batch in batches:
            if "ref_per_token_logps" not in batch:
                scored = self._policy_tokens(batch)
                with self.reference_pass():
                    log_probs_RC = self._unrecorded_log_probs(self._reference_model(), batch, scored)
                batch["ref_per_token_logps"] = scored.spread(log_probs_RC)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """TRL's own loss, on the log-probs of the passes that the plan has."""
        self._loss_is_ours()
        self._check_same_rows(inputs["completion_ids"])
        inputs = self._with_kept(inputs, SCORED)
        scored = self._policy_tokens(inputs)
        with self._policy_scored_here(self._own_pass() if self.plan.own_pass else None):
            policy_RC, entropies_RC, aux_loss = self._policy_pass(model, inputs, scored, num_items_in_batch)
        if "old_per_token_logps" not in inputs and self.plan.trl_scores_old_policy:
            self._count_skipped_pass(inputs)
        visit = Visit.of(inputs, scored, policy_RC, entropies_RC, self.plan)
        loss = self._loss_of(model, inputs, visit, aux_loss, return_outputs, num_items_in_batch)
        if self._mode == "train" and self.plan.trl_scores_old_policy:
            present = self._present_slice(inputs)
            if present is not None:
                present.update(visit.kept)
        self._measure(visit)
        self._watch_loss(loss, lambda: visit.not_finite(inputs), lambda row: prompt_of(inputs, row))
        return loss

    def _loss_of(
        self, model: Any, inputs: Any, visit: Visit, aux_loss: Any, return_outputs: bool, num_items_in_batch: Any
    ) -> Tensor:
        """TRL's loss of a micro-batch, on what the visit found."""
        given, scored = visit.given_to_loss(inputs), [visit.policy_BC, visit.entropies_BC]
        if visit.policy_BC.size(1) == 1 and not self.plan.score_tools:  # a user's own loss gets what TRL gives it
            given, scored = with_padding(given, *scored)
        with self._answered_by(model, given, (*scored, aux_loss)):
            loss: Tensor = super().compute_loss(model, given, return_outputs, num_items_in_batch)  # type: ignore[misc]
        return loss

    def _measure(self, visit: Visit) -> None:
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        packed_away, *fed = self._tokens_fed()
        of_rank = statistics(visit, [self._skipped_tokens + packed_away, *fed])
        totals = accelerator.reduce(of_rank, reduction="sum")
        self._skipped_tokens = 0
        rows, tokens, *fed = (int(count) for count in totals[4:].tolist())
        self.fed.add(self._mode, fed)
        self.skipped.add(self._mode, passes=0, rows=rows, tokens=tokens)
        if self._mode == "train" and not self.plan.score_tools:  # else TRL's means, or a subclass's, are whole
            over_scored_rows(self._mode_metrics(), totals)
        if visit.formed is not None:
            self._measure_sampler(visit.formed)

    def _measure_sampler(self, formed: SamplerRatio) -> None:
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        for name, value in sampler_metrics(accelerator.gather(formed.statistics().unsqueeze(0))).items():
            self._mode_metrics()[name].append(value)

    def _policy_tokens(self, inputs: dict[str, Any]) -> ScoredTokens:
        """What of a micro-batch the policy and the old policy score."""
        plan = self.plan
        if self._mode == "eval" or self._has_images(inputs) or plan.score_tools:
            return every_token(inputs, of_tools=plan.score_tools)
        return scored_tokens(inputs, leave_masked=plan.leave_masked, leave_zero_advantages=plan.leave_zero_advantages)

    def _policy_pass(
        self, model: Any, inputs: dict[str, Any], scored: ScoredTokens, num_items_in_batch: Any
    ) -> tuple[Tensor, Any, Any]:
        """The pass of the loss: log-probs and entropies `(R, C)`, and the router loss."""
        aux_loss_enabled = self.aux_loss_enabled  # type: ignore[attr-defined]
        return self._pass(model, inputs, scored, compute_entropy=True, compute_aux_loss=aux_loss_enabled)

    def _unrecorded_log_probs(self, model: Any, inputs: dict[str, Any], scored: ScoredTokens) -> Tensor:
        """Log-probs `(R, C)` of the old policy or the reference, from as many forwards as the policy's pass."""
        return self._pass(model, inputs, scored)[0]

    def _pass(self, model: Any, batch: dict[str, Any], scored: ScoredTokens, **options: Any) -> tuple[Tensor, Any, Any]:
        """One pass of `model` over the fed rows: log-probs and entropies `(R, C)`, and the router loss."""
        self._skipped_tokens += scored.tokens_left_out(batch)
        return self._run_pass(model, batch, scored, **options)

    def _run_pass(
        self, model: Any, batch: dict[str, Any], scored: ScoredTokens, **options: Any
    ) -> tuple[Tensor, Any, Any]:
        if not self.plan.own_pass:
            outputs = ("log_probs", "entropy") if options.get("compute_entropy") else ("log_probs",)
            model = scored.labelled(model, outputs)
        return self._completion_log_probs(model, scored.fed(batch), **options)

    def _rewarded_alike(self, batch: dict[str, Any]) -> Tensor:
        """The rows of this rank, `(B,)`, in groups that were rewarded alike; where the plan says so, their advantages
        are set to 0."""
        trainer: Any = self
        alike = rows_of_equal_rewards(
            self._rewards_per_function,
            trainer.reward_weights.to(self._rewards_per_function.device),
            trainer.num_generations,
            normalized_apart=trainer.multi_objective_aggregation == "normalize_then_sum",
        )
        # A group can lie on two ranks; the rewards are those of all
        alike_B = alike.view(trainer.accelerator.num_processes, -1)[trainer.accelerator.process_index]
        if self.plan.zero_equal_rewards:
            batch["advantages"] = batch["advantages"].masked_fill(alike_B, 0.0)
        return alike_B

    def _without_dead_groups(self, batch: dict[str, Any], rewarded_alike_B: Tensor) -> dict[str, Any]:
        """Dynamic sampling: draw until no rank has a dead group, or as often as the plan allows."""
        trainer: Any = self
        size = trainer.num_generations
        dead_G = dead_groups(batch["advantages"], rewarded_alike_B, size)
        draws = 1
        while (left := self._on_all_ranks(dead_G.sum())) and draws < self.plan.max_draws:
            draw = self._draw(self._further_inputs(len(batch["advantages"])))
            dead_in_draw_G = dead_groups(draw["advantages"], self._rewarded_alike(draw), size)
            batch, dead_G = replaced(batch, dead_G, draw, dead_in_draw_G, size, self._padding())
            draws += 1
        if draws > 1:
            batch["num_items_in_batch"] = trainer.accelerator.gather(loss_mask(batch).sum()).sum()
        self._mode_metrics()["dynamic_sampling/draws"].append(draws)
        self._mode_metrics()["dynamic_sampling/dead_groups"].append(left)
        return batch

    def _on_all_ranks(self, count: Tensor) -> int:
        return int(self.accelerator.reduce(count, reduction="sum"))  # type: ignore[attr-defined]

    def _further_inputs(self, rows: int) -> list[dict[str, Any]]:
        """This rank's rows of a further generation batch, each prompt once for each of its completions."""
        trainer: Any = self
        if self._further_prompts is None:
            self._further_prompts = self._further_prompts_after(0)
        size, accelerator = trainer.num_generations, trainer.accelerator
        prompts = self._further_prompts.take(rows * accelerator.num_processes // size)
        first = accelerator.process_index * rows // size
        return [dict(prompt) for prompt in prompts[first : first + rows // size] for _ in range(size)]

    def _further_prompts_after(self, taken: int) -> FurtherPrompts:
        trainer: Any = self
        return FurtherPrompts(
            self._training_rows(), shuffle=trainer.shuffle_dataset, seed=trainer.args.seed + 1, taken=taken
        )

    def _count_skipped_pass(self, inputs: dict[str, Any]) -> None:
        self.skipped.add(self._mode, passes=1)
        self._skipped_tokens += tokens_of(inputs)


def _truncated_sampling(args: Any) -> tuple[str, ...]:
    """The arguments that cut the distribution from which completions are drawn."""
    whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    # TRL's `generation_kwargs` override its own arguments
    given = {name: (args.generation_kwargs or {}).get(name, getattr(args, name)) or whole[name] for name in whole}
    cuts = {"top_p": given["top_p"] < 1.0, "top_k": given["top_k"] > 0, "min_p": given["min_p"] > 0.0}
    return tuple(f"{name}={given[name]}" for name, is_cut in cuts.items() if is_cut)
