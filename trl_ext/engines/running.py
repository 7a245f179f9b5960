"""Which engine really runs: what accelerate's state, the model's parameters and what wraps them say."""

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .asked import SHARDED_PARAMETERS, TENSOR_PARALLEL

_HELD_BY_ALL = "each holds the whole model, and gradients are averaged"
_SHARDED_AT_STAGE = (
    None,
    "optimizer states",
    "optimizer states and gradients",
    "optimizer states, gradients and parameters",
)


@dataclass(frozen=True, kw_only=True)
class Running:
    """What runs, as far as it is known.

    Args:
        distributed_type (`str`): accelerate's, such as `"NO"`, `"MULTI_GPU"`, `"FSDP"`.
        processes (`int`): that train together, as accelerate's state has it.
        in_group (`int`): in torch's default process group; 1 where there is none.
        backend (`str`, *optional*): of the process group.
        device (`str`): its type.
        fsdp_version (`int`, *optional*): of accelerate's FSDP, where that runs.
        zero_stage (`int`, *optional*): of DeepSpeed, where that runs.
        autotp_size (`int`): over how many processes DeepSpeed's config has it split layers, by AutoTP; 0 or 1 for none.
        sizes (`dict[str, int]`): of the axes of accelerate's `ParallelismConfig` that are longer than 1.
        model_axes (`dict[str, int]`): lengths of the named axes of the meshes on which the model's parameters lie.
        wrapping (`str`, *optional*): what averages the gradients, by what the model is wrapped in; `None` before it is.
    """

    distributed_type: str
    processes: int
    in_group: int
    backend: str | None
    device: str
    fsdp_version: int | None = None
    zero_stage: int | None = None
    autotp_size: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    model_axes: dict[str, int] = field(default_factory=dict)
    wrapping: str | None = None

    @property
    def tensor_parallel(self) -> int:
        """Over how many processes layers are split."""
        return self.model_axes.get("tp", 1)

    @property
    def sharded_at_loading(self) -> bool:
        """Whether transformers has sharded the parameters, by FSDP2, as it loaded them."""
        return self.model_axes.get("fsdp", 1) * self.model_axes.get("dp_replicate", 1) > 1

    @property
    def data_engine(self) -> str | None:
        """The engine by which processes that see other rows train together."""
        if self.zero_stage is not None:
            return f"DeepSpeed ZeRO-{self.zero_stage}"
        if self.sharded_at_loading:
            return "FSDP2"
        if self.fsdp_version is not None:
            return f"FSDP{self.fsdp_version}"
        return "DDP" if self.processes > self.tensor_parallel else None

    @property
    def name(self) -> str:
        """In words, such as `"DDP"` or `"tensor parallelism x FSDP2"`."""
        engines = [TENSOR_PARALLEL] if self.tensor_parallel > 1 else []
        return " x ".join([*engines, *filter(None, [self.data_engine])]) or "one process"

    @property
    def provides(self) -> frozenset[str]:
        """The engines among those that can be asked for."""
        engine = self.data_engine or ""
        found = {engine}
        if engine.startswith("FSDP"):
            found |= {"FSDP", SHARDED_PARAMETERS}
        if engine.startswith("DeepSpeed"):  # shards by its own config
            found |= {"DeepSpeed", SHARDED_PARAMETERS}
        if self.tensor_parallel > 1:
            found.add(TENSOR_PARALLEL)
        return frozenset(found)

    def __str__(self) -> str:
        """What runs, and who holds what."""
        if self.name == "one process":
            return f"one process ({self.device})"
        count = "one process" if self.processes == 1 else f"{self.processes} processes"
        return f"{self.name}, {count} ({self.backend or self.device}): {', '.join(self._held())}"

    def _held(self) -> list[str]:
        held = [f"layers split over {self.tensor_parallel}"] if self.tensor_parallel > 1 else []
        held += [f"each sequence cut over {self.sizes[axis]}" for axis in ("cp", "sp") if axis in self.sizes]
        others = self.processes // self.tensor_parallel
        if self.zero_stage is not None:
            what = _SHARDED_AT_STAGE[self.zero_stage]
            return [*held, _HELD_BY_ALL if what is None else f"{what} sharded over {others}"]
        if self.sharded_at_loading:
            return [*held, f"parameters sharded over {self.model_axes.get('fsdp', 1)} as they were loaded"]
        if self.fsdp_version is not None:
            over = self.sizes.get("dp_shard", 1) * self.sizes.get("cp", 1) if self.sizes else others
            return [*held, f"parameters sharded over {over}"]
        return [*held, _HELD_BY_ALL] if others > 1 else held


def running(accelerator: Any, model: nn.Module, wrapped: nn.Module | None = None) -> Running:
    """What runs, by the trainer's `accelerator` and `model`, and by the model `wrapped` as `prepare` returned it."""
    state = accelerator.state
    distributed_type = state.distributed_type.value
    deepspeed = state.deepspeed_plugin if distributed_type == "DEEPSPEED" else None
    parallelism = getattr(accelerator, "parallelism_config", None)  # accelerate 1.10 and later
    axes = () if parallelism is None else ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    return Running(
        distributed_type=distributed_type,
        processes=state.num_processes,  # under tensor parallelism the accelerator may count copies of the model
        in_group=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        backend=state.backend,
        device=accelerator.device.type,
        fsdp_version=state.fsdp_plugin.fsdp_version if distributed_type == "FSDP" else None,
        zero_stage=None if deepspeed is None else deepspeed.zero_stage,
        autotp_size=0 if deepspeed is None else _autotp_size(deepspeed.deepspeed_config),
        sizes={axis: size for axis in axes if (size := getattr(parallelism, f"{axis}_size")) > 1},
        model_axes=_model_axes(model),
        wrapping=None if wrapped is None else _wrapping(wrapped),
    )


def _autotp_size(config: dict[str, Any]) -> int:
    return int(config.get("tensor_parallel", {}).get("autotp_size", 0))


def _model_axes(model: nn.Module) -> dict[str, int]:
    axes: dict[str, int] = {}
    for param in model.parameters():
        if isinstance(param.data, DTensor):
            mesh = param.data.device_mesh
            axes.update(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return axes


def _wrapping(model: nn.Module) -> str:
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper is the outermost
    stage = getattr(model, "zero_optimization_stage", None)  # a method of DeepSpeed's engine
    if stage is not None:
        return f"DeepSpeed ZeRO-{stage()}"
    if isinstance(model, DistributedDataParallel):
        return "DDP"
    if isinstance(model, FullyShardedDataParallel):
        return "FSDP1"
    return "DTensor" if any(isinstance(param.data, DTensor) for param in model.parameters()) else "nothing"
