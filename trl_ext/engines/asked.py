"""Which engine was asked for: by `accelerate launch`, in the environment, and by the trainer's arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

SHARDED_PARAMETERS, TENSOR_PARALLEL = "sharding of parameters", "tensor parallelism"

# What MPI's launchers, and torchrun, tell each process of how many there are
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


class Wish(NamedTuple):
    """An engine that was asked for, and what asks for it."""

    engine: str
    by: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the environment and the arguments ask for.

    Args:
        processes (`int`, *optional*): how many; `None` where all that is known is that they are several.
        processes_by (`str`, *optional*): what asks for several.
        cpu (`bool`): whether the CPU is to be used.
        wishes (`tuple[Wish, ...]`): engines.
    """

    processes: int | None
    processes_by: str | None
    cpu: bool
    wishes: tuple[Wish, ...]


def asked(environment: Mapping[str, str], args: Any) -> Asked:
    """What the `environment` and the `args` (`TrainingArguments`) of a trainer ask for.

    The environment is that before the trainer's `Accelerator` exists, which writes the arguments into it.
    """
    processes, processes_by = _processes(environment)
    return Asked(
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


def _by_launcher(environment: Mapping[str, str]) -> list[Wish]:
    wishes = []
    if _is_true(environment, "ACCELERATE_USE_FSDP"):
        # `FSDP_VERSION=1` is also what a config without a version gets
        version = "2" if environment.get("FSDP_VERSION") == "2" else ""
        wishes.append(Wish(f"FSDP{version}", "`ACCELERATE_USE_FSDP`" + ", `FSDP_VERSION=2`" * bool(version)))
    if _is_true(environment, "ACCELERATE_USE_DEEPSPEED"):
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        if stage is None:  # it stands in a file of DeepSpeed's own
            wishes.append(Wish("DeepSpeed", "`ACCELERATE_USE_DEEPSPEED`"))
        else:
            wishes.append(Wish(f"DeepSpeed ZeRO-{stage}", f"`ACCELERATE_DEEPSPEED_ZERO_STAGE={stage}`"))
    if _is_true(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        wishes += _sizes(
            lambda axis: int(environment.get(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", 1)),
            lambda axis, size: f"`PARALLELISM_CONFIG_{axis.upper()}_SIZE={size}`",
            {"tp": TENSOR_PARALLEL, "dp_shard": SHARDED_PARAMETERS},
        )
    return wishes


def _by_arguments(args: Any) -> list[Wish]:
    wishes = []
    if args.fsdp_plugin_args:
        wishes.append(Wish(f"FSDP{args.fsdp_plugin_args['fsdp_version']}", "the argument `fsdp`"))
    if args.deepspeed:
        wishes.append(Wish("DeepSpeed", "the argument `deepspeed`"))
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


def _sizes(size_of: Callable[[str], int], by: Callable[[str, int], str], engines: dict[str, str]) -> list[Wish]:
    return [Wish(engine, by(axis, size)) for axis, engine in engines.items() if (size := size_of(axis)) > 1]
