"""RLOO: TRL's trainer with our scoring forward, without work that cannot change the gradient.

The methods of TRL's trainer that only RLOO overrides are here; the others are in `base.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import trl
from torch import Tensor
from transformers import ProcessorMixin

from ..compat import grpo as internals
from ..compat.overrides import PASS, overrides_below
from ..compat.readers import batch_reader
from ..config import AddedGroupFields
from ..config import RLOOConfig as RLOOConfig  # `training_args.bin` files refer to it here
from ..packing.support import positions_by_length, trains_expert_modules
from ..planning.loss_inputs import not_finite_in, prompt_of, replace_last
from ..planning.micro_batches import RowTokens, micro_batches_per_step
from ..planning.non_finite import check_first_rewards, not_finite_rows
from ..planning.rloo import RLOOFacts, RLOOPlan, plan_rloo
from ..planning.rows import ScoredTokens, every_token, rows_of_equal_rewards, scored_tokens, tokens_of
from .base import ExactTrainer
from .checked_arguments import check_completion_length, check_rloo_arguments
from .checked_data import check_enough_prompts, check_prompts, check_rewards
from .checked_generation import check_ends, check_generation, check_images
from .generation_checkpoints import GenerationCheckpoints

# Entry of ours in a micro-batch: the old policy's log-probs, summed over each completion that ran, `(B,)`
_OLD_SUMS = "old_policy_sums"


class RLOOTrainer(ExactTrainer, trl.RLOOTrainer):
    """TRL's [`~trl.RLOOTrainer`] with exact per-token log-probs, and without completions that have no gradient.

    Arguments, losses and metrics are the same. Pass a [`RLOOConfig`], or TRL's for the defaults of the added fields.
    """

    _trl_trainer = trl.RLOOTrainer
    _config_class = trl.RLOOConfig
    _added_fields = AddedGroupFields

    def _check(self, given: dict[str, Any], config: Any) -> dict[str, Any]:
        if not self._replaces("rewards"):
            check_rewards(given, config, has_environments=False, columns_are_added=self._replaces("rollouts"))
        if config is not None:
            check_rloo_arguments(
                config,
                own_loss=self._replaces("loss"),
                own_advantages=self._replaces("batches"),
                own_generation=self._replaces("generation"),
            )
            if not self._replaces("generation"):
                check_generation(config)
        self._buffer = internals.Buffer(self)  # type: ignore[arg-type]
        self._generation = internals.Generation(
            self, trl.RLOOTrainer, lambda *_, **__: self._reference_weights.entered()
        )
        self._generation_checkpoints = GenerationCheckpoints(self, self._ranks, self._buffer)
        self._checkpoints.parts.append(self._generation_checkpoints.save)
        return {}

    def _ready(self, callbacks: Any) -> None:
        super()._ready(callbacks)
        self._make_plan()  # a wrong argument is an error here, not at the first step
        if not self._replaces("generation"):
            check_completion_length(self.args, self.model)
            check_ends(self)
        if not self._replaces("batches"):
            check_prompts(self, None if self._replaces("rendering") else self.processing_class)
            check_images(self.train_dataset, "train_dataset", self.processing_class)

    def _has_reference(self) -> bool:
        return bool(self.args.beta != 0)

    def _on_accelerator(self) -> None:
        if self._ranks.group is not None or self._ranks.sequence is not None:
            raise ValueError(
                "`RLOOTrainer` does not support tensor parallelism, `cp_size` and `sp_size`. Use FSDP2 or ZeRO-3, or "
                "`GRPOTrainer`."
            )

    def _make_plan(self) -> RLOOPlan:
        if self.beta != 0.0 and self.ref_model is None and self._reference_weights.own is None:
            self._reference_weights.take_late(self.beta)
        args, own, options = self.args, self._reference_weights.own, AddedGroupFields.of(self.args)
        randomness = self._randomness()
        facts = RLOOFacts(
            beta=self.beta,
            own_reference=None if own is None else own.describe(),
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            steps_per_generation=args.steps_per_generation,
            num_iterations=self.num_iterations,
            epoch_is_known=hasattr(self.train_dataset, "__len__"),
            shares_prompts=self._packing_plan().share_in_training,
            randomness=None if randomness is None else randomness.reason,
            draws_for_batch=randomness is not None and not randomness.of_tokens,
            has_images=isinstance(self.processing_class, ProcessorMixin),
            has_router_loss=self.aux_loss_enabled,
            trains_expert_modules=self._look_at_policy(trains_expert_modules),
            positions_by_length=positions_by_length(self.model),
            generation_reader=internals.generation_reader(self),  # type: ignore[arg-type]
            overridden_below=internals.overridden_below(self),  # type: ignore[arg-type]
            batch_reader=batch_reader(self),
            own_pass=internals.overridden_pass(self),  # type: ignore[arg-type]
            own_loss=internals.overridden_loss(self) or ("compute_loss" if self._bypasses_loss else None),  # type: ignore[arg-type]
            keep_groups_together=options.keep_groups_together,
            zero_advantages_of_equal_rewards=options.zero_advantages_of_equal_rewards,
        )
        return plan_rloo(self._for_all_ranks(facts))

    def _before_training(self) -> None:
        if not self._replaces("sampler"):
            check_enough_prompts(self.train_dataset, self.args.generation_batch_size, self.args.num_generations)

    def _resumed(self, state: Any) -> None:
        folder = self._checkpoints.resumes_from
        if folder is not None and not self._checkpoints.is_finished:
            self._generation_checkpoints.read(folder)

    def _get_train_sampler(self, *positional: Any, **keywords: Any) -> Any:
        self._buffer.sampler = super()._get_train_sampler(*positional, **keywords)
        return self._buffer.sampler

    # Generation

    def get_batch_samples(self, *positional: Any, **keywords: Any) -> Any:
        """Get the batches as transformers does, and note where the accumulation window begins."""
        self._buffer.window_begins()
        return super().get_batch_samples(*positional, **keywords)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with internals.shuffled_then(self._rearranged, trl.RLOOTrainer):
            return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Sample and reward as TRL does. Equal rewards have advantages of exactly 0, if the plan says so."""
        skipped: dict[str, Any] = {PASS: _no_pass} if self.plan.reuses_old_policy else {}
        batch = self._generation.draw(inputs, **skipped)
        rewards, accelerator = self._generation.rewards, self.accelerator
        # An override in place of TRL's generation may compute advantages without rewards
        has_rewards = rewards is not None and self.model.training
        # Infinite rewards of any batch are the business of `on_non_finite_loss`, if it is set
        if has_rewards and self.state.global_step == 0 and self._non_finite.action is None:
            check_first_rewards(
                rewards, self.reward_weights, self.reward_func_names, bounds=self.args.reward_clip_range
            )
        if self.plan.reuses_old_policy:
            del batch["old_logps"]  # the loss gets them from the policy's pass
        if has_rewards and self.plan.zeroes_equal_rewards:
            size = self.num_generations
            equal = rows_of_equal_rewards(rewards, self.reward_weights.to(rewards.device), size, normalized_apart=False)
            equal_B = equal.view(accelerator.num_processes, -1)[accelerator.process_index]
            batch["advantages"] = batch["advantages"].masked_fill(equal_B, 0.0)
        return batch

    def _rearranged(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Reorder the rows of a batch that TRL has shuffled, so that rows of a group share micro-batches."""
        plan, args = self.plan, self.args
        if not plan.keeps_groups_together or internals.has_images(batch):
            return batch
        packing = self._packing_plan()
        together = micro_batches_per_step(
            steps_per_generation=args.steps_per_generation,
            accumulation_steps=args.gradient_accumulation_steps,
            micro_batches_of_an_epoch=self._buffer.micro_batches_of_an_epoch,
            window_began=self._buffer.window_began,
        )
        unit = {"rows_of_a_slice": args.per_device_train_batch_size, "micro_batches_per_step": together}
        shares = {"packed": packing.padding_free, "shared": packing.share_in_training}
        tokens = RowTokens.of(batch, self._scored_tokens(batch), **shares)
        return self._balance.arranged(batch, tokens, {}, unit, over_ranks=False)

    def _scored_tokens(self, batch: dict[str, Any]) -> ScoredTokens:
        plan = self.plan
        if not self.model.training or not plan.skips_masked:
            return every_token(batch)
        return scored_tokens(batch, skip_masked=True, skip_zero_advantages=plan.skips_zero_advantages)

    def _get_per_token_logps_and_entropies(  # type: ignore[override]
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **options: Any,
    ) -> tuple[Any, Any, Any]:
        """Run TRL's pass, without the statistics that it does not read."""
        called = model
        if overrides_below(self, PASS) is None:  # it may read the model's attributes, or its logits
            called = functools.partial(model, head_outputs=("log_probs", "entropy")[: 1 + compute_entropy])
        run = super()._get_per_token_logps_and_entropies
        return run(called, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **options)

    # Training

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Compute TRL's loss from the log-probs of the planned passes."""
        self._follow_changes()
        self._loss_reached, plan = True, self.plan
        if plan.facts.own_loss is not None:
            return self._overridden_loss(super().compute_loss, model, inputs, return_outputs, num_items_in_batch)
        scored = self._scored_tokens(inputs)
        policy_BC, entropies_BC, aux_loss = self._policy_pass(model, inputs, scored)
        given = dict(inputs)
        # Asked of the batch, because a user may have changed the schedule since it was generated
        reuses_old_policy = "old_logps" not in inputs
        if reuses_old_policy:
            sums_B = (policy_BC.detach() * inputs["completion_mask"]).sum(dim=1)
            given["old_logps"] = inputs.setdefault(_OLD_SUMS, sums_B)
        if not scored.every_row:
            # The ratio of a row that does not run is 1, and its entropy does not count
            live_B = torch.zeros(len(scored.tokens_BC), dtype=torch.bool, device=scored.rows_R.device)
            live_B[scored.rows_R] = True
            given["completion_mask"] = inputs["completion_mask"] * live_B.unsqueeze(1)
            given["old_logps"] = given["old_logps"].masked_fill(~live_B, 0.0)
        with internals.answered_by(self, model, (policy_BC, entropies_BC, aux_loss)):  # type: ignore[arg-type]
            loss: Tensor = super().compute_loss(model, given, return_outputs, num_items_in_batch)
        values = {"policy": policy_BC.detach(), "old policy": given["old_logps"], "reward": given["advantages"]}
        self._non_finite.watch(
            loss, lambda: not_finite_rows(values, scored.tokens_BC), lambda row: prompt_of(inputs, row)
        )
        skipped = scored.tokens_left_out(inputs) + (tokens_of(inputs) if reuses_old_policy else 0)
        packed_away, *ran = self._scorer.take_counts()
        rows, tokens = len(scored.tokens_BC) - len(scored.rows_R), int(scored.tokens_BC.sum())
        *counts, rows, tokens = self._ranks.sum_counts([packed_away + skipped, *ran, rows, tokens])
        self._count_tokens(counts)
        mode = "train" if self.model.training else "eval"
        self.skipped.add(mode, passes=int(reuses_old_policy), rows=rows)
        if mode == "train" and not tokens:  # on any rank
            replace_last(self._metrics[mode], "entropy", None)
        return loss

    def _overridden_loss(self, trl_loss: Callable[..., Tensor], model: Any, batch: Any, *options: Any) -> Tensor:
        """Compute the loss of an overridden method, which gets TRL's batch and runs its own passes."""
        name = self.plan.facts.own_pass or self.plan.facts.own_loss
        with self._policy_scored(f"`{type(self).__name__}.{name}`"), self._non_finite.recorded(model) as passes:
            loss = trl_loss(model, batch, *options)
        not_finite = functools.partial(not_finite_in, batch, passes, every_token(batch))
        self._non_finite.watch(loss, not_finite, lambda row: prompt_of(batch, row))
        self._count_tokens()
        return loss

    def _policy_pass(self, model: Any, inputs: Any, scored: ScoredTokens) -> tuple[Tensor, Tensor, Any]:
        """Return log-probs and entropies `(B, C)` of the tokens to score, and the router loss if there is one."""
        own_pass = self.plan.facts.own_pass
        called = model if own_pass is not None else scored.labelled(model, ("log_probs", "entropy"))
        options = {"compute_entropy": True, "compute_aux_loss": self.aux_loss_enabled}
        with self._policy_scored(None if own_pass is None else f"`{type(self).__name__}.{own_pass}`"):
            found = internals.completion_log_probs(self, called, scored.fed(inputs), **options)  # type: ignore[arg-type]
        return scored.spread(found[0]), scored.spread(found[1]), found[2]


def _no_pass(model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any) -> Any:
    return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
