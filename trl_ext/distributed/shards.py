"""The rows of the head's weight that each rank holds, found without gathering the weight."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .gradients import scale_grad

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


@dataclass(frozen=True)
class ShardedWeight:
    """A weight `(V, H)` whose rows are spread over the ranks of a group, in the order of the ranks."""

    engine: Literal["tensor parallel", "FSDP2", "ZeRO-3"]
    group: dist.ProcessGroup
    ranges: list[list[tuple[int, int]]]  # for each rank, (first row, number of rows) of each of its blocks
    # (first row, weight (v, H), bias (v,)) of each block of this rank. A trained weight is a single block, which gets
    # the gradient of this rank's rows
    blocks: tuple[tuple[int, Tensor, Tensor | None], ...]
    trained: bool  # whether weight or bias gets a gradient

    @property
    def vocabulary(self) -> int:
        return sum(count for blocks in self.ranges for _, count in blocks)


def parameter_of(module: nn.Module, name: str) -> Any:
    """Return `module.name` without ZeRO-3's hook, which gathers a parameter when the attribute is read."""
    parameters = module._parameters
    if dict.__contains__(parameters, name):
        return dict.__getitem__(parameters, name)
    return getattr(module, name, None)


def sharded_weight(lm_head: nn.Module) -> ShardedWeight | None:
    """Return how the rows of a head's weight are spread; `None` if this rank has all of them, or must gather them."""
    weight = parameter_of(lm_head, "weight")
    bias = parameter_of(lm_head, "bias")
    if isinstance(weight, DTensor):
        return _of_dtensor(weight, bias)
    return _of_zero3(weight, bias) if is_zero3(weight) else None


def whole_tensor(x: DTensor) -> Tensor:
    """Gather `x`. Its gradient is the mean over the ranks with different tokens, as the engine computes it."""
    names = x.device_mesh.mesh_dim_names or ("",) * x.device_mesh.ndim
    # The ranks of a tensor-parallel group have the same tokens, so each has the whole gradient
    placements = [Replicate() if name == "tp" else Partial() for name in names]
    batches = prod(size for name, size in zip(names, x.device_mesh.shape, strict=True) if name != "tp")
    return scale_grad(x.full_tensor(grad_placements=placements), 1 / batches)


def is_zero3(parameter: Any) -> bool:
    """Return whether ZeRO-3 may have partitioned this parameter."""
    return hasattr(parameter, "ds_tensor")


def gathered_by_zero3(*parameters: Any) -> AbstractContextManager[Any]:
    """Return a context in which parameters that ZeRO-3 has partitioned are whole. Each may be None.

    Those that are whole already, as a weight that the embedding shares, stay as they are afterwards.
    """
    # ZeRO-3 does not accept the same parameter twice
    candidates = {id(parameter): parameter for parameter in parameters if is_zero3(parameter)}.values()
    if not candidates:
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    partitioned = [parameter for parameter in candidates if parameter.ds_status != ZeroParamStatus.AVAILABLE]
    return GatheredParameters(partitioned) if partitioned else nullcontext()


def _of_dtensor(weight: DTensor, bias: Any) -> ShardedWeight | None:
    names = weight.device_mesh.mesh_dim_names or ()
    if "tp" in names:
        axis = names.index("tp")
        if not weight.placements[axis].is_shard(0):
            return None
        engine: Literal["tensor parallel", "FSDP2"] = "tensor parallel"
        # FSDP2 may have spread each rank's rows further: only those are gathered
        local = _rows_of_tensor_parallel(weight, axis)
        local_bias = None if bias is None else _rows_of_tensor_parallel(bias, axis)
    elif weight.device_mesh.ndim == 1 and weight.placements[0] == Shard(0):
        axis = 0
        engine = "FSDP2"
        local = weight.to_local()
        local_bias = None if bias is None else bias.to_local()
    else:
        return None
    # A DTensor gives each rank ceil(V / R) rows; the last ranks get fewer or none
    size = -(-weight.shape[0] // weight.device_mesh.size(axis))
    edges = [min(rank * size, weight.shape[0]) for rank in range(weight.device_mesh.size(axis) + 1)]
    ranges = [[(first, end - first)] for first, end in pairwise(edges)]
    first, count = ranges[weight.device_mesh.get_local_rank(axis)][0]
    if len(local) != count or (local_bias is not None and len(local_bias) != count):
        return None
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    return ShardedWeight(engine, weight.device_mesh.get_group(axis), ranges, ((first, local, local_bias),), trained)


def _rows_of_tensor_parallel(x: DTensor, axis: int) -> Tensor:
    """Gather this rank's rows of `x` over the other mesh dimensions. The gradient is the mean over those."""
    other_sizes = [size for number, size in enumerate(x.device_mesh.shape) if number != axis]
    if not other_sizes:
        return x.to_local()
    placements: list[Any] = [Shard(0) if number == axis else Replicate() for number in range(x.device_mesh.ndim)]
    gradient = [Shard(0) if number == axis else Partial() for number in range(x.device_mesh.ndim)]
    local = x.redistribute(placements=placements).to_local(grad_placements=gradient)
    return scale_grad(local, 1 / prod(other_sizes))


def _of_zero3(weight: Any, bias: Any) -> ShardedWeight | None:
    """Return the shards of a weight that ZeRO-3 cuts into flat parts. A split row belongs to the rank of its start."""
    part = weight.ds_tensor
    is_released = weight.ds_status.name == "NOT_AVAILABLE" and part.status.name == "AVAILABLE"
    is_released = is_released and part.device == weight.device  # not offloaded
    # A trained weight must be gathered: DeepSpeed's gradient hooks are on the whole parameter
    if weight.requires_grad or bias is not None or not is_released or hasattr(part, "ds_quant_scale"):
        return None
    rows, width = weight.ds_shape
    group = weight.ds_process_group
    ranks = group.size()
    rank = group.rank()
    size = part.numel()
    if size < width or size * ranks < rows * width:
        return None
    ranges = rows_of_parts(rows, width, size, ranks)
    flat = part.detach().view(-1)
    heads = None
    if any(len(rank_ranges) > 1 for rank_ranges in ranges):
        heads = flat.new_empty(ranks * width)
        all_gather(heads, flat[:width].contiguous(), group=group)
        heads = heads.view(-1, width)
    blocks = tuple((first, x, None) for first, x in blocks_of_part(flat, rank, ranges[rank], width, heads))
    return ShardedWeight("ZeRO-3", group, ranges, blocks, trained=False)


def rows_of_parts(rows: int, width: int, size: int, ranks: int) -> list[list[tuple[int, int]]]:
    """Return (first row, number of rows) of each block of each part of a flat weight `(rows, width)`.

    Each part has `size` elements. If its end splits a row, this row is a second block. A part may hold only padding.
    """
    ranges = []
    for start in range(0, ranks * size, size):
        first = min(-(-start // width), rows)
        whole = min((start + size) // width, rows)
        after = min(-(-(start + size) // width), rows)
        blocks = [(first, whole - first)]
        if after > whole:
            blocks.append((whole, 1))
        ranges.append(blocks)
    return ranges


def blocks_of_part(
    flat: Tensor, rank: int, ranges: list[tuple[int, int]], width: int, heads: Tensor | None
) -> list[tuple[int, Tensor]]:
    """Return (first row, rows) of each block of a rank's part `flat`: views, except for a row that its end splits.

    `heads` `(R, width)` has the first `width` elements of each part. It is needed only if a part splits a row.
    """
    size = len(flat)
    blocks = []
    for first, count in ranges:
        start = first * width - rank * size
        stop = start + count * width
        if stop <= size:
            # Empty for a part that holds only padding, where `start` is negative
            blocks.append((first, flat[max(start, 0) : max(stop, 0)].view(count, width)))
        else:
            assert heads is not None
            blocks.append((first, torch.cat([flat[start:], heads[rank + 1, : stop - size]]).view(1, width)))
    return blocks
