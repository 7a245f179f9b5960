"""Scaling and tensor-parallel sums of gradients, a check of gradient checkpointing, and activation offloading."""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """Return `x`, and multiply its gradient by `factor` in the backward."""
    if factor == 1.0 or not x.requires_grad:
        return x
    return cast(Tensor, _ScaleGrad.apply(x, factor))  # type: ignore[no-untyped-call]


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def sum_gradients_once(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace transformers' sum of replicated gradients: sum over `group` only what each backward adds.

    A norm of attention heads (Qwen3, Gemma 3) is whole on every rank but sees only that rank's heads. Transformers 5.17
    to 5.23 sums its `param.grad` after every backward, so gradient accumulation sums earlier micro-batches again.
    Parameters that FSDP2 also shards stay with transformers, because they have no gradient when a backward begins.
    """
    for module in model.modules():
        params = [param for param in module.parameters(recurse=False) if param.requires_grad]
        if params and not any(isinstance(param, DTensor) for param in params) and _remove_transformers_sum(module):
            for param in params:
                param.register_hook(partial(_summed, group=group))


def _remove_transformers_sum(module: nn.Module) -> bool:
    """Remove transformers' sum of gradients from `module`. Returns whether there was one."""
    found = False
    hooks: dict[Any, Any] = module._backward_hooks
    for own, keys in ((hooks, [*hooks]), (vars(module), ["forward"])):
        for key in keys:
            if getattr(own.get(key), "__qualname__", "").startswith("ReplicatedWithGradAllReduce."):
                del own[key]
                found = True
    return found


def _summed(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total


def check_checkpointing(wrapped: nn.Module) -> None:
    """Raise `ValueError` if gradient checkpointing is reentrant and DDP searches for unused parameters."""
    ddp = getattr(wrapped, "_orig_mod", wrapped)  # torch.compile's wrapper is the outermost
    if not isinstance(ddp, DistributedDataParallel) or not ddp.find_unused_parameters or ddp.static_graph:
        return
    for name, module in ddp.module.named_modules():
        if _is_reentrant(module) and any(param.requires_grad for param in module.parameters()):
            raise ValueError(
                f"`gradient_checkpointing_kwargs={{'use_reentrant': True}}` does not work under DDP with "
                "`ddp_find_unused_parameters=True`, the default for a PEFT model: DDP would treat the trained "
                f"parameters of `{name}` as unused, and the first backward would fail. Set "
                '`gradient_checkpointing_kwargs={"use_reentrant": False}` or `ddp_find_unused_parameters=False`.'
            )


def _is_reentrant(module: nn.Module) -> bool:
    if not isinstance(module, GradientCheckpointingLayer) or not module.gradient_checkpointing:
        return False
    function = module._gradient_checkpointing_func
    return isinstance(function, partial) and bool(function.keywords.get("use_reentrant", True))  # torch's default


_SMALLEST = 1024  # bytes; smaller tensors are not worth a copy
_IN_FLIGHT = 4  # tensors that stay on the device while they are copied to the host, or are brought back early


@contextmanager
def activations_on_host(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep in host memory what autograd saves for the backward in the `with` block, pinned if `device` is not the CPU.

    It moves only tensors on `device`, but not weights of `model`, nor small, expanded or sharded tensors. A tensor that
    is saved several times is copied once. Copies run on their own stream, so neither host nor device waits for each.
    Values stay bitwise equal. Copies live as long as the graph. TRL's class, which DPO uses, does not suffice: it
    leaves a tensor that is saved twice on the device, and raises if a graph is dropped or unpacked twice.
    """
    kept = _KeptOnHost(model, device)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        yield


class _KeptOnHost:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with its index
        self._weights = {param.data_ptr() for param in model.parameters() if not isinstance(param.data, DTensor)}
        self._copies = _copy_stream(self._device) if device.type == "cuda" else None
        # Autograd also saves gathered weights, which FSDP frees even if something else still holds them
        sharded = any(isinstance(param.data, DTensor) for param in model.parameters())
        sharded = sharded or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        self._in_flight = 0 if sharded else _IN_FLIGHT
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[_HostCopy]]] = {}
        self._order: list[weakref.ref[_HostCopy]] = []  # in the order of packing; the backward needs them in reverse
        self._leaving: deque[tuple[Any, Tensor]] = deque()  # (event that ends the copy, tensor)

    def pack(self, tensor: Tensor) -> "Tensor | _HostCopy":
        stays = isinstance(tensor, DTensor) or tensor.device.type != self._device.type or tensor.nbytes < _SMALLEST
        storage = tensor.untyped_storage()
        if stays or 0 in tensor.stride() or storage.data_ptr() in self._weights:
            return tensor
        reference = StorageWeakRef(storage)
        view = tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype
        name = reference.cdata, tensor._version, *view
        storage_then, known = self._known.get(name, (reference, None))
        packed = None if known is None or storage_then.expired() else known()
        if packed is not None:
            return packed
        memory = torch.empty_strided(*view[1:3], dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
        packed = _HostCopy(memory, tensor.device, len(self._order))
        copies = self._copies if tensor.device == self._device else None
        with _on(copies):
            memory.copy_(tensor, non_blocking=copies is not None)
        if copies is not None:
            # Hold the tensor until the compute stream waits for the copy: nothing may overwrite it before
            self._leaving.append((copies.record_event(), tensor))
            if len(self._leaving) > self._in_flight:
                torch.cuda.current_stream(self._device).wait_event(self._leaving.popleft()[0])
        self._known[name] = reference, weakref.ref(packed)
        self._order.append(self._known[name][1])
        return packed

    def unpack(self, packed: "Tensor | _HostCopy") -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._copies is None or packed.device != self._device:
            return packed.empty().copy_(packed.memory, non_blocking=True)
        compute = torch.cuda.current_stream(self._device)
        while self._leaving:
            compute.wait_event(self._leaving.popleft()[0])
        for known in reversed(self._order[max(0, packed.place - _IN_FLIGHT) : packed.place + 1]):
            earlier = known()
            if earlier is not None and earlier.back is None and earlier.device == self._device:
                earlier.back = earlier.empty()
                with _on(self._copies):
                    earlier.back.copy_(earlier.memory, non_blocking=True)
                earlier.back.record_stream(self._copies)  # because it may be freed unused
                earlier.came = self._copies.record_event()
        back, packed.back = packed.back, None
        assert back is not None
        compute.wait_event(packed.came)
        return back


@dataclass(eq=False)
class _HostCopy:
    """A saved tensor in host memory. `back`: its copy on the device, while needed. `came`: the event at its end."""

    memory: Tensor
    device: torch.device
    place: int  # in the order of packing
    back: Tensor | None = None
    came: Any = None

    def empty(self) -> Tensor:
        """Return an empty tensor on the device, with the original strides, on which the choice of kernels depends."""
        shape = self.memory.size(), self.memory.stride()
        return torch.empty_strided(*shape, dtype=self.memory.dtype, device=self.device)


@cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Run the `with` block on `stream`, after the current stream's work; `None` for a device without streams."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield
