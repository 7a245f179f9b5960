"""Activations kept on the host between forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_SMALLEST = 1024  # bytes; less is not worth a copy


@contextmanager
def activations_on_host(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within, what autograd saves on `device` for a backward lies in host memory, pinned if `device` is another.

    The weights of `model` stay where they are, as do small tensors, expanded and sharded ones. Values are
    the same bit for bit; a backward frees its copies, and so does a graph of which none is taken.
    """
    weights = {param.data_ptr() for param in model.parameters() if not isinstance(param.data, DTensor)}
    pinned = device.type != "cpu"

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        stays = isinstance(tensor, DTensor) or tensor.device.type != device.type or tensor.nbytes < _SMALLEST
        if stays or 0 in tensor.stride() or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=pinned)
        copy.copy_(tensor)
        return tensor.device, copy

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        where, copy = packed
        # With the strides that it had, by which kernels are chosen
        back = torch.empty_strided(copy.size(), copy.stride(), dtype=copy.dtype, device=where)
        return back.copy_(copy, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
