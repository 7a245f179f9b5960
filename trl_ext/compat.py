"""Every name of TRL that is not public API, imported in this one file, and the versions for which that holds."""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import trl
from datasets import Dataset, IterableDataset
from packaging.specifiers import SpecifierSet

SUPPORTED_TRL = SpecifierSet(">=1.15,<1.17")

if version("trl") not in SUPPORTED_TRL:
    raise ImportError(
        f"trl_ext works with trl{SUPPORTED_TRL}, found trl {version('trl')}. Run `pip install 'trl{SUPPORTED_TRL}'`."
    )

from accelerate.utils import is_peft_model  # noqa: E402
from transformers import Trainer  # noqa: E402
from transformers.trainer_utils import has_length  # noqa: E402
from trl.models import prepare_deepspeed  # noqa: E402
from trl.models.utils import disable_gradient_checkpointing  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput as TRLFusedCausalLMOutput  # noqa: E402
from trl.trainer.utils import (  # noqa: E402
    disable_dropout_in_model,
    maybe_gather_lm_head_ctx,
)

__all__ = [
    "DPOLossInternals",
    "FusedCausalLMOutput",
    "GRPOInternals",
    "PolicyInFolder",
    "Recorded",
    "ReferenceGiven",
    "TensorParallelInternals",
    "WholeBatches",
    "adapters_made_by",
    "gathered_by",
    "head_attached_by",
    "loaded_models_recorded",
    "maybe_gather_lm_head_ctx",
    "no_adapter_copied_by",
    "rotation_put_off",
    "sequence_parallelism_hidden",
    "unrecorded_pass",
]


@dataclass
class FusedCausalLMOutput(TRLFusedCausalLMOutput):
    """TRL's output of the scoring forward, and a field that it lacks.

    Args:
        mean_log_probs (`torch.Tensor`, same shape as `log_probs`):
            Mean of the log-probs over the vocabulary, of each next-token distribution.
    """

    mean_log_probs: torch.Tensor | None = None


@contextmanager
def head_attached_by(attach: Callable[..., None], trainer_class: type, *, adapted: bool) -> Iterator[None]:
    """Within, `trainer_class.__init__` attaches its models' scoring head with `attach(model, **options)`.

    TRL's trainers call the `add_fused_lm_head` of their module on the policy and on the reference model, after both
    exist and before reference log-probs are precomputed; there is no method to override at that point. The name is put
    back on the way out, so stock trainers keep TRL's head.

    Args:
        adapted (`bool`): whether an adapter on the LM head is taken, which TRL's own head would not see: TRL refuses a
            head that is an instance of the class that this name stands for.
    """
    module: Any = sys.modules[trainer_class.__module__]
    original, refused = module.add_fused_lm_head, module.BaseTunerLayer
    module.add_fused_lm_head = attach
    if adapted:
        module.BaseTunerLayer = _NoHead
    try:
        yield
    finally:
        module.add_fused_lm_head, module.BaseTunerLayer = original, refused


class _NoHead:
    """No head is an instance of it."""


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


class TensorParallelInternals:
    """Mixed in before a TRL trainer: what of its private attributes counts the ranks of a tensor-parallel group."""

    def _tokens_are_counted_once(self) -> None:
        """Tell TRL that its gathered counts hold each token once."""
        if hasattr(self, "_tp_size"):  # DPO's
            self._tp_size = 1


@contextmanager
def adapters_made_by(make: Callable[..., Any], trainer_class: type) -> Iterator[None]:
    """Within, `trainer_class.__init__` puts an adapter on its model with `make(get_peft_model, model, config, ...)`."""
    module: Any = sys.modules[trainer_class.__module__]
    original = module.get_peft_model
    module.get_peft_model = partial(make, original)
    try:
        yield
    finally:
        module.get_peft_model = original


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


class PolicyInFolder:
    """Mixed in before a TRL trainer: transformers' checkpoints of several adapters.

    PEFT saves the adapter "default" in the checkpoint itself and any other in a folder of its name. For the best one
    transformers looks in the checkpoint alone; to resume, transformers 5.17 looks in the folders alone.
    """

    state: Any

    def policy_folder(self) -> str | None:
        """In which folder of a checkpoint the policy lies, where that is not the checkpoint itself."""
        return None

    def policy_loaded(self, checkpoint: str) -> None:
        """Called after transformers has loaded the policy of `checkpoint`, to resume from it."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        self.policy_loaded(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best, folder = self.state.best_model_checkpoint, self.policy_folder()
        inner = None if folder is None else os.path.join(best, folder)
        try:
            if inner is not None and os.path.isdir(inner):
                self.state.best_model_checkpoint = inner
            super()._load_best_model()  # type: ignore[misc]
        finally:
            self.state.best_model_checkpoint = best


@contextmanager
def gathered_by(accelerator: Any, trainer_class: type) -> Iterator[None]:
    """Within, what `trainer_class` gathers by its module's names, it gathers by the methods of `accelerator`."""
    module: Any = sys.modules[trainer_class.__module__]
    gather, gather_object = module.gather, module.gather_object
    module.gather, module.gather_object = accelerator.gather, accelerator.gather_object
    try:
        yield
    finally:
        module.gather, module.gather_object = gather, gather_object


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


# Columns of a batch with a value for each pair, of which no model is given any
_PAIR_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps", "chosen_reward", "rejected_reward")


class Recorded:
    """A model, and what its last scoring forward gave.

    Attributes:
        outputs (`FusedCausalLMOutput`): of the last call.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.outputs: Any = None

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        outputs = self._model(*positional, **keywords)
        if keywords.get("fused_lm_head"):
            self.outputs = outputs
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _AsIfAlone:
    """An accelerator that gathers from this rank alone; all else is the accelerator's own."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return input_data


class DPOLossInternals:
    """Mixed in before TRL's `DPOTrainer`: its loss, its metrics and the columns of its batches, by names of ours."""

    accelerator: Any
    args: Any
    model: Any
    ref_model: Any
    loss_types: list[str]
    loss_weights: list[float]
    beta: float
    label_smoothing: float
    precompute_ref_logps: bool
    aux_loss_enabled: bool
    f_divergence_type: str
    f_alpha_divergence_coef: float
    _metrics: dict[str, dict[str, list[float]]]
    _total_train_tokens: int
    _extra_columns: tuple[str, ...] = ()  # of the data sets, that must reach the collator and the batches

    def _loss_of(self, model: Any, batch: dict[str, Any], return_outputs: bool) -> Any:
        """Stands for TRL's loss of a batch: a loss, or that and the model's outputs."""
        raise NotImplementedError

    def _before_preparing(self, dataset: Any, name: str) -> Any:
        """Called with each data set before TRL prepares it."""
        return dataset

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        return self._loss_of(model, inputs, return_outputs)

    def _trls_loss(self, model: Any, batch: dict[str, Any], return_outputs: bool, but: Collection[str]) -> Any:
        """TRL's own loss from `loss_types` and their weights without those in `but`: 0.0 where none is left."""
        held = self.loss_types, self.loss_weights
        kept = [(name, weight) for name, weight in zip(*held, strict=True) if name not in but]
        self.loss_types, self.loss_weights = [name for name, _ in kept], [weight for _, weight in kept]
        try:
            return super()._compute_loss(model, batch, return_outputs)  # type: ignore[misc]
        finally:
            self.loss_types, self.loss_weights = held

    def _reference_sums(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's log-probs that TRL's loss reads, summed over each completion: chosen and rejected, `(B,)`."""
        if self.precompute_ref_logps:
            return batch["ref_chosen_logps"], batch["ref_rejected_logps"]
        return super().compute_ref_log_probs(self.ref_model, batch)  # type: ignore[misc, no-any-return]

    def _policy_sums(self, outputs: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's log-probs in `outputs`, summed as TRL's loss does, without a gradient: chosen and rejected."""
        chosen, rejected = super().compute_ref_log_probs(lambda **_: outputs, batch)  # type: ignore[misc]
        return chosen.detach(), rejected.detach()

    def _trls_loss_again(
        self,
        outputs: Any,
        batch: dict[str, Any],
        but: Collection[str],
        reference_sums: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        """What `_trls_loss` gives, from the policy's `outputs`, with no metric logged.

        Args:
            reference_sums (`tuple`, *optional*): read instead of the reference's. The loss is without the router's
                then, so that it can be added to one that has it.
        """
        held = self.precompute_ref_logps, self.aux_loss_enabled
        if reference_sums is not None:
            batch = {**batch, "ref_chosen_logps": reference_sums[0], "ref_rejected_logps": reference_sums[1]}
            self.precompute_ref_logps, self.aux_loss_enabled = True, False
        try:
            with self._metrics_of_this_rank():
                return DPOLossInternals._trls_loss(self, lambda **_: outputs, batch, False, but)
        finally:
            self.precompute_ref_logps, self.aux_loss_enabled = held

    @contextmanager
    def _metrics_of_this_rank(self) -> Iterator[dict[str, list[float]]]:
        """Within, TRL logs this rank's rows alone, into the dict that this gives; `num_tokens` are the batch's."""
        held = self._metrics, self.accelerator, self._total_train_tokens
        found: dict[str, list[float]] = defaultdict(list)
        self._metrics, self.accelerator = dict.fromkeys(held[0], found), _AsIfAlone(held[1])
        self._total_train_tokens = 0
        try:
            yield found
        finally:
            self._metrics, self.accelerator, self._total_train_tokens = held

    def _log_metrics(self, values: dict[str, float]) -> None:
        """Add to the metrics of the present mode what one more batch has."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in values.items():
            metrics[name].append(value)

    def _log_tokens(self, count: int) -> None:
        """Count tokens of a batch of training, as TRL does."""
        self._total_train_tokens += count
        self._metrics["train" if self.model.training else "eval"]["num_tokens"] = [self._total_train_tokens]

    def _repeated_rows_at_end(self) -> int | None:
        """Which rows of the batch, counted over all ranks, accelerate has repeated to give all ranks as many.

        Those from the number that is returned on; `None`: none of them.
        """
        state = self.accelerator.gradient_state
        # In training the last window's batches are all drawn before the first of them is fed
        last = state.end_of_dataloader and (state.sync_gradients or not self.model.training)
        return state.remainder if last and state.remainder > 0 and self.accelerator.even_batches else None

    def _can_score_again(self) -> bool:
        """Whether TRL's loss can be formed again from what is known, without a pass of the reference."""
        return self.precompute_ref_logps or not (self.ref_model is None or isinstance(self.ref_model, torch.nn.Module))

    def _loss_of_pairs(
        self, pairs: int, outputs: Any, batch: dict[str, Any], loss: Callable[[Any, dict[str, Any]], Any]
    ) -> Any:
        """What `loss` is of the first `pairs` of a batch, from the policy's `outputs` of the whole."""
        every = len(batch["completion_mask"]) // 2
        rows = torch.arange(2 * every, device=batch["completion_mask"].device)
        rows = rows[rows % every < pairs]

        def of(scored: Any) -> Any:
            fields = {name: x[rows.to(x.device)].detach() if x.dim() > 1 else x for name, x in scored.items()}
            return FusedCausalLMOutput(**fields)

        batch = {name: x[:pairs] if name in _PAIR_COLUMNS else x for name, x in batch.items()}
        for name in ("input_ids", "attention_mask", "completion_mask"):
            batch[name] = batch[name][rows]
        reference = self.ref_model
        if not self.precompute_ref_logps:
            given = of(reference())
            self.ref_model = lambda **_: given
        try:
            with torch.no_grad():
                return loss(lambda **_: of(outputs), batch)
        finally:
            self.ref_model = reference

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        dataset = self._before_preparing(dataset, dataset_name)
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)  # type: ignore[misc]

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        columns = self._signature_columns  # type: ignore[has-type]
        self._signature_columns = [*columns, *(x for x in self._extra_columns if x not in columns)]

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Transformers' own; it rounds every float of a batch to half precision under DeepSpeed, but not these."""
        extra = {name: inputs[name] for name in self._extra_columns if name in inputs}
        if not extra:
            return super()._prepare_inputs(inputs)  # type: ignore[misc, no-any-return]
        rest = super()._prepare_inputs({name: x for name, x in inputs.items() if name not in extra})  # type: ignore[misc]
        return {**rest, **{name: x.to(self.args.device) for name, x in extra.items()}}


class WholeBatches:
    """Mixed in before a TRL trainer: what transformers does where the ranks of a sequence group get whole batches.

    It takes it that batches are split over them before the trainer meets them.
    """

    _ranks_of_group = 1
    accelerator: Any
    args: Any
    model: Any

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        """The batch as it is, for our scoring forward to split."""
        if self._ranks_of_group == 1:
            return super()._prepare_context_parallel_inputs(model, inputs)  # type: ignore[misc]
        return nullcontext, inputs

    def get_sp_size(self) -> int:
        """How many micro-batches are made of each that a data loader gives."""
        return 1 if self._ranks_of_group > 1 else super().get_sp_size()  # type: ignore[misc, no-any-return]

    def floating_point_ops(self, inputs: Any) -> int:
        """Transformers' estimate of what this rank computes of a batch."""
        return int(super().floating_point_ops(inputs)) // self._ranks_of_group  # type: ignore[misc]

    def get_total_train_batch_size(self, args: Any) -> int:
        """Transformers' own, in which the ranks of a group count once."""
        total: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return total // self.accelerator.parallelism_config.sp_size if self._ranks_of_group > 1 else total


@contextmanager
def rotation_put_off() -> Iterator[list[Callable[[], None]]]:
    """Within, transformers' trainers delete no old checkpoint; the list gets what they would have called."""
    module: Any = sys.modules[Trainer.__module__]
    original = module.rotate_checkpoints
    put_off: list[Callable[[], None]] = []
    module.rotate_checkpoints = lambda *positional, **keywords: put_off.append(
        partial(original, *positional, **keywords)
    )
    try:
        yield put_off
    finally:
        module.rotate_checkpoints = original


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
    _train_sampler: Any = None
    _buffered_inputs: list[dict[str, Any]] | None
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
            with undeferred():
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
                _no_adapter_turned(),
                self._in_place_of(
                    _get_per_token_logps_and_entropies=deferred, _generate=generated, _calculate_rewards=recorded
                ),
            ):
                return super()._generate_and_score_completions(inputs)  # type: ignore[misc, no-any-return]
        finally:
            self.vllm_importance_sampling_correction = correction

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if self._mode == "eval":
            return super()._prepare_inputs(generation_batch)  # type: ignore[misc, no-any-return]
        with _shuffling_followed_by(self._shuffled):
            inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
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

    def _present_slice(self, inputs: dict[str, Any]) -> dict[str, Any] | None:
        """The slice of the generation buffer that `inputs` is, or is a copy of, if it will be visited again."""
        for present in self._slices_to_come()[:1]:
            is_it = inputs.get("completion_ids") is present["completion_ids"]
            return present if is_it and any(x is present for x in self._slices_to_come()[1:]) else None
        return None

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


@contextmanager
def _no_adapter_turned() -> Iterator[None]:
    """Within, TRL's GRPO trainer leaves the adapters as they are where it would run a reference pass."""
    module: Any = sys.modules[trl.GRPOTrainer.__module__]
    original = module.use_adapter
    module.use_adapter = lambda *_, **__: nullcontext()
    try:
        yield
    finally:
        module.use_adapter = original


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
