"""The arguments of `accelerate launch` that start an engine, as the files in `examples/accelerate_configs`."""

import re
from typing import Any

_FSDP2 = {
    "use_fsdp": True,
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_activation_checkpointing": False,
}
# All that `launch_arguments` sets, but for `env`
LAUNCH_ARGUMENTS = {*_FSDP2, "num_processes", "mixed_precision", "multi_gpu", "use_deepspeed", "zero_stage"}


def launch_arguments(engine: str, devices: int, device: str, precision: str) -> dict[str, Any]:
    """Return the arguments that start `engine` on devices of one kind; `None` for those to leave out.

    `precision` is the run's mixed precision, by Accelerate's name. The trainer's `bf16` and `fp16` set it anyway.
    """
    use_cpu = True if device == "cpu" else None
    if engine == "one_process":
        return {"use_cpu": use_cpu, "num_processes": 1}
    arguments: dict[str, Any] = {"use_cpu": use_cpu, "num_processes": devices, "mixed_precision": precision}
    if stage := re.fullmatch(r"zero(\d)", engine):
        arguments["use_deepspeed"] = True
        arguments["zero_stage"] = int(stage[1])
    elif engine == "fsdp2":
        arguments.update(_FSDP2)
    else:
        arguments["multi_gpu"] = True
    if device == "cpu":
        arguments["env"] = {"ACCELERATE_USE_CPU": "true"}
    return arguments
