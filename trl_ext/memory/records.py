"""What a piece of code allocates, recorded as it runs on tensors that hold no numbers: now, and at its peak."""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationRecords(TorchDispatchMode):
    """While entered, every storage that an operator makes counts from then until it is freed, or made smaller.

    What an operator allocates for itself while it runs is not seen.

    Attributes:
        held (`int`): bytes of the storages that are alive.
        peak (`int`): the most that `held` was, since `mark()` was called last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: dict[int, int] = {}  # bytes of each

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor`, if it is new; of one that is spread over ranks, this rank's part."""
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        name, size = storage._cdata, storage.nbytes()
        if name in self._known or size == 0:
            return
        self._known[name] = 0
        weakref.finalize(storage, self._freed, name)
        self._resized(name, size)

    def mark(self) -> None:
        """Look for the peak from here on."""
        self.peak = self.held

    def _resized(self, name: int, size: int) -> None:
        self.held += size - self._known[name]
        self._known[name] = size
        self.peak = max(self.peak, self.held)

    def _freed(self, name: int) -> None:
        self.held -= self._known.pop(name)

    def __enter__(self) -> Any:
        """FSDP2 resizes the storages of gathered weights, which is no operator, so it is watched where it is called."""
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._known:
                self._resized(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and count what it returns. A tensor that is asked for its truth has none: it says yes."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result
