"""A record of what the allocator holds, on tensors without numbers, for one rank of several."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
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


_AXIS = "dp_shard"


@contextmanager
def one_rank_of(devices: int) -> Iterator[DeviceMesh]:
    """Within, this process is the first rank of the mesh of `devices`, whose collectives move nothing."""
    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (devices,), mesh_dim_names=(_AXIS,))
    finally:
        dist.destroy_process_group()


def under_fsdp2(model: Any, mesh: DeviceMesh, mixed_precision: torch.dtype | None) -> Any:
    """`model` as accelerate prepares it for FSDP2: layer by layer, with its settings in `examples/accelerate_configs`.

    Args:
        mixed_precision (`torch.dtype`, *optional*): what weights are gathered as.
    """
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
    )
    mixed = {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}[mixed_precision]
    if mixed_precision is not None:
        plugin.set_mixed_precision(mixed)
    # What accelerate reads of its `Accelerator`, which would look for the processes
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=(_AXIS,)),
        mixed_precision=mixed,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)
