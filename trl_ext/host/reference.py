"""Keep a reference model's weights in pinned host memory, and copy them to the device layer by layer in a forward.

Accelerate's `cpu_offload` neither pins memory nor overlaps copies, and it loads `lm_head` only for that module's own
forward, which a scoring forward never calls.
"""

import logging
import mmap
import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .activations import event, wait

logger = logging.getLogger("trl_ext")

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 256  # bytes, as for a CUDA allocation; the choice of kernels depends on it


class HostedReference:
    """Keeps the weights of `model` on the host, and copies them to `device` in each call of `model`.

    During a call the device holds the weights outside of the decoder layers (embeddings, last norm, head; tied weights
    once), the layer that computes, and the next layer, which is copied meanwhile. After a call, even a failed one, all
    parameters are on the host again, unchanged and frozen. Buffers, which are small, stay on `device`.

    Args:
        model (`PreTrainedModel`): on one device, not sharded, quantized or wrapped. Call `check_supported` on it first.
        device (`torch.device`): where `model` computes. A CUDA device copies on a separate stream.
        option (`str`): the argument that asks for it, for errors.

    Attributes:
        layer_bytes (`int`), rest_bytes (`int`): the size of the largest decoder layer, and of the weights outside.

    Raises:
        `ValueError`: the model has no list of layers.
    """

    def __init__(self, model: Any, device: torch.device, option: str = "reference_device") -> None:
        layers = _decoder_layers(model, option)
        self._device = device
        pinned = device.type == "cuda"
        self._copies: Any = torch.cuda.Stream(device) if pinned else None
        # A parameter that a layer shares with the rest stays on the device with the rest
        inside = {id(param) for layer in layers for param in layer.parameters()}
        inside -= {id(param) for param in _outside(model, layers)}
        model.requires_grad_(False)
        self._rest = _Group((param for param in model.parameters() if id(param) not in inside), pinned)
        self._layers = [_Group((param for param in x.parameters() if id(param) in inside), pinned) for x in layers]
        self._places: list[_Place] = []
        self.rest_bytes = self._rest.size
        self.layer_bytes = max(layer.size for layer in self._layers)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        model.register_forward_pre_hook(lambda *_: self._enter(), prepend=True)
        model.register_forward_hook(lambda *_: self._leave(), always_call=True)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._bring(index), prepend=True)
            layer.register_forward_hook(lambda *_, index=index: self._drop(index))

        place = torch.empty(0, device=device).device  # has an index: "cuda" is the current device

        def to(*args: Any, **kwargs: Any) -> Any:
            is_device = not kwargs and len(args) == 1 and not isinstance(args[0], torch.dtype)
            if not is_device or torch.empty(0, device=args[0]).device != place:
                raise RuntimeError(
                    f"`{option}='cpu'` keeps this model in host memory, and runs it on {device}. The model "
                    f"cannot be moved or cast, but `to` was called with {[*args, *kwargs.values()]}. Cast it "
                    "before you build the trainer."
                )
            return model

        model.to = to  # Accelerate's `prepare_model` moves every model to the device

    @property
    def _compute(self) -> Any:
        return None if self._copies is None else torch.cuda.current_stream(self._device)

    def _enter(self) -> None:
        self._leave()  # an interrupt may have stopped the last call
        rest = torch.empty(self._rest.size, dtype=torch.uint8, device=self._device)
        self._places = [_Place(torch.empty(self.layer_bytes, dtype=torch.uint8, device=self._device)) for _ in range(2)]
        # Kernels that are still running may use this memory
        wait(self._copies, event(self._compute))
        rest.copy_(self._rest.host, non_blocking=True)
        self._rest.point_at(rest)
        self._fetch(0)

    def _leave(self) -> None:
        # The copy of a layer that was not called may still be running
        wait(self._compute, event(self._copies))
        for group in (self._rest, *self._layers):
            group.point_at(group.host)
        self._places = []

    def _fetch(self, index: int) -> None:
        """Start copying layer `index` to its place. The copy waits until the layer there has computed."""
        place = self._places[index % 2]
        group = self._layers[index]
        if place.layer == index:
            return
        wait(self._copies, place.computed)
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            place.memory[: group.size].copy_(group.host, non_blocking=True)
        place.layer = index
        place.copied = event(self._copies)

    def _bring(self, index: int) -> None:
        if not self._places:
            raise RuntimeError(
                "The model is in host memory. Call the model itself, not its `forward` or one of its modules."
            )
        self._fetch(index)
        place = self._places[index % 2]
        wait(self._compute, place.copied)
        self._layers[index].point_at(place.memory)
        if index + 1 < len(self._layers):
            self._fetch(index + 1)

    def _drop(self, index: int) -> None:
        place = self._places[index % 2]
        group = self._layers[index]
        group.point_at(group.host)
        place.layer = None
        place.computed = event(self._compute)


class _Group:
    """Parameters that are copied together: views of one block of host memory."""

    def __init__(self, params: Iterable[nn.Parameter], pinned: bool) -> None:
        self._params = list(params)
        self._starts = []
        self.size = 0
        for param in self._params:
            self._starts.append(self.size)
            self.size += -(-param.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._shapes = [(param.nbytes, param.dtype, param.shape) for param in self._params]
        self.host = torch.empty(self.size + pinned * 2 * _PAGE, dtype=torch.uint8, device="cpu")
        if pinned and self.size:
            self.host = self._pinned(self.host)
        for param, part in zip(self._params, self._parts(self.host), strict=True):
            part.copy_(param.data)
        self.point_at(self.host)

    def _pinned(self, memory: Tensor) -> Tensor:
        """Return whole pages of `memory`, locked. torch's `pin_memory` would round the size up to a power of two."""
        pages = -(-self.size // _PAGE) * _PAGE
        part = memory[-memory.data_ptr() % _PAGE :][:pages]
        error = torch.cuda.cudart().cudaHostRegister(part.data_ptr(), pages, 0)
        if int(error):
            with suppress(RuntimeError):  # raises this error again, and clears it
                torch.ones(1, device="cuda").add_(1)
            logger.warning(
                "CUDA cannot lock %d MiB of host memory (cudaHostRegister: error %d), so torch pins the reference "
                "model, which takes up to twice as much host memory.",
                pages >> 20,
                int(error),
            )
            return torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, part.data_ptr()).atexit = False
        return part[: self.size]

    def _parts(self, memory: Tensor) -> Iterator[Tensor]:
        for start, (nbytes, dtype, shape) in zip(self._starts, self._shapes, strict=True):
            yield memory[start : start + nbytes].view(dtype).view(shape)

    def point_at(self, memory: Tensor) -> None:
        """Make the parameters views of `memory`, which has the group's bytes."""
        for param, part in zip(self._params, self._parts(memory), strict=True):
            param.data = part


@dataclass
class _Place:
    """Device memory for one layer, with events for the end of its copy and for the last computation in it."""

    memory: Tensor
    layer: int | None = None
    copied: Any = None
    computed: Any = None


def _decoder_layers(model: nn.Module, option: str) -> list[nn.Module]:
    """Return the modules of the `nn.ModuleList` with the most weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(
            f"`{option}='cpu'` needs a model with an `nn.ModuleList` of layers, got {type(model).__name__}. Leave "
            f"`{option}` unset."
        )
    # `max` takes the first of equals: the list of layers, not a list inside its only layer
    largest = max(lists, key=lambda layers: sum(param.nbytes for param in layers.parameters()))
    return list(dict.fromkeys(largest))


def _outside(model: nn.Module, layers: list[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters of modules outside of the layers."""
    within = {id(module) for layer in layers for module in layer.modules()}
    for module in model.modules():
        if id(module) not in within:
            yield from module.parameters(recurse=False)


def check_supported(model: Any, option: str = "reference_device") -> None:
    """Raise `ValueError` if the model is spread over devices or ranks, or is quantized."""
    if getattr(model, "is_quantized", False):
        raise ValueError(
            f"`{option}='cpu'` does not support a quantized model. Leave `{option}` unset, or load the model without "
            "quantization."
        )
    # From `device_map="auto"`
    if len(getattr(model, "hf_device_map", None) or {}) > 1:
        raise ValueError(
            f"`{option}='cpu'` needs a model on one device, got the `device_map` "
            f"{model.hf_device_map}. Pass `model_init_kwargs={{'device_map': None}}`."
        )
    for name, param in model.named_parameters():
        if type(param) is not nn.Parameter or param.is_meta:
            raise ValueError(
                f"`{option}='cpu'` needs plain parameters in memory, but `{name}` is a {type(param).__name__} on "
                f"{param.device}. Leave `{option}` unset."
            )
