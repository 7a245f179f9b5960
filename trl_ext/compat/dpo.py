"""The private parts of TRL's `DPOTrainer`, as functions of a trainer."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pyarrow.compute as pc
import torch
import trl
from datasets import Dataset
from trl.models import prepare_deepspeed
from trl.trainer.utils import disable_dropout_in_model

from .choices import FusedCausalLMOutput
from .replaced import module_of, next_of, replaced

# Columns of a batch with one value per pair, which are not model inputs
PAIR_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps", "chosen_reward", "rejected_reward")


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


class DPOInternals(Protocol):
    """The members of TRL's trainer that this file reads or replaces."""

    accelerator: Any
    args: Any
    model: Any
    ref_model: Any
    loss_types: list[str]
    loss_weights: list[float]
    precompute_ref_logps: bool
    aux_loss_enabled: bool
    is_deepspeed_enabled: bool
    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: int
    _precompute_engine: Any
    _is_vision_dataset: bool
    train_dataset: Any
    _tokenizer: Any

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]: ...

    def _remove_unused_columns(self, dataset: Dataset, description: str | None = None) -> Dataset: ...


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
def reference_given(trainer: DPOInternals, log_probs: torch.Tensor | None) -> Iterator[None]:
    """Make TRL's loss read `log_probs` `(2B, S - 1)` in the `with` block; `None` means the sums in the batch."""
    outputs = FusedCausalLMOutput(log_probs=log_probs)
    with replaced(trainer, ref_model=lambda **_: outputs, precompute_ref_logps=log_probs is None):
        yield


def with_labels(model: Any, labels: torch.Tensor) -> Callable[..., Any]:
    """Return `model`, called with `labels` in place of TRL's equal tensor, so that packing can reuse its layout."""

    def call(*positional: Any, **keywords: Any) -> Any:
        if keywords.get("fused_lm_head"):
            keywords["labels"] = labels
        return model(*positional, **keywords)

    return call


def labels_of(batch: dict[str, Any]) -> torch.Tensor:
    return batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)  # type: ignore[no-any-return]


def score_as_reference(trainer: DPOInternals, model: Any, batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    inputs = {k: v for k, v in batch.items() if k not in ("completion_mask", *PAIR_COLUMNS)}
    text_config = trainer.accelerator.unwrap_model(model).config.get_text_config()
    if trainer.aux_loss_enabled and hasattr(text_config, "output_router_logits"):
        inputs["output_router_logits"] = True  # as in the policy's pass
    with trainer.accelerator.autocast():
        scored = model(**inputs, use_cache=False, labels=labels, fused_lm_head=True, head_outputs=("log_probs",))
    return scored.log_probs[:, -(labels.shape[1] - 1) :]


def policy_before_training(trainer: DPOInternals) -> Any:
    if not trainer.is_deepspeed_enabled:
        return trainer.model
    if trainer._precompute_engine is None:
        trainer._precompute_engine = prepare_deepspeed(trainer.model, trainer.accelerator)
    return trainer._precompute_engine


def holds_images(trainer: DPOInternals) -> bool:
    return bool(trainer._is_vision_dataset)


def training_columns(trainer: DPOInternals, dataset: Dataset) -> Dataset:
    """Return the dataset with only the columns that the collator gets."""
    return trainer._remove_unused_columns(dataset, description="training")


def made_as_reference(trainer: DPOInternals, load: Callable[[], Any]) -> Any:
    model = load()
    if trainer.args.disable_dropout:
        disable_dropout_in_model(model)
    return model


def recorded_loads(loaded: list[tuple[Any, Callable[[], Any]]]) -> dict[str, Any]:
    """Return replacements for names in TRL's module, which record each model that TRL loads, with its loader."""
    original = module_of(trl.DPOTrainer).create_model_from_path

    def create(*positional: Any, **keywords: Any) -> Any:
        model = original(*positional, **keywords)
        loaded.append((model, lambda: original(*positional, **keywords)))
        return model

    return {"create_model_from_path": create, "hash_module": lambda _: None}


def largest_token_ids(dataset: Any, rows: int) -> Iterator[int | None]:
    if not isinstance(dataset, Dataset):
        return
    columns = [x for x in ("prompt_ids", "chosen_ids", "rejected_ids") if x in dataset.column_names]
    if columns:
        first = dataset.select_columns(columns).with_format("arrow")[:rows]
        yield from (pc.max(pc.list_flatten(first[column])).as_py() for column in columns)
