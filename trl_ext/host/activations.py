"""Keeps activations in host memory between the forward and the backward pass."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

_SMALLEST = 1024  # bytes; smaller tensors are not worth a copy
_IN_FLIGHT = 4  # tensors that stay on the device while they are copied to the host, or are brought back early


class ActivationsOnHost:
    """A context in which autograd keeps what it saves for the backward in host memory, pinned unless `device` is a CPU.

    It moves only tensors on `device`, but not weights of the model, nor small, expanded or sharded tensors. A tensor
    that is saved several times is copied once. Copies run on their own stream, so neither host nor device waits for
    each copy. Values stay bitwise equal. Copies live as long as the graph. TRL's class is not enough: it leaves tensors
    that are saved twice on the device, which LoRA layers produce, and raises if a graph is dropped or unpacked twice.

    Args:
        model (`Callable`): returns the model; called at each entry, because an engine may have replaced it.
        device (`torch.device`): the device that computes.
    """

    def __init__(self, model: Callable[[], nn.Module], device: torch.device) -> None:
        self._model = model
        self._device = device
        self._entered: list[saved_tensors_hooks] = []

    def __enter__(self) -> None:
        tensors = HostTensors(self._model(), self._device)
        self._entered.append(saved_tensors_hooks(tensors.pack, tensors.unpack))
        self._entered[-1].__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


class HostTensors:
    """The tensors that one block has moved to the host."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with its index
        weights = (param for param in model.parameters() if not isinstance(param.data, DTensor))
        self._weights = {StorageWeakRef(param.untyped_storage()) for param in weights}
        self._copies = _copy_stream(self._device) if device.type == "cuda" else None
        # Autograd also saves gathered weights, which FSDP frees even if something else still holds them
        sharded = any(isinstance(param.data, DTensor) for param in model.parameters())
        sharded = sharded or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
        self._in_flight = 0 if sharded else _IN_FLIGHT
        self._packed: dict[Any, tuple[StorageWeakRef, weakref.ref[HostCopy]]] = {}
        self._order: list[weakref.ref[HostCopy]] = []  # in the order of packing; the backward needs them in reverse
        self._leaving: deque[tuple[Any, Tensor]] = deque()  # (event that ends the copy, tensor)

    @property
    def _compute(self) -> Any:
        return None if self._copies is None else torch.cuda.current_stream(self._device)

    def pack(self, tensor: Tensor) -> "Tensor | HostCopy":
        stays = isinstance(tensor, DTensor) or tensor.device.type != self._device.type or tensor.nbytes < _SMALLEST
        reference = StorageWeakRef(tensor.untyped_storage())
        if stays or 0 in tensor.stride() or reference in self._weights:
            return tensor
        view = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        key = (reference.cdata, tensor._version, *view)
        packed_storage, packed_reference = self._packed.get(key, (reference, None))
        packed = None if packed_reference is None or packed_storage.expired() else packed_reference()
        if packed is not None:
            return packed
        is_pinned = tensor.device.type != "cpu"
        memory = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=is_pinned)
        packed = HostCopy(memory, tensor.device, len(self._order))
        is_on_device = tensor.device == self._device
        with _on(self._copies if is_on_device else None):
            memory.copy_(tensor, non_blocking=is_on_device and self._copies is not None)
        if is_on_device:
            # Hold the tensor until the compute stream waits for the copy: nothing may overwrite it before
            self._leaving.append((event(self._copies), tensor))
            if len(self._leaving) > self._in_flight:
                wait(self._compute, self._leaving.popleft()[0])
        packed_reference = weakref.ref(packed)
        self._packed[key] = (reference, packed_reference)
        self._order.append(packed_reference)
        return packed

    def unpack(self, packed: "Tensor | HostCopy") -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.device != self._device:
            return packed.empty().copy_(packed.memory, non_blocking=True)
        while self._leaving:
            wait(self._compute, self._leaving.popleft()[0])
        for packed_reference in reversed(self._order[max(0, packed.place - _IN_FLIGHT) : packed.place + 1]):
            earlier = packed_reference()
            if earlier is not None and earlier.back is None and earlier.device == self._device:
                earlier.back = earlier.empty()
                with _on(self._copies):
                    earlier.back.copy_(earlier.memory, non_blocking=True)
                if self._copies is not None:
                    earlier.back.record_stream(self._copies)  # because it may be freed unused
                earlier.copied = event(self._copies)
        back = packed.back
        packed.back = None
        assert back is not None
        wait(self._compute, packed.copied)
        return back


@dataclass(eq=False)
class HostCopy:
    """A saved tensor in host memory. `back`: its copy on the device, while needed. `copied`: the event at its end."""

    memory: Tensor
    device: torch.device
    place: int  # in the order of packing
    back: Tensor | None = None
    copied: Any = None

    def empty(self) -> Tensor:
        """Return an empty tensor on the device, with the original strides, on which the choice of kernels depends."""
        memory = self.memory
        return torch.empty_strided(memory.size(), memory.stride(), dtype=memory.dtype, device=self.device)


# Streams; `None` for a device without


@cache
def _copy_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Run the `with` block on `stream`, after the current stream's work."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def event(stream: Any) -> Any:
    """Record an event after the current work of `stream`."""
    return None if stream is None else stream.record_event()


def wait(stream: Any, event: Any) -> None:
    """Make later work of `stream` wait for `event`."""
    if event is not None:
        stream.wait_event(event)
