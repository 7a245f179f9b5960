"""Counts the memory of operators that run on tensors without data."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def here(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Segment(NamedTuple):
    """What a part of a pass does to the memory, in bytes."""

    rise: int  # the most, over the beginning
    held: int  # more at the end than at the beginning
    host: int  # the same, in host memory


class AllocationRecords(TorchDispatchMode):
    """Counts the storages that operators return inside the `with` block, until they are freed or resized.

    The temporary memory of an operator is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = 0  # bytes of live storages
        self.peak = 0  # the most of them since the last `mark()`
        self.host = 0  # bytes of live storages in host memory, which `held_bytes` leaves out
        self._storage_bytes: dict[int, int] = {}  # bytes of each storage
        self._of_host: set[int] = set()
        self._makes_on_host = False
        self._start = (0, 0)  # bytes held, and on the host, at the beginning of the segment
        self._segment_peak = 0  # the most held since then
        self._segment = 0  # its number
        self._repeated_segment = -1
        self._segment_of: dict[int, int] = {}  # the segment that made a storage

    def count(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` if it is new. Of a sharded tensor, count this rank's part."""
        storage = here(tensor).untyped_storage()
        name = storage._cdata
        size = storage.nbytes()
        if name in self._storage_bytes or size == 0:
            return
        self._storage_bytes[name] = 0
        self._segment_of[name] = self._segment
        if self._makes_on_host:
            self._of_host.add(name)
        weakref.finalize(storage, self._freed, name)
        self._resized(name, size)

    def mark(self) -> None:
        self.peak = self.held_bytes

    def next_segment(self) -> Segment:
        """Return the segment that ends, and begin the next one."""
        held, host = self._start
        segment = Segment(self._segment_peak - held, self.held_bytes - held, self.host - host)
        self._start = (self.held_bytes, self.host)
        self._segment_peak = self.held_bytes
        self._segment += 1
        return segment

    def repeat(self, segment: Segment, times: int) -> None:
        """Count the segment that has just ended some more times."""
        most = max(self.held_bytes, self.held_bytes + segment.held * (times - 1))
        self.peak = max(self.peak, most + segment.rise)
        self.held_bytes += segment.held * times
        self.host += segment.host * times
        self._start = (self.held_bytes, self.host)
        self._segment_peak = self.held_bytes
        self._repeated_segment = self._segment - 1

    @property
    def bytes_of_repeated(self) -> int:
        """The bytes of storages that the segment that was repeated last has made, without their repetitions."""
        return sum(
            self._storage_bytes[x] for x, segment in self._segment_of.items() if segment == self._repeated_segment
        )

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count what is made in the `with` block as host memory."""
        before = self._makes_on_host
        self._makes_on_host = True
        try:
            yield
        finally:
            self._makes_on_host = before

    def _resized(self, name: int, size: int) -> None:
        more = size - self._storage_bytes[name]
        self._storage_bytes[name] = size
        if name in self._of_host:
            self.host += more
        else:
            self.held_bytes += more
            self.peak = max(self.peak, self.held_bytes)
            self._segment_peak = max(self._segment_peak, self.held_bytes)

    def _freed(self, name: int) -> None:
        self._resized(name, 0)
        del self._storage_bytes[name], self._segment_of[name]
        self._of_host.discard(name)

    def __enter__(self) -> Any:
        """Also watch `resize_`, because FSDP2 resizes the storages of gathered weights without an operator."""
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._storage_bytes:
                self._resized(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and count the memory of what it returns. The value of a tensor without data is 1."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return result
