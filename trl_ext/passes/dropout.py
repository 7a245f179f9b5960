"""Whether a model's dropout is active, so that two passes over the same tokens differ."""

from torch import nn


def draws_at_random(module: nn.Module) -> bool:
    """Whether `module` itself, its children aside, drops something in training.

    transformers' attention takes its rate from an attribute (`attention_dropout`, `attn_pdrop`, ...), which TRL's
    `disable_dropout` leaves.
    """
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())


def has_dropout(model: nn.Module) -> bool:
    """Whether some part of `model` drops something in training."""
    return any(draws_at_random(module) for module in model.modules())
