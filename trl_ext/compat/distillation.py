"""The private parts of TRL's `DistillationTrainer`, as functions of a trainer.

Dimensions: B rows of P prompt and C completion tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# Entries of a batch that TRL passes on to the backbone
_IMAGE_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


class DistillationInternals(Protocol):
    """The members of TRL's trainer that this file reads."""

    accelerator: Any
    args: Any
    is_deepspeed_enabled: bool
    _forward_redirection: Any


class DistilledRows(NamedTuple):
    """What both models process of a batch."""

    labels: Tensor  # (B, P + C), -100 for tokens that are not in the loss
    inputs: dict[str, Tensor]  # the arguments of the model

    @classmethod
    def of(cls, batch: dict[str, Tensor]) -> "DistilledRows":
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        loss_mask = batch["completion_mask"]
        if "tool_mask" in batch:
            loss_mask = loss_mask * batch["tool_mask"]
        completion_labels = batch["completion_ids"].masked_fill(loss_mask == 0, -100)
        labels = torch.cat([torch.full_like(batch["prompt_ids"], -100), completion_labels], dim=1)
        images = {name: batch[name] for name in _IMAGE_KEYS if name in batch}
        return cls(labels, {"input_ids": ids, "attention_mask": mask, **images})

    def subset(self, rows: list[int]) -> "DistilledRows":
        """Return some rows of a batch of text."""
        return DistilledRows(self.labels[rows], {name: x[rows] for name, x in self.inputs.items()})


def load_teacher(trainer: DistillationInternals, name: str) -> Any:
    """Load the teacher as TRL does."""
    from trl.trainer.utils import create_model_from_path

    args = trainer.args
    keywords = dict(args.teacher_model_init_kwargs or {})
    dtype = keywords.get("dtype")
    keywords["dtype"] = dtype if dtype in ("auto", None) else getattr(torch, dtype)
    if args.teacher_model_revision is not None:
        keywords.setdefault("revision", args.teacher_model_revision)
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        keywords["device_map"] = None
    keywords.setdefault("trust_remote_code", args.trust_remote_code)
    return create_model_from_path(name, **keywords)


def prepare_teacher(trainer: DistillationInternals, model: Any) -> Any:
    """Return the teacher in the engine's wrapper, as TRL does."""
    if trainer.is_deepspeed_enabled:
        from trl.models import prepare_deepspeed

        return prepare_deepspeed(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


def call_in_wrapper(trainer: DistillationInternals, wrapper: Any, run: Callable[..., Any], *positional: Any) -> Any:
    """Return `run(model, *positional)`, called in the forward of the engine's `wrapper`, which gathers its weights."""
    model = trainer.accelerator.unwrap_model(wrapper)
    return trainer._forward_redirection(wrapper, model, run, model, *positional)
