"""The private parts of TRL's `DPOTrainer`, as functions of a trainer.

Dimensions: B pairs, so 2B rows, the chosen ones first; S tokens of the longest row.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import pyarrow.compute as pc
import torch
import trl
from datasets import Dataset
from torch import Tensor

from ..scoring.output import FusedCausalLMOutput
from .reference import PAIR_COLUMNS, ReferenceInternals
from .replaced import next_of, replaced

# Digests of the source of TRL's loss in the releases that were read. No term of these reads a value that it gathers, so
# the loss of a rank needs only the rank's own rows
_LOSSES_OF_ONE_RANK = frozenset(
    {
        "5e58a1699e0d76cd093095fa24cfe6ca5cb950fa73ad769d4e4c483d6ff722d2",  # 1.15, 1.16
    }
)

# TRL's sums of log-probs. Code of the user in its place is for precomputing, and TRL's loss does not call it
_REFERENCE_SUMS: Any = getattr(getattr(trl, "DPOTrainer", None), "compute_ref_log_probs", None)


class DPOInternals(ReferenceInternals, Protocol):
    """The members of TRL's trainer that this file reads or replaces."""

    loss_types: list[str]
    loss_weights: list[float]
    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: int
    train_dataset: Any
    _tokenizer: Any


# The policy's pass


def score_policy(trainer: DPOInternals, model: Any, batch: dict[str, Any], labels: Tensor) -> FusedCausalLMOutput:
    """Run the policy with the arguments that TRL's loss would give it. `labels`, `(2B, S)`: -100 is not scored."""
    inputs = {name: x for name, x in batch.items() if name not in ("completion_mask", *PAIR_COLUMNS)}
    inputs["use_cache"] = False
    if trainer.aux_loss_enabled:
        inputs["output_router_logits"] = True
    scores: FusedCausalLMOutput = model(**inputs, labels=labels, fused_lm_head=True)
    return scores


# TRL's loss


def is_loss_of_one_rank(trainer: DPOInternals) -> bool:
    """Whether the source of TRL's loss is known, and no term of it depends on the rows of other ranks."""
    return _digest(next_of(trainer)._compute_loss.__func__) in _LOSSES_OF_ONE_RANK


@cache
def _digest(function: Callable[..., Any]) -> str | None:
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except OSError:  # an installation without sources
        return None


class _AsIfAlone:
    """An accelerator whose gathers return only this rank's values."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return input_data


def loss_of_scores(
    trainer: DPOInternals,
    terms: list[tuple[str, float]],
    reference: Tensor | Callable[..., Any] | None,
    *,
    rank_metrics: dict[str, list[float]] | None = None,
    router_loss: bool = True,
) -> AbstractContextManager[None]:
    """Make TRL's loss in the `with` block compute `terms`, from log-probs of the reference that are finished.

    Args:
        terms (`list[tuple[str, float]]`): loss types with their weights.
        reference (`Tensor` of shape `(2B, S - 1)` or `Callable`, *optional*):
            log-probs, or a function to call as the model; None if the batch has the sums of the log-probs.
        rank_metrics (`dict`, *optional*):
            TRL logs the metrics of this rank's rows here, without a collective. By default, it logs those of all ranks.
        router_loss (`bool`): whether the loss has the router loss, if the trainer has one.
    """
    members: dict[str, Any] = {
        "loss_types": [name for name, _ in terms],
        "loss_weights": [weight for _, weight in terms],
        "ref_model": reference if callable(reference) else lambda **_: FusedCausalLMOutput(log_probs=reference),
        "precompute_ref_logps": reference is None,
        "aux_loss_enabled": trainer.aux_loss_enabled and router_loss,
    }
    if rank_metrics is not None:
        members["_metrics"] = dict.fromkeys(trainer._metrics, rank_metrics)
        members["_total_train_tokens"] = 0
        members["accelerator"] = _AsIfAlone(trainer.accelerator)
    return replaced(trainer, **members)


def completion_sums(trainer: DPOInternals, log_probs: Tensor, batch: dict[str, Any]) -> Tensor:
    """Return `log_probs`, `(2B, S - 1)`, summed over each completion as in TRL's loss: `(2, B)`, without a graph."""

    def outputs(**_: Any) -> FusedCausalLMOutput:
        return FusedCausalLMOutput(log_probs=log_probs)

    # Without a reference model, TRL would switch the adapters of the policy
    with replaced(trainer, ref_model=outputs):
        return torch.stack(_REFERENCE_SUMS(trainer, outputs, batch))


# Metrics


def mode_metrics(trainer: DPOInternals, mode: str | None = None) -> dict[str, list[float]]:
    return trainer._metrics[mode or ("train" if trainer.model.training else "eval")]


def log_metrics(trainer: DPOInternals, values: dict[str, float], metrics: dict[str, list[float]] | None = None) -> None:
    """Log `values` in `metrics`, by default those that TRL logs now."""
    metrics = mode_metrics(trainer) if metrics is None else metrics
    for name, value in values.items():
        metrics[name].append(value)


def log_tokens(trainer: DPOInternals, count: int) -> None:
    trainer._total_train_tokens += count
    mode_metrics(trainer)["num_tokens"] = [trainer._total_train_tokens]


def drop_reward_metrics(trainer: DPOInternals) -> None:
    metrics = mode_metrics(trainer)
    for name in [name for name in metrics if name.startswith("rewards/")]:
        del metrics[name]


def pairs_not_repeated(trainer: DPOInternals, pairs: int) -> int:
    """Return the number of this rank's `pairs`, without repeats that Accelerate adds to fill the last batch."""
    accelerator = trainer.accelerator
    state = accelerator.gradient_state
    is_last = state.end_of_dataloader and (state.sync_gradients or not trainer.model.training)
    if not (is_last and state.remainder > 0 and accelerator.even_batches):
        return pairs
    return min(max(state.remainder - accelerator.process_index * pairs, 0), pairs)


def has_repeats(trainer: DPOInternals) -> bool:
    """Whether the latest batch is the last of an epoch, and Accelerate may have filled it with repeated pairs.

    It does not read the dataloader's remainder, which differs after a checkpoint is resumed.
    """
    size = trainer.args.per_device_train_batch_size * trainer.accelerator.num_processes
    is_even = isinstance(trainer.train_dataset, Dataset) and len(trainer.train_dataset) % size == 0
    return bool(trainer.accelerator.gradient_state.end_of_dataloader) and not is_even


# Rows and pairs


def rows_of_pairs(batch: dict[str, Any], pairs: list[int]) -> Tensor:
    """Return the rows of `pairs` in a batch: the chosen ones, then the rejected ones."""
    all_pairs = len(batch["completion_mask"]) // 2
    rejected = [all_pairs + pair for pair in pairs]
    return torch.tensor([*pairs, *rejected], device=batch["completion_mask"].device)


def select_rows(values: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Return the rows of all tensors of shape (2B, ...)."""
    return {name: x[rows.to(x.device)] if torch.is_tensor(x) and x.dim() > 1 else x for name, x in values.items()}


def select_pairs(batch: dict[str, Any], pairs: list[int]) -> dict[str, Any]:
    """Return a batch of some pairs."""
    columns = {name: x[pairs] for name, x in batch.items() if name in PAIR_COLUMNS}
    return select_rows(batch, rows_of_pairs(batch, pairs)) | columns


def select_scores(scores: FusedCausalLMOutput, rows: Tensor) -> FusedCausalLMOutput:
    return FusedCausalLMOutput(**select_rows(dict(scores.items()), rows))


def join_scores(parts: list[dict[str, Any]], order: Tensor) -> FusedCausalLMOutput:
    """Return the scores of several forwards as one, with their rows in `order`."""
    last = parts[-1]
    joined_scores = {name: torch.cat([part[name] for part in parts])[order] for name, x in last.items() if x.dim() > 1}
    return FusedCausalLMOutput(**{**last, **joined_scores})


def pad_token_id(trainer: DPOInternals) -> int:
    return int(trainer._tokenizer.pad_token_id)


def largest_token_ids(dataset: Any, rows: int) -> Iterator[int | None]:
    if not isinstance(dataset, Dataset):
        return
    columns = [x for x in ("prompt_ids", "chosen_ids", "rejected_ids") if x in dataset.column_names]
    if columns:
        first = dataset.select_columns(columns).with_format("arrow")[:rows]
        yield from (pc.max(pc.list_flatten(first[column])).as_py() for column in columns)
