"""The private parts of TRL's `DPOTrainer`, as functions of a trainer."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import pyarrow.compute as pc
import torch
from datasets import Dataset

from .choices import FusedCausalLMOutput
from .reference import PAIR_COLUMNS, ReferenceInternals
from .replaced import next_of, replaced


class _Wrapper:
    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class Recorded(_Wrapper):
    """A model that records the `outputs` of its last scoring forward."""

    outputs: Any = None

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        outputs = self._wrapped(*positional, **keywords)
        if keywords.get("fused_lm_head"):
            self.outputs = outputs
        return outputs


class _AsIfAlone(_Wrapper):
    """An accelerator whose gathers return only this rank's values."""

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return input_data


class DPOInternals(ReferenceInternals, Protocol):
    """The members of TRL's trainer that this file reads or replaces."""

    loss_types: list[str]
    loss_weights: list[float]
    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: int
    train_dataset: Any
    _tokenizer: Any

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]: ...


def trl_loss(
    trainer: DPOInternals, model: Any, batch: dict[str, Any], return_outputs: bool = False, but: Collection[str] = ()
) -> Any:
    """Compute TRL's loss for the loss types that are not in `but`; 0.0 if none is left."""
    kept = [x for x in zip(trainer.loss_types, trainer.loss_weights, strict=True) if x[0] not in but]
    with replaced(trainer, loss_types=[x for x, _ in kept], loss_weights=[x for _, x in kept]):
        return next_of(trainer)._compute_loss(model, batch, return_outputs)


def recompute_trl_loss(
    trainer: DPOInternals, outputs: Any, batch: dict[str, Any], but: Collection[str], sums: Any = None
) -> Any:
    """Compute TRL's loss again from `outputs`, without logging. `sums` replace the reference's summed log-probs."""
    given: dict[str, Any] = {}
    if sums is not None:
        batch = {**batch, "ref_chosen_logps": sums[0], "ref_rejected_logps": sums[1]}
        given = {"precompute_ref_logps": True, "aux_loss_enabled": False}
    with replaced(trainer, **given), metrics_of_this_rank(trainer):
        return trl_loss(trainer, lambda **_: outputs, batch, False, but)


def policy_sums(trainer: DPOInternals, outputs: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return next_of(trainer).compute_ref_log_probs(lambda **_: outputs, batch)


def reference_sums(trainer: DPOInternals, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    if trainer.precompute_ref_logps:
        return batch["ref_chosen_logps"], batch["ref_rejected_logps"]
    return next_of(trainer).compute_ref_log_probs(trainer.ref_model, batch)


@contextmanager
def metrics_of_this_rank(trainer: DPOInternals) -> Iterator[dict[str, list[float]]]:
    """Make TRL log only this rank's rows, into the yielded dict, in the `with` block."""
    found: dict[str, list[float]] = defaultdict(list)
    alone = _AsIfAlone(trainer.accelerator)
    with replaced(trainer, _metrics=dict.fromkeys(trainer._metrics, found), accelerator=alone, _total_train_tokens=0):
        yield found


def _logged(trainer: DPOInternals) -> dict[str, list[float]]:
    return trainer._metrics["train" if trainer.model.training else "eval"]


def log_metrics(trainer: DPOInternals, values: dict[str, float], mode: str | None = None) -> None:
    logged = _logged(trainer) if mode is None else trainer._metrics[mode]
    for name, value in values.items():
        logged[name].append(value)


def log_tokens(trainer: DPOInternals, count: int) -> None:
    trainer._total_train_tokens += count
    _logged(trainer)["num_tokens"] = [trainer._total_train_tokens]


def drop_reward_metrics(trainer: DPOInternals) -> None:
    metrics = _logged(trainer)
    for name in [name for name in metrics if name.startswith("rewards/")]:
        del metrics[name]


def pairs_not_repeated(trainer: DPOInternals, pairs: int) -> int:
    """Return the number of this rank's `pairs`, without repeats that Accelerate adds to fill the last batch."""
    replaceable = trainer.ref_model is not None and not isinstance(trainer.ref_model, torch.nn.Module)
    replaceable = replaceable or trainer.precompute_ref_logps
    accelerator, state = trainer.accelerator, trainer.accelerator.gradient_state
    last = state.end_of_dataloader and (state.sync_gradients or not trainer.model.training)
    if not (replaceable and last and state.remainder > 0 and accelerator.even_batches):
        return pairs
    return min(max(state.remainder - accelerator.process_index * pairs, 0), pairs)


def has_repeats(trainer: DPOInternals) -> bool:
    """Whether the latest batch is the last of an epoch, and Accelerate may have filled it with repeated pairs.

    It does not read the dataloader's remainder, which differs after a checkpoint is resumed.
    """
    size = trainer.args.per_device_train_batch_size * trainer.accelerator.num_processes
    whole = isinstance(trainer.train_dataset, Dataset) and len(trainer.train_dataset) % size == 0
    return bool(trainer.accelerator.gradient_state.end_of_dataloader) and not whole


def pad_token_id(trainer: DPOInternals) -> int:
    return int(trainer._tokenizer.pad_token_id)


def loss_of_first_pairs(
    trainer: DPOInternals, pairs: int, outputs: Any, batch: dict[str, Any], loss: Callable[[Any, dict[str, Any]], Any]
) -> Any:
    """Compute `loss` of the first `pairs` of a batch, from `outputs` of the whole batch, without gradients."""
    chosen = list(range(pairs))
    first = rows_of(dict(outputs.items()), rows_of_pairs(batch, chosen))
    with part_given(trainer, chosen, batch) as part, torch.no_grad():
        return loss(lambda **_: FusedCausalLMOutput(**first), part)


def rows_of_pairs(batch: dict[str, Any], pairs: list[int]) -> torch.Tensor:
    """Return the rows of `pairs` in a batch: the chosen ones, then the rejected ones."""
    every = len(batch["completion_mask"]) // 2
    return torch.tensor([*pairs, *(every + pair for pair in pairs)], device=batch["completion_mask"].device)


def rows_of(values: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """Return the rows of all tensors of shape (2B, ...)."""
    return {name: x[rows.to(x.device)] if torch.is_tensor(x) and x.dim() > 1 else x for name, x in values.items()}


def joined(outputs: list[dict[str, Any]], order: torch.Tensor) -> Any:
    """Return the outputs of several forward passes as one, with their rows in `order`."""
    last = outputs[-1]
    whole = {name: torch.cat([x[name] for x in outputs])[order] for name, x in last.items() if x.dim() > 1}
    return FusedCausalLMOutput(**{**last, **whole})


@contextmanager
def part_given(trainer: DPOInternals, pairs: list[int], batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield some pairs of a batch, and make TRL's loss read their reference log-probs in the `with` block."""
    rows, given = rows_of_pairs(batch, pairs), {}
    part = rows_of(batch, rows) | {name: x[pairs] for name, x in batch.items() if name in PAIR_COLUMNS}
    if not trainer.precompute_ref_logps:
        reference = FusedCausalLMOutput(log_probs=trainer.ref_model().log_probs[rows])
        given["ref_model"] = lambda **_: reference
    with replaced(trainer, **given):
        yield part


@contextmanager
def reference_given(
    trainer: DPOInternals,
    log_probs: torch.Tensor | Callable[[], torch.Tensor] | None,
    run_if_changed: Callable[..., FusedCausalLMOutput] | None = None,
) -> Iterator[None]:
    """Make TRL's loss read `log_probs` `(2B, S - 1)` in the `with` block; `None` means the sums in the batch.

    A function is called once, where TRL runs the reference: after the policy's pass.

    Args:
        run_if_changed (`Callable`, *optional*):
            called with the reference's inputs. It returns `None` if they are those that `log_probs` belong to.
    """

    @cache
    def outputs() -> FusedCausalLMOutput:
        return FusedCausalLMOutput(log_probs=log_probs() if callable(log_probs) else log_probs)

    def reference(**inputs: Any) -> Any:
        changed = run_if_changed(**inputs) if inputs and run_if_changed is not None else None
        return outputs() if changed is None else changed

    with replaced(trainer, ref_model=reference, precompute_ref_logps=log_probs is None):
        yield


def with_labels(model: Any, labels: torch.Tensor) -> Callable[..., Any]:
    """Return `model`, called with `labels` in place of TRL's equal tensor, so that packing can reuse its layout."""

    def call(*positional: Any, **keywords: Any) -> Any:
        if keywords.get("fused_lm_head"):
            keywords["labels"] = labels
        return model(*positional, **keywords)

    return call


def largest_token_ids(dataset: Any, rows: int) -> Iterator[int | None]:
    if not isinstance(dataset, Dataset):
        return
    columns = [x for x in ("prompt_ids", "chosen_ids", "rejected_ids") if x in dataset.column_names]
    if columns:
        first = dataset.select_columns(columns).with_format("arrow")[:rows]
        yield from (pc.max(pc.list_flatten(first[column])).as_py() for column in columns)
