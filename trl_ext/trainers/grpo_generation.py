"""GRPO's generation: sampling, rewards, dynamic sampling, and checkpoints in the middle of a generation cycle."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..compat import grpo as internals
from ..compat.replaced import replaced
from ..distributed.exchange import Column
from ..distributed.ranks import Ranks
from ..distributed.tensor_parallel import TensorParallel
from ..planning.dynamic_sampling import FurtherPrompts, dead_groups, with_live_groups
from ..planning.grpo import GRPOPlan
from ..planning.loss_inputs import BY_TOKEN, has_old_policy, with_scored
from ..planning.micro_batches import micro_batches_per_step
from ..planning.non_finite import check_first_rewards
from ..planning.plan import Plan
from ..planning.rows import KEPT_CLASSES, loss_mask, rows_of_equal_rewards
from ..sampler.kept import SamplingMask, log_probs_to_ask, warn_of_missing
from .generation_checkpoints import GenerationCheckpoints
from .grpo_scoring import GRPOScoring
from .non_finite import NonFiniteLoss
from .row_balance import RowBalance

logger = logging.getLogger("trl_ext")


class Trainer(internals.GRPOInternals, Protocol):
    """The trainer members that generation reads."""

    beta: float
    multi_objective_aggregation: str
    num_generations: int
    reward_func_names: list[str]
    reward_weights: Tensor
    shuffle_dataset: bool
    _non_finite: NonFiniteLoss

    @property
    def plan(self) -> GRPOPlan: ...

    def _plan_again(self) -> None: ...

    def explain(self) -> Plan: ...


class GRPOGeneration:
    def __init__(
        self, trainer: Trainer, ranks: Ranks, scoring: GRPOScoring, buffer: internals.Buffer, balance: RowBalance
    ) -> None:
        self.trainer, self.ranks, self.scoring, self.buffer, self.balance = trainer, ranks, scoring, buffer, balance
        self._trl = internals.without_passes(trainer)
        self._checkpoints = GenerationCheckpoints(trainer, ranks, buffer)
        self._further: FurtherPrompts | None = None
        self._fills_buffer = False

    def of_batch(self, inputs: Any) -> dict[str, Any]:
        """Sample and reward a generation batch, in place of TRL's `_generate_and_score_completions`."""
        trainer, training = self.trainer, self.trainer.model.training
        batch = self._draw(inputs)
        if training:
            self.scoring.sampled_at_step = trainer.state.global_step
            # An override in place of TRL's generation may compute advantages without rewards
            has_rewards = self._trl.rewards is not None
            # Infinite rewards of any batch are the business of `on_non_finite_loss`, if it is set
            if has_rewards and trainer.state.global_step == 0 and trainer._non_finite.action is None:
                check_first_rewards(self._trl.rewards, trainer.reward_weights, trainer.reward_func_names)
            equal_B = self._equal_rewards(batch)
            if trainer.plan.facts.max_draws > 1:
                batch = self._without_dead_groups(batch, equal_B)
        self._score(batch)
        # The user's functions may have drawn random numbers, and TRL shuffles next
        self.ranks.share_random_state()
        return batch

    def _score(self, batch: dict[str, Any]) -> None:
        """Add the log-probs that code of the user may read before the batch is in TRL's buffer."""
        plan, training = self.trainer.plan, self.trainer.model.training
        # An overridden `_prepare_inputs` may keep batches in its own buffer, and evaluation has none
        is_buffered = training and self._fills_buffer
        if plan.facts.overridden_below is not None:
            self.scoring.measure_sampler_of(batch)
        elif plan.scores_at_generation or (plan.gives_trls_batches and not is_buffered):
            self.scoring.score_as_trl(batch)
        elif not training:
            self.scoring.score_reference([batch])

    @contextmanager
    def fills_buffer(self) -> Iterator[None]:
        """Rearrange the rows of a generation batch in the `with` block, in which TRL puts it into its buffer."""
        with replaced(self, _fills_buffer=True), internals.shuffled_then(self.rearranged):
            yield

    def _draw(self, inputs: Any) -> dict[str, Any]:
        trainer = self.trainer
        if not trainer.plan.keeps_sampling_mask:
            return self._drawn(inputs)
        mask, asked, top_k = SamplingMask(), None, int(sampling_values(trainer.args)["top_k"])
        if trainer.use_vllm:
            asked = log_probs_to_ask(top_k, self._most_log_probs)
        with internals.sampling_recorded(trainer, mask, asked):
            batch = self._drawn(inputs)
        warn_of_missing(mask, top_k)
        completions = batch["completion_ids"]
        entries = self.ranks.agreed(mask.entries(completions.size(1), completions.device))
        return {**batch, **{name: x.to(completions.device) for name, x in zip(KEPT_CLASSES, entries, strict=True)}}

    @cached_property
    def _most_log_probs(self) -> int:
        return internals.most_log_probs(self.trainer)

    def unknown_mask_reason(self, *, overridden: bool, is_asked: bool) -> str | None:
        """Return why it is not known which tokens the sampler could choose; `None` if it is known.

        Args:
            overridden (`bool`): whether a subclass overrides TRL's generation.
            is_asked (`bool`): whether `keep_sampling_mask` is set. If not, a vLLM server is not asked what it supports.
        """
        trainer, top_k = self.trainer, sampling_values(self.trainer.args)["top_k"]
        given = trainer.args.generation_kwargs or {}
        if overridden or trainer.rollout_func is not None:
            return "the completions come from a `rollout_func` or an overridden method"
        if trainer.tools:
            return "completions with tools are sampled in several turns"
        if trainer.use_vllm and top_k <= 0:
            return "vLLM returns the log-probs of a fixed number of tokens (set `top_k` too)"
        if trainer.use_vllm and "logprobs" in given:
            return "`generation_kwargs` sets `logprobs`"
        if trainer.use_vllm and is_asked and self._most_log_probs < top_k:
            most = self._most_log_probs
            return f"vLLM returns the log-probs of {most} tokens, fewer than `top_k={top_k}` (raise its `max_logprobs`)"
        if not trainer.use_vllm and trainer.use_transformers_continuous_batching:
            return "transformers' continuous batching does not return the tokens that it could choose"
        if not trainer.use_vllm and (given.get("num_beams") or 1) > 1:
            return "beam search (`num_beams`) does not sample"
        return None

    def _drawn(self, inputs: Any) -> dict[str, Any]:
        ranks, group = self.ranks, self.ranks.sequence
        draw = partial(self._trl.draw, inputs, runs_passes=self.trainer.plan.facts.overridden_below is not None)
        if ranks.tensor_parallel is not None:
            ranks.tensor_parallel.share_random_state(ranks.device)
            with internals.gathered_by(ranks.accelerator), self._same_samples(ranks.tensor_parallel):
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

    def _same_samples(self, ranks: TensorParallel) -> AbstractContextManager[None]:
        """Make `generate` use the first rank's scores in the `with` block, because devices may round differently."""
        model = self.trainer.model
        generate = model.generate

        def of_first_rank(_: Tensor, scores: Tensor) -> Tensor:
            return ranks.share_(scores.clone(memory_format=torch.contiguous_format))

        def in_step(*positional: Any, logits_processor: Any = None, **keywords: Any) -> Any:
            processors = LogitsProcessorList([*(logits_processor or []), of_first_rank])
            return generate(*positional, logits_processor=processors, **keywords)

        return replaced(model, generate=in_step)

    def _equal_rewards(self, batch: dict[str, Any]) -> Tensor:
        """Return which rows are in groups with identical rewards, `(B,)` bool; if planned, zero their advantages."""
        trainer, rewards = self.trainer, self._trl.rewards
        if rewards is None:
            return torch.zeros_like(batch["completion_mask"][:, 0], dtype=torch.bool)
        equal = rows_of_equal_rewards(  # on the host: on a device these are a dozen tiny kernels
            rewards.cpu(),
            trainer.reward_weights.cpu(),
            trainer.num_generations,
            normalized_apart=trainer.multi_objective_aggregation == "normalize_then_sum",
        )
        equal_B = equal.view(trainer.accelerator.num_processes, -1)[trainer.accelerator.process_index]
        equal_B = equal_B.to(rewards.device, non_blocking=True)
        if trainer.plan.zeroes_equal_rewards:
            batch["advantages"] = batch["advantages"].masked_fill(equal_B, 0.0)
        return equal_B

    def _without_dead_groups(self, batch: dict[str, Any], equal_B: Tensor) -> dict[str, Any]:
        trainer, size = self.trainer, self.trainer.num_generations
        dead_G, draws = dead_groups(batch["advantages"], equal_B, size), 1
        while (left := int(self.ranks.reduce(dead_G.sum()))) and draws < trainer.plan.facts.max_draws:
            draw = self._draw(self._further_inputs(len(batch["advantages"])))
            equal_in_draw_B = self._equal_rewards(draw)
            dead_in_draw_G = dead_groups(draw["advantages"], equal_in_draw_B, size)
            batch, dead_G = with_live_groups(batch, dead_G, draw, dead_in_draw_G, size, self.buffer.padding())
            draws += 1
        if draws > 1:
            batch["num_items_in_batch"] = trainer.accelerator.gather(loss_mask(batch).sum()).sum()
        metrics = internals.mode_metrics(trainer)
        metrics["dynamic_sampling/draws"].append(draws)
        metrics["dynamic_sampling/dead_groups"].append(left)
        return batch

    def _further_inputs(self, rows: int) -> list[dict[str, Any]]:
        if self._further is None:
            self._further = self._further_after(0)
        size, accelerator = self.trainer.num_generations, self.trainer.accelerator
        prompts = self._further.take(rows * accelerator.num_processes // size)
        first = accelerator.process_index * rows // size
        return [dict(prompt) for prompt in prompts[first : first + rows // size] for _ in range(size)]

    def _further_after(self, taken: int) -> FurtherPrompts:
        trainer = self.trainer
        rows = self.buffer.training_rows()
        return FurtherPrompts(rows, shuffle=trainer.shuffle_dataset, seed=trainer.args.seed + 1, taken=taken)

    def rearranged(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Reorder the rows of a batch that TRL has shuffled, within each optimizer step.

        Rows of a group then share micro-batches, and ranks and micro-batches have about the same number of tokens.
        """
        trainer, plan, args = self.trainer, self.trainer.plan, self.trainer.args
        if not plan.balances and (not plan.keeps_groups_together or plan.merges or internals.has_images(batch)):
            return batch
        together = 1 if plan.facts.keep_groups_together is False else self.micro_batches_per_step()
        unit = {"rows_of_a_slice": args.per_device_train_batch_size, "micro_batches_per_step": together}
        if plan.merges:
            unit = {"rows_of_a_slice": args.per_device_train_batch_size * together, "micro_batches_per_step": 1}
        tokens = self.scoring.row_tokens(batch)
        batch = self.balance.arranged(batch, tokens, self._columns(), unit, over_ranks=plan.balances)
        metrics = internals.mode_metrics(trainer)
        for name, value in self.balance.metrics().items():
            metrics[name].append(value)
        return batch

    def micro_batches_per_step(self) -> int:
        """Return how many slices of the generation batch that begins now are certain to share an optimizer step."""
        args = self.trainer.args
        return micro_batches_per_step(
            steps_per_generation=args.steps_per_generation,
            accumulation_steps=args.gradient_accumulation_steps,
            micro_batches_of_an_epoch=self.buffer.micro_batches_of_an_epoch,
            window_began=self.buffer.window_began,
        )

    def _columns(self) -> dict[str, Column]:
        fills = self.buffer.padding()

        def column(name: str) -> Column:
            side = "prompt" if name.startswith("prompt_") else "completion"
            multiple = self.trainer.args.pad_to_multiple_of or 1
            return Column(fills.get(name, 0), left=side == "prompt", width=side, multiple=multiple)

        names = ("prompt_ids", "prompt_mask", "kept_counts", *BY_TOKEN)
        return {name: column(name) for name in names} | {"kept_ids": Column(fills["kept_ids"])}

    # Checkpoints

    def save(self, folder: Path) -> None:
        plan, lost = self.trainer.plan, None
        unscored = not all(has_old_policy(x) for x in self.buffer.to_come())
        if unscored and not plan.facts.trust_sampling_log_probs and not plan.gives_trls_batches:
            lost = "training ended before the old policy had scored them"
        self._checkpoints.save(
            folder,
            sampled_at_step=self.scoring.sampled_at_step,
            further_prompts=0 if self._further is None else self._further.taken,
            options=self._schedule(),
            lost=lost,
        )

    def _schedule(self) -> dict[str, int]:
        # Only those that are on, because earlier checkpoints lack them
        on = {
            "keep_sampling_mask": self.trainer.plan.keeps_sampling_mask,
            "code that reads batches": self.trainer.plan.gives_trls_batches,
        }
        return {name: 1 for name, is_on in on.items() if is_on}

    def resume(self, folder: Path) -> None:
        saved = self._checkpoints.read(folder, self._schedule())
        if saved is None:
            return
        slices = None if saved.slices is None else [with_scored(inputs) for inputs in saved.slices]
        self.buffer.continue_at(saved.micro_batch, slices)
        self.scoring.sampled_at_step = saved.sampled_at_step
        self._further = self._further_after(saved.further_prompts)


def sampling_values(args: Any) -> dict[str, float]:
    """Return the values of `top_p`, `top_k` and `min_p` that the sampler gets."""
    whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    # `generation_kwargs` override the arguments
    return {name: (args.generation_kwargs or {}).get(name, getattr(args, name)) or whole[name] for name in whole}


def truncated_sampling(args: Any) -> tuple[str, ...]:
    """Return the arguments, as "name=value", that truncate the distribution of sampled tokens."""
    given = sampling_values(args)
    cuts = {"top_p": given["top_p"] < 1.0, "top_k": given["top_k"] > 0, "min_p": given["min_p"] > 0.0}
    return tuple(f"{name}={given[name]}" for name, is_cut in cuts.items() if is_cut)
