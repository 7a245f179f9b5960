"""GRPO: TRL's trainer with our scoring forward, without work that cannot change the gradient.

The methods of TRL's trainer that only GRPO overrides are here; the others are in `base.py`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import trl
from accelerate.utils import set_seed
from torch import Tensor

from ..checks.arguments import check_completion_length, check_groups, check_grpo_arguments, check_offloading_device
from ..checks.data import check_enough_prompts, check_prompts, check_rewards
from ..checks.generation import check_ends, check_generation, check_has_length, check_images
from ..compat import sampled as internals
from ..compat.replaced import logged_times
from ..config import AddedGRPOFields
from ..config import GRPOConfig as GRPOConfig  # earlier `training_args.bin` files refer to it here
from ..planning.batch_keys import has_old_policy, prompt_of
from ..planning.grpo import GRPOFacts, GRPOPlan, plan_grpo
from ..planning.loss_inputs import LossInputs, not_finite_in
from ..planning.rows import all_tokens
from ..planning.sampled import GenerateFacts, samples_policy, truncated_sampling
from ..planning.sampler_ratio import RatioRule
from .base import ExactTrainer
from .grpo_generation import GRPOGeneration
from .grpo_passes import GRPOPasses
from .part_training import PartTraining
from .route_replay import RouteReplay
from .sampled_facts import facts_of
from .sampled_metrics import SampledMetrics

logger = logging.getLogger("trl_ext")


class GRPOTrainer(ExactTrainer, trl.GRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`] with exact per-token log-probs, and without work that cannot change the gradient.

    Arguments, losses and metrics are the same. Pass a [`GRPOConfig`], or TRL's for the defaults of the added fields.
    """

    _trl_trainer = trl.GRPOTrainer
    _config_class = trl.GRPOConfig
    _added_fields = AddedGRPOFields

    _has_generation = True

    _methods_of_step = (*ExactTrainer._methods_of_step, "_prepare_inputs", "get_batch_samples")

    def _check(self, arguments: dict[str, Any], config: Any) -> dict[str, Any]:
        if not self._replaces("rewards"):
            check_rewards(
                arguments,
                config,
                has_environments=arguments.get("environment_factory") is not None,
                columns_are_added=arguments.get("rollout_func") is not None or self._replaces("rollouts"),
            )
        if config is not None:
            own_generation = arguments.get("rollout_func") is not None or self._replaces("generation")
            check_grpo_arguments(
                config,
                own_loss=self._replaces("loss"),
                own_advantages=self._replaces("batches"),
                own_generation=own_generation,
            )
            if not own_generation:
                check_generation(config)
            has_tools = bool(arguments.get("tools") or arguments.get("environment_factory")) and not own_generation
            check_has_length(config, has_tools=has_tools, own_loss=self._replaces("loss"))
        self._buffer = internals.Buffer(self)
        self._part_training = PartTraining(self, self._ranks)
        self._sampled_metrics = SampledMetrics(self, self._ranks, self._scorer, self._buffer)
        self._routes = RouteReplay(self, self._ranks, self._scorer)
        self._grpo_passes = GRPOPasses(self, self._buffer, self._sampled_metrics, self._routes, self._part_training)
        self._grpo_generation = GRPOGeneration(self, self._ranks, self._grpo_passes, self._buffer, self._balance)
        self._checkpoints.parts.append(self._grpo_generation.save)
        if not getattr(config, "use_vllm", False):
            return {}
        from ..sampler.engine import EngineGeneration  # it needs TRL's classes for vLLM

        return {"VLLMGeneration": partial(EngineGeneration, engine_args=self._added.vllm_engine_args)}

    def _ready(self, callbacks: Any) -> None:
        if self._offloads:
            check_offloading_device(self.accelerator.device)
        super()._ready(callbacks)
        self._grpo_generation.ahead.check()
        plan = self._make_plan()  # a wrong argument is an error here, not at the first step
        self._routes.check(plan.facts.generation)
        if self._ranks.tensor_parallel is not None:
            set_seed(self.args.seed + self._ranks.tensor_parallel.copy)  # TRL seeds each rank differently
        self._check_data()

    def _check_data(self) -> None:
        rolled_out = self.rollout_func is not None or self._replaces("generation")
        if not rolled_out:  # otherwise completions may have any length
            check_completion_length(self.args, self.model)
            check_ends(self)
        if self._replaces("batches") or self.environment_factories is not None:
            return
        if self._features.why_off("checks of data") is None:
            check_prompts(self, None if rolled_out or self._replaces("rendering") else self.processing_class)
        check_images(self.train_dataset, "train_dataset", self.processing_class)

    def _has_reference(self) -> bool:
        return bool(self.args.beta != 0)

    def _entropy_has_gradient(self) -> bool:
        # `top_entropy_quantile` compares entropies, which has no gradient
        return bool(self._entropy_bonus_enabled) or super()._entropy_has_gradient()

    def _loss_reads_entropy(self) -> bool:
        return bool(self._entropy_bonus_enabled) or super()._loss_reads_entropy()

    @property
    def _offloads(self) -> bool:
        return bool(getattr(self.args, "activation_offloading", False))

    def _on_accelerator(self) -> None:
        """Set the generation batch size for ranks that get the same prompts, which TRL does not expect."""
        check_groups(self.args, self._ranks)

    def _make_plan(self) -> GRPOPlan:
        truncated = truncated_sampling(self.args)
        generation = self._grpo_generation.fewer_rows.facts()
        facts = facts_of(
            self,
            GRPOFacts,
            generation=generation,
            processes=self.accelerator.num_processes,
            has_images=bool(self._is_vlm),
            has_entropy_bonus=bool(self._entropy_bonus_enabled),
            samples_ahead=self._grpo_generation.ahead.is_on,
            samples_in_process=self._grpo_generation.ahead.samples_in_process,
            sampler_ratio=self._ratio_rule(generation),
            sampler_gives_log_probs=self.use_vllm or self.rollout_func is not None or generation.keeps_log_probs,
            truncated_sampling=truncated,
            unknown_mask=self._unknown_mask_reason() if truncated else None,
            bypasses_loss=self._bypasses_loss,
            has_own_loss=internals.overridden_loss(self) is not None or self._bypasses_loss,
        )
        return plan_grpo(facts)

    def _ratio_rule(self, generation: GenerateFacts) -> RatioRule | None:
        """Return how the loss corrects for the sampler: for vLLM as in TRL, and also for continuous batching."""
        is_lagged = bool(self._added.generation_lag)  # the rows are older than the policy
        has_log_probs = self.use_vllm or is_lagged or (generation.keeps_log_probs and samples_policy(self.args))
        if not has_log_probs or self._features.why_off("vLLM"):
            return None
        if not self.vllm_importance_sampling_correction:
            return None
        return RatioRule(
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )

    def _unknown_mask_reason(self) -> str | None:
        is_asked = AddedGRPOFields.of(self.args).keep_sampling_mask
        is_overridden = self._replaces("generation") or self._replaces("batches")
        is_overridden = is_overridden or internals.overridden_below(self) is not None
        return self._grpo_generation.unknown_mask_reason(overridden=is_overridden, is_asked=is_asked)

    # Training: the run

    def _before_training(self) -> None:
        if not self._replaces("sampler"):
            check_enough_prompts(self.train_dataset, self.args.generation_batch_size, self.args.num_generations)
        # An earlier `train` may have ended before it scored its completions; the weights that sampled them are gone
        unscored = not all(has_old_policy(x) for x in self._buffer.remaining())
        plan = self._make_plan()
        if unscored and not plan.facts.trust_sampling_log_probs and not plan.gives_trls_batches:
            self._buffer.drop()

    def _after_training(self) -> None:
        self._grpo_generation.ahead.end()

    def _resumed(self, state: Any) -> None:
        folder = None if self._checkpoints.is_finished else self._checkpoints.resumes_from
        self._grpo_generation.ahead.begin(resumes=folder is not None)
        if folder is not None:
            self._grpo_generation.resume(folder)

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, *positional: Any, **keywords: Any) -> Tensor:
        """Return TRL's mask plus tokens that only rounding puts below its threshold: equal contexts must tie."""
        high_entropy: Tensor = super().get_high_entropy_mask(entropies, mask, *positional, **keywords)
        lowest = torch.where(high_entropy, entropies, torch.inf).amin()
        rounding = 8 * torch.finfo(entropies.dtype).eps * lowest.clamp(min=1.0)
        return high_entropy | ((entropies >= lowest - rounding) & mask.bool())

    def _get_train_sampler(self, *positional: Any, **keywords: Any) -> Any:
        self._buffer.sampler = super()._get_train_sampler(*positional, **keywords)
        return self._buffer.sampler

    def get_batch_samples(self, *positional: Any, **keywords: Any) -> Any:
        """Get the batches as transformers does, and note where the accumulation window begins."""
        self._methods_called.add("get_batch_samples")
        self._buffer.window_begins()
        return super().get_batch_samples(*positional, **keywords)

    # Training: a micro-batch

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        # TRL's GRPO has no such argument
        on_host = self._activations_on_host() if self._offloads else nullcontext()
        with self._part_training.training_step(), on_host:
            yield

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        self._note_call("_prepare_inputs")
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        generates = self._buffer.mid_cycle_slices() is None
        with self._grpo_generation.fills_buffer() if generates else nullcontext():
            batch = super()._prepare_inputs(generation_batch)
        if generates:
            self._follow_changes()  # a reward function may change what the loss reads
        else:
            self._follow_changes_in_step()
        if generates and self.plan.merges:
            batch = self._buffer.merge(self._grpo_generation.micro_batches_per_step())
        self._grpo_passes.score_buffer(is_new=generates)
        return batch

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return self._grpo_generation.of_batch(inputs)

    def _lacks_old_policy(self, batch: dict[str, Any]) -> bool:
        return self.plan.trl_scores_old_policy and "old_per_token_logps" not in batch

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return TRL's loss of a micro-batch, a scalar, from the log-probs of the planned passes.

        `_prepare_inputs` has run the passes of reference and old policy. `inputs` holds B rows of C completion tokens;
        `planning/batch_keys.py` lists its keys.
        """
        batch = inputs
        self._loss_begins(batch)
        if not len(batch["completion_ids"]):
            # Its rows run with a later micro-batch, in parts as large as `max_tokens_per_micro_batch` allows
            return self._part_training.loss_without_backward()
        self._ranks.check_same(batch["completion_ids"])
        self._part_training.start_micro_batch()
        if self.plan.loss_runs_passes:
            # Log-probs of the planned passes would lack tokens that a subclass, or a loss that is not known, may read
            return self._subclass_loss(model, batch, return_outputs, num_items_in_batch)
        micro_batches = internals.merged_micro_batches(batch)

        def trl_loss(loss_inputs: LossInputs) -> Tensor:
            trl_batch, pass_outputs = loss_inputs.for_trl(batch)
            corrects = self.plan.facts.sampler_ratio is not None
            with internals.loss_of_scores(self, model, pass_outputs, micro_batches, corrects_for_sampler=corrects):
                loss: Tensor = super(GRPOTrainer, self).compute_loss(
                    model, trl_batch, return_outputs, num_items_in_batch
                )
            return loss

        # Parts of the micro-batch train inside the pass, which therefore takes the loss
        scores = self._grpo_passes.score_policy(model, batch, num_items_in_batch, trl_loss)
        self._grpo_passes.compare_routes(model, batch)
        loss_inputs = LossInputs.of(batch, scores, self.plan)
        with logged_times(internals.mode_metrics(self), micro_batches):
            loss = trl_loss(loss_inputs)
            self._sampled_metrics.record_grpo(loss_inputs)
            self._routes.record()
        if self.model.training and self._grpo_passes.scores_before_step:
            self._buffer.store(batch, loss_inputs.entries_for_reuse)
        self._part_training.check_last_part(loss)
        self._non_finite.watch(loss, partial(loss_inputs.not_finite, batch), partial(prompt_of, batch))
        return loss

    def _subclass_loss(self, model: Any, batch: dict[str, Any], return_outputs: bool, num_items: Any) -> Tensor:
        """Return an overridden loss, or one that is not known, which gets TRL's batch and runs its own passes."""
        self._routes.refuse_loss()
        scored_tokens = all_tokens(batch, of_tools=True)
        trl_batch = self._grpo_passes.batch_for_subclass(model, batch, scored_tokens)
        micro_batches = internals.merged_micro_batches(batch)
        with (
            self._policy_scored(self._loss_scores()),
            self._non_finite.recorded(model) as pass_log_probs,
            self._grpo_passes.sampling_mask_applied(model, batch, scored_tokens),
            logged_times(internals.mode_metrics(self), micro_batches),
            internals.as_one_micro_batch(self, micro_batches),
        ):
            loss: Tensor = super().compute_loss(model, trl_batch, return_outputs, num_items)
        self._sampled_metrics.record_subclass_loss()
        rows = partial(not_finite_in, trl_batch, pass_log_probs, scored_tokens)
        self._non_finite.watch(loss, rows, partial(prompt_of, batch))
        return loss

    def _loss_scores(self) -> str:
        """Return the overridden method that runs the policy in the loss, as the plan names it."""
        name = internals.overridden_pass(self) or internals.overridden_loss(self) or "compute_loss"
        return f"`{type(self).__name__}.{name}`"
