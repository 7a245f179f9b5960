"""The tensor-parallel group: the ranks that hold one copy of the model together, and must do the same."""

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
    """The group of this rank, whose ranks hold one copy of the model and get the same data."""

    group: Any
    rank: int  # of this process in it
    size: int  # ranks that hold one copy of the model
    copy: int  # index of the copy that this rank holds a part of
    copies: int  # of the model

    @classmethod
    def of(cls, model: nn.Module) -> "TensorParallel | None":
        """The group of a model whose parameters are split over a mesh dimension "tp"; `None` for any other.

        Raises:
            `ValueError`: its ranks are not consecutive, as Accelerate's data loader assumes, or the mesh has no "tp".
        """
        mesh = next((found for param in model.parameters() if (found := tensor_parallel_mesh(param)) is not None), None)
        if mesh is None and (getattr(model, "_tp_size", None) or 1) > 1:  # set by transformers
            raise ValueError(
                "The model was loaded with tensor parallelism, and no device mesh of its parameters has a dimension "
                'called "tp", by which the ranks of a group are known: older versions of transformers give it no name. '
                "Update transformers to 5.23, or load the model without tensor parallelism."
            )
        if mesh is None or mesh.size() == 1:
            return None
        ranks = dist.get_process_group_ranks(mesh.get_group())
        size = len(ranks)
        if ranks != list(range(ranks[0], ranks[0] + size)) or ranks[0] % size:
            raise ValueError(
                f"The tensor-parallel group of this process is the ranks {ranks}, and Accelerate gives the same data "
                f'to each {size} ranks that follow each other. Make "tp" the last dimension of the device mesh.'
            )
        copies = dist.get_world_size() // size
        return cls(mesh.get_group(), dist.get_rank() - ranks[0], size, ranks[0] // size, copies)

    def shared(self, value: Any, device: torch.device | None = None) -> Any:
        """The `value` (any that pickles) of the group's first rank. One broadcast over the group."""
        values = [value]
        dist.broadcast_object_list(values, src=self.copy * self.size, group=self.group, device=device)
        return values[0]

    def share_(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with the one of the group's first rank. One broadcast over the group."""
        dist.broadcast(tensor, src=self.copy * self.size, group=self.group)
        return tensor

    def share_random_state(self, device: torch.device) -> None:
        """Give all ranks of the group one random state: Python's, numpy's and torch's. One broadcast."""
        accelerated = torch.get_device_module(device) if device.type != "cpu" else None
        mine = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        python, numpy, cpu, on_device = self.shared((*mine, accelerated and accelerated.get_rng_state()), device)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if accelerated is not None:
            accelerated.set_rng_state(on_device)

    def check_same(self, ids: Tensor) -> None:
        """Raise `ValueError` on every rank if their token ids differ. One all-gather of four integers."""
        mine = signature(ids)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.group)
        if any(not torch.equal(other, mine) for other in found):
            raise ValueError(
                f"The {self.size} ranks of a tensor-parallel group hold one model together, and were given different "
                "batches. Give all of them the same data in the same order: do not split the data set by rank, and "
                "let the data collator draw no random numbers of its own."
            )


def signature(x: Tensor) -> Tensor:
    """A hash of shape and content: int64 of shape `(4,)`."""
    # Bit patterns, summed with weights that depend on the place, modulo 2**64
    bits = x.detach().contiguous().flatten()
    bits = (bits.view(torch.uint8) if x.is_floating_point() else bits).long()
    places = torch.arange(1, bits.numel() + 1, device=x.device)
    mixed = (places * 6364136223846793005 + 1442695040888963407) * (bits + 1013904223)
    sizes = torch.tensor([x.shape[0] if x.dim() else 0, x.numel()], device=x.device)
    return torch.cat([sizes, bits.sum().view(1), (mixed ^ (mixed >> 29)).sum().view(1)])


def tensor_parallel_mesh(param: Tensor) -> Any:
    """The one-dimensional mesh over which tensor parallelism splits `param`, or `None`."""
    if isinstance(param, DTensor) and _MESH_DIMENSION in (param.device_mesh.mesh_dim_names or ()):
        return param.device_mesh[_MESH_DIMENSION]
    return None


class DataParallelAccelerator:
    """A proxy that counts the ranks of each copy of the model as one process.

    Every member that is not overridden below is the accelerator's, and still counts every rank.
    """

    def __init__(self, accelerator: Accelerator, ranks: TensorParallel) -> None:
        vars(self).update(_accelerator=accelerator, _ranks=ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_accelerator"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._accelerator, name, value)

    @property
    def of_every_rank(self) -> Any:
        return self._accelerator

    @property
    def num_processes(self) -> int:
        """How many copies of the model there are, each with its own data."""
        return int(self._ranks.copies)

    @property
    def process_index(self) -> int:
        return int(self._ranks.copy)

    def gather(self, tensor: Any) -> Any:
        """Accelerate's, from one rank of each copy."""
        ranks: TensorParallel = self._ranks

        def first_of_each_copy(gathered: Tensor) -> Tensor:
            rows = len(gathered) // (ranks.copies * ranks.size)
            return gathered.unflatten(0, (ranks.copies, ranks.size, rows))[:, 0].flatten(0, 1)

        return recursively_apply(first_of_each_copy, self._accelerator.gather(tensor))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Accelerate's, from one rank of each copy; objects that are not tensors come from every rank."""
        return Accelerator.gather_for_metrics(self, input_data, use_gather_object)  # type: ignore[arg-type]

    def reduce(self, tensor: Any, reduction: str = "sum") -> Any:
        """Accelerate's sum or mean, over one rank of each copy."""
        ranks: TensorParallel = self._ranks
        once = tensor if ranks.rank == 0 else recursively_apply(torch.zeros_like, tensor)
        total = self._accelerator.reduce(once, reduction="sum")
        return total if reduction == "sum" else recursively_apply(lambda x: x / ranks.copies, total)

    def gather_object(self, objects: list[Any]) -> list[Any]:
        """`accelerate.utils.gather_object` of lists, from one rank of each copy."""
        return list(chain.from_iterable(gather_object([objects])[:: self._ranks.size]))
