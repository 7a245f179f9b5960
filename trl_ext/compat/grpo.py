"""The private methods and attributes of TRL's GRPO trainer, under names of ours."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers.trainer_utils import has_length

from .reference import no_adapter_turned
from .rewards import noting_nan


@contextmanager
def sequence_parallelism_hidden(config: Any) -> Iterator[None]:
    """Within, TRL's `GRPOConfig` does not find the context or sequence parallelism that it refuses."""
    asked = config.parallelism_config
    if asked is not None and (asked.cp_enabled or asked.sp_enabled):
        config.parallelism_config = None
    try:
        yield
    finally:
        config.parallelism_config = asked


class GRPOInternals:
    """Mixed in before TRL's `GRPOTrainer`: its private methods and attributes, under names of ours.

    TRL runs its log-prob passes from two places. Where it generates they are deferred: it finds no old-policy and no
    reference log-probs, and `_generated` may add them. In its loss the policy's is answered by what `_answered_by` was
    given. Both are methods of the instance while TRL runs, so that those of a subclass are called for real passes only.
    """

    # Inputs of vision-language models; their rows cannot be told apart here
    _VISION_INPUTS = (
        *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
        *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    )

    _rewards_per_function: torch.Tensor
    reward_funcs: list[Any]
    _train_sampler: Any = None
    _buffered_inputs: list[dict[str, Any]] | None
    _fills_buffer = False  # whether TRL's `_prepare_inputs` runs, in training
    _window_began = 0  # the micro-batch, counted from the first of all, with which the present window began
    _get_per_token_logps_and_entropies: Callable[..., Any]
    # Called with what a turn of generation is given, with what it gives, and with what all turns together give
    _agreed: Callable[[Any], Any]
    vllm_importance_sampling_correction: bool
    _metrics: dict[str, dict[str, list[float]]]

    def _generated(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Called with each batch that was generated and rewarded, before it is shuffled and split."""
        return batch

    def _shuffled(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Called in training with each generation batch that TRL has shuffled, before it is split into slices."""
        return batch

    def _about_to_visit(self) -> None:
        """Called in training before each micro-batch."""

    @contextmanager
    def _in_place_of(self, **methods: Callable[..., Any]) -> Iterator[None]:
        """Within, these stand for the methods of the same names, also for those of a subclass or of the instance."""
        held = {name: vars(self)[name] for name in methods if name in vars(self)}
        vars(self).update(methods)
        try:
            yield
        finally:
            for name in methods:
                vars(self).pop(name, None)
            vars(self).update(held)

    @contextmanager
    def _answered_by(self, model: Any, batch: dict[str, Any], answer: tuple[Any, Any, Any]) -> Iterator[None]:
        """Within, TRL's pass of `model` over `batch` is `answer`: log-probs, entropies and router loss. Others run."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        unanswered = self._get_per_token_logps_and_entropies

        def answered(called: Any, input_ids: torch.Tensor, *positional: Any, **options: Any) -> Any:
            if called is model and torch.equal(input_ids, ids):
                return answer
            return unanswered(called, input_ids, *positional, **options)

        with self._in_place_of(_get_per_token_logps_and_entropies=answered):
            yield

    def _completion_log_probs(
        self, model: Any, batch: dict[str, Any], **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's own pass, or a subclass's, over the rows of `batch`: log-probs and entropies `(B, C)`, router loss.

        Args:
            options: TRL's `batch_size`, `compute_entropy` and `compute_aux_loss`.
        """
        log_probs: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
        log_probs = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            **options,
            **{name: batch[name] for name in self._VISION_INPUTS if name in batch},
        )
        return log_probs

    def _own_pass(self) -> str:
        """The name of the method that scores."""
        return f"`{type(self).__name__}._get_per_token_logps_and_entropies`"

    def _has_own_loss(self) -> bool:
        """Whether a subclass or this instance has replaced TRL's loss."""
        of_class = type(self)._compute_loss  # type: ignore[attr-defined]
        return "_compute_loss" in vars(self) or of_class is not trl.GRPOTrainer._compute_loss

    def _own_step(self) -> str | None:
        """The name of a method, given whole micro-batches, that a subclass or this instance has replaced."""
        ours = next(cls for cls in type(self).__mro__ if "_trl_trainer" in vars(cls))
        for name in ("training_step", "_prepare_inputs", "compute_loss"):
            if name in vars(self) or getattr(type(self), name) is not getattr(ours, name):
                return name
        return None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return self._generated(self._draw(inputs))

    def _draw(self, inputs: Any) -> dict[str, Any]:
        """Completions of `inputs`, rewarded, without log-probs."""
        generate, calculate_rewards = self._generate, self._calculate_rewards  # type: ignore[attr-defined]
        generate_turn = self._generate_single_turn  # type: ignore[attr-defined]
        # The user's rollout and reward functions may run passes of their own
        undeferred = partial(
            self._in_place_of, _get_per_token_logps_and_entropies=self._get_per_token_logps_and_entropies
        )

        def deferred(*_: Any, **__: Any) -> tuple[None, None, None]:
            return None, None, None

        def recorded(*positional: Any, **keywords: Any) -> torch.Tensor:
            with undeferred(), self._nan_noted(calculate_rewards):
                self._rewards_per_function = calculate_rewards(*positional, **keywords)
            return self._rewards_per_function

        def generated(*positional: Any, **keywords: Any) -> Any:
            with undeferred(), self._in_place_of(_generate_single_turn=turn):
                return self._agreed(generate(*positional, **keywords))

        def turn(prompt_ids: Any, *positional: Any, **keywords: Any) -> Any:
            return self._agreed(generate_turn(self._agreed(prompt_ids), *positional, **keywords))

        # Without the correction TRL forms no ratio, which would need the old policy's log-probs
        correction = self.vllm_importance_sampling_correction
        self.vllm_importance_sampling_correction = False
        try:
            with (
                no_adapter_turned(),
                self._in_place_of(
                    _get_per_token_logps_and_entropies=deferred, _generate=generated, _calculate_rewards=recorded
                ),
            ):
                return super()._generate_and_score_completions(inputs)  # type: ignore[misc, no-any-return]
        finally:
            self.vllm_importance_sampling_correction = correction

    @contextmanager
    def _nan_noted(self, calculate_rewards: Any) -> Iterator[None]:
        """Within, and before the first step, it is kept for which completions a reward function gives NaN, not None."""
        held: list[Any] = self.reward_funcs
        self._rewarded_nan: set[int] = set()
        is_trls = getattr(calculate_rewards, "__func__", None) is trl.GRPOTrainer._calculate_rewards
        if is_trls and self._mode == "train" and self.state.global_step == 0:  # type: ignore[attr-defined]
            self.reward_funcs = [noting_nan(reward, self._rewarded_nan) for reward in held]
        try:
            yield
        finally:
            self.reward_funcs = held

    def _gave_nan(self) -> torch.Tensor:
        """The completions of the first generation batch, `(B,)` over all ranks, to which a reward gave NaN itself."""
        rewards_BF, accelerator = self._rewards_per_function, self.accelerator  # type: ignore[attr-defined]
        of_rank = torch.zeros(len(rewards_BF) // accelerator.num_processes, dtype=torch.bool, device=rewards_BF.device)
        of_rank[torch.tensor(sorted(self._rewarded_nan), dtype=torch.long, device=rewards_BF.device)] = True
        are_models = [isinstance(reward, torch.nn.Module) for reward in self.reward_funcs]
        gathered: torch.Tensor = accelerator.gather(of_rank)
        return gathered | rewards_BF[:, are_models].isnan().any(dim=1)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if self._mode == "eval":
            return super()._prepare_inputs(generation_batch)  # type: ignore[misc, no-any-return]
        self._fills_buffer = True
        try:
            with _shuffling_followed_by(self._shuffled):
                inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        finally:
            self._fills_buffer = False
        self._about_to_visit()
        return inputs

    def get_batch_samples(self, *positional: Any, **keywords: Any) -> Any:
        """Transformers' own; called when an accumulation window begins."""
        self._window_began = self._step  # type: ignore[attr-defined]
        return super().get_batch_samples(*positional, **keywords)  # type: ignore[misc]

    def _micro_batches_of_an_epoch(self) -> int | None:
        """How many micro-batches the training data makes; `None` where only its end will tell."""
        loader = self.callback_handler.train_dataloader  # type: ignore[attr-defined]
        return len(loader) if has_length(loader) else None

    def _slices_to_come(self) -> list[dict[str, Any]]:
        """The slices of the generation buffer, from that of the present micro-batch to the last before generation.

        Each is there once, also where `num_iterations` visits it again, but for the present one, which stands at the
        end a second time if it will be visited again.
        """
        buffer = self._buffered_inputs
        if buffer is None:
            return []
        every = len(buffer) * self.num_iterations  # type: ignore[attr-defined]
        visits = min(every - self._step % every, len(buffer) + 1)  # type: ignore[attr-defined]
        return [buffer[(self._step + visit) % len(buffer)] for visit in range(visits)]  # type: ignore[attr-defined]

    def _training_rows(self) -> Any:
        """The training data set, with the columns that reach TRL's generation."""
        dataset = self.train_dataset  # type: ignore[attr-defined]
        if isinstance(dataset, Dataset):
            return self._remove_unused_columns(dataset, description="training")  # type: ignore[attr-defined]
        return dataset

    def _padding(self) -> dict[str, float]:
        """What TRL pads the entries of a generation batch with, where that is not 0."""
        pad_token_id = self._tokenizer.pad_token_id  # type: ignore[attr-defined]
        return {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "tool_mask": 1}

    def _with_kept(self, inputs: dict[str, Any], name: str) -> dict[str, Any]:
        """`inputs` with an entry of the slice that it was made of, where a subclass has left that out."""
        for present in self._slices_to_come()[:1]:
            if name in present and name not in inputs and "old_per_token_logps" in inputs:
                return {**inputs, name: present[name]} if _same_rows(inputs, present) else inputs
        return inputs

    def _present_slice(self, inputs: dict[str, Any]) -> dict[str, Any] | None:
        """The slice of the generation buffer whose rows `inputs` holds, if it will be visited again."""
        slices = self._slices_to_come()
        if not slices or not any(x is slices[0] for x in slices[1:]):
            return None
        return slices[0] if _same_rows(inputs, slices[0]) else None

    def _regenerate(self) -> None:
        """Drop the generation buffer: TRL fills it again at its next micro-batch."""
        self._buffered_inputs = None

    def _micro_batches_trained(self) -> int:
        """How many micro-batches were trained on, counted from the first of all."""
        return int(self._step)  # type: ignore[has-type]

    def _in_mid_cycle(self) -> bool:
        """Whether the next micro-batch is not one at which TRL generates."""
        every: int = self.args.steps_per_generation * self.num_iterations  # type: ignore[attr-defined]
        return self._micro_batches_trained() % every != 0

    def _slices_in_mid_cycle(self) -> list[dict[str, Any]] | None:
        """The generation buffer, where it will be visited again."""
        return self._buffered_inputs if self._in_mid_cycle() else None

    def _continue_at(self, micro_batch: int, slices: list[dict[str, Any]] | None) -> None:
        """Let the next micro-batch be this one, with this generation buffer; `None`: TRL fills it again."""
        self._step, self._buffered_inputs = micro_batch, slices
        self._last_loaded_step = -1  # vLLM has other weights

    def _get_train_sampler(self, *positional: Any, **keywords: Any) -> Any:
        self._train_sampler = super()._get_train_sampler(*positional, **keywords)  # type: ignore[misc]
        return self._train_sampler

    def _draw_orders_of(self, epochs: int) -> None:
        """Let the sampler of the training data be as after so many epochs: it draws their orders one after another."""
        if self._train_sampler is not None:
            for _ in range(epochs):
                next(iter(self._train_sampler), None)

    def get_high_entropy_mask(
        self, entropies: torch.Tensor, mask: torch.Tensor, *positional: Any, **keywords: Any
    ) -> torch.Tensor:
        """TRL's own, and what is below its threshold by a rounding error alone: tokens of one context tie."""
        chosen: torch.Tensor = super().get_high_entropy_mask(entropies, mask, *positional, **keywords)  # type: ignore[misc]
        lowest = torch.where(chosen, entropies, torch.inf).amin()
        rounding = 8 * torch.finfo(entropies.dtype).eps * lowest.clamp(min=1.0)
        return chosen | ((entropies >= lowest - rounding) & mask.bool())

    def _takes_images(self) -> bool:
        """Whether the policy is a vision-language model."""
        return bool(self._is_vlm)  # type: ignore[attr-defined]

    def _has_images(self, batch: dict[str, Any]) -> bool:
        """Whether a batch holds images."""
        return any(name in batch for name in self._VISION_INPUTS)

    @property
    def _mode(self) -> str:
        """`"train"` or `"eval"`."""
        return "train" if self.model.training else "eval"  # type: ignore[attr-defined]

    @contextmanager
    def _metrics_set_aside(self) -> Iterator[None]:
        """Within, what is appended to the metrics is not logged."""
        metrics = self._metrics
        self._metrics = {mode: defaultdict(list) for mode in metrics}
        try:
            yield
        finally:
            self._metrics = metrics

    def _mode_metrics(self) -> dict[str, list[float]]:
        """The metrics of the present mode, train or eval, since the last log: a value for each micro-batch."""
        return self._metrics[self._mode]  # type: ignore[attr-defined]


def _same_rows(inputs: dict[str, Any], present: dict[str, Any]) -> bool:
    return all(_equal(inputs.get(name), present[name]) for name in ("prompt_ids", "completion_ids"))


def _equal(value: Any, tensor: torch.Tensor) -> bool:
    return value is tensor or (isinstance(value, torch.Tensor) and torch.equal(value, tensor))


@contextmanager
def _shuffling_followed_by(rearrange: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Within, what TRL's GRPO trainer has shuffled, by its own draw, is replaced by what `rearrange` makes of it."""
    module: Any = sys.modules[trl.GRPOTrainer.__module__]
    original = module.shuffle_sequence_dict
    module.shuffle_sequence_dict = lambda batch: rearrange(original(batch))
    try:
        yield
    finally:
        module.shuffle_sequence_dict = original
