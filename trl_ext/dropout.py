"""Whether a model's dropout or jitter is active, so that two passes over the same tokens differ."""

from torch import nn

_RATES = ("drop", "jitter")


def draws_at_random(module: nn.Module) -> bool:
    """Whether `module` itself, its children aside, drops or disturbs something in training.

    transformers' attention takes its rate from an attribute (`attention_dropout`, `attn_pdrop`, ...), and its routers
    of experts the width of their noise (`jitter_noise`, ...), all of which TRL's `disable_dropout` leaves.
    """
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any(
        isinstance(value, float) and value > 0 and any(rate in name for rate in _RATES)
        for name, value in vars(module).items()
    )


def has_dropout(model: nn.Module) -> bool:
    """Whether some part of `model` drops or disturbs something in training."""
    return any(draws_at_random(module) for module in model.modules())
