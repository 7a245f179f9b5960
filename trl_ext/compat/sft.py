"""The private parts of TRL's `SFTTrainer`: its loss with `label_smoothing_factor`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from .replaced import replaced


class SmoothingInternals(Protocol):
    """The members of the trainer that this file reads or replaces."""

    label_smoother: Any
    compute_loss_func: Any
    args: Any


def smooths_labels(trainer: SmoothingInternals) -> bool:
    """Return whether TRL's loss would smooth labels with all logits of transformers' `LabelSmoother`."""
    is_transformers = type(trainer.label_smoother).__module__.startswith("transformers.")  # not one of the user
    return is_transformers and trainer.compute_loss_func is None and trainer.args.loss_type == "nll"


@contextmanager
def smoothed_by_head(trainer: SmoothingInternals, model: Any, labels: Tensor) -> Iterator[Callable[..., Any]]:
    """Make TRL's loss smooth labels with the head's mean log-probs in the `with` block, which yields its model.

    TRL runs the model twice: for logits, and without a gradient for the head's scores, from which it computes metrics.
    The yielded model runs once for both.

    Args:
        labels (`Tensor`): of the batch, `(B, S)`.
    """
    smoothing = trainer.label_smoother.epsilon
    scores: Any = None

    def score(**model_inputs: Any) -> Any:
        nonlocal scores
        if scores is None:
            scores = model(**{**model_inputs, "labels": labels, "fused_lm_head": True})
        elif "fused_lm_head" not in model_inputs:
            return model(**model_inputs)  # the logits for metrics of the user
        return scores

    def smoothed_loss(outputs: Any, labels: Tensor, shift_labels: bool, num_items_in_batch: Any = None) -> Tensor:
        # Both are 0 where there is no label
        log_probs = (1 - smoothing) * outputs.log_probs + smoothing * outputs.mean_log_probs
        tokens = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss: Tensor = -log_probs.sum() / tokens
        return loss

    with replaced(trainer, label_smoother=smoothed_loss):
        yield score
