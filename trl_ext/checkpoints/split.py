"""Checkpoints of a model that transformers splits over ranks as it loads it (`DistributedConfig`).

Transformers' trainer writes its weights and can load neither these nor the optimizer's state.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor


def save_optimizer(optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> None:
    """Write a rank's part of the optimizer's state into a checkpoint."""
    state = optimizer.state_dict()
    parts = {
        i: {name: x.to_local() if isinstance(x, DTensor) else x for name, x in values.items()}
        for i, values in state["state"].items()
    }
    split = [(i, name) for i, values in state["state"].items() for name, x in values.items() if isinstance(x, DTensor)]
    torch.save({**state, "state": parts, "split": split, "layout": _layout(optimizer)}, _file(folder, rank))


def read_optimizer(optimizer: torch.optim.Optimizer, folder: Path, rank: int) -> dict[str, Any] | None:
    """A rank's part, for `load_state_dict`; `None` where the checkpoint has none for parameters split as they are now.

    Args:
        optimizer (`Optimizer`): which is to have the state.
    """
    file = _file(folder, rank)
    if not file.exists():
        return None
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    if state.pop("layout") != _layout(optimizer):
        return None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i, name in state.pop("split"):
        param: Any = params[i]
        state["state"][i][name] = DTensor.from_local(
            state["state"][i][name].to(param.device),
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    return state


def _file(folder: Path, rank: int) -> Path:
    return folder / f"optimizer_{rank}.pt"


def _layout(optimizer: torch.optim.Optimizer) -> list[str]:
    """How each parameter is split over which ranks."""
    params = [param.data for group in optimizer.param_groups for param in group["params"]]
    return [
        f"{tuple(x.shape)} {x.device_mesh} {x.placements}" if isinstance(x, DTensor) else f"{tuple(x.shape)}"
        for x in params
    ]


def load_weights(model: Any, folder: Path) -> None:
    """Load the weights of a checkpoint into a `PreTrainedModel`, as `from_pretrained` does: split, and renamed."""
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    loaded, info = type(model).from_pretrained(
        folder,
        dtype=max(dtypes, key=lambda dtype: dtype.itemsize),  # an LM head in fp32 keeps its digits
        distributed_config=getattr(model.config, "distributed_config", None),
        output_loading_info=True,
    )
    read = loaded.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name not in info["missing_keys"]:  # these are random in `read`
                tensor.copy_(read[name])


def names_differ(model: Any, folder: Path) -> bool:
    """Whether the files of a checkpoint lack weights of `model` by the names that they have in it.

    Transformers saves experts one by one that are one tensor in the model, and to resume looks for them by name.
    """
    index = folder / "model.safetensors.index.json"
    names: set[str] = set()
    if index.exists():
        names = set(json.loads(index.read_text())["weight_map"])
    elif (folder / "model.safetensors").exists():
        file: Any
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            names = set(file.keys())
    return bool(names) and any(name not in names for name, _ in model.named_parameters())
