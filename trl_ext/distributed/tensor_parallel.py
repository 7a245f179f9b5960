"""The tensor-parallel group: ranks that hold one copy of the model together, and must all do the same."""

import random
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_MESH_DIMENSION = "tp"  # transformers' and accelerate's name


@dataclass(frozen=True)
class TensorParallel:
    """The group of this rank. Its ranks hold one copy of the model together, and get the same data."""

    group: Any
    rank: int  # of this process in the group
    size: int  # number of ranks in the group
    copy: int  # index of this group's copy of the model
    copies: int  # number of copies of the model

    @classmethod
    def of(cls, model: nn.Module) -> "TensorParallel | None":
        """Return the group of a model whose parameters are split over a mesh dimension "tp"; `None` for other models.

        Raises:
            `ValueError`: the mesh has no dimension "tp", or the group's ranks are not consecutive, as Accelerate needs.
        """
        mesh = next((x for x in map(tensor_parallel_mesh, model.parameters()) if x is not None), None)
        if mesh is None and (getattr(model, "_tp_size", None) or 1) > 1:  # set by transformers
            raise ValueError(
                'The model was loaded with tensor parallelism, but its device mesh has no dimension named "tp": older '
                "versions of transformers do not name it. Update transformers to 5.23, or load the model without "
                "tensor parallelism."
            )
        if mesh is None or mesh.size() == 1:
            return None
        ranks = dist.get_process_group_ranks(mesh.get_group())
        size = len(ranks)
        if ranks != list(range(ranks[0], ranks[0] + size)) or ranks[0] % size:
            raise ValueError(
                f"The tensor-parallel group of this process has the ranks {ranks}, but Accelerate gives the same data "
                f'to {size} consecutive ranks. Make "tp" the last dimension of the device mesh.'
            )
        copies = dist.get_world_size() // size
        return cls(mesh.get_group(), dist.get_rank() - ranks[0], size, ranks[0] // size, copies)

    def shared(self, value: Any, device: torch.device | None = None) -> Any:
        """Return the `value` (any picklable object) of the group's first rank. One broadcast over the group."""
        values = [value]
        dist.broadcast_object_list(values, src=self.copy * self.size, group=self.group, device=device)
        return values[0]

    def share_(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with the tensor of the group's first rank. One broadcast over the group."""
        dist.broadcast(tensor, src=self.copy * self.size, group=self.group)
        return tensor

    def share_random_state(self, device: torch.device) -> None:
        """Give all ranks of the group the first rank's random state: Python's, numpy's and torch's. One broadcast."""
        accelerated = torch.get_device_module(device) if device.type != "cpu" else None
        device_state = accelerated and accelerated.get_rng_state()
        state = (random.getstate(), np.random.get_state(), torch.get_rng_state(), device_state)
        python, numpy, cpu, on_device = self.shared(state, device)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if accelerated is not None:
            accelerated.set_rng_state(on_device)

    def check_same(self, ids: Tensor) -> None:
        """Raise `ValueError` on every rank if their token ids differ. One all-gather of four integers."""
        ids_hash = signature(ids)
        rank_hashes = [torch.empty_like(ids_hash) for _ in range(self.size)]
        dist.all_gather(rank_hashes, ids_hash, group=self.group)
        if any(not torch.equal(rank_hash, ids_hash) for rank_hash in rank_hashes):
            raise ValueError(
                f"The {self.size} ranks of a tensor-parallel group hold one model together, but were given different "
                "batches. Give all of them the same data in the same order: do not split the dataset by rank, and do "
                "not draw random numbers in the data collator."
            )


def signature(x: Tensor) -> Tensor:
    """Return a hash of shape and content: int64 of shape `(4,)`."""
    # Bit patterns, summed modulo 2**64 with weights that depend on the position
    bits = x.detach().contiguous().flatten()
    bits = (bits.view(torch.uint8) if x.is_floating_point() else bits).long()
    places = torch.arange(1, bits.numel() + 1, device=x.device)
    mixed = (places * 6364136223846793005 + 1442695040888963407) * (bits + 1013904223)
    sizes = torch.tensor([x.shape[0] if x.dim() else 0, x.numel()], device=x.device)
    return torch.cat([sizes, bits.sum().view(1), (mixed ^ (mixed >> 29)).sum().view(1)])


def tensor_parallel_mesh(param: Tensor) -> Any:
    """Return the one-dimensional mesh over which tensor parallelism splits `param`, or `None`."""
    if isinstance(param, DTensor) and _MESH_DIMENSION in (param.device_mesh.mesh_dim_names or ()):
        return param.device_mesh[_MESH_DIMENSION]
    return None


class DataParallelAccelerator:
    """A proxy for an `Accelerator` that counts the ranks of each copy of the model as one process.

    Members that are not overridden below are the accelerator's, and still count every rank.
    """

    def __init__(self, accelerator: Accelerator, ranks: TensorParallel) -> None:
        vars(self).update(_accelerator=accelerator, _ranks=ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_accelerator"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._accelerator, name, value)

    @property
    def of_all_ranks(self) -> Any:
        return self._accelerator

    @property
    def num_processes(self) -> int:
        """The number of copies of the model, each with its own data."""
        return int(self._ranks.copies)

    @property
    def process_index(self) -> int:
        return int(self._ranks.copy)

    def gather(self, tensor: Any) -> Any:
        """Gather as Accelerate does, but from one rank of each copy of the model."""
        ranks: TensorParallel = self._ranks

        def first_of_each_copy(gathered: Tensor) -> Tensor:
            rows = len(gathered) // (ranks.copies * ranks.size)
            return gathered.unflatten(0, (ranks.copies, ranks.size, rows))[:, 0].flatten(0, 1)

        return recursively_apply(first_of_each_copy, self._accelerator.gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as Accelerate does, but tensors from one rank of each copy only; other objects from all."""
        return Accelerator.gather_for_metrics(self, input_data, use_gather_object)  # type: ignore[arg-type]

    def reduce(self, tensor: Any, reduction: str = "sum") -> Any:
        """Sum or average as Accelerate does, but over one rank of each copy of the model."""
        ranks: TensorParallel = self._ranks
        once = tensor if ranks.rank == 0 else recursively_apply(torch.zeros_like, tensor)
        total = self._accelerator.reduce(once, reduction="sum")
        return total if reduction == "sum" else recursively_apply(lambda x: x / ranks.copies, total)

    def gather_object(self, objects: list[Any]) -> list[Any]:
        """Gather lists with `accelerate.utils.gather_object`, and keep those from one rank of each copy."""
        return list(chain.from_iterable(gather_object([objects])[:: self._ranks.size]))
