"""How TRL's `DPOTrainer` and `KTOTrainer` load, place and run their reference, as functions of a trainer."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from datasets import Dataset

from .replaced import module_of

# Columns of a batch with one value per pair, which are not model inputs
PAIR_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps", "chosen_reward", "rejected_reward")


class ReferenceInternals(Protocol):
    """The members of TRL's trainer that this file reads or replaces."""

    accelerator: Any
    args: Any
    model: Any
    ref_model: Any
    precompute_ref_logps: bool
    aux_loss_enabled: bool
    is_deepspeed_enabled: bool
    _precompute_engine: Any
    _features: Any  # ours
    _is_vision_dataset: bool

    def _remove_unused_columns(self, dataset: Dataset, description: str | None = None) -> Dataset: ...


def labels_of(batch: dict[str, Any]) -> torch.Tensor:
    return batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)  # type: ignore[no-any-return]


def score_as_reference(
    trainer: ReferenceInternals, model: Any, batch: dict[str, Any], labels: torch.Tensor
) -> torch.Tensor:
    inputs = {k: v for k, v in batch.items() if k not in ("completion_mask", *PAIR_COLUMNS)}
    if trainer.aux_loss_enabled:
        text_config = trainer.accelerator.unwrap_model(model).config.get_text_config()
        if hasattr(text_config, "output_router_logits"):
            inputs["output_router_logits"] = True  # as in the policy's pass
    with trainer.accelerator.autocast():
        outputs = model(**inputs, use_cache=False, labels=labels, fused_lm_head=True, head_outputs=("log_probs",))
    return outputs.log_probs[:, -(labels.shape[1] - 1) :]


def policy_before_training(trainer: ReferenceInternals) -> Any:
    if not trainer.is_deepspeed_enabled:
        return trainer.model
    trainer._features.require("precomputing under DeepSpeed")
    from trl.models import prepare_deepspeed

    if trainer._precompute_engine is None:
        trainer._precompute_engine = prepare_deepspeed(trainer.model, trainer.accelerator)
    return trainer._precompute_engine


def holds_images(trainer: ReferenceInternals) -> bool:
    return bool(trainer._is_vision_dataset)


def training_columns(trainer: ReferenceInternals, dataset: Dataset) -> Dataset:
    """Return the dataset with only the columns that the collator gets."""
    return trainer._remove_unused_columns(dataset, description="training")


def made_as_reference(trainer: ReferenceInternals, load: Callable[[], Any]) -> Any:
    from trl.trainer.utils import disable_dropout_in_model

    model = load()
    if trainer.args.disable_dropout:
        disable_dropout_in_model(model)
    return model


def recorded_loads(trainer_class: type, loads: list[tuple[Any, Callable[[], Any]]]) -> dict[str, Any]:
    """Return replacements for names in a trainer's module, which record each model that TRL loads, with its loader."""
    return {**recorded_model_loads(trainer_class, loads), "hash_module": lambda _: None}


def recorded_model_loads(trainer_class: type, loads: list[tuple[Any, Callable[[], Any]]]) -> dict[str, Any]:
    """As `recorded_loads`, for a trainer that does not precompute reference log-probs."""
    original = module_of(trainer_class).create_model_from_path

    def create(*positional: Any, **keywords: Any) -> Any:
        model = original(*positional, **keywords)
        loads.append((model, lambda: original(*positional, **keywords)))
        return model

    return {"create_model_from_path": create}
