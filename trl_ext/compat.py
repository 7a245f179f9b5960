"""Every name of TRL that is not public API, imported in this one file, and the versions for which that holds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from packaging.specifiers import SpecifierSet

SUPPORTED_TRL = SpecifierSet(">=1.15,<1.17")

if version("trl") not in SUPPORTED_TRL:
    raise ImportError(
        f"trl_ext works with trl{SUPPORTED_TRL}, found trl {version('trl')}. Run `pip install 'trl{SUPPORTED_TRL}'`."
    )

from trl.models.utils import disable_gradient_checkpointing  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx, use_adapter  # noqa: E402

__all__ = [
    "FusedCausalLMOutput",
    "GRPOInternals",
    "OwnPrecomputeCache",
    "disable_gradient_checkpointing",
    "head_attached_by",
    "maybe_gather_lm_head_ctx",
    "use_adapter",
]


@contextmanager
def head_attached_by(attach: Callable[..., None], trainer_class: type) -> Iterator[None]:
    """Within, `trainer_class.__init__` attaches its models' scoring head with `attach(model, **options)`.

    TRL's trainers call the `add_fused_lm_head` of their module on the policy and on the reference model, after both
    exist and before reference log-probs are precomputed; there is no method to override at that point. The name is put
    back on the way out, so stock trainers keep TRL's head.
    """
    module: Any = sys.modules[trainer_class.__module__]
    original = module.add_fused_lm_head
    module.add_fused_lm_head = attach
    try:
        yield
    finally:
        module.add_fused_lm_head = original


class OwnPrecomputeCache:
    """Mixed in before TRL's `DPOTrainer`: `precompute_key()` is a part of what its cache files are found by.

    TRL finds the file of precomputed reference log-probs by the data set's fingerprint and `_precompute_model_hash`,
    which its `__init__` sets.
    """

    def precompute_key(self) -> tuple[object, ...]:
        """What else the precomputed values depend on."""
        raise NotImplementedError

    @property
    def _precompute_model_hash(self) -> tuple[object, ...]:
        return (self.__dict__["_precompute_model_hash"], *self.precompute_key())

    @_precompute_model_hash.setter
    def _precompute_model_hash(self, model_hash: str | None) -> None:
        self.__dict__["_precompute_model_hash"] = model_hash


class GRPOInternals:
    """Mixed in before TRL's `GRPOTrainer`: its private methods and attributes, under names of ours.

    TRL runs its log-prob passes from two places. Where it generates they are deferred: it finds no old-policy and no
    reference log-probs, and `_generated` may add them. In its loss they are answered by what `_answered_by` was given.
    """

    # Inputs of vision-language models; their rows cannot be told apart here
    _VISION_INPUTS = (
        *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
        *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
    )

    _answer: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] | None = None
    _rewards_per_function: torch.Tensor
    vllm_importance_sampling_correction: bool

    def _generated(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Called with each batch that was generated and rewarded, before it is shuffled and split."""
        return batch

    def _about_to_visit(self) -> None:
        """Called in training before each micro-batch, outside autocast."""

    @contextmanager
    def _answered_by(
        self, log_probs: torch.Tensor | None, entropies: torch.Tensor | None, aux_loss: torch.Tensor | None
    ) -> Iterator[None]:
        """Within, TRL's log-prob passes return these."""
        self._answer = (log_probs, entropies, aux_loss)
        try:
            yield
        finally:
            self._answer = None

    def _completion_log_probs(
        self, model: Any, batch: dict[str, Any], **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's own pass over the rows of `batch`: log-probs and entropies `(B, C)`, and the router loss.

        Args:
            options: TRL's `batch_size`, `compute_entropy` and `compute_aux_loss`.
        """
        return super()._get_per_token_logps_and_entropies(  # type: ignore[misc]
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            **options,
            **{name: batch[name] for name in self._VISION_INPUTS if name in batch},
        )

    def _get_per_token_logps_and_entropies(
        self, model: Any, *positional: Any, **options: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        if self._answer is not None:
            return self._answer
        return super()._get_per_token_logps_and_entropies(model, *positional, **options)  # type: ignore[misc]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return self._generated(self._draw(inputs))

    def _draw(self, inputs: Any) -> dict[str, Any]:
        """Completions of `inputs`, rewarded, without log-probs."""
        # Without the correction TRL forms no ratio, which would need the old policy's log-probs
        correction = self.vllm_importance_sampling_correction
        self.vllm_importance_sampling_correction = False
        try:
            with self._answered_by(None, None, None):
                return super()._generate_and_score_completions(inputs)  # type: ignore[misc, no-any-return]
        finally:
            self.vllm_importance_sampling_correction = correction

    def _calculate_rewards(self, *positional: Any, **keywords: Any) -> torch.Tensor:
        self._rewards_per_function = super()._calculate_rewards(*positional, **keywords)  # type: ignore[misc]
        return self._rewards_per_function

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if self._mode == "train":
            self._about_to_visit()
        return inputs

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

    def _regenerate(self) -> None:
        """Drop the generation buffer: TRL fills it again at its next micro-batch."""
        self._buffered_inputs = None

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

    def _mode_metrics(self) -> dict[str, list[float]]:
        """The metrics of the present mode, train or eval, since the last log: a value for each micro-batch."""
        return self._metrics[self._mode]  # type: ignore[attr-defined]
