"""Where TRL's trainers load a reference, score with it, and what their adapters stand for."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import trl
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from trl.models import prepare_deepspeed
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import (
    disable_dropout_in_model,
)

from .dpo import _PAIR_COLUMNS
from .head import FusedCausalLMOutput


@contextmanager
def unrecorded_pass(trainer: Any) -> Iterator[None]:
    """Within, a model of `trainer` is called without gradients, and without gradient checkpointing, as TRL does it."""
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        yield


class Loaded(NamedTuple):
    """A model that TRL loaded, and how to load it again."""

    model: Any
    load: Callable[[], Any]


@contextmanager
def loaded_models_recorded(trainer_class: type) -> Iterator[list[Loaded]]:
    """Within, what `trainer_class.__init__` loads from a path is appended to the list; afterwards the list is empty.

    TRL's own hash of the reference is not taken: only the cache that [`ReferenceGiven`] leaves out reads it, and it
    costs as much as loading.
    """
    module: Any = sys.modules[trainer_class.__module__]
    original, hash_module = module.create_model_from_path, module.hash_module
    loaded: list[Loaded] = []

    def create(*positional: Any, **keywords: Any) -> Any:
        model = original(*positional, **keywords)
        loaded.append(Loaded(model, lambda: original(*positional, **keywords)))
        return model

    module.create_model_from_path, module.hash_module = create, lambda _: None
    try:
        yield loaded
    finally:
        module.create_model_from_path, module.hash_module = original, hash_module
        loaded.clear()


@contextmanager
def no_adapter_copied_by(trainer_class: type) -> Iterator[None]:
    """Within, `trainer_class.__init__` makes no adapter "ref" of a `PeftModel` that comes without a `peft_config`.

    Whether it makes one is the first that it asks the `is_peft_model` of its module for.
    """
    module: Any = sys.modules[trainer_class.__module__]
    original = module.is_peft_model

    def asked_first(_: Any) -> bool:
        module.is_peft_model = original
        return False

    module.is_peft_model = asked_first
    try:
        yield
    finally:
        module.is_peft_model = original


class ReferenceGiven:
    """Mixed in before TRL's `DPOTrainer`: its reference log-probs are asked for, and given, by the names below."""

    # Of the trainer that this is mixed in before
    ref_model: Any
    precompute_ref_logps: bool
    _precompute_engine: Any
    model: Any
    args: Any
    accelerator: Any
    callback_handler: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    aux_loss_enabled: bool
    reference_pass: Callable[[], AbstractContextManager[None]]

    def fill_reference(self, dataset: Any, name: str, batch_size: int) -> None:
        """Stands for TRL's precomputing over a map-style data set."""
        raise NotImplementedError

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        if isinstance(dataset, IterableDataset):
            return super()._precompute_ref_logps(dataset, name, batch_size)  # type: ignore[misc]  # raises, and says why
        self.fill_reference(dataset, name, batch_size)
        return dataset

    @property
    def takes_images(self) -> bool:
        """Whether the data sets hold images."""
        return bool(self._is_vision_dataset)  # type: ignore[attr-defined]

    def adapters_of_policy(self) -> dict[str, Any]:
        """The configuration of each adapter that the policy has now."""
        return dict(self.accelerator.unwrap_model(self.model).peft_config) if is_peft_model(self.model) else {}

    def as_fed(self, dataset: Dataset) -> Dataset:
        """A map-style data set with the columns that reach the collator."""
        rows: Dataset = self._remove_unused_columns(dataset, description="training")  # type: ignore[attr-defined]
        return rows

    def policy_before_training(self) -> Any:
        """The policy in what places and gathers its parameters, as long as `train` has not prepared it."""
        if not self.is_deepspeed_enabled:
            return self.model
        if self._precompute_engine is None:
            self._precompute_engine = prepare_deepspeed(self.model, self.accelerator)
        return self._precompute_engine

    def score_as_reference(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """Log-probs of shape `(rows, S - 1)` from one pass of `model`, with the reference's adapter on, or none."""
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        inputs = {k: v for k, v in batch.items() if k not in ("completion_mask", *_PAIR_COLUMNS)}
        text_config = self.accelerator.unwrap_model(model).config.get_text_config()
        if self.aux_loss_enabled and hasattr(text_config, "output_router_logits"):
            inputs["output_router_logits"] = True  # the policy's pass runs on every token then, so this one does too
        with self.reference_pass(), self.accelerator.autocast():
            scored = model(**inputs, use_cache=False, labels=labels, fused_lm_head=True, head_outputs=("log_probs",))
        log_probs: torch.Tensor = scored.log_probs[:, -(labels.shape[1] - 1) :]  # prompt learning puts tokens before
        return log_probs

    @contextmanager
    def reference_given(self, log_probs: torch.Tensor | None) -> Iterator[None]:
        """Within, TRL's loss reads these `(2B, S - 1)` log-probs, or, for None, the sums in the batch's columns."""
        held = self.ref_model, self.precompute_ref_logps
        self.ref_model = lambda **_: FusedCausalLMOutput(log_probs=log_probs)
        self.precompute_ref_logps = log_probs is None
        try:
            yield
        finally:
            self.ref_model, self.precompute_ref_logps = held

    def drop_metrics(self, prefix: str) -> None:
        """Keep metrics that begin with `prefix` out of the next log."""
        metrics = self._metrics["train" if self.model.training else "eval"]  # type: ignore[attr-defined]
        for name in [name for name in metrics if name.startswith(prefix)]:
            del metrics[name]

    def loaded_reference(self, load: Callable[[], Any]) -> Any:
        """A reference model as TRL's `__init__` makes it, before its head is attached."""
        model = load()
        if self.args.disable_dropout:
            disable_dropout_in_model(model)
        return model


@contextmanager
def no_adapter_turned() -> Iterator[None]:
    """Within, TRL's GRPO trainer leaves the adapters as they are where it would run a reference pass."""
    module: Any = sys.modules[trl.GRPOTrainer.__module__]
    original = module.use_adapter
    module.use_adapter = lambda *_, **__: nullcontext()
    try:
        yield
    finally:
        module.use_adapter = original
