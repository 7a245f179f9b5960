"""Whether a model's dropout or jitter is active, so that two passes over the same tokens differ."""

from typing import Any

from torch import nn

_RATES = ("drop", "jitter")


def draws_at_random(module: nn.Module) -> bool:
    """Whether `module` itself, its children aside, drops or disturbs something in training.

    transformers' attention takes its rate from an attribute (`attention_dropout`, `attn_pdrop`, ...), its routers of
    experts the width of their noise (`jitter_noise`, ...), all of which TRL's `disable_dropout` leaves, and PEFT's
    layers keep a rate for each adapter (`rank_dropout`, ...).
    """
    bases = type(module).__mro__
    if any(base.__name__ == "PveraLayer" for base in bases):
        return True  # it draws its vectors for each token
    if isinstance(module, nn.modules.dropout._DropoutNd) or "Dropout" in bases[0].__name__:
        return bool(getattr(module, "p", 0.0) > 0)
    return any(_is_active(value) for name, value in vars(module).items() if any(rate in name for rate in _RATES))


def _is_active(rate: Any) -> bool:
    rates = rate.values() if isinstance(rate, dict) else (rate,)
    return any(isinstance(x, float) and x > 0 for x in rates)


def has_dropout(model: nn.Module) -> bool:
    """Whether some part of `model` drops or disturbs something in training."""
    return any(draws_at_random(module) for module in model.modules())
