"""What an engine of several devices does with a model without data, as one of its ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

_AXIS = "dp_shard"


@contextmanager
def one_rank_of(devices: int) -> Iterator[DeviceMesh]:
    """Make this process the first rank of a mesh of `devices` in the `with` block. Its collectives move no data."""
    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (devices,), mesh_dim_names=(_AXIS,))
    finally:
        dist.destroy_process_group()


def under_fsdp2(model: Any, mesh: DeviceMesh, mixed_precision: torch.dtype | None, *, trains: bool = True) -> Any:
    """Prepare `model` for FSDP2 as Accelerate does, with the settings of `examples/accelerate_configs`.

    A reference model does not train. TRL shards it as one unit, so its forward pass gathers all weights.
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
    if not trains:
        policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
        return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=plugin.reshard_after_forward)
    # A real `Accelerator` would look for other processes
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=(_AXIS,)),
        mixed_precision=mixed,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)


class Zero:
    """Allocates what DeepSpeed does in ZeRO-1 and ZeRO-2, in addition to weights and gradients, at the same time.

    A rank has fp32 copies and optimizer states of its partition of the trained weights. Gradients are copied to a
    bucket and freed: in ZeRO-2 during the backward pass, in ZeRO-1 after it. A full bucket is reduced in a copy.
    (deepspeed/runtime/zero/stage_1_and_2.py, with `contiguous_gradients` and without `overlap_comm`)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, stage: int, devices: int, bucket_size: int) -> None:
        self._groups = [group for group in optimizer.param_groups if group["params"]]
        self._trained: list[Tensor] = [x for group in self._groups for x in group["params"]]
        self._stage = stage
        self._bucket_size = bucket_size
        self._bucket: Tensor | None = None
        self._filled = 0  # elements of the bucket
        self._partition: Tensor | None = None  # gradients of the weights that are in this rank's partition
        self._earlier_partition: Tensor | None = None  # the same, of earlier micro-batches
        self._partition_size = 0  # its elements
        for group in self._groups:
            sizes = [x.numel() for x in group["params"]]
            partition = -(-sum(sizes) // devices)
            self._partition_size += _most_in_a_partition(sizes, partition)
            group["params"] = [torch.nn.Parameter(torch.empty(partition, dtype=torch.float32))]
        for parameter in self._trained:
            hook: Any = self._make_bucket if stage == 1 else self._into_bucket
            parameter.register_post_accumulate_grad_hook(hook)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay until the end of the backward pass."""
        return self._stage == 1

    @property
    def reduces_in_backward(self) -> bool:
        """Whether a bucket may become full during the backward pass."""
        return self._stage == 2 and sum(x.numel() for x in self._trained) > self._bucket_size

    def fill(self, parameters: Sequence[Tensor]) -> None:
        """Put gradients of `parameters` into the bucket, which has room for all."""
        self._filled += sum(x.numel() for x in parameters)

    @property
    def gradients(self) -> int:
        """Bytes of the gradients that a rank keeps."""
        return (
            sum(x.nbytes for x in self._trained)
            if self.keeps_gradients
            else self._partition_size * self._dtype.itemsize
        )

    @property
    def bucket(self) -> int:
        """Bytes of the bucket."""
        return self._bucket_size * self._dtype.itemsize

    @property
    def _dtype(self) -> torch.dtype:
        return self._trained[0].dtype

    def accumulated(self) -> None:
        """Make what earlier micro-batches leave: gradients, and in ZeRO-1 the bucket, which only the last one frees."""
        if self._stage == 2:
            self._earlier_partition = torch.empty(self._partition_size, dtype=self._dtype)
        else:
            self._bucket = torch.empty(self._bucket_size, dtype=self._dtype)
            for parameter in self._trained:
                parameter.grad = torch.empty_like(parameter)

    def _make_bucket(self, parameter: Tensor) -> None:
        if self._bucket is None:
            self._bucket = torch.empty(self._bucket_size, dtype=self._dtype)

    def _into_bucket(self, parameter: Tensor) -> None:
        self._make_bucket(parameter)
        size = parameter.numel()
        if self._filled + size > self._bucket_size:
            self._reduce()
        self._filled += size
        if size <= self._bucket_size:
            parameter.grad = None  # a larger one is reduced without the bucket

    def _reduce(self) -> None:
        torch.empty(self._filled, dtype=self._dtype)  # freed at once
        self._filled = 0
        if self._partition is None:
            self._partition = torch.empty(self._partition_size, dtype=self._dtype)
        for parameter in self._trained:
            if parameter.numel() > self._bucket_size:
                parameter.grad = None

    def after_backward(self) -> None:
        """Reduce what is left, and give the optimizer the gradients of its partition, in fp32."""
        for parameter in self._trained:
            if parameter.grad is not None:
                self._into_bucket(parameter)
        self._reduce()
        self._bucket = self._earlier_partition = None
        for group in self._groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        if len(self._groups) == 1:
            self._partition = None  # otherwise the groups whose turn comes later keep it

    def free(self) -> None:
        """Free what the step has left."""
        self._bucket = self._partition = self._earlier_partition = None
        self._filled = 0


def _most_in_a_partition(sizes: list[int], partition: int) -> int:
    """Return the most elements of tensors that are at least partly in one of the equal partitions of their sequence."""
    ends = list(accumulate(sizes))
    spans = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    starts = range(0, ends[-1], partition)
    return max(sum(end - start for start, end in spans if start < x + partition and x < end) for x in starts)
