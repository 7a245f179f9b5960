"""The requested engine, the engine that runs, and the error when they differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

_SHARDED_PARAMETERS = "sharding of parameters"
_TENSOR_PARALLEL = "tensor parallelism"

# Where MPI launchers and torchrun put the number of processes
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


class RequestedEngine(NamedTuple):
    """An engine, and the setting that requests it."""

    engine: str
    by: str


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The processes and engines that the environment and the arguments request."""

    processes: int | None  # `None`: several, but how many is unknown
    processes_by: str | None  # the setting that requests several processes
    cpu: bool
    engines: tuple[RequestedEngine, ...]  # those of the launcher, then those of the arguments

    @property
    def sources(self) -> list[str]:
        """The settings that request an engine; if there are none, the one that requests several processes."""
        return [x.by for x in self.engines] or [x for x in (self.processes_by,) if x is not None]


def requested_engine(environment: Mapping[str, str], args: Any) -> EngineRequest:
    """Read the request from the environment and from a trainer's `args` (`TrainingArguments`).

    Pass the `environment` from before the trainer creates its `Accelerator`, which writes the arguments into it.
    """
    processes, by = _requested_processes(environment)
    cpu = _is_true(environment, "ACCELERATE_USE_CPU") or args.use_cpu
    engines = (*_engines_of_launcher(environment), *_engines_of_arguments(args))
    return EngineRequest(processes=processes, processes_by=by, cpu=cpu, engines=engines)


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").lower() in ("1", "true", "yes", "y", "t", "on")


def _requested_processes(environment: Mapping[str, str]) -> tuple[int | None, str | None]:
    if "RANK" in environment or "LOCAL_RANK" in environment:
        count = int(environment.get("WORLD_SIZE") or 1)
        return count, f"`WORLD_SIZE={count}`" if count > 1 else None
    # accelerate's `simple_launcher` starts one process, but sets an address if `num_processes` is more than 1
    on_cpu = "ACCELERATE_MIXED_PRECISION" in environment and _is_true(environment, "ACCELERATE_USE_CPU")
    if on_cpu and "MASTER_ADDR" in environment and "MASTER_PORT" in environment and not environment.keys() & _COUNTS:
        return None, "`num_processes` of `accelerate launch`"
    return 1, None


def _engines_of_launcher(environment: Mapping[str, str]) -> Iterator[RequestedEngine]:
    if _is_true(environment, "ACCELERATE_USE_FSDP"):
        # A config without a version also sets `FSDP_VERSION=1`
        if environment.get("FSDP_VERSION") == "2":
            yield RequestedEngine("FSDP2", "`ACCELERATE_USE_FSDP`, `FSDP_VERSION=2`")
        else:
            yield RequestedEngine("FSDP", "`ACCELERATE_USE_FSDP`")
    if _is_true(environment, "ACCELERATE_USE_DEEPSPEED"):
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        if stage is None:  # a DeepSpeed config file holds it
            yield RequestedEngine("DeepSpeed", "`ACCELERATE_USE_DEEPSPEED`")
        else:
            yield RequestedEngine(f"DeepSpeed ZeRO-{stage}", f"`ACCELERATE_DEEPSPEED_ZERO_STAGE={stage}`")
    if _is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        prefix = "PARALLELISM_CONFIG_"
        names = {f"{prefix}TP_SIZE": _TENSOR_PARALLEL, f"{prefix}DP_SHARD_SIZE": _SHARDED_PARAMETERS}
        yield from _engines_of_sizes(environment, "", names)


def _engines_of_arguments(args: Any) -> Iterator[RequestedEngine]:
    if args.fsdp_plugin_args:
        yield RequestedEngine(f"FSDP{args.fsdp_plugin_args['fsdp_version']}", "the argument `fsdp`")
    if args.deepspeed:
        yield RequestedEngine("DeepSpeed", "the argument `deepspeed`")
    if args.parallelism_config is not None:
        names = {"tp_size": _TENSOR_PARALLEL, "dp_shard_size": _SHARDED_PARAMETERS}
        yield from _engines_of_sizes(vars(args.parallelism_config), "parallelism_config.", names)
    config = (args.model_init_kwargs or {}).get("distributed_config")
    if config is not None:
        sizes = config if isinstance(config, dict) else vars(config)
        names = {"tp_size": _TENSOR_PARALLEL, "fsdp_size": "FSDP2"}
        yield from _engines_of_sizes(sizes, "distributed_config.", names)


def _engines_of_sizes(sizes: Mapping[str, Any], owner: str, names: dict[str, str]) -> Iterator[RequestedEngine]:
    """Yield the engine of each name whose size is over 1."""
    for name, engine in names.items():
        size = int(sizes.get(name) or 1)
        if size > 1:
            yield RequestedEngine(engine, f"`{owner}{name}={size}`")


_WHOLE_MODEL = "each holds the whole model, and gradients are averaged"
_SHARDED = ("", "optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")


@dataclass(frozen=True, kw_only=True)
class DetectedEngine:
    """The engine that runs, as far as it is known."""

    distributed_type: str  # accelerate's, such as "NO", "MULTI_GPU", "FSDP"
    processes: int  # number of processes that train together, from accelerate's state
    in_group: int  # size of torch's default process group; 1 without one
    backend: str | None  # the backend of the process group
    device: str  # the type of the device
    fsdp_version: int | None = None
    zero_stage: int | None = None  # of DeepSpeed
    autotp_size: int = 0  # number of processes over which DeepSpeed's AutoTP splits layers; 0 or 1 if it splits none
    sizes: dict[str, int] = field(default_factory=dict)  # axis of accelerate's `ParallelismConfig` -> size, if over 1
    model_axes: dict[str, int] = field(default_factory=dict)  # named mesh dimension of a parameter -> size
    wrapping: str | None = None  # the engine whose wrapper the model has; `None` before it is wrapped

    @property
    def tensor_parallel(self) -> int:
        """The number of processes that each layer is split over."""
        return self.model_axes.get("tp", 1)

    @property
    def sharded_at_loading(self) -> bool:
        """Whether transformers sharded the parameters with FSDP2 when it loaded the model."""
        return self.model_axes.get("fsdp", 1) * self.model_axes.get("dp_replicate", 1) > 1

    @property
    def data_engine(self) -> str | None:
        """The engine under which processes with different data train together."""
        if self.zero_stage is not None:
            return f"DeepSpeed ZeRO-{self.zero_stage}"
        if self.sharded_at_loading:
            return "FSDP2"
        if self.fsdp_version is not None:
            return f"FSDP{self.fsdp_version}"
        return "DDP" if self.processes > self.tensor_parallel else None

    @property
    def name(self) -> str:
        """The engine's name in messages, such as `"DDP"` or `"tensor parallelism x FSDP2"`."""
        layers = _TENSOR_PARALLEL if self.tensor_parallel > 1 else None
        return " x ".join(filter(None, [layers, self.data_engine])) or "one process"

    def provides(self, engine: str) -> bool:
        if engine == _TENSOR_PARALLEL:
            return self.tensor_parallel > 1
        runs = self.data_engine or ""
        if engine == _SHARDED_PARAMETERS:
            return runs.startswith(("FSDP", "DeepSpeed"))  # DeepSpeed's own config says what it shards
        return engine == runs or (engine in ("FSDP", "DeepSpeed") and runs.startswith(engine))

    def __str__(self) -> str:
        """Describe the engine and the parts that each process holds."""
        if self.name == "one process":
            return f"one process ({self.device})"
        count = "one process" if self.processes == 1 else f"{self.processes} processes"
        return f"{self.name}, {count} ({self.backend or self.device}): {', '.join(self._parts_of_process())}"

    def _parts_of_process(self) -> Iterator[str]:
        """Yield how the model and its sequences are spread over the processes."""
        if self.tensor_parallel > 1:
            yield f"layers split over {self.tensor_parallel}"
        yield from (f"each sequence split over {self.sizes[axis]}" for axis in ("cp", "sp") if axis in self.sizes)
        copies = self.processes // self.tensor_parallel
        if self.zero_stage is not None:
            sharded = _SHARDED[self.zero_stage]
            yield f"{sharded} sharded over {copies}" if sharded else _WHOLE_MODEL
        elif self.sharded_at_loading:
            yield f"parameters sharded over {self.model_axes.get('fsdp', 1)} when they were loaded"
        elif self.fsdp_version is not None:
            over = self.sizes.get("dp_shard", 1) * self.sizes.get("cp", 1) if self.sizes else copies
            yield f"parameters sharded over {over}"
        elif copies > 1:
            yield _WHOLE_MODEL


def detect_engine(accelerator: Any, model: nn.Module, wrapped: nn.Module | None = None) -> DetectedEngine:
    """Detect the engine from a trainer's `accelerator` and `model`, and from the model `wrapped` by `prepare`."""
    state = accelerator.state
    distributed_type = state.distributed_type.value
    deepspeed = state.deepspeed_plugin if distributed_type == "DEEPSPEED" else None
    split = {} if deepspeed is None else deepspeed.deepspeed_config.get("tensor_parallel", {})
    parallelism = getattr(accelerator, "parallelism_config", None)  # accelerate 1.10 and later
    axes = () if parallelism is None else ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    model_axes: dict[str, int] = {}
    for param in model.parameters():
        if isinstance(param.data, DTensor):
            mesh = param.data.device_mesh
            model_axes.update(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return DetectedEngine(
        distributed_type=distributed_type,
        processes=state.num_processes,  # the accelerator itself may count copies of the model, under tensor parallelism
        in_group=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        backend=state.backend,
        device=accelerator.device.type,
        fsdp_version=state.fsdp_plugin.fsdp_version if distributed_type == "FSDP" else None,
        zero_stage=deepspeed and deepspeed.zero_stage,
        autotp_size=int(split.get("autotp_size", 0)),
        sizes={axis: size for axis in axes if (size := getattr(parallelism, f"{axis}_size")) > 1},
        model_axes=model_axes,
        wrapping=None if wrapped is None else _wrapping(wrapped),
    )


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
    "accelerate found no GPU and was not told to use the CPU. Make the GPUs visible (`CUDA_VISIBLE_DEVICES`), or set "
    f"`ACCELERATE_USE_CPU=true` to train with DDP on the CPU (`{_CONFIGS}/ddp.yaml`)."
)


def engine_mismatch(requested: EngineRequest, running_engine: DetectedEngine) -> str | None:
    """Describe how the engine that runs differs from the request, and what to do; `None` if they agree.

    TPU and Megatron-LM are not checked.
    """
    if not running_engine.distributed_type.startswith(("NO", "FSDP", "DEEPSPEED", "MULTI_")):
        return None
    return (
        _separate_processes(requested, running_engine)
        or _missing_engine(requested, running_engine)
        or _wrong_engine(running_engine)
    )


def _separate_processes(requested: EngineRequest, running_engine: DetectedEngine) -> str | None:
    """Describe the error if processes that should train together do not."""
    if requested.processes is None and running_engine.processes == 1:
        return (
            f"Several processes were requested (by {requested.processes_by}), but only one runs: `accelerate launch` "
            "starts one process for `--cpu` and for `MULTI_CPU` in its config. To train with several processes on the "
            f"CPU, set `ACCELERATE_USE_CPU=true` and launch with `{_CONFIGS}/ddp.yaml`. To train with one, pass "
            "`--num_processes 1`, and unset `MASTER_ADDR` and `MASTER_PORT` if you set them yourself."
        )
    together = max(running_engine.in_group, requested.processes or 1)
    if together > running_engine.processes:
        by = f" (by {requested.processes_by})" if requested.processes_by else ""
        return (
            f"{together} processes were requested{by}, but each trains alone ({running_engine.device}), without "
            f"averaging gradients: {_FIND_GPU}"
        )
    if running_engine.distributed_type == "NO" and running_engine.processes > 1:
        return (
            f"{running_engine.processes} processes were requested (by {requested.processes_by}) and share the data, "
            f"but each trains a separate model ({running_engine.device}): {_FIND_GPU} `ddp_backend` alone is not "
            "enough."
        )
    return None


def _missing_engine(requested: EngineRequest, running_engine: DetectedEngine) -> str | None:
    """Describe the error if a requested engine does not run."""
    for engine, by in requested.engines:
        if not running_engine.provides(engine):
            name = engine[0].upper() + engine[1:]
            remedy = _remedy(engine, by, requested, running_engine)
            return f"{name} was requested (by {by}), but the engine is {running_engine}. {remedy}"
    return None


def _remedy(engine: str, by: str, requested: EngineRequest, running_engine: DetectedEngine) -> str:
    if "distributed_config" in by:
        return (
            "TRL ignores `model_init_kwargs` when `model` is already loaded. Pass the model's name or path instead, or "
            "load the model with `from_pretrained(..., distributed_config=...)`."
        )
    if engine == _TENSOR_PARALLEL:
        return (
            "`parallelism_config` alone does not split layers. Pass the sizes as `distributed_config` in "
            f"`model_init_kwargs`, with a model's name or path. See `{_CONFIGS}/tp_fsdp2.yaml`."
        )
    if engine == _SHARDED_PARAMETERS:
        return f"`parallelism_config` needs FSDP2 to shard parameters. Launch with `{_CONFIGS}/fsdp2.yaml`."
    other_source = next((x.by for x in requested.engines if running_engine.provides(x.engine)), None)
    if other_source is not None:
        return f"That engine was requested by {other_source}. Request only one engine, in one place."
    if requested.cpu:
        name = "FSDP"
        on_cpu = ""
        if not engine.startswith("FSDP"):
            name = "DeepSpeed"
            on_cpu = " (DeepSpeed runs on the CPU with `DS_ACCELERATOR=cpu` and `ddp_backend='gloo'`)"
        return (
            f"accelerate does not use {name} when `ACCELERATE_USE_CPU` or `use_cpu` is set. Unset it{on_cpu}, or "
            f"launch with `{_CONFIGS}/ddp.yaml` to train with DDP on the CPU."
        )
    if running_engine.device == "cpu" and running_engine.processes == 1:
        return _FIND_GPU
    return f"Launch with `accelerate launch` and a config from `{_CONFIGS}`."


def _wrong_engine(running_engine: DetectedEngine) -> str | None:
    """Describe the error if the engine that runs would train incorrectly."""
    if running_engine.fsdp_version is not None and running_engine.sharded_at_loading:
        return (
            "The model was sharded when it was loaded (`distributed_config`), and the config of `accelerate launch` or "
            f"the argument `fsdp` would shard it again. Use only one: launch with `{_CONFIGS}/tp_fsdp2.yaml`."
        )
    wrapping = "DTensor" if running_engine.data_engine in ("FSDP2", None) else running_engine.data_engine
    if running_engine.name != "one process" and running_engine.wrapping not in (None, wrapping):
        return (
            f"The engine is {running_engine}, but the trained model is wrapped in {running_engine.wrapping}, so "
            "gradients would not be averaged correctly. Do not replace `trainer.model_wrapped` or "
            "`accelerator.prepare`, and do not prepare the model before training."
        )
    if running_engine.autotp_size > 1:
        return (
            f"DeepSpeed's config splits layers over {running_engine.autotp_size} processes "
            f"(`tensor_parallel.autotp_size={running_engine.autotp_size}`). Each process then has a part of the LM "
            "head's weight as a plain tensor, and log-probs would be wrong. Remove `autotp_size`. For tensor "
            f"parallelism, pass `distributed_config` in `model_init_kwargs`, and launch with `{_CONFIGS}/ddp.yaml`."
        )
    return None
