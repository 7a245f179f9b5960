"""Checkpoint formats of the engines, and saving the optimizer state of a model that is split over ranks."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

_FSDP = "pytorch_model_fsdp"  # accelerate's name
_WHOLE_WEIGHTS = re.compile(r"(model|adapter_model|pytorch_model|adapter)\.(safetensors|bin)(\.index\.json)?")
_PARTITIONED_WEIGHTS = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
_OPTIMIZER_OF_RANK = re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")


def format_of(folder: Path) -> str:
    """Return the engine format of a checkpoint; "" if one process, DDP or tensor parallelism wrote it."""
    if (folder / f"{_FSDP}.bin").exists():
        return fsdp_format("FULL_STATE_DICT")
    if (folder / f"{_FSDP}_0").is_dir():
        return fsdp_format("SHARDED_STATE_DICT")
    if not any(folder.glob("global_step*")):
        return ""
    tag = folder / "latest"
    step = folder / tag.read_text().strip() if tag.exists() else max(folder.glob("global_step*"))
    names = [path.name for path in step.iterdir()] if step.is_dir() else []
    processes = sum(_OPTIMIZER_OF_RANK.fullmatch(name) is not None for name in names)
    return deepspeed_format(3 if any(map(_PARTITIONED_WEIGHTS.fullmatch, names)) else 2 if processes else 0, processes)


def fsdp_format(state_dict_type: str) -> str:
    return f"FSDP with {state_dict_type}"


def deepspeed_format(stage: int, processes: int) -> str:
    if stage == 0:
        return "DeepSpeed"
    return f"DeepSpeed {'ZeRO-3' if stage == 3 else 'ZeRO-1 or ZeRO-2'} on {processes} processes"


def why_not_loaded(folder: Path, runs: str, engine: str) -> str | None:
    """Return why `engine` cannot resume from `folder`, or `None` if it can. `runs`: the format that it writes."""
    saved_format = format_of(folder)
    names = [path.name for path in folder.iterdir()]
    has_weights = any(map(_WHOLE_WEIGHTS.fullmatch, names))
    if saved_format == runs or (not runs and has_weights and saved_format.startswith("DeepSpeed")):
        return None
    if saved_format and runs and (saved_format.startswith(runs) or runs.startswith(saved_format)):
        return None  # DeepSpeed without ZeRO: its files tell neither the stage nor the number of processes
    if not saved_format and runs.startswith("FSDP") and "optimizer.pt" not in names and "adapter_config.json" in names:
        return None  # an adapter without an optimizer, which transformers also loads under FSDP
    tool = "its `zero_to_fp32.py`" if saved_format.startswith("DeepSpeed") else "`accelerate merge-weights`"
    anew = "start a new run from its weights." if has_weights else f"merge its weights with {tool} for a new run."
    return (
        f"{folder} was written under {saved_format or 'an engine other than FSDP and DeepSpeed'}, and {runs or engine} "
        f"cannot resume from it. Launch with the engine that wrote it, or {anew}"
    )


def save_optimizer(optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> None:
    """Write this rank's part of the optimizer state into a checkpoint."""
    state = optimizer.state_dict()
    parts = {
        i: {name: x.to_local() if isinstance(x, DTensor) else x for name, x in values.items()}
        for i, values in state["state"].items()
    }
    split = [(i, name) for i, values in state["state"].items() for name, x in values.items() if isinstance(x, DTensor)]
    torch.save({**state, "state": parts, "split": split, "layout": _layout(optimizer)}, _file(folder, rank))


def read_optimizer(optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> dict[str, Any] | None:
    """Return this rank's part for `optimizer.load_state_dict`; `None` if it is missing or was split differently."""
    file = _file(folder, rank)
    if not file.exists():
        return None
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    if state.pop("layout") != _layout(optimizer):
        return None
    params: list[Any] = [param for group in optimizer.param_groups for param in group["params"]]
    for i, name in state.pop("split"):
        param = params[i]
        local = state["state"][i][name].to(param.device)
        state["state"][i][name] = DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    return state


def _file(folder: Path, rank: int) -> Path:
    return folder / f"optimizer_{rank}.pt"


def _layout(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return, for each parameter, its shape and how it is split over which ranks."""
    params = [param.data for group in optimizer.param_groups for param in group["params"]]
    return [
        f"{tuple(x.shape)} {x.device_mesh} {x.placements}" if isinstance(x, DTensor) else f"{tuple(x.shape)}"
        for x in params
    ]


def load_weights(model: Any, folder: Path) -> None:
    """Load a checkpoint's weights into a `PreTrainedModel`, split and renamed by `from_pretrained`."""
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    loaded_model, info = type(model).from_pretrained(
        folder,
        dtype=max(dtypes, key=lambda dtype: dtype.itemsize),  # an LM head in fp32 keeps its precision
        distributed_config=getattr(model.config, "distributed_config", None),
        output_loading_info=True,
    )
    loaded_state = loaded_model.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name not in info["missing_keys"]:  # `from_pretrained` initializes missing weights at random
                tensor.copy_(loaded_state[name])


def names_differ(model: Any, folder: Path) -> bool:
    """Return whether a checkpoint names some weights differently than `model`.

    Transformers saves each expert separately but holds all of them in one tensor, and resumes by the model's names.
    """
    index = folder / "model.safetensors.index.json"
    weights = folder / "model.safetensors"
    names: set[str] = set()
    if index.exists():
        names.update(json.loads(index.read_text())["weight_map"])
    elif weights.exists():
        with safe_open(weights, framework="pt") as file:
            names.update(file.keys())
    return bool(names) and any(name not in names for name, _ in model.named_parameters())
