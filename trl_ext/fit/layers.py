"""Runs some of a model's equal layers in place of all of them, and counts the others like their neighbours.

Equal layers allocate and free the same bytes, in the forward and in the backward pass. So two of them are counted and
compared, and the second one counts for those that are skipped. Where layers differ in anything, all run.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from peft import PeftType
from torch import Tensor, nn

from ..packing.support import text_backbone_of
from .records import AllocationRecords, Segment

# Layers that run. Two in the middle are compared. FSDP2 holds weights and gradients of neighbours, and offloading holds
# some tensors on the device, with checkpointing those of several layers.
_LAYERS = 4
_LAYERS_FSDP2 = 6
_LAYERS_OFFLOADING = 12


class UnequalLayersError(Exception):
    """Layers that looked equal did not move the memory by the same bytes, so all must run."""


class LayerList(NamedTuple):
    """A list of equal layers, by the module that has it."""

    parent: nn.Module
    name: str


def equal_layers(model: Any) -> LayerList | None:
    """Return the list of a model's layers, or `None` if they may differ in memory.

    Whatever a layer reads must be equal: its modules, their settings, the sizes of tensors and the model's config.
    Adapters other than LoRA, and code that is not a release of transformers, may share something between layers.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    adapters = getattr(model, "peft_config", {}).values()
    backbone = text_backbone_of(inner)
    lists = [name for name, child in backbone.named_children() if isinstance(child, nn.ModuleList)]
    is_known = type(backbone).__module__.startswith("transformers.models.")
    if not is_known or len(lists) != 1 or any(x.peft_type != PeftType.LORA for x in adapters):
        return None
    layers = [*getattr(backbone, lists[0])]
    if not layers:
        return None
    parameters = [id(x) for layer in layers for x in layer.parameters()]
    of_layers = [
        value
        for value in vars(inner.config.get_text_config()).values()
        if isinstance(value, list | tuple) and len(value) == len(layers)
    ]
    if len(parameters) != len({*parameters}) or any(value.count(value[0]) != len(value) for value in of_layers):
        return None
    first, *rest = (_description(layer, index) for index, layer in enumerate(layers))
    return LayerList(backbone, lists[0]) if all(x == first for x in rest) else None


def _description(layer: nn.Module, index: int) -> list[Any]:
    """Return what distinguishes a layer from others, but for its own index."""
    lines: list[Any] = []
    for name, module in layer.named_modules():
        lines.append((name, type(module)))
        for attribute, value in vars(module).items():
            if isinstance(value, bool | int | float | str | None) and (attribute, value) != ("layer_idx", index):
                lines.append((attribute, value))
            elif isinstance(value, list | tuple | dict | set) and not attribute.startswith("_"):
                # PEFT stores the name of the module
                lines.append((attribute, repr(value).replace(f".{index}.", ".")))
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        lines.append((name, tensor.shape, tensor.dtype, tensor.requires_grad))
    return lines


class LayersInPart:
    """Equal layers of which some run.

    The model loses the others, so its engine and its optimizer must have been made. With `layers=None`, all run.
    """

    def __init__(
        self, layers: LayerList | None, records: AllocationRecords, *, sharded: bool = False, offloads: bool = False
    ) -> None:
        self._records = records
        self._skipped: list[nn.Module] = []
        self._skipped_bytes = 0  # that the passes of the skipped layers have left
        self._in_backward = False
        self._segments: list[Segment] = []
        count = _LAYERS_OFFLOADING if offloads else _LAYERS_FSDP2 if sharded else _LAYERS
        all_layers = [] if layers is None else [*getattr(layers.parent, layers.name)]
        if layers is None or len(all_layers) <= count:
            return
        self._skipped = all_layers[count - 1 : -1]
        run = [*all_layers[: count - 1], all_layers[-1]]
        setattr(layers.parent, layers.name, nn.ModuleList(run))
        middle = count // 2
        for layer in run[middle - 1 : middle + 2]:
            self._watch(layer)

    @property
    def skipped_parameters(self) -> list[nn.Parameter]:
        """The trained parameters of the layers that do not run."""
        return [x for layer in self._skipped for x in layer.parameters() if x.requires_grad]

    def _watch(self, layer: nn.Module) -> None:
        """Begin a segment of a forward pass where `layer` does, and of a backward pass where the layer ends."""

        def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._in_backward:  # run again, with checkpointing
                return
            self._next_segment()
            hidden = args[0] if args else kwargs["hidden_states"]
            if hidden.requires_grad:
                hidden.register_hook(ends)

        def ends(gradient: Tensor) -> None:
            self._next_segment()

        # Before the engine's hook, which gathers the weights
        layer.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)

    def begin_pass(self, *, backward: bool) -> None:
        """Begin a forward or a backward pass."""
        self._in_backward = backward
        self._segments = []

    def _next_segment(self) -> None:
        self._segments.append(self._records.next_segment())
        if len(self._segments) == 3:
            # The first is what ran before
            _, compared, repeated = self._segments
            if compared != repeated:
                raise UnequalLayersError
            self._records.repeat(repeated, len(self._skipped))
            self._skipped_bytes += repeated.held * len(self._skipped)

    def end_pass(self) -> None:
        """End the pass.

        Raises:
            `UnequalLayersError`: the layers did not run one after the other.
        """
        if self._skipped and len(self._segments) != 3:
            raise UnequalLayersError

    @contextmanager
    def within(self, autocast: AbstractContextManager[Any]) -> Iterator[None]:
        """Run a forward pass within `autocast`, whose end frees the weights that it has cast, of skipped layers too."""
        with autocast:
            yield
            before = self._records.bytes_of_repeated
        if self._skipped:
            freed = (before - self._records.bytes_of_repeated) * len(self._skipped)
            self._records.held_bytes -= freed
            self._skipped_bytes -= freed

    def make_gradients(self, *, keeps: bool) -> None:
        """Make the gradients of the skipped layers, in place of the bytes that their passes have left.

        Args:
            keeps: whether the engine keeps gradients until the end of the backward pass; if not, nothing is left.

        Raises:
            `UnequalLayersError`: the passes have left something else.
        """
        held_before = self._records.held_bytes
        self._records.held_bytes -= self._skipped_bytes
        self._skipped_bytes = 0
        for parameter in self.skipped_parameters if keeps else ():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        if self._records.held_bytes != held_before:
            raise UnequalLayersError
