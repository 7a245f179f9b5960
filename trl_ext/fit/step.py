"""Estimates the memory of one training step, by running the model's own code on tensors without data.

Backbone, adapters, checkpointing, packing, head and optimizer run as in training, so this file has no formulas for
them. The operators are those of the CPU: sdpa saves the same tensors as flash attention, but the head upcasts tiles
that a GPU multiplies without upcasting.

Dimensions: B rows, S tokens of a row, N scored tokens, T tokens of the packed row, H hidden size.
"""

import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks

from ..heads.divergence import DivergenceHead, linear_divergence
from ..heads.linear_log_probs import operand_dtype, run_head
from ..heads.products import statistics_dtype
from ..heads.tiled import columns_per_tile, rows_per_tile
from ..host.activations import HostTensors
from ..host.reference import HostedReference
from ..packing.attention import index_select_fp32_grad, run_packed
from ..packing.layout import Layout
from ..packing.packing import Packing
from ..packing.randomness import randomness_of
from ..packing.support import backbone_of, can_rebase
from ..scoring.classifier import unknown_class_reason
from ..scoring.head import LinearHead, OpaqueHead, logit_transform, resolve_head
from ..scoring.weight_layout import weight_layout_of
from .engines import Zero, one_rank_of, under_fsdp2
from .layers import LayersInPart, UnequalLayersError, equal_layers
from .quantized import packed
from .records import AllocationRecords, here
from .tiles import few_tiles

_CPU = torch.device("cpu")  # that of the tensors without data
SCORE_HEAD = "score"  # a head that scores the last token of each row
DIVERGENCE_HEAD = "divergence"  # the heads of student and teacher, which are compared
Engine = Literal["one_process", "ddp", "fsdp2", "zero1", "zero2"]


class Row(NamedTuple):
    """The tokens of one row. Rows of the same group share their prompt, which the model then processes once."""

    group: int
    prompt: int
    completion: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """The model, the batch shape and the settings of the step to estimate."""

    model: Callable[[], Any]  # makes the policy with its adapters, in training mode; called on the device "meta"
    optimizer: Callable[[Any], torch.optim.Optimizer]  # makes the optimizer of that model
    rows: int  # of a micro-batch; two for each pair
    tokens: int  # of each row that the model processes
    scored_tokens: int  # the last tokens of each row, which the head scores
    outputs: tuple[str, ...]  # of the head
    device: torch.device  # the device for which the head chooses its tile sizes
    head: str = "tiled"  # or `SCORE_HEAD`, or `DIVERGENCE_HEAD`
    beta: float = 0.0  # of the divergence
    chunk_size: int | None = None  # the config's `head_chunk_size`
    autocast: torch.dtype | None = None  # of mixed precision
    accumulates: bool = False  # whether gradients of an earlier micro-batch are in memory
    reference: Callable[[], Any] | None = None  # makes the reference model or the teacher, if there is one, as `model`
    reference_batches: int = 0  # how many times the rows of a micro-batch the reference's pass scores; 0: no such pass
    engine: Engine = "one_process"
    devices: int = 1  # the number of devices; all other values are for one of them
    reduce_bucket_size: int = 500_000_000  # DeepSpeed's, with its default: elements of its buffer for gradients
    lengths: tuple[Row, ...] = ()  # of rows that differ, in place of `rows`, `tokens` and `scored_tokens`
    shares: bool = False  # `share_prompts`
    offloads: bool = False  # `activation_offloading`
    hosts_reference: bool = False  # `reference_device="cpu"`


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes on one device.

    Weights, reference, optimizer and buckets stay in memory. The backward frees activations while it makes gradients,
    so `peak` is usually below the sum.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    buckets: int  # of DDP and DeepSpeed, where gradients are reduced
    activations: int  # after the backbone's forward, with the weights gathered at that time
    offloaded: int  # activations in host memory at that time
    hosted: int  # the reference's weights in host memory
    head: int  # of the LM head, in addition to the activations
    peak: int

    @property
    def static(self) -> int:
        """What an optimizer step needs whatever the micro-batch is."""
        return self.weights + self.reference + self.gradients + self.optimizer


@dataclass(frozen=True)
class _MicroBatchMemory:
    """Bytes of a micro-batch on one device, as those of `StepMemory`. `peak` includes what was there before."""

    activations: int
    offloaded: int
    head: int
    peak: int


def memory_of_step(step: Step) -> StepMemory:
    """Return the parts and the peak of a step after the first, when the optimizer states exist."""
    try:
        return _memory(step)
    except UnequalLayersError:
        return _memory(step, all_layers=True)


def _memory(step: Step, *, all_layers: bool = False, all_tiles: bool = False) -> StepMemory:
    """Return the memory of a step, counted from some of its equal layers and some of the head's tiles.

    Raises:
        `UnequalLayersError`: the layers are not equal.
    """
    without_rows = replace(step, rows=0, tokens=0, scored_tokens=0, lengths=(), accumulates=False)
    with nullcontext() if all_tiles else few_tiles():
        if step.engine == "fsdp2":
            with one_rank_of(step.devices) as mesh:
                return _Rank(without_rows, mesh, all_layers).memory_of(step)
        rank = _rank_of(without_rows, all_layers)
        is_as_before = False
        try:
            memory = rank.memory_of(step)
            is_as_before = rank.is_as_before()
        finally:
            if not is_as_before:
                _rank_of.cache_clear()
        return memory


@lru_cache(maxsize=1)
def _rank_of(step: Step, all_layers: bool) -> "_Rank":
    """Return the rank of the last count, if only the rows differ: to make it takes as long as to count."""
    return _Rank(step, None, all_layers)


class _Passes(NamedTuple):
    """A model, and its layers that run."""

    model: Any
    layers: LayersInPart


class _Teacher(NamedTuple):
    """What the divergence reads of the teacher."""

    head: DivergenceHead
    hidden: Tensor  # (N, H)


class _Rank:
    """The weights, the engine and the optimizer of a step on one device, after a first step."""

    def __init__(self, step: Step, mesh: Any, all_layers: bool) -> None:
        with torch.device("meta"):
            model = step.model()
            reference_model = None if step.reference is None else step.reference()
            if _is_zero(step) and step.autocast is not None:  # DeepSpeed trains weights of this dtype
                model.to(step.autocast)
                reference_model = reference_model and reference_model.to(step.autocast)
        layers, reference_layers = (
            None if all_layers or x is None else equal_layers(x) for x in (model, reference_model)
        )
        self._fake = FakeTensorMode()
        self._records = records = AllocationRecords()
        with self._fake, records:
            self._weights, model = _placed(model, mesh, step, records)
            self._reference, reference_model = _placed(reference_model, mesh, step, records)
            if step.hosts_reference and reference_model is not None:
                before = records.held_bytes
                with records.on_host():
                    HostedReference(reference_model, _CPU)
                self._reference += records.held_bytes - before
            self._trained = [x for x in model.parameters() if x.requires_grad]
            before = records.held_bytes
            self._optimizer, self._zero = _optimizer(step, model)
            self._states = records.held_bytes - before
            self._ddp_buckets = [torch.empty_like(x) for x in self._trained] if step.engine == "ddp" else []
        if self._zero is not None and self._zero.reduces_in_backward:
            layers = None  # when a bucket is full does not depend on the layer
        is_sharded = step.engine == "fsdp2"
        self._policy = _Passes(model, LayersInPart(layers, records, sharded=is_sharded, offloads=step.offloads))
        self._scorer = self._policy
        if reference_model is not None:
            self._scorer = _Passes(reference_model, LayersInPart(reference_layers, records, sharded=is_sharded))
        self._held = (records.held_bytes, records.host)

    def memory_of(self, step: Step) -> StepMemory:
        """Return the memory of a step, which may differ in its rows from that of the constructor."""
        records, zero = self._records, self._zero
        with self._fake, records:
            records.mark()
            peaks = []
            if step.accumulates:
                peaks.append(self._earlier_micro_batch(step))
            score = partial(_scores, step)
            if step.head == DIVERGENCE_HEAD:
                teachers: list[_Teacher] = []
                peaks.append(self._teacher_pass(step, teachers))
                score = partial(_divergence, step, teachers)
            elif step.reference_batches:
                reference_step = replace(
                    step,
                    rows=step.rows * step.reference_batches,
                    lengths=step.lengths * step.reference_batches,
                    outputs=("log_probs",),
                )
                with torch.no_grad():
                    peaks.append(_micro_batch(reference_step, self._scorer, self._fake, records).peak)
            micro_batch = _micro_batch(step, self._policy, self._fake, records, score)
            peaks.append(micro_batch.peak)
            self._policy.layers.make_gradients(keeps=zero is None or zero.keeps_gradients)
            if zero is not None:
                if not zero.keeps_gradients:
                    zero.fill(self._policy.layers.skipped_parameters)
                zero.after_backward()
            self._optimizer.step()
            peaks.append(records.peak)
        return StepMemory(
            weights=self._weights,
            reference=self._reference,
            gradients=sum(here(x).nbytes for x in self._trained) if zero is None else zero.gradients,
            optimizer=self._states,
            buckets=sum(x.nbytes for x in self._ddp_buckets) if zero is None else zero.bucket,
            activations=micro_batch.activations,
            offloaded=micro_batch.offloaded,
            hosted=self._held[1],
            head=micro_batch.head,
            peak=max(peaks),
        )

    def is_as_before(self) -> bool:
        """Free gradients and batch, and return whether all is as before the step."""
        self._optimizer.zero_grad()
        for passes in (self._policy, self._scorer):
            vars(_inner_of(passes.model)).pop("forward", None)
        for parameter in self._trained:
            parameter.grad = None
        if self._zero is not None:
            self._zero.free()
        return (self._records.held_bytes, self._records.host) == self._held

    def _teacher_pass(self, step: Step, teachers: list[_Teacher]) -> int:
        """Add what the divergence reads of the teacher to a list. Return the bytes of the pass's highest total."""

        def take(inner: Any, hidden_NH: Tensor) -> Tensor:
            teachers.append(_Teacher(_divergence_head(inner), hidden_NH))
            return hidden_NH

        with torch.no_grad():
            return _micro_batch(step, self._scorer, self._fake, self._records, take).peak

    def _earlier_micro_batch(self, step: Step) -> int:
        """Make the gradients that an earlier micro-batch leaves, and return the bytes of its highest total."""
        if self._zero is not None:
            self._zero.accumulated()
        elif step.engine == "fsdp2":
            # Accelerate makes FSDP2 keep whole gradients on each rank until the last micro-batch
            model = self._policy.model
            model.set_requires_gradient_sync(False)
            peak = _micro_batch(step, self._policy, self._fake, self._records).peak
            model.set_requires_gradient_sync(True)
            return peak
        else:
            for parameter in self._trained:
                parameter.grad = torch.zeros_like(parameter)
        return 0


def _placed(model: Any, mesh: Any, step: Step, records: AllocationRecords) -> tuple[int, Any]:
    """Return the bytes of `model` without data on one device, and the model there."""
    if model is None:
        return 0, None
    before = records.held_bytes
    trains = any(x.requires_grad for x in model.parameters())
    _move_from_meta(model)
    if mesh is not None:
        model = under_fsdp2(model, mesh, step.autocast, trains=trains)
    for tensor in (*model.parameters(), *model.buffers()):
        records.count(tensor.data)
    return records.held_bytes - before, model


def _optimizer(step: Step, model: Any) -> tuple[torch.optim.Optimizer, Zero | None]:
    """Return the optimizer after a first step, which has made its states."""
    optimizer = step.optimizer(model)
    zero = None
    if _is_zero(step):
        zero = Zero(
            optimizer,
            stage=int(step.engine[-1]),
            devices=step.devices,
            bucket_size=step.reduce_bucket_size,
        )
    for group in optimizer.param_groups:
        if step.device.type == "cuda" and "foreach" in group:  # what torch chooses on a GPU
            group["foreach"] = group["foreach"] is not False and not group.get("fused")
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    with warnings.catch_warnings():  # of bitsandbytes: the tensors without data are on the CPU
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
        optimizer.step()
    optimizer.zero_grad()
    return optimizer, zero


def _is_zero(step: Step) -> bool:
    return step.engine.startswith("zero")


def _micro_batch(
    step: Step,
    passes: _Passes,
    fake: FakeTensorMode,
    records: AllocationRecords,
    score: Callable[[Any, Tensor], Tensor] | None = None,
) -> _MicroBatchMemory:
    """Run forward and, if there is a gradient, backward.

    `score` returns, from the model and its hidden states `(N, H)`, what the loss sums. `None`: the step's head does.
    """
    model, layers = passes
    inner = _inner_of(model)
    packing = Packing(inner, padding_free=True, share_prompts=step.shares)
    if step.head == SCORE_HEAD:
        packing.padded_reason = packing.padded_reason or unknown_class_reason(inner)
    shares = step.shares and packing.padded_reason is None and randomness_of(model) is None
    layout = _layout(step, model, fake, shares)
    held_before = records.held_bytes
    host_before = records.host
    activations = 0
    offloaded = 0
    backbone_peak = held_before

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Replace the model's own forward inside its wrappers, as in training."""
        nonlocal activations, offloaded, backbone_peak
        hidden_NH = _hidden_states(step, packing, inner, layout)
        activations = records.held_bytes - held_before
        offloaded = records.host - host_before
        backbone_peak = records.peak
        records.mark()
        scores_N = _scores(step, inner, hidden_NH) if score is None else score(inner, hidden_NH)
        return scores_N.clone()  # FSDP2 warns of a view

    inner.forward = types.MethodType(forward, inner)
    casts = step.autocast is not None and not _is_zero(step)
    autocast: AbstractContextManager[Any] = torch.autocast("cpu", dtype=step.autocast) if casts else nullcontext()
    with _on_host(model, records) if step.offloads else nullcontext():
        with layers.within(autocast):
            records.mark()
            layers.begin_pass(backward=False)
            scores_N = model(input_ids=layout.input_ids)
            layers.end_pass()
            head_peak = records.peak
        records.mark()
        if scores_N.requires_grad:
            layers.begin_pass(backward=True)
            scores_N.sum().backward()
            layers.end_pass()
    return _MicroBatchMemory(
        activations=activations,
        offloaded=offloaded,
        head=head_peak - held_before - activations,
        peak=max(held_before, backbone_peak, head_peak, records.peak),
    )


def _inner_of(model: Any) -> Any:
    """Return the model inside PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _on_host(model: Any, records: AllocationRecords) -> saved_tensors_hooks:
    """Return the context of `activation_offloading`, whose copies are in host memory."""
    host_tensors = HostTensors(model, _CPU)

    def pack(tensor: Tensor) -> Any:
        with records.on_host():
            return host_tensors.pack(tensor)

    return saved_tensors_hooks(pack, host_tensors.unpack)


def _layout(step: Step, model: Any, fake: FakeTensorMode, shares: bool) -> Layout:
    """Return the packed row of the micro-batch, without padding.

    If rows may share tokens, all share their first, as with a chat template: attention then copies keys and values.
    """
    rows = step.lengths or [Row(i, step.tokens - step.scored_tokens + 1, step.scored_tokens) for i in range(step.rows)]
    # The last token of a row is only predicted
    lengths_B = np.array([row.prompt + row.completion - 1 for row in rows])
    ids_BS = np.zeros((len(rows), max(lengths_B)), np.int64)
    scored_BS = np.zeros(ids_BS.shape, bool)
    for i, (row, length) in enumerate(zip(rows, lengths_B, strict=True)):
        ids_BS[i, 1:] = 1 + row.group
        ids_BS[i, max(row.prompt, 1) :] = 1 + i
        scored_BS[i, length - 1 if step.head == SCORE_HEAD else max(row.prompt - 1, 0) : length] = True
    with unset_fake_temporarily():
        layout = Layout(
            ids_BS,
            lengths_B,
            np.zeros(len(rows), np.int64),
            scored_BS=scored_BS,
            share=shares,
            rebase=can_rebase(model),
            implementation=model.config.get_text_config()._attn_implementation,
        )
    for name, value in vars(layout).items():
        if isinstance(value, Tensor):
            setattr(layout, name, fake.from_tensor(value))
    return layout


def _hidden_states(step: Step, packing: Packing, inner: Any, layout: Layout) -> Tensor:
    """Return the hidden states `(N, H)` of the scored tokens."""
    if packing.padded_reason is None:
        hidden_TH = run_packed(inner, layout, {"use_cache": False}).last_hidden_state.squeeze(0)
    else:
        ids_BS = layout.input_ids.view(step.rows, step.tokens)
        hidden_TH = backbone_of(inner)(input_ids=ids_BS, use_cache=False).last_hidden_state.flatten(0, 1)
        if step.head == SCORE_HEAD:  # the model's own forward scores each token
            return hidden_TH  # type: ignore[no-any-return]
    return index_select_fp32_grad(hidden_TH, layout.at_N)


def _scores(step: Step, inner: Any, hidden_NH: Tensor) -> Tensor:
    if step.head == SCORE_HEAD:
        return inner.score(hidden_NH).flatten()  # type: ignore[no-any-return]
    return _log_probs(step, inner, hidden_NH)


def _linear_head(inner: Any) -> LinearHead:
    head = resolve_head(inner.get_output_embeddings())
    if isinstance(head, OpaqueHead) and not head.in_adapter:
        raise NotImplementedError(
            f"The memory of this model's LM head cannot be estimated: {head.reason}, not a plain `torch.nn.Linear`. "
            "Use another model."
        )
    if isinstance(head, OpaqueHead) or head.module is not None:
        raise NotImplementedError("An adapter on `lm_head` cannot be estimated. Leave `lm_head` out of the adapter.")
    return head


def _divergence_head(inner: Any) -> DivergenceHead:
    linear: Any = _linear_head(inner).linear
    return DivergenceHead(linear.weight, linear.bias, logit_transform(inner.config, 1.0))


def _divergence(step: Step, teachers: list[_Teacher], inner: Any, hidden_NH: Tensor) -> Tensor:
    teacher = teachers.pop()  # nothing else holds it during the backward pass
    head = _divergence_head(inner)
    scores = partial(linear_divergence, hidden_NH, head, teacher.hidden, teacher.head, step.beta)
    if step.device.type == "cpu":
        return scores(chunk_size=step.chunk_size).divergence
    V, H = head.weight.shape
    chunk = rows_per_tile(len(hidden_NH), step.device, step.chunk_size, V * H)
    return scores(
        chunk_size=chunk,
        tile_columns=columns_per_tile(chunk, V, step.device, weights=V * H),
        tile_dtype=statistics_dtype(operand_dtype(hidden_NH, head.weight)),
    ).divergence


def _log_probs(step: Step, inner: Any, hidden_NH: Tensor) -> Tensor:
    head = _linear_head(inner)
    N = len(hidden_NH)
    rows = weight_layout_of(
        head,
        hidden_NH,
        outputs=step.outputs,
        whole=step.head == "dense",
        entropy_grad=False,
        counts=(N,) * step.devices,
    )
    vocabulary = (rows.shard and rows.shard.vocabulary) or len(rows.weight)
    weights = vocabulary * hidden_NH.shape[1]
    chunk = rows_per_tile(N, step.device, step.chunk_size, weights)
    with rows.readable():
        scores = run_head(
            step.head,
            hidden_NH,
            rows.weight,
            torch.zeros(N, dtype=torch.long),
            bias=rows.bias,
            transform=logit_transform(inner.config, 1.0),
            outputs=step.outputs,
            chunk_size=chunk,
            tile_columns=columns_per_tile(chunk, vocabulary, step.device, weights=weights),
            readable=rows.readable,
            shard=rows.shard,
        )
    assert scores.log_probs is not None
    return scores.log_probs


def _move_from_meta(model: torch.nn.Module) -> None:
    """Move parameters and buffers to the CPU of the active `FakeTensorMode`. Tied ones stay tied."""
    moved_tensors: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved_tensors and hasattr(tensor, "quant_state"):
                    moved_tensors[id(tensor)] = packed(tensor)
                elif id(tensor) not in moved_tensors:
                    empty: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    trains = isinstance(tensor, torch.nn.Parameter)
                    moved_tensors[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if trains else empty
                tensors[name] = moved_tensors[id(tensor)]  # type: ignore[assignment]
