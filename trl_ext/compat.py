"""Every name of TRL that is not public API, imported in this one file, and the versions for which that holds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from datasets import IterableDataset
from packaging.specifiers import SpecifierSet

SUPPORTED_TRL = SpecifierSet(">=1.15,<1.17")

if version("trl") not in SUPPORTED_TRL:
    raise ImportError(
        f"trl_ext works with trl{SUPPORTED_TRL}, found trl {version('trl')}. Run `pip install 'trl{SUPPORTED_TRL}'`."
    )

from accelerate.utils import is_peft_model  # noqa: E402
from trl.models import prepare_deepspeed  # noqa: E402
from trl.models.utils import disable_gradient_checkpointing  # noqa: E402
from trl.trainer.utils import (  # noqa: E402
    FusedCausalLMOutput,
    disable_dropout_in_model,
    maybe_gather_lm_head_ctx,
    use_adapter,
)

__all__ = [
    "FusedCausalLMOutput",
    "OwnReference",
    "head_attached_by",
    "loaded_models_recorded",
    "maybe_gather_lm_head_ctx",
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


class Loaded(NamedTuple):
    """A model that TRL loaded, and how to load it again."""

    model: Any
    load: Callable[[], Any]


@contextmanager
def loaded_models_recorded(trainer_class: type) -> Iterator[list[Loaded]]:
    """Within, what `trainer_class.__init__` loads from a path is appended to the list; afterwards the list is empty.

    TRL's own hash of the reference is not taken: only the cache that [`OwnReference`] leaves out reads it, and it costs
    as much as loading.
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


class OwnReference:
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

    def reference_kind(self) -> str:
        """`"model"`, `"adapter"`, `"base"` or `"initial"`: what TRL takes as the reference."""
        if self.ref_model is not None:
            return "model"
        if is_peft_model(self.model):
            return "base" if self._reference_adapter() is None else "adapter"
        return "initial"

    def _reference_adapter(self) -> str | None:
        peft_config = self.accelerator.unwrap_model(self.model).peft_config
        return "ref" if "ref" in peft_config else None

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
        inputs = {k: v for k, v in batch.items() if k not in ("completion_mask", *_REFERENCE_COLUMNS)}
        adapter: AbstractContextManager[Any] = nullcontext()
        if self.ref_model is None and is_peft_model(self.model):
            adapter = use_adapter(self.accelerator.unwrap_model(self.model), self._reference_adapter())
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), checkpointing, adapter, self.accelerator.autocast():
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


_REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
