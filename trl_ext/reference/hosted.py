"""Keeps a reference model's weights in pinned host memory and brings them to the device layer by layer for a forward.

Accelerate's `cpu_offload` is not used: it neither pins nor overlaps its copies, and it brings `lm_head` in for that
module's own forward only, which a scoring forward never calls.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ALIGNMENT = 256  # bytes: what a CUDA allocation of its own would have, and kernels are chosen by


def host_reference(model: Any, device: torch.device) -> "HostedReference":
    """
    Keep the weights of `model` on the host from now on, and have each call of `model` bring them to `device`.

    A call holds on the device what is not in a decoder layer (embeddings, last norm, head; tied weights once) and, of
    the decoder layers, the one that computes and the one that comes next, whose copy runs meanwhile. After it, failed
    or not, every parameter is its tensor on the host again, which nothing ever writes to. Buffers, which are small,
    move to `device` for good. The parameters are frozen.

    Args:
        model (`PreTrainedModel`): whole on one device, not quantized, not wrapped.
        device (`torch.device`): where `model` computes. A CUDA device copies on a stream of its own; on any other the
            same happens in order.

    Returns:
        `HostedReference`: what holds the weights, attached to `model`.

    Raises:
        `ValueError`: the model is spread over devices or ranks, is quantized, or has no list of layers.
    """
    return HostedReference(model, device)


class HostedReference:
    """The weights of one model: groups on the host, and two places on the device that its layers take in turn.

    Attributes:
        layer_bytes (`int`): of the largest decoder layer.
        rest_bytes (`int`): of the weights that are on the device for the whole of a call.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        _refuse(model)
        layers = _decoder_layers(model)
        self._device = device
        self._streams = _Streams(device)
        # A parameter that a layer shares with the rest stays as long as the rest does
        inside = {id(param) for layer in layers for param in layer.parameters()}
        inside -= {id(param) for param in _outside(model, layers)}
        pinned = device.type == "cuda"
        model.requires_grad_(False)
        self._rest = _Group((param for param in model.parameters() if id(param) not in inside), pinned)
        self._layers = [_Group((param for param in x.parameters() if id(param) in inside), pinned) for x in layers]
        self._rest_on_device: Tensor | None = None
        self._places: list[_Place] = []
        self.rest_bytes, self.layer_bytes = self._rest.size, max(layer.size for layer in self._layers)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        model.register_forward_pre_hook(lambda *_: self._enter(), prepend=True)
        model.register_forward_hook(lambda *_: self._leave(), always_call=True)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._bring(index), prepend=True)
            layer.register_forward_hook(lambda *_, index=index: self._drop(index))
        model.to = self._stay(model)

    def _stay(self, model: Any) -> Any:
        """`model.to` from now on: Accelerate's `prepare_model` moves every model to the device it computes on."""

        def to(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != 1 or args[0] != self._device:
                raise RuntimeError(
                    f"The reference model is kept on the host for {self._device} (`reference_device='cpu'`) and can "
                    f"be neither moved nor cast, got `.to{args}`, {kwargs}. Cast it before the trainer is built."
                )
            return model

        return to

    def _enter(self) -> None:
        self._leave()  # a call that an interrupt ended had no time to
        self._rest_on_device = torch.empty(self._rest.size, dtype=torch.uint8, device=self._device)
        self._places = [_Place(torch.empty(self.layer_bytes, dtype=torch.uint8, device=self._device)) for _ in range(2)]
        # The memory of the places may have been another tensor's, in kernels that still run
        self._streams.copies_wait(self._streams.computed())
        self._rest_on_device.copy_(self._rest.host, non_blocking=True)
        self._rest.point_at(self._rest_on_device)
        self._fetch(0)

    def _leave(self) -> None:
        # A copy that nobody waited for, of a layer that was not called, may still write to its place
        self._streams.compute_waits(self._streams.copied())
        for group in (self._rest, *self._layers):
            group.point_at(group.host)
        self._rest_on_device, self._places = None, []

    def _fetch(self, index: int) -> None:
        """Start to copy layer `index` to its place, once the layer that was there has computed."""
        place, group = self._places[index % 2], self._layers[index]
        if place.layer == index:
            return
        self._streams.copies_wait(place.computed)
        with self._streams.copying():
            place.memory[: group.size].copy_(group.host, non_blocking=True)
        place.layer, place.copied = index, self._streams.copied()

    def _bring(self, index: int) -> None:
        if not self._places:
            raise RuntimeError("The reference model is kept on the host: call the model, not a part or its `forward`.")
        self._fetch(index)
        place = self._places[index % 2]
        self._streams.compute_waits(place.copied)
        self._layers[index].point_at(place.memory)
        if index + 1 < len(self._layers):
            self._fetch(index + 1)

    def _drop(self, index: int) -> None:
        place, group = self._places[index % 2], self._layers[index]
        group.point_at(group.host)
        place.layer, place.computed = None, self._streams.computed()


class _Group:
    """Parameters that travel together: one piece of host memory, which each of them is a part of."""

    def __init__(self, params: Iterable[nn.Parameter], pinned: bool) -> None:
        self._params = list(params)
        self._starts = []
        self.size = 0
        for param in self._params:
            self._starts.append(self.size)
            self.size += -(-param.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._shapes = [(param.nbytes, param.dtype, param.shape) for param in self._params]
        self.host = torch.empty(self.size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        for param, part in zip(self._params, self._parts(self.host), strict=True):
            part.copy_(param.data)
        self.point_at(self.host)

    def _parts(self, memory: Tensor) -> Iterator[Tensor]:
        for start, (nbytes, dtype, shape) in zip(self._starts, self._shapes, strict=True):
            yield memory[start : start + nbytes].view(dtype).view(shape)

    def point_at(self, memory: Tensor) -> None:
        """Make the parameters parts of `memory`, which holds the group's bytes."""
        for param, part in zip(self._params, self._parts(memory), strict=True):
            param.data = part


@dataclass
class _Place:
    """Device memory for one layer: which one is there, when it has arrived, and when the last one had computed."""

    memory: Tensor
    layer: int | None = None
    copied: Any = None
    computed: Any = None


class _Streams:
    """The order of copies and compute: by events between two streams on CUDA; elsewhere all is in order already."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copying(self) -> AbstractContextManager[Any]:
        """Copies within run on the stream for copies."""
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)

    def computed(self) -> Any:
        """The end of what was asked of the compute stream up to now."""
        return None if self._copies is None else torch.cuda.current_stream(self._device).record_event()

    def copied(self) -> Any:
        """The end of the copies asked for up to now."""
        return None if self._copies is None else self._copies.record_event()

    def copies_wait(self, event: Any) -> None:
        """Copies asked for from now on start after `event`."""
        if self._copies is not None and event is not None:
            self._copies.wait_event(event)

    def compute_waits(self, event: Any) -> None:
        """What is asked of the compute stream from now on starts after `event`."""
        if self._copies is not None and event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def _decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of the `nn.ModuleList` with the most weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(
            f"`reference_device='cpu'` brings a model in layer by layer, and {type(model).__name__} has no "
            "`nn.ModuleList` of layers. Leave `reference_device` unset."
        )
    # The first of equals: a list of layers comes before a list inside its only layer
    largest = max(lists, key=lambda layers: sum(param.nbytes for param in layers.parameters()))
    return list(dict.fromkeys(largest))


def _outside(model: nn.Module, layers: list[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters of modules that are in no layer."""
    within = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in within:
            yield from module.parameters(recurse=False)


def _refuse(model: Any) -> None:
    unless = "Leave `reference_device` unset"
    if getattr(model, "is_quantized", False):
        raise ValueError(
            f"`reference_device='cpu'` does not keep a quantized reference model on the host. {unless}, or load it "
            "without quantization."
        )
    # TRL and transformers spread a model that is loaded with `device_map="auto"` over the devices they see
    if len(getattr(model, "hf_device_map", None) or {}) > 1:
        raise ValueError(
            f"`reference_device='cpu'` needs a reference model that was loaded whole, got the `device_map` "
            f"{model.hf_device_map}. Pass `model_init_kwargs={{'device_map': None}}`."
        )
    for name, param in model.named_parameters():
        if type(param) is not nn.Parameter or param.is_meta:
            raise ValueError(
                f"`reference_device='cpu'` needs plain weights, got {type(param).__name__} on {param.device} for "
                f"{name}. {unless}: a reference model that is sharded over ranks is spread already."
            )
