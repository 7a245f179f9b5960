"""TRL's DPO loss, its metrics and its data, under names of ours."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .head import FusedCausalLMOutput

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

    def _before_preparing(self, dataset: Any, name: str, processing_class: Any) -> Any:
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
        dataset = self._before_preparing(dataset, dataset_name, processing_class)
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
