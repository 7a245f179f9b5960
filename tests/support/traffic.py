"""Counts the collectives that torch runs on one rank, with their bytes, and the bytes of live storages.

A dispatch mode sees the calls of this package, FSDP2, DDP and DTensor, in the forward and in a backward on the CPU.
Nothing is estimated: the bytes are those of the tensors that the process group gets.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank sees it.

    Args:
        kind (`str`): `"all_gather"`, `"reduce_scatter"`, `"all_reduce"` or `"broadcast"`.
        payload (`int`): bytes of the whole tensor: for `all_gather` and `reduce_scatter`, the parts of all ranks.
        ranks (`int`): number of ranks in its group.
        sends (`bool`): whether this rank is the source of a broadcast.
        dtype (`torch.dtype`): dtype of the tensor.
    """

    kind: str
    payload: int
    ranks: int
    sends: bool
    dtype: torch.dtype

    @property
    def received(self) -> float:
        """The bytes that this rank receives, if the ranks form a ring."""
        return 0.0 if self.sends else self.payload * RING[self.kind](self.ranks)


# The share of a payload that each of R ranks receives over a ring (Patarasuk and Yuan, 2009). An all-reduce is a
# reduce-scatter and an all-gather; a broadcast reaches every rank but its source.
RING = {
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
}

# Operator of torch -> (kind, index of the argument that is the whole tensor; None if the result is)
_NATIVE = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
}
_FUNCTIONAL = {
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
}
_NOTHING_MOVES = {"c10d::barrier", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


class Traffic(TorchDispatchMode):
    """Watches one thread.

    Attributes:
        collectives (`list[Collective]`): in the order of the calls.
        peak (`int`): peak bytes of the storages that were made since the watch began.
        largest (`int`): bytes of the largest of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.peak = self.largest = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: dict[int, StorageWeakRef] = {}

    @property
    def received(self) -> float:
        """The bytes that this rank received, if the ranks form a ring."""
        return sum(x.received for x in self.collectives)

    def of_kind(self, kind: str) -> int:
        """Return the payload of all collectives of a kind."""
        return sum(x.payload for x in self.collectives if x.kind == kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again, with this rank's part
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional")) and name not in _NOTHING_MOVES:
            self._record(name, args, out)
        self._hold(args, out)
        return out

    def _record(self, name: str, args: Any, out: Any) -> None:
        kind, which = _NATIVE[name] if name in _NATIVE else _FUNCTIONAL[name]
        tensors = [x for x in tree_leaves(out if which is None else args[which]) if isinstance(x, Tensor)]
        group = _group(name, args)
        sends = kind == "broadcast" and name in _NATIVE and args[2] == group.rank()
        payload = sum(x.numel() * x.element_size() for x in tensors)
        self.collectives.append(Collective(kind, payload, group.size(), sends, tensors[0].dtype))

    def _hold(self, args: Any, out: Any) -> None:
        self._alive = {key: x for key, x in self._alive.items() if not x[0].expired()}
        self._before = {key: x for key, x in self._before.items() if not x.expired()}
        # An argument that was not made since the watch began existed before
        for storage in _storages(args):
            if storage._cdata not in self._alive:
                self._before.setdefault(storage._cdata, StorageWeakRef(storage))
        for storage in _storages(out):
            if storage._cdata not in self._alive and storage._cdata not in self._before:
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(count for _, count in self._alive.values()))


def _storages(x: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def _group(name: str, args: Any) -> dist.ProcessGroup:
    if name in _FUNCTIONAL:
        return dist.distributed_c10d._resolve_process_group(args[-1])
    boxed = next(x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()))
    return dist.ProcessGroup.unbox(boxed)
