"""A reference that is a model of its own and follows the policy: its weights, in a file of a checkpoint."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from .adapters import FILE


def save_moved(model: Any, folder: Path, writes: bool) -> None:
    """Write the parameters of `model`, whole, to `folder`. Every rank must call it.

    Args:
        writes (`bool`): whether this process writes.
    """
    tensors = {}
    for name, param in model.named_parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        if writes:
            tensors[name] = whole.detach().to("cpu", copy=True).contiguous()
    if writes:
        unfinished = folder / f"{FILE}.unfinished"
        save_file(tensors, unfinished)
        unfinished.replace(folder / FILE)


def load_moved(model: Any, folder: Path) -> bool:
    """Give `model` the parameters that [`save_moved`] has written; whether there are any. Every rank must call it.

    Raises:
        `ValueError`: they are those of another model.
    """
    path = folder / FILE
    if not path.exists():
        return False
    params = dict(model.named_parameters())
    with safe_open(path, framework="pt") as file, torch.no_grad():
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        unlike = {name for name in shapes.keys() | params if shapes.get(name) != _shape(params.get(name))}
        if unlike:
            raise ValueError(
                f"`{path}` holds the reference of another model: `{min(unlike)}` is in one of the two only, or has "
                "another shape. Build the trainer with the `ref_model` that the checkpoint was written with."
            )
        for name, param in params.items():
            value = file.get_tensor(name).to(param.device, param.dtype)
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            param.copy_(value)
    return True


def _shape(param: Any) -> tuple[int, ...] | None:
    return None if param is None else tuple(param.shape)
