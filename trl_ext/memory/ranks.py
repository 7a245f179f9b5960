"""One rank of several, for a count of its memory: the engine's own code runs, and no other process is there."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

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
