"""A trainer's collectives. Ranks that share one copy of the model, or one sequence, count as one process."""

import os
import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .lora import complete_adapters
from .sequence_parallel import SequenceGroup, keep_batches_whole
from .shards import is_zero3
from .tensor_parallel import DataParallelAccelerator, TensorParallel


class Ranks:
    """Collectives for the parts of a trainer, and the group of this rank, in which all ranks must do the same."""

    accelerator: Any = None  # accelerate's, or the proxy that counts each group as one process
    tensor_parallel: TensorParallel | None = None  # this rank's group
    sequence: SequenceGroup | None = None  # this rank's group

    def join(self, accelerator: Any, model: Any, *, splits_rows: bool = True) -> Any:
        """Find this rank's group; that of a sequence only with `splits_rows`. Returns the accelerator to train with."""
        self.tensor_parallel = TensorParallel.of(model)
        if self.tensor_parallel is not None:
            complete_adapters(model, self.tensor_parallel)
            accelerator = DataParallelAccelerator(accelerator, self.tensor_parallel)
        self.sequence = SequenceGroup.of(accelerator) if splits_rows else None
        if self.sequence is not None:
            keep_batches_whole(accelerator, self.sequence)
            accelerator = DataParallelAccelerator(accelerator, self.sequence.ranks)
        self.accelerator = accelerator
        return accelerator

    @property
    def group(self) -> TensorParallel | None:
        """This rank's group, once its process group exists."""
        if self.tensor_parallel is None and self.sequence is not None and self.sequence.processes is not None:
            return self.sequence.ranks
        return self.tensor_parallel

    @property
    def is_sharded(self) -> bool:
        state = self.accelerator.state
        return getattr(state, "fsdp_plugin", None) is not None or state.deepspeed_plugin is not None

    def forward_together(self, model: nn.Module) -> bool:
        """Return whether each forward of `model` needs all ranks, because each rank has a part of its weights."""
        if getattr(self.accelerator.state, "fsdp_plugin", None) is not None:
            return True
        is_split_by_torch = any(isinstance(module, FSDPModule) for module in model.modules())
        return is_split_by_torch or any(map(is_zero3, model.parameters()))

    @property
    def sequence_size(self) -> int:
        return 1 if self.sequence is None else self.sequence.size

    @property
    def world(self) -> Any:
        """The accelerator that counts each rank as a process."""
        accelerator = self.accelerator
        return accelerator.of_all_ranks if isinstance(accelerator, DataParallelAccelerator) else accelerator

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def check_same(self, ids: Tensor) -> None:
        """Under tensor parallelism, raise `ValueError` if the ranks of this rank's group get different batches."""
        if self.tensor_parallel is not None:
            self.tensor_parallel.check_same(ids)

    def agreed(self, value: Any) -> Any:
        """Return the `value` of the first rank of the tensor-parallel group."""
        tp = self.tensor_parallel
        return value if tp is None else tp.shared(value, self.device)

    def shared(self, value: Any) -> Any:
        """Return the `value` of the first rank of this rank's group."""
        group = self.group
        return value if group is None else group.shared(value, self.device)

    def share_random_state(self) -> None:
        group = self.group
        if group is not None:
            group.share_random_state(self.device)

    def gather_counts(self, counts: list[int]) -> list[list[int]]:
        if self.accelerator.num_processes == 1:
            return [counts]
        return self.accelerator.gather(torch.tensor([counts], device=self.device)).tolist()

    def sum_counts(self, counts: list[int]) -> list[int]:
        return [sum(x) for x in zip(*self.gather_counts(counts), strict=True)]

    def any(self, on_this_rank: bool) -> bool:
        return any(x[0] for x in self.gather_counts([int(on_this_rank)]))

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] if self.accelerator.num_processes == 1 else gather_object([value])

    def differing(self, value: Any) -> list[Any] | None:
        """Return the `value` of each rank, also of those of a group, if they differ; `None` if all are equal."""
        world = self.world
        if world.num_processes == 1:
            return None
        digest = torch.tensor([zlib.crc32(repr(value).encode())], device=world.device)
        is_same = len(set(world.gather(digest).tolist())) == 1
        return None if is_same else gather_object([value])

    def exchange(self, sent_bytes: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Send `sent[i]`, bytes, to process i. Returns the `sizes[i]` bytes that process i sent.

        The ranks of a group have the same batch, and each exchanges with those in its own place of the other groups.
        """
        process = self.accelerator.process_index
        processes = self.accelerator.num_processes
        world_size = dist.get_world_size()
        members = world_size // processes  # of a group
        sizes_sent = [0] * world_size
        sizes_received = [0] * world_size
        for i in range(processes):
            if i != process:
                rank = i * members + dist.get_rank() % members
                sizes_sent[rank] = len(sent_bytes[i])
                sizes_received[rank] = sizes[i]
        received_bytes = torch.empty(sum(sizes_received), dtype=torch.uint8, device=self.device)
        to_send = torch.cat([x for i, x in enumerate(sent_bytes) if i != process]).to(self.device)
        dist.all_to_all_single(received_bytes, to_send, sizes_received, sizes_sent)
        received_bytes = received_bytes.to(sent_bytes[process].device)
        pieces = list(received_bytes.split([0 if i == process else size for i, size in enumerate(sizes)]))
        pieces[process] = sent_bytes[process]
        return pieces

    def of_main(self, value: Any) -> Any:
        """Call `value` on the main process only, and return its result on all processes."""
        values = [value() if self.accelerator.is_main_process else None]
        broadcast_object_list(values, from_process=0)
        return values[0]

    def writes_to(self, folder: Path) -> bool:
        """Return whether this process writes to `folder`: the main one, and one on each node that does not see it."""
        accelerator = self.accelerator
        if accelerator.num_processes == 1:
            return bool(accelerator.is_main_process)
        mark = folder / self.of_main(lambda: f"{uuid.uuid4().hex}.seen")
        if accelerator.is_main_process:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                mark.touch()
        accelerator.wait_for_everyone()
        sees_folder = os.path.exists(
            mark
        )  # False after any error. `Path.exists` raises some, while the other ranks wait
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            with suppress(OSError):  # it was never made on a read-only file system, which refuses to delete, too
                mark.unlink()
            return True
        return bool(accelerator.is_local_main_process and not sees_folder)

    def reduce(self, x: Tensor) -> Tensor:
        return self.accelerator.reduce(x, reduction="sum")
