"""Which engine was asked for, which one runs, and the error where they differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

SHARDED_PARAMETERS, TENSOR_PARALLEL = "sharding of parameters", "tensor parallelism"

# What MPI's launchers, and torchrun, tell each process of how many there are
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


class RequestedEngine(NamedTuple):
    """An engine that was asked for, and what asks for it."""

    engine: str
    by: str


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """What the environment and the arguments ask for.

    Args:
        processes (`int`, *optional*): how many; `None` where all that is known is that they are several.
        processes_by (`str`, *optional*): what asks for several.
        cpu (`bool`): whether the CPU is to be used.
        wishes (`tuple[RequestedEngine, ...]`): engines.
    """

    processes: int | None
    processes_by: str | None
    cpu: bool
    wishes: tuple[RequestedEngine, ...]


def requested_engine(environment: Mapping[str, str], args: Any) -> EngineRequest:
    """What the `environment` and the `args` (`TrainingArguments`) of a trainer ask for.

    The environment is that before the trainer's `Accelerator` exists, which writes the arguments into it.
    """
    processes, processes_by = _processes(environment)
    return EngineRequest(
        processes=processes,
        processes_by=processes_by,
        cpu=_is_true(environment, "ACCELERATE_USE_CPU") or args.use_cpu,
        wishes=(*_by_launcher(environment), *_by_arguments(args)),
    )


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("1", "true", "yes", "y", "t", "on")


def _processes(environment: Mapping[str, str]) -> tuple[int | None, str | None]:
    if "RANK" in environment or "LOCAL_RANK" in environment:
        count = int(environment.get("WORLD_SIZE") or 1)
        return count, f"`WORLD_SIZE={count}`" if count > 1 else None
    # accelerate's `simple_launcher` sets an address where `num_processes` is more than 1, and starts one process
    on_cpu = "ACCELERATE_MIXED_PRECISION" in environment and _is_true(environment, "ACCELERATE_USE_CPU")
    if on_cpu and "MASTER_ADDR" in environment and "MASTER_PORT" in environment and not environment.keys() & _COUNTS:
        return None, "`num_processes` of `accelerate launch`"
    return 1, None


def _by_launcher(environment: Mapping[str, str]) -> list[RequestedEngine]:
    wishes = []
    if _is_true(environment, "ACCELERATE_USE_FSDP"):
        # `FSDP_VERSION=1` is also what a config without a version gets
        version = "2" if environment.get("FSDP_VERSION") == "2" else ""
        wishes.append(RequestedEngine(f"FSDP{version}", "`ACCELERATE_USE_FSDP`" + ", `FSDP_VERSION=2`" * bool(version)))
    if _is_true(environment, "ACCELERATE_USE_DEEPSPEED"):
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        if stage is None:  # it stands in a file of DeepSpeed's own
            wishes.append(RequestedEngine("DeepSpeed", "`ACCELERATE_USE_DEEPSPEED`"))
        else:
            wishes.append(RequestedEngine(f"DeepSpeed ZeRO-{stage}", f"`ACCELERATE_DEEPSPEED_ZERO_STAGE={stage}`"))
    if _is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        wishes += _sizes(
            lambda axis: int(environment.get(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", 1)),
            lambda axis, size: f"`PARALLELISM_CONFIG_{axis.upper()}_SIZE={size}`",
            {"tp": TENSOR_PARALLEL, "dp_shard": SHARDED_PARAMETERS},
        )
    return wishes


def _by_arguments(args: Any) -> list[RequestedEngine]:
    wishes = []
    if args.fsdp_plugin_args:
        wishes.append(RequestedEngine(f"FSDP{args.fsdp_plugin_args['fsdp_version']}", "the argument `fsdp`"))
    if args.deepspeed:
        wishes.append(RequestedEngine("DeepSpeed", "the argument `deepspeed`"))
    if args.parallelism_config is not None:
        wishes += _sizes(
            lambda axis: getattr(args.parallelism_config, f"{axis}_size"),
            lambda axis, size: f"`parallelism_config.{axis}_size={size}`",
            {"tp": TENSOR_PARALLEL, "dp_shard": SHARDED_PARAMETERS},
        )
    config = (args.model_init_kwargs or {}).get("distributed_config")
    if config is not None:
        sizes = config if isinstance(config, dict) else vars(config)
        wishes += _sizes(
            lambda axis: sizes.get(f"{axis}_size") or 1,
            lambda axis, size: f"`distributed_config.{axis}_size={size}`",
            {"tp": TENSOR_PARALLEL, "fsdp": "FSDP2"},
        )
    return wishes


def _sizes(
    size_of: Callable[[str], int], by: Callable[[str, int], str], engines: dict[str, str]
) -> list[RequestedEngine]:
    return [RequestedEngine(engine, by(axis, size)) for axis, engine in engines.items() if (size := size_of(axis)) > 1]


_HELD_BY_ALL = "each holds the whole model, and gradients are averaged"
_SHARDED_AT_STAGE = (
    None,
    "optimizer states",
    "optimizer states and gradients",
    "optimizer states, gradients and parameters",
)


@dataclass(frozen=True, kw_only=True)
class DetectedEngine:
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


def detect_engine(accelerator: Any, model: nn.Module, wrapped: nn.Module | None = None) -> DetectedEngine:
    """What runs, by the trainer's `accelerator` and `model`, and by the model `wrapped` as `prepare` returned it."""
    state = accelerator.state
    distributed_type = state.distributed_type.value
    deepspeed = state.deepspeed_plugin if distributed_type == "DEEPSPEED" else None
    parallelism = getattr(accelerator, "parallelism_config", None)  # accelerate 1.10 and later
    axes = () if parallelism is None else ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    return DetectedEngine(
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


_CONFIGS = "examples/accelerate_configs"
_FIND_GPU = (
    "accelerate found no GPU and was not told to use the CPU. Make the GPUs visible (`CUDA_VISIBLE_DEVICES`); or set "
    f"`ACCELERATE_USE_CPU=true`, which trains with DDP on the CPU (`{_CONFIGS}/ddp.yaml`)."
)
# What averages the gradients under an engine; else the engine's own name
_WRAPPING = {"FSDP2": "DTensor", None: "DTensor"}


def engine_mismatch(asked: EngineRequest, running: DetectedEngine) -> str | None:
    """What was asked for, what runs, and what to do; `None` where the two agree.

    Of accelerate's types for TPU and Megatron-LM nothing is known here, and nothing said.
    """
    known = running.distributed_type in ("NO", "FSDP", "DEEPSPEED") or running.distributed_type.startswith("MULTI_")
    if not known:
        return None
    return (
        _unrelated(asked, running)
        or _other_engine(asked, running)
        or _twice(running)
        or _other_wrapping(running)
        or _split_by_deepspeed(running)
    )


def _unrelated(asked: EngineRequest, running: DetectedEngine) -> str | None:
    """Of processes that should train together, and do not."""
    if asked.processes is None and running.processes == 1:
        return (
            f"Several processes were asked for (by {asked.processes_by}), but one runs: for `--cpu`, and for "
            "`MULTI_CPU` in its config, `accelerate launch` starts one. For several on the CPU, set "
            f"`ACCELERATE_USE_CPU=true` and launch with `{_CONFIGS}/ddp.yaml`. For one, say `--num_processes 1`, and "
            "unset `MASTER_ADDR` and `MASTER_PORT` if they are your own."
        )
    together = max(running.in_group, asked.processes or 1)
    if together > running.processes:
        by = f" (by {asked.processes_by})" if asked.processes_by else ""
        return (
            f"{together} processes were asked for{by}, but what runs is this one alone ({running.device}), unrelated "
            f"to the others: {_FIND_GPU}"
        )
    if running.distributed_type == "NO" and running.processes > 1:
        return (
            f"{running.processes} processes were asked for (by {asked.processes_by}), and they share the data, but "
            f"each trains a model of its own ({running.device}): {_FIND_GPU} `ddp_backend` says neither."
        )
    return None


def _other_engine(asked: EngineRequest, running: DetectedEngine) -> str | None:
    """Of an engine that was asked for and does not run."""
    for wish in asked.wishes:
        if wish.engine not in running.provides:
            what = wish.engine[0].upper() + wish.engine[1:]
            return f"{what} was asked for (by {wish.by}), but what runs is {running}. {_remedy(wish, asked, running)}"
    return None


def _remedy(wish: RequestedEngine, asked: EngineRequest, running: DetectedEngine) -> str:
    if "distributed_config" in wish.by:
        return (
            "The model was not loaded with it: TRL leaves `model_init_kwargs` out where it is given a model. Give it "
            "the model's name or path, or load the model with `from_pretrained(..., distributed_config=...)`."
        )
    if wish.engine == TENSOR_PARALLEL:
        return (
            "`parallelism_config` splits no layer. Give the sizes in `model_init_kwargs`, as `distributed_config`, "
            f"with a model's name or path, as `{_CONFIGS}/tp_fsdp2.yaml` shows."
        )
    if wish.engine == SHARDED_PARAMETERS:
        return f"`parallelism_config` shards nothing without FSDP2: launch with `{_CONFIGS}/fsdp2.yaml`."
    other = next((x for x in asked.wishes if x.engine in running.provides), None)
    if other is not None:
        return f"That is what {other.by} asks for. Ask for one engine, in one place."
    name = "FSDP" if wish.engine.startswith("FSDP") else "DeepSpeed"
    if asked.cpu:
        on_cpu = (
            "" if name == "FSDP" else ", where `DS_ACCELERATOR=cpu` and `ddp_backend='gloo'` have it run on the CPU"
        )
        return (
            f"accelerate leaves {name} out where it is told to use the CPU (`ACCELERATE_USE_CPU`, `use_cpu`): do not "
            f"tell it{on_cpu}; or launch with `{_CONFIGS}/ddp.yaml` for DDP on the CPU."
        )
    if running.device == "cpu" and running.processes == 1:
        return _FIND_GPU
    return f"Launch with `accelerate launch` and a config of `{_CONFIGS}`."


def _twice(running: DetectedEngine) -> str | None:
    """Of a model that transformers has sharded, and accelerate is to shard again."""
    if running.fsdp_version is not None and running.sharded_at_loading:
        return (
            "The model was sharded as it was loaded (`distributed_config`), and the config of `accelerate launch`, or "
            f"the argument `fsdp`, asks to shard it again. Leave out one: launch with `{_CONFIGS}/tp_fsdp2.yaml`."
        )
    return None


def _split_by_deepspeed(running: DetectedEngine) -> str | None:
    """Of layers that DeepSpeed splits: its head holds a share of the vocabulary, and nothing on it says so."""
    if running.autotp_size > 1:
        return (
            f"DeepSpeed's config splits layers over {running.autotp_size} processes "
            f"(`tensor_parallel.autotp_size={running.autotp_size}`). The head's weight is then a plain tensor with a "
            "share of the vocabulary's rows, and log-probs formed from it would be wrong. Leave `autotp_size` out; for "
            f"tensor parallelism give `model_init_kwargs` a `distributed_config`, with `{_CONFIGS}/ddp.yaml`."
        )
    return None


def _other_wrapping(running: DetectedEngine) -> str | None:
    """Of a model that is not wrapped as its engine wraps it, once that is known."""
    if running.wrapping is None or running.name == "one process":
        return None
    if running.wrapping != _WRAPPING.get(running.data_engine, running.data_engine):
        return (
            f"The engine is {running}; but the model that trains is wrapped in {running.wrapping}, so gradients are "
            "not averaged as that engine does it. Something has replaced `trainer.model_wrapped` or "
            "`accelerator.prepare`."
        )
    return None
