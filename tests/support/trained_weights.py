"""Whole copies of a model's trained weights, and the difference between two sets of them."""

import torch
from torch.distributed.tensor import DTensor


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the trained weights, gathered on every rank."""
    weights = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in weights.items()}


def far(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the difference of two sets of tensors, relative to the second."""
    assert ours.keys() == other.keys()
    ours_all, other_all = (torch.cat([each[name].double().flatten() for name in other]) for each in (ours, other))
    return ((ours_all - other_all).norm() / other_all.norm()).item()
