"""The memory of one training step, part by part: the model's own code runs on tensors that hold no numbers.

Backbone, adapters, checkpointing, packing and head are the ones that train, so no formula of theirs is repeated here.
What the optimizer adds is counted from its parameters. Operators are the CPU's: sdpa keeps what flash
attention keeps; the head upcasts tiles that a GPU multiplies as they are.

Dimensions: B rows, S tokens of a row, N tokens that are scored, H hidden size.
"""

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from ..heads.linear_log_probs import run_head
from ..heads.tiles import columns_per_tile, rows_per_tile
from ..packing.layout import Layout, index_select_fp32_grad
from ..packing.packing import Packing
from ..scoring.head import OpaqueHead, logit_transform, resolve_head
from ..scoring.weight_layout import weight_layout_of
from .records import AllocationRecords, one_rank_of, under_fsdp2

Engine = Literal["one_process", "ddp", "fsdp2"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is trained, and on how much.

    Args:
        model (`Callable`): makes the policy, with its adapters, as it is trained; called on the device "meta".
        rows (`int`): of a micro-batch, as they are fed: two for each pair.
        tokens (`int`): of each row, as it is fed.
        scored (`int`): of each row, from its end.
        outputs (`tuple[str, ...]`): what the head gives.
        device (`torch.device`): for which the head's tiles are chosen.
        head, chunk_size (`str`, `int`): the config's `head` and `head_chunk_size`.
        autocast (`torch.dtype`, *optional*): of mixed precision.
        accumulates (`bool`): whether gradients of an earlier micro-batch are there already.
        states (`int`): numbers that the optimizer keeps for each trained one.
        reference_model (`bool`): whether a model of the policy's size is held beside it.
        engine (`str`): `"one_process"`, `"ddp"` or `"fsdp2"`.
        devices (`int`): on how many it runs; all else is of one of them.
    """

    model: Callable[[], Any]
    rows: int
    tokens: int
    scored: int
    outputs: tuple[str, ...]
    device: torch.device
    head: str = "tiled"
    chunk_size: int | None = None
    autocast: torch.dtype | None = None
    accumulates: bool = False
    states: int = 2
    reference_model: bool = False
    engine: Engine = "one_process"
    devices: int = 1


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one device. `activations` are those held when the backbone has run, with the weights that are gathered
    then; `head` what the head takes beside them; `buckets` DDP's, in which gradients are summed over the processes.

    Weights, reference, optimizer and buckets are held all the time; gradients come while activations go, so `peak` is
    below the sum.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    buckets: int
    activations: int
    head: int
    peak: int


def memory_of_step(step: Step) -> StepMemory:
    """The parts and the peak of a step after the first, which finds the optimizer's states there."""
    with torch.device("meta"):
        model = step.model()
    layout = _layout(step, model.config.get_text_config()._attn_implementation)
    ranks: AbstractContextManager[Any] = one_rank_of(step.devices) if step.engine == "fsdp2" else nullcontext()
    with ranks as mesh, FakeTensorMode() as fake:
        _move_from_meta(model)
        if mesh is not None:
            model = under_fsdp2(model, mesh, step.autocast)
        records = AllocationRecords()
        with records:
            for tensor in (*model.parameters(), *model.buffers()):
                records.count(tensor.data)
            weights = records.held
            gradients = sum(_bytes_here(x) for x in model.parameters() if x.requires_grad)
            optimizer = step.states * gradients
            reference = sum(_bytes_here(x) for x in model.parameters()) if step.reference_model else 0
            activations, head, micro_batch = _micro_batches(step, model, _without_numbers(layout, fake), records)
    buckets = gradients if step.engine == "ddp" else 0
    held = weights + reference + optimizer + buckets
    return StepMemory(
        weights=weights,
        reference=reference,
        gradients=gradients,
        optimizer=optimizer,
        buckets=buckets,
        activations=activations,
        head=head,
        peak=held + max(micro_batch - weights, gradients),
    )


def _bytes_here(tensor: Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _micro_batches(step: Step, model: Any, layout: Layout, records: AllocationRecords) -> tuple[int, int, int]:
    """Activations, what the head takes beside them, and the most that was held, where gradients are accumulated."""
    if step.accumulates and step.engine == "fsdp2":
        # Until the last micro-batch, accelerate has FSDP2 keep whole gradients on each rank
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


def _micro_batch(step: Step, model: Any, layout: Layout, records: AllocationRecords) -> tuple[int, int, int]:
    """Activations, what the head takes beside them, and the most that was held in forward and backward."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    packing = Packing(inner, padding_free=True, share_prompts=False)
    before, highest, activations = records.held, records.held, 0

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of the model's own, as in training: inside what wraps it."""
        nonlocal highest, activations
        hidden_NH = _scored(step, packing, inner, layout)
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


def _scored(step: Step, packing: Packing, inner: Any, layout: Layout) -> Tensor:
    """`(N, H)`: hidden states of the scored tokens."""
    if packing.why_padded is None:
        hidden_TH = packing.run(inner, layout, {"use_cache": False}).last_hidden_state.squeeze(0)
    else:
        ids_BS = layout.input_ids.view(step.rows, step.tokens)
        hidden_TH = inner.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state.flatten(0, 1)
    starts_B = torch.arange(step.rows) * step.tokens + step.tokens - step.scored
    at_N = (starts_B.unsqueeze(1) + torch.arange(step.scored)).flatten()
    return index_select_fp32_grad(hidden_TH, at_N)


def _log_probs(step: Step, inner: Any, hidden_NH: Tensor) -> Tensor:
    parts = resolve_head(inner.get_output_embeddings())
    if isinstance(parts, OpaqueHead) or parts.module is not None:
        raise NotImplementedError("The memory of an adapter on the LM head is not known: leave `lm_head` out of it.")
    rows = weight_layout_of(
        parts,
        hidden_NH,
        outputs=step.outputs,
        whole=step.head == "dense",
        gradient=True,
        entropy_grad=False,
        counts=(len(hidden_NH),) * step.devices,
    )
    chunk = rows_per_tile(len(hidden_NH), step.device, step.chunk_size)
    with rows.readable():
        found = run_head(
            *(step.head, hidden_NH, rows.weight, torch.zeros(len(hidden_NH), dtype=torch.long)),
            bias=rows.bias,
            transform=logit_transform(inner.config, 1.0),
            outputs=step.outputs,
            chunk_size=chunk,
            tile_columns=columns_per_tile(chunk, len(rows.weight), step.device),
            readable=rows.readable,
            shard=rows.shard,
        )
    assert found.log_probs is not None
    return found.log_probs


def _move_from_meta(model: torch.nn.Module) -> None:
    """Put parameters and buffers on the CPU, under a `FakeTensorMode`; those that are tied stay one."""
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


def _layout(step: Step, implementation: str) -> Layout:
    """Of rows that share nothing and have no padding: the most that a batch of this shape feeds."""
    ids_BS = torch.zeros(step.rows, step.tokens, dtype=torch.long)
    lengths_B, first_B = torch.full((step.rows,), step.tokens), torch.zeros(step.rows, dtype=torch.long)
    return Layout(ids_BS, lengths_B, first_B, share=False, rebase=False, implementation=implementation)


def _without_numbers(layout: Layout, fake: FakeTensorMode) -> Layout:
    for name, value in vars(layout).items():
        if isinstance(value, Tensor):
            setattr(layout, name, fake.from_tensor(value))
    return layout
