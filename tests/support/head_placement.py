"""A check that the head's weight is never gathered, which records torch's collectives."""

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_OF_GROUPS = [name for name in dir(dist.ProcessGroup) if "gather" in name] + ["broadcast"]


class HeadGatheredError(AssertionError):
    """The head's weight, or a tensor of its size, was gathered on this rank."""


@contextmanager
def head_stays_sharded(shape: tuple[int, int]) -> Iterator[list[str]]:
    """Raise if a weight of this shape is gathered in the `with` block. The list gets a line for each collective.

    FSDP2's own gathers are not checked, because it gathers layers, and the embedding has the size of the head. A head
    that it gathers would be a plain tensor in the forward, which is detected there.
    """
    seen: list[str] = []

    def look(what: str, numbers: int) -> None:
        if any("fsdp/_fully_shard" in frame.filename for frame in traceback.extract_stack()):
            return
        seen.append(f"{what} of {numbers}")
        if numbers >= shape[0] * shape[1]:
            raise HeadGatheredError(f"{what}: {numbers} numbers")

    def watch_group(name: str) -> Any:
        own = getattr(dist.ProcessGroup, name)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            look(name, _numbers(args[0]))
            return own(self, *args, **kwargs)

        return patch.object(dist.ProcessGroup, name, watched)

    full_tensor, redistribute, all_gather = DTensor.full_tensor, DTensor.redistribute, functional.all_gather_tensor

    def watched_full_tensor(self: DTensor, **kwargs: Any) -> Tensor:
        if tuple(self.shape) == shape:
            look("full_tensor", self.numel())
        return full_tensor(self, **kwargs)

    def watched_redistribute(self: DTensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> DTensor:
        # Both placements count: FSDP2 may shard the rows that tensor parallelism left on a rank
        gathered = [a.is_shard() and b.is_replicate() for a, b in zip(self.placements, placements or (), strict=False)]
        if tuple(self.shape) == shape and gathered and not any(isinstance(x, Shard) for x in placements):
            look("redistribute", self.numel())
        return redistribute(self, device_mesh, placements, **kwargs)

    def watched_all_gather(x: Tensor, gather_dim: int, group: Any, *args: Any, **kwargs: Any) -> Tensor:
        gathered = all_gather(x, gather_dim, group, *args, **kwargs)
        look("all_gather_tensor", gathered.numel())
        return gathered

    with ExitStack() as stack:
        for name in _OF_GROUPS:
            stack.enter_context(watch_group(name))
        stack.enter_context(patch.object(DTensor, "full_tensor", watched_full_tensor))
        stack.enter_context(patch.object(DTensor, "redistribute", watched_redistribute))
        stack.enter_context(patch.object(functional, "all_gather_tensor", watched_all_gather))
        yield seen


def _numbers(output: Any) -> int:
    """Count floating-point numbers. Pickled objects are sent as bytes."""
    if isinstance(output, Tensor):
        return output.numel() if output.is_floating_point() else 0
    return sum(_numbers(x) for x in output)
