"""GRPO's generation: sampling, rewards, dynamic sampling, and checkpoints in the middle of a generation cycle."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compat import sampled as internals
from ..compat.replaced import replaced
from ..distributed.exchange import Column
from ..distributed.ranks import Ranks
from ..planning.batch_keys import (
    ROUTE_KEYS,
    SAMPLING_MASK_KEYS,
    TOKEN_KEYS,
    has_old_policy,
    with_old_policy_mask,
)
from ..planning.dynamic_sampling import FurtherPrompts, dead_groups, with_live_groups
from ..planning.micro_batches import StepRows
from ..planning.rows import loss_mask, padded_tokens
from ..planning.sampled import sampling_values
from ..sampler.sampling_mask import SamplingMaskRecorder, log_probs_to_ask, warn_of_missing
from .generate_rows import FewerRows
from .generation_ahead import GenerationAhead
from .generation_checkpoints import GenerationCheckpoints
from .grpo_passes import GRPOPasses
from .row_balance import RowBalance
from .sampled_batches import check_rewards_of_first_step, equal_rewards, micro_batches_of_a_step

logger = logging.getLogger("trl_ext")


class GRPOGeneration:
    """Makes the generation batches of one trainer.

    Args:
        trainer (`GRPOTrainer`): whose methods generate and reward, and whose plan says what is added.
    """

    def __init__(
        self, trainer: Any, ranks: Ranks, passes: GRPOPasses, buffer: internals.Buffer, balance: RowBalance
    ) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.passes = passes
        self.buffer = buffer
        self.balance = balance
        self.routes = passes.routes
        self.fewer_rows = FewerRows(trainer, ranks, self.routes.sampled)
        self.ahead = GenerationAhead(trainer, ranks, passes.metrics, buffer, self.fewer_rows)
        self._trl = internals.without_passes(trainer, self.ahead.run_turn, self.fewer_rows.continuing_turns)
        self.ahead.gave_nan = self._trl.gave_nan
        self._checkpoints = GenerationCheckpoints(trainer, ranks, buffer)
        self._further: FurtherPrompts | None = None
        self._fills_buffer = False

    def of_batch(self, inputs: Any) -> dict[str, Any]:
        """Sample and reward a generation batch, in place of TRL's `_generate_and_score_completions`."""
        trainer = self.trainer
        with self.ahead.batch(inputs):
            batch = self._draw(inputs)
        if trainer.model.training:
            self.buffer.sampled_at_step = trainer.state.global_step
            # An override in place of TRL's generation may compute advantages without rewards
            if self._trl.rewards is not None:
                check_rewards_of_first_step(trainer, self._trl.rewards)
            equal_B = self._equal_rewards(batch)
            if trainer.plan.facts.max_draws > 1:
                batch = self._without_dead_groups(batch, equal_B)
        self.fewer_rows.record()
        self._score(batch)
        # The user's functions may have drawn random numbers, and TRL shuffles next
        self.ranks.share_random_state()
        return batch

    def _score(self, batch: dict[str, Any]) -> None:
        """Add the log-probs that code of the user may read before the batch is in TRL's buffer."""
        plan = self.trainer.plan
        training = self.trainer.model.training
        # An overridden `_prepare_inputs` may keep batches in its own buffer, and evaluation has none
        is_buffered = training and self._fills_buffer
        if plan.facts.overridden_below is not None:
            self.passes.metrics.record_sampler_ratio_of(batch)
        elif plan.scores_at_generation or (plan.gives_trls_batches and not is_buffered):
            self.passes.score_as_trl(batch)
        elif not training:
            self.passes.score_reference([batch])

    @contextmanager
    def fills_buffer(self) -> Iterator[None]:
        """Rearrange the rows of a generation batch in the `with` block, in which TRL puts it into its buffer."""
        self._fills_buffer = True
        try:
            is_fixed = self.trainer._features.why_off("balance") is not None
            with nullcontext() if is_fixed else internals.shuffled_then(self.reorder, self.trainer._trl_trainer):
                yield
        finally:
            self._fills_buffer = False

    def _draw(self, inputs: Any) -> dict[str, Any]:
        with self._rollouts_recorded():
            batch = self._draw_with_mask(inputs)
        return {**batch, **self.routes.sampled_entries(batch)}

    def _rollouts_recorded(self) -> AbstractContextManager[None]:
        rollout_func = self.trainer.rollout_func
        if rollout_func is None or self.routes.sampled is None:
            return nullcontext()
        return replaced(self.trainer, rollout_func=self.routes.sampled.recorded_rollout(rollout_func))

    def _draw_with_mask(self, inputs: Any) -> dict[str, Any]:
        """Sample and reward, and add the sampling mask if the plan keeps it."""
        trainer = self.trainer
        if not trainer.plan.keeps_sampling_mask:
            return self._draw_alike(inputs)
        mask = SamplingMaskRecorder()
        top_k = int(sampling_values(trainer.args)["top_k"])
        log_probs = log_probs_to_ask(top_k, self._most_log_probs) if trainer.use_vllm else None
        self.fewer_rows.recorder = mask
        try:
            with internals.sampling_recorded(trainer, mask, log_probs):
                batch = self._draw_alike(inputs)
        finally:
            self.fewer_rows.recorder = None
        warn_of_missing(mask, top_k)
        completions = batch["completion_ids"]
        values = self.ranks.agreed(mask.entries(completions.size(1), completions.device))
        mask_entries = {key: x.to(completions.device) for key, x in zip(SAMPLING_MASK_KEYS, values, strict=True)}
        return {**batch, **mask_entries}

    @cached_property
    def _most_log_probs(self) -> int:
        return internals.most_log_probs(self.trainer)

    def unknown_mask_reason(self, *, overridden: bool, is_asked: bool) -> str | None:
        """Return why it is not known which tokens the sampler could choose; `None` if it is known.

        Args:
            overridden (`bool`): whether a subclass overrides TRL's generation.
            is_asked (`bool`): whether `keep_sampling_mask` is set. If not, a vLLM server is not asked what it supports.
        """
        trainer = self.trainer
        moved_reason = trainer._features.why_off("sampling mask")
        if moved_reason is not None and not trainer.use_vllm:
            return moved_reason
        top_k = sampling_values(trainer.args)["top_k"]
        generation_kwargs = trainer.args.generation_kwargs or {}
        if overridden or trainer.rollout_func is not None:
            return "the completions come from a `rollout_func` or an overridden method"
        if trainer.tools:
            return "completions with tools are sampled in several turns"
        if trainer.use_vllm and top_k <= 0:
            return "vLLM returns log-probs of a fixed number of tokens, so `top_k` must be set"
        if trainer.use_vllm and "logprobs" in generation_kwargs:
            return "`generation_kwargs` sets `logprobs`"
        if trainer.use_vllm and is_asked and self._most_log_probs < top_k:
            most = self._most_log_probs
            return (
                f"vLLM returns the log-probs of {most} tokens, fewer than `top_k={top_k}` (raise vLLM's `max_logprobs`)"
            )
        if not trainer.use_vllm and trainer.use_transformers_continuous_batching:
            return "transformers' continuous batching does not return the tokens that it could choose"
        if not trainer.use_vllm and (generation_kwargs.get("num_beams") or 1) > 1:
            return "beam search (`num_beams`) does not sample"
        return None

    def _draw_alike(self, inputs: Any) -> dict[str, Any]:
        """Sample and reward as TRL does; ranks that share a model or the tokens of a row get the same completions."""
        ranks = self.ranks
        group = ranks.sequence
        draw = partial(self._trl.draw, inputs, runs_passes=self.trainer.plan.facts.overridden_below is not None)
        if ranks.tensor_parallel is not None:
            ranks.tensor_parallel.share_random_state(ranks.device)
            share = ranks.tensor_parallel.share_
            with internals.gathered_by(ranks.accelerator), internals.shared_scores(self.trainer.model, share):
                return draw()
        if group is None:
            return draw()
        ranks.share_random_state()
        with internals.gathered_by(ranks.accelerator):
            batch = draw()
        tensors = [x for _, x in sorted(batch.items()) if isinstance(x, torch.Tensor)]
        if group.processes is not None and not group.alike(*tensors):
            raise RuntimeError(
                f"The {group.size} ranks that split the tokens of a batch (`{group.kind}_size`) generated different "
                "completions. A rollout function that samples or calls a service must return the same ones on all "
                "ranks of a group."
            )
        return batch

    def _equal_rewards(self, batch: dict[str, Any]) -> Tensor:
        """Return which rows are in groups with identical rewards, `(B,)` bool; if planned, zero their advantages."""
        trainer = self.trainer
        rewards_BF = self._trl.rewards
        if rewards_BF is None:
            return torch.zeros_like(batch["completion_mask"][:, 0], dtype=torch.bool)
        normalized_apart = trainer.multi_objective_aggregation == "normalize_then_sum"
        equal_B = equal_rewards(trainer, rewards_BF, normalized_apart=normalized_apart)
        if trainer.plan.zeroes_equal_rewards:
            batch["advantages"] = batch["advantages"].masked_fill(equal_B, 0.0)
        return equal_B

    def _without_dead_groups(self, batch: dict[str, Any], equal_B: Tensor) -> dict[str, Any]:
        trainer = self.trainer
        size = trainer.num_generations
        dead_G = dead_groups(batch["advantages"], equal_B, size)
        draws = 1
        while (dead := int(self.ranks.reduce(dead_G.sum()))) and draws < trainer.plan.facts.max_draws:
            draw = self._draw(self._further_inputs(len(batch["advantages"])))
            equal_in_draw_B = self._equal_rewards(draw)
            dead_in_draw_G = dead_groups(draw["advantages"], equal_in_draw_B, size)
            batch, dead_G = with_live_groups(batch, dead_G, draw, dead_in_draw_G, size, self._padding())
            draws += 1
        if draws > 1:
            batch["num_items_in_batch"] = trainer.accelerator.gather(loss_mask(batch).sum()).sum()
        metrics = internals.mode_metrics(trainer)
        metrics["dynamic_sampling/draws"].append(draws)
        metrics["dynamic_sampling/dead_groups"].append(dead)
        return batch

    def _further_inputs(self, rows: int) -> list[dict[str, Any]]:
        if self._further is None:
            self._further = self._further_after(0)
        size = self.trainer.num_generations
        accelerator = self.trainer.accelerator
        prompts = self._further.take(rows * accelerator.num_processes // size)
        first = accelerator.process_index * rows // size
        return [dict(prompt) for prompt in prompts[first : first + rows // size] for _ in range(size)]

    def _further_after(self, taken_prompts: int) -> FurtherPrompts:
        trainer = self.trainer
        rows = self.buffer.training_rows()
        return FurtherPrompts(rows, shuffle=trainer.shuffle_dataset, seed=trainer.args.seed + 1, taken=taken_prompts)

    def reorder(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Reorder the rows of a batch that TRL has shuffled, within each optimizer step.

        Rows of a group then share micro-batches, and ranks and micro-batches have about the same number of tokens.
        """
        trainer = self.trainer
        plan = trainer.plan
        self.passes.metrics.added_padding = 0
        # Merged micro-batches are split by prompt anyway
        keeps_groups_together = plan.keeps_groups_together and not plan.merges and not internals.has_images(batch)
        if not plan.balances and not keeps_groups_together:
            return batch
        micro_batches = 1 if plan.facts.keep_groups_together is False else self.micro_batches_per_step()
        step = StepRows(trainer.args.per_device_train_batch_size, micro_batches)
        if plan.merges:
            step = step.merged
        tokens = self.passes.row_tokens(batch)
        trl_tokens = padded_tokens(batch)
        batch = self.balance.reorder(batch, tokens, self._columns(), step, over_ranks=plan.balances)
        self.passes.metrics.added_padding = (padded_tokens(batch) - trl_tokens) // len(batch["completion_ids"])
        metrics = internals.mode_metrics(trainer)
        for name, value in self.balance.metrics().items():
            metrics[name].append(value)
        return batch

    def micro_batches_per_step(self) -> int:
        return micro_batches_of_a_step(self.trainer.args, self.buffer)

    def _padding(self) -> dict[str, float]:
        return self.buffer.padding() | self.routes.padding()

    def _columns(self) -> dict[str, Column]:
        fills = self._padding()

        def column(key: str) -> Column:
            side = "prompt" if key.startswith("prompt_") else "completion"
            multiple = self.trainer.args.pad_to_multiple_of or 1
            return Column(fills.get(key, 0), pads_left=side == "prompt", width=side, multiple=multiple)

        keys = ("prompt_ids", "prompt_mask", "kept_counts", *TOKEN_KEYS)
        columns = {key: column(key) for key in keys} | {"kept_ids": Column(fills["kept_ids"])}
        for key in ROUTE_KEYS:
            side = column(key).width
            # A token's route may be unknown, as those of padding are
            columns[key] = replace(column(key), like=(f"{side}_ids", f"{side}_mask"))
        return columns

    # Checkpoints

    def save(self, folder: Path) -> None:
        plan = self.trainer.plan
        lost = None
        unscored = not all(has_old_policy(x) for x in self.buffer.remaining())
        if unscored and not plan.facts.trust_sampling_log_probs and not plan.gives_trls_batches:
            lost = "training ended before the old policy had scored them"
        self._checkpoints.save(
            folder,
            sampled_at_step=self.buffer.sampled_at_step,
            sampler_is_older=self.buffer.sampler_is_older,
            further_prompts=0 if self._further is None else self._further.taken,
            options=self._schedule(),
            lost=lost,
        )
        self.ahead.save(folder)

    def _schedule(self) -> dict[str, int]:
        # Only those that are on, because earlier checkpoints lack them
        on = {
            "keep_sampling_mask": self.trainer.plan.keeps_sampling_mask,
            "code that reads batches": self.trainer.plan.gives_trls_batches,
        }
        return {name: 1 for name, is_on in on.items() if is_on} | self.routes.schedule()

    def resume(self, folder: Path) -> None:
        saved_generation = self._checkpoints.read(folder, self._schedule())
        self.ahead.resume(folder, same_schedule=saved_generation is not None)
        if saved_generation is None:
            return
        slices = saved_generation.slices
        if slices is not None:
            slices = [with_old_policy_mask(batch) for batch in slices]
        self.buffer.continue_at(saved_generation.micro_batch, slices)
        self.buffer.sampled_at_step = saved_generation.sampled_at_step
        self.buffer.sampler_is_older = saved_generation.sampler_is_older
        self._further = self._further_after(saved_generation.further_prompts)
