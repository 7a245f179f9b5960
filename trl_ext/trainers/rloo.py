"""RLOO: TRL's trainer with our scoring forward, without work that cannot change the gradient.

The methods of TRL's trainer that only RLOO overrides are here; the others are in `base.py`.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import trl
from torch import Tensor
from transformers import ProcessorMixin

from ..checks.arguments import check_completion_length, check_rloo_arguments
from ..checks.data import check_enough_prompts, check_prompts, check_rewards
from ..checks.generation import check_ends, check_generation, check_images
from ..compat import sampled as internals
from ..compat.overrides import PASS
from ..config import AddedGroupFields
from ..config import RLOOConfig as RLOOConfig  # `training_args.bin` files refer to it here
from ..planning.batch_keys import prompt_of
from ..planning.loss_inputs import RLOOLossInputs, not_finite_in
from ..planning.micro_batches import StepRows
from ..planning.rloo import RLOOFacts, RLOOPlan, plan_rloo
from ..planning.rows import all_tokens
from ..planning.sampled import samples_policy
from .base import ExactTrainer
from .generate_rows import FewerRows
from .generation_checkpoints import GenerationCheckpoints
from .route_replay import RouteReplay
from .sampled_batches import check_rewards_of_first_step, equal_rewards, micro_batches_of_a_step
from .sampled_facts import facts_of
from .sampled_metrics import SampledMetrics
from .sampled_passes import SampledPasses


class RLOOTrainer(ExactTrainer, trl.RLOOTrainer):
    """TRL's [`~trl.RLOOTrainer`] with exact per-token log-probs, and without completions that have no gradient.

    Arguments, losses and metrics are the same. Pass a [`RLOOConfig`], or TRL's for the defaults of the added fields.
    """

    _trl_trainer = trl.RLOOTrainer
    _config_class = trl.RLOOConfig
    _added_fields = AddedGroupFields

    _has_generation = True

    _methods_of_step = (*ExactTrainer._methods_of_step, "_prepare_inputs", "get_batch_samples")

    def _check(self, arguments: dict[str, Any], config: Any) -> dict[str, Any]:
        if not self._replaces("rewards"):
            check_rewards(arguments, config, has_environments=False, columns_are_added=self._replaces("rollouts"))
        if config is not None:
            check_rloo_arguments(
                config,
                own_loss=self._replaces("loss"),
                own_advantages=self._replaces("batches"),
                own_generation=self._replaces("generation"),
            )
            if not self._replaces("generation"):
                check_generation(config)
        self._buffer = internals.Buffer(self)
        self._sampled_metrics = SampledMetrics(self, self._ranks, self._scorer, self._buffer)
        self._routes = RouteReplay(self, self._ranks, self._scorer)
        self._passes: SampledPasses[RLOOPlan] = SampledPasses(self, self._sampled_metrics, self._routes)
        self._fewer_rows = FewerRows(self, self._ranks, self._routes.sampled)
        self._generation = internals.Generation(
            self,
            trl.RLOOTrainer,
            lambda *_, **__: self._reference_weights.entered(),
            self._fewer_rows.run_turn,
        )
        self._generation_checkpoints = GenerationCheckpoints(self, self._ranks, self._buffer)
        self._checkpoints.parts.append(partial(self._generation_checkpoints.save, options=self._routes.schedule()))
        return {}

    def _ready(self, callbacks: Any) -> None:
        super()._ready(callbacks)
        plan = self._make_plan()  # a wrong argument is an error here, not at the first step
        self._routes.check(plan.facts.generation)
        if not self._replaces("generation"):
            check_completion_length(self.args, self.model)
            check_ends(self)
        if not self._replaces("batches"):
            if self._features.why_off("checks of data") is None:
                check_prompts(self, None if self._replaces("rendering") else self.processing_class)
            check_images(self.train_dataset, "train_dataset", self.processing_class)

    def _has_reference(self) -> bool:
        return bool(self.args.beta != 0)

    def _on_accelerator(self) -> None:
        if self._ranks.group is not None or self._ranks.sequence is not None:
            raise ValueError(
                "`RLOOTrainer` does not support tensor parallelism, `cp_size` or `sp_size`. Use FSDP2 or ZeRO-3, or "
                "`GRPOTrainer`."
            )

    def _make_plan(self) -> RLOOPlan:
        facts = facts_of(
            self,
            RLOOFacts,
            has_images=isinstance(self.processing_class, ProcessorMixin),
            generation=self._fewer_rows.facts(),
            samples_policy=samples_policy(self.args),
            own_loss=internals.overridden_loss(self) or ("compute_loss" if self._bypasses_loss else None),
        )
        return plan_rloo(facts)

    def _before_training(self) -> None:
        self._buffer.sampled_at_step = -1
        if not self._replaces("sampler"):
            check_enough_prompts(self.train_dataset, self.args.generation_batch_size, self.args.num_generations)

    def _resumed(self, state: Any) -> None:
        folder = self._checkpoints.resumes_from
        if folder is not None and not self._checkpoints.is_finished:
            self._generation_checkpoints.read(folder, self._routes.schedule())

    def _get_train_sampler(self, *positional: Any, **keywords: Any) -> Any:
        self._buffer.sampler = super()._get_train_sampler(*positional, **keywords)
        return self._buffer.sampler

    # Generation

    def get_batch_samples(self, *positional: Any, **keywords: Any) -> Any:
        """Get the batches as transformers does, and note where the accumulation window begins."""
        self._methods_called.add("get_batch_samples")
        self._buffer.window_begins()
        return super().get_batch_samples(*positional, **keywords)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        self._note_call("_prepare_inputs")
        generates = self._buffer.mid_cycle_slices() is None
        is_fixed = self._features.why_off("balance") is not None
        with nullcontext() if is_fixed else internals.shuffled_then(self._reorder, trl.RLOOTrainer):
            batch = super()._prepare_inputs(generation_batch)
        if self.model.training and generates:
            self._follow_changes()  # a reward function may change what the loss reads
        return batch

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Sample and reward as TRL does. Equal rewards have advantages of exactly 0, if the plan says so."""
        plan = self.plan
        members: dict[str, Any] = {PASS: _no_pass} if plan.reuses_old_policy else {}
        batch = self._generation.draw(inputs, **members)
        batch.update(self._routes.sampled_entries(batch))
        self._fewer_rows.record()
        log_probs = self._fewer_rows.continuous.take_log_probs(batch)
        if log_probs is not None:
            batch["sampling_per_token_logps"] = log_probs
        if self.model.training:
            self._buffer.sampled_at_step = self.state.global_step
        rewards_BF = self._generation.rewards
        if plan.reuses_old_policy:
            del batch["old_logps"]  # the loss gets them from the policy's pass
        # An override in place of TRL's generation may compute advantages without rewards
        if self.model.training and rewards_BF is not None:
            check_rewards_of_first_step(self, rewards_BF, bounds=self.args.reward_clip_range)
            if plan.zeroes_equal_rewards:
                equal_B = equal_rewards(self, rewards_BF, normalized_apart=False)
                batch["advantages"] = batch["advantages"].masked_fill(equal_B, 0.0)
        return batch

    def _reorder(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Reorder the rows of a batch that TRL has shuffled, so that rows of a group share micro-batches."""
        if not self.plan.keeps_groups_together or internals.has_images(batch):
            return batch
        step = StepRows(self.args.per_device_train_batch_size, micro_batches_of_a_step(self.args, self._buffer))
        return self._balance.reorder(batch, self._passes.row_tokens(batch), {}, step, over_ranks=False)

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
        if PASS not in self._overridden_below:  # else it may read the model's attributes, or its logits
            model = partial(model, head_outputs=("log_probs", "entropy")[: 1 + compute_entropy])
        if self._routes.sampled is not None:
            model = self._routes.while_sampling(model, input_ids, logits_to_keep)
        run_pass = super()._get_per_token_logps_and_entropies
        timed = nullcontext() if torch.is_grad_enabled() else self._phase_times.measured("passes")
        with timed:
            return run_pass(model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **options)

    # Training

    def _lacks_old_policy(self, batch: dict[str, Any]) -> bool:
        return "old_logps" not in batch

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return TRL's loss of a micro-batch, a scalar, from the log-probs of the planned passes.

        `inputs` holds B rows of C completion tokens; `planning/batch_keys.py` lists its keys.
        """
        batch = inputs
        self._loss_begins(batch)
        if self.plan.loss_runs_passes:
            return self._subclass_loss(model, batch, return_outputs, num_items_in_batch)
        scores = self._passes.score_micro_batch(model, batch)
        self._passes.compare_routes(model, batch)
        loss_inputs = RLOOLossInputs.of(batch, scores)
        trl_batch, pass_outputs = loss_inputs.for_trl(batch)
        with internals.loss_of_scores(self, model, pass_outputs):
            loss: Tensor = super().compute_loss(model, trl_batch, return_outputs, num_items_in_batch)
        batch.update(loss_inputs.entries_for_reuse)
        if loss_inputs.is_old_policy:
            self._sampled_metrics.count_skipped_pass(batch)
        self._sampled_metrics.record_rloo(batch, loss_inputs)
        self._routes.record()
        self._non_finite.watch(loss, partial(loss_inputs.not_finite, batch), partial(prompt_of, batch))
        return loss

    def _subclass_loss(self, model: Any, batch: dict[str, Any], return_outputs: bool, num_items: Any) -> Tensor:
        """Return the loss of an overridden method, which gets TRL's batch and runs its own passes."""
        self._routes.refuse_loss()
        method = PASS if self.plan.facts.has_own_pass else self.plan.facts.own_loss
        with (
            self._policy_scored(f"`{type(self).__name__}.{method}`"),
            self._non_finite.recorded(model) as pass_log_probs,
        ):
            loss: Tensor = super().compute_loss(model, batch, return_outputs, num_items)
        self._count_tokens()
        rows = partial(not_finite_in, batch, pass_log_probs, all_tokens(batch))
        self._non_finite.watch(loss, rows, partial(prompt_of, batch))
        return loss


def _no_pass(model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any) -> Any:
    return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
