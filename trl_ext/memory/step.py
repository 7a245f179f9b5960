"""The memory of one training step, part by part: the model's own code runs on tensors that hold no numbers.

Backbone, adapters, checkpointing, packing and head are the ones that train, so no formula of theirs is repeated here.
What the optimizer adds is counted from its parameters. Operators are the CPU's: sdpa keeps what flash
attention keeps; the head upcasts tiles that a GPU multiplies as they are.

Dimensions: B rows, S tokens of a row, N tokens that are scored, H hidden size.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..heads import run_head
from ..heads.tiles import columns_per_tile, rows_per_tile
from ..packing import Layout, Packing, picked
from ..scoring.families import logit_transform
from ..scoring.head_parts import OtherHead, head_parts
from .records import AllocationRecords


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


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes. `activations` are those held when the backbone has run, `head` what the head takes beside them.

    Weights, reference and optimizer are held all the time; gradients come while activations go, so `peak` is below the
    sum.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    peak: int


def memory_of_step(step: Step) -> StepMemory:
    """The parts and the peak of a step after the first, which finds the optimizer's states there."""
    with torch.device("meta"):
        model = step.model()
    layout = _layout(step, model.config.get_text_config()._attn_implementation)
    with FakeTensorMode() as fake:
        _move_from_meta(model)
        trained = [x for x in model.parameters() if x.requires_grad]
        records = AllocationRecords()
        with records:
            for tensor in (*model.parameters(), *model.buffers()):
                records.count(tensor.data)
            weights = records.held
            gradients = sum(x.nbytes for x in trained)
            optimizer = step.states * gradients
            reference = sum(x.nbytes for x in model.parameters()) if step.reference_model else 0
            if step.accumulates:
                for parameter in trained:
                    parameter.grad = torch.zeros_like(parameter)
            activations, head, micro_batch = _micro_batch(step, model, _without_numbers(layout, fake), records)
    held = weights + reference + optimizer
    return StepMemory(
        weights=weights,
        reference=reference,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        head=head,
        peak=held + max(micro_batch - weights, gradients),
    )


def _micro_batch(step: Step, model: Any, layout: Layout, records: AllocationRecords) -> tuple[int, int, int]:
    """Activations, what the head takes beside them, and the most that was held in forward and backward."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    packing = Packing(inner, padding_free=True, share_prompts=False)
    before, highest = records.held, records.held
    autocast = nullcontext() if step.autocast is None else torch.autocast("cpu", dtype=step.autocast)
    with autocast:
        records.mark()
        hidden_NH = _scored(step, packing, inner, layout)
        activations, highest = records.held - before, max(highest, records.peak)
        records.mark()
        log_probs_N = _log_probs(step, inner, hidden_NH)
        head, highest = records.peak - before - activations, max(highest, records.peak)
    del hidden_NH
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
    return picked(hidden_TH, at_N)


def _log_probs(step: Step, inner: Any, hidden_NH: Tensor) -> Tensor:
    parts = head_parts(inner.get_output_embeddings())
    if isinstance(parts, OtherHead) or parts.adapter is not None:
        raise NotImplementedError("The memory of an adapter on the LM head is not known: leave `lm_head` out of it.")
    weight: Any = parts.linear.weight
    rows = rows_per_tile(len(hidden_NH), step.device, step.chunk_size)
    found = run_head(
        *(step.head, hidden_NH, weight, torch.zeros(len(hidden_NH), dtype=torch.long)),
        bias=getattr(parts.linear, "bias", None),
        transform=logit_transform(inner.config, 1.0),
        outputs=step.outputs,
        chunk_size=rows,
        tile_columns=columns_per_tile(rows, len(weight), step.device),
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
