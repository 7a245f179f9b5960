"""Estimates the memory of one training step, by running the model's own code on tensors without data.

Backbone, adapters, checkpointing, packing and head run as in training, so this file has no formulas for them.
Optimizer states are counted from the trained parameters. The operators are those of the CPU: sdpa saves the same
tensors as flash attention, but the head upcasts tiles that a GPU multiplies without upcasting.

Dimensions: B rows, S tokens of a row, N scored tokens, T tokens of the packed row, H hidden size.
"""

import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..heads.linear_log_probs import run_head
from ..heads.tiled import columns_per_tile, rows_per_tile
from ..packing.attention import index_select_fp32_grad, run_packed
from ..packing.layout import Layout
from ..packing.packing import Packing
from ..packing.support import has_dropout, positions_by_length, rebases
from ..scoring.head import OpaqueHead, logit_transform, resolve_head
from ..scoring.weight_layout import weight_layout_of

Engine = Literal["one_process", "ddp", "fsdp2"]
_AXIS = "dp_shard"


class Row(NamedTuple):
    """The tokens of one row. Rows of the same group share their prompt, which the model then processes once."""

    group: int
    prompt: int
    completion: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """The model, the batch shape and the settings of the step to estimate."""

    model: Callable[[], Any]  # makes the policy with its adapters, in training mode; called on the device "meta"
    rows: int  # of a micro-batch; two for each pair
    tokens: int  # of each row that the model processes
    scored: int  # the last tokens of each row, which the head scores
    outputs: tuple[str, ...]  # of the head
    device: torch.device  # the device for which the head chooses its tile sizes
    head: str = "tiled"
    chunk_size: int | None = None  # the config's `head_chunk_size`
    autocast: torch.dtype | None = None  # of mixed precision
    accumulates: bool = False  # whether gradients of an earlier micro-batch are in memory
    states: int = 2  # optimizer states for each trained parameter
    reference_model: bool = False  # whether a reference model of the policy's size is in memory
    engine: Engine = "one_process"
    devices: int = 1  # the number of devices; all other values are for one of them
    lengths: tuple[Row, ...] = ()  # of rows that differ, in place of `rows`, `tokens` and `scored`


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes on one device.

    Weights, reference, optimizer and buckets stay in memory. The backward frees activations while it makes gradients,
    so `peak` is below the sum.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    buckets: int  # of DDP, for the all-reduce of gradients
    activations: int  # after the backbone's forward, with the weights gathered at that time
    head: int  # of the LM head, in addition to the activations
    peak: int


def memory_of_step(step: Step) -> StepMemory:
    """Return the parts and the peak of a step after the first, when the optimizer states exist."""
    with torch.device("meta"):
        model = step.model()
    layout = _layout(step, model)
    ranks: AbstractContextManager[Any] = _one_rank_of(step.devices) if step.engine == "fsdp2" else nullcontext()
    with ranks as mesh, FakeTensorMode() as fake:
        _move_from_meta(model)
        if mesh is not None:
            model = _under_fsdp2(model, mesh, step.autocast)
        with AllocationRecords() as records:
            for tensor in (*model.parameters(), *model.buffers()):
                records.count(tensor.data)
            weights = records.held
            gradients = sum(_here(x).nbytes for x in model.parameters() if x.requires_grad)
            reference = sum(_here(x).nbytes for x in model.parameters()) if step.reference_model else 0
            for name, value in vars(layout).items():
                if isinstance(value, Tensor):
                    setattr(layout, name, fake.from_tensor(value))
            activations, head, highest = _micro_batches(step, model, layout, records)
    optimizer, buckets = step.states * gradients, gradients if step.engine == "ddp" else 0
    held = weights + reference + optimizer + buckets
    return StepMemory(
        weights=weights,
        reference=reference,
        gradients=gradients,
        optimizer=optimizer,
        buckets=buckets,
        activations=activations,
        head=head,
        peak=held + max(highest - weights, gradients),
    )


def _layout(step: Step, model: Any) -> Layout:
    """Return the packed row of the micro-batch: without padding, and without shared tokens unless rows have groups."""
    attention = model.config.get_text_config()._attn_implementation
    same = (Row(-1, step.tokens - step.scored + 1, step.scored),) * step.rows
    rows = step.lengths or same
    # The last token of a row is only predicted
    lengths_B = np.array([row.prompt + row.completion - 1 for row in rows])
    ids_BS = np.zeros((len(rows), max(lengths_B)), np.int64)
    scored_BS = np.zeros(ids_BS.shape, bool)
    for i, (row, length) in enumerate(zip(rows, lengths_B, strict=True)):
        ids_BS[i, 0] = 1 + row.group
        ids_BS[i, row.prompt :] = 1 + i
        scored_BS[i, max(row.prompt - 1, 0) : length] = True
    return Layout(
        *(ids_BS, lengths_B, np.zeros(len(rows), np.int64)),
        scored_BS=scored_BS if step.lengths else None,
        share=bool(step.lengths),
        rebase=rebases(model),
        implementation=attention,
    )


def _here(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _micro_batches(step: Step, model: Any, layout: Layout, records: "AllocationRecords") -> tuple[int, int, int]:
    """Return the bytes of activations, of the head and of the highest total, also with gradient accumulation."""
    if step.accumulates and step.engine == "fsdp2":
        # Accelerate makes FSDP2 keep whole gradients on each rank until the last micro-batch
        model.set_requires_gradient_sync(False)
        first = _micro_batch(step, model, layout, records)[2]
        model.set_requires_gradient_sync(True)
        activations, head, last = _micro_batch(step, model, layout, records)
        return activations, head, max(first, last)
    if step.accumulates:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    return _micro_batch(step, model, layout, records)


def _micro_batch(step: Step, model: Any, layout: Layout, records: "AllocationRecords") -> tuple[int, int, int]:
    """Return the bytes of activations, of the head and of the highest total, after one forward and backward."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    packing = Packing(inner, padding_free=True, share_prompts=False)
    before, highest, activations = records.held, records.held, 0

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Replace the model's own forward inside its wrappers, as in training."""
        nonlocal highest, activations
        hidden_NH = _hidden_states(step, packing, inner, layout)
        activations, highest = records.held - before, max(highest, records.peak)
        records.mark()
        return _log_probs(step, inner, hidden_NH).clone()  # FSDP2 warns of a view

    inner.forward = types.MethodType(forward, inner)
    autocast = nullcontext() if step.autocast is None else torch.autocast("cpu", dtype=step.autocast)
    with autocast:
        records.mark()
        log_probs_N = model(input_ids=layout.input_ids)
        head, highest = records.peak - before - activations, max(highest, records.peak)
    records.mark()
    log_probs_N.sum().backward()
    return activations, head, max(highest, records.peak)


def _hidden_states(step: Step, packing: Packing, inner: Any, layout: Layout) -> Tensor:
    """Return the hidden states `(N, H)` of the scored tokens."""
    if packing.padded_reason is None:
        hidden_TH = run_packed(inner, layout, {"use_cache": False}).last_hidden_state.squeeze(0)
    else:
        ids_BS = layout.input_ids.view(step.rows, step.tokens)
        hidden_TH = inner.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state.flatten(0, 1)
    if step.lengths:
        return index_select_fp32_grad(hidden_TH, layout.at_N)
    starts_B = torch.arange(step.rows) * step.tokens + step.tokens - step.scored
    at_N = (starts_B.unsqueeze(1) + torch.arange(step.scored)).flatten()
    return index_select_fp32_grad(hidden_TH, at_N)


def _log_probs(step: Step, inner: Any, hidden_NH: Tensor) -> Tensor:
    head = resolve_head(inner.get_output_embeddings())
    if isinstance(head, OpaqueHead) or head.module is not None:
        raise NotImplementedError("An adapter on `lm_head` cannot be estimated. Leave `lm_head` out of the adapter.")
    N = len(hidden_NH)
    whole, counts = step.head == "dense", (N,) * step.devices
    rows = weight_layout_of(head, hidden_NH, outputs=step.outputs, whole=whole, entropy_grad=False, counts=counts)
    vocabulary = (rows.shard and rows.shard.vocabulary) or len(rows.weight)
    weights = vocabulary * hidden_NH.shape[1]
    chunk = rows_per_tile(N, step.device, step.chunk_size, weights)
    with rows.readable():
        scored = run_head(
            *(step.head, hidden_NH, rows.weight, torch.zeros(N, dtype=torch.long)),
            bias=rows.bias,
            transform=logit_transform(inner.config, 1.0),
            outputs=step.outputs,
            chunk_size=chunk,
            tile_columns=columns_per_tile(chunk, vocabulary, step.device, weights=weights),
            readable=rows.readable,
            shard=rows.shard,
        )
    assert scored.log_probs is not None
    return scored.log_probs


def _move_from_meta(model: torch.nn.Module) -> None:
    """Move parameters and buffers to the CPU of the active `FakeTensorMode`. Tied ones stay tied."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    empty: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    trains = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if trains else empty
                tensors[name] = moved[id(tensor)]  # type: ignore[assignment]


class AllocationRecords(TorchDispatchMode):
    """Counts the storages that operators return inside the `with` block, until they are freed or resized.

    The temporary memory of an operator is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0  # bytes of live storages: now, and the most since the last `mark()`
        self._known: dict[int, int] = {}  # bytes of each storage

    def count(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` if it is new. Of a sharded tensor, count this rank's part."""
        storage = _here(tensor).untyped_storage()
        name, size = storage._cdata, storage.nbytes()
        if name in self._known or size == 0:
            return
        self._known[name] = 0
        weakref.finalize(storage, self._freed, name)
        self._resized(name, size)

    def mark(self) -> None:
        self.peak = self.held

    def _resized(self, name: int, size: int) -> None:
        self.held += size - self._known[name]
        self._known[name] = size
        self.peak = max(self.peak, self.held)

    def _freed(self, name: int) -> None:
        self.held -= self._known.pop(name)

    def __enter__(self) -> Any:
        """Also watch `resize_`, because FSDP2 resizes the storages of gathered weights without an operator."""
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._known:
                self._resized(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and count the memory of what it returns. `bool()` of a tensor without data is True."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return result


class ModelFacts(NamedTuple):
    """What a plan of micro-batches needs to know about the model."""

    packs: bool  # batches run without padding
    shares: bool  # rows of a pass share their prompt in training
    by_micro_batch: str | None  # why the gradient depends on which rows share a micro-batch
    weight_bytes: int
    trained_bytes: int


def facts_of(make: Callable[[], Any], router_aux_loss_coef: float | None) -> ModelFacts:
    """Return the facts of the model that `make` makes on the device "meta". `router_aux_loss_coef`: the config's."""
    with torch.device("meta"):
        model = make()
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    packs = Packing(inner, padding_free=True, share_prompts=True).padded_reason is None
    reason = None
    if positions_by_length(inner):
        reason = "the model's rotary embeddings depend on the longest row of each micro-batch"
    config = inner.config.get_text_config()
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if router_aux_loss_coef is None else router_aux_loss_coef
    if hasattr(config, "output_router_logits") and coefficient != 0.0:
        reason = "the router loss is computed for each micro-batch"
    sizes = [(x.nbytes, x.requires_grad) for x in model.parameters()]
    return ModelFacts(
        packs=packs,
        shares=packs and not has_dropout(model),
        by_micro_batch=reason,
        weight_bytes=sum(size for size, _ in sizes),
        trained_bytes=sum(size for size, trains in sizes if trains),
    )


@contextmanager
def _one_rank_of(devices: int) -> Iterator[DeviceMesh]:
    """Make this process the first rank of a mesh of `devices` in the `with` block. Its collectives move no data."""
    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (devices,), mesh_dim_names=(_AXIS,))
    finally:
        dist.destroy_process_group()


def _under_fsdp2(model: Any, mesh: DeviceMesh, mixed_precision: torch.dtype | None) -> Any:
    """Prepare `model` for FSDP2 as Accelerate does, with the settings of `examples/accelerate_configs`."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
    )
    mixed = {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[mixed_precision]
    if mixed_precision is not None:
        plugin.set_mixed_precision(mixed)
    # A real `Accelerator` would look for other processes
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=(_AXIS,)),
        mixed_precision=mixed,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)
