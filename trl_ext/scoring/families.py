"""Where the model families keep the multiplier and the softcap of their logits."""

from typing import Any

from ..heads import LogitTransform

# Config fields that multiply the head's product: Cohere, Muse, Falcon-H1
_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
# Granite and MiniCPM3 divide by `logits_scaling`; these multiply by it
_MULTIPLY_BY_LOGITS_SCALING = ("hyperclovax",)


def logit_transform(config: Any, temperature: float) -> LogitTransform:
    """The transform of a causal or vision-language model's logits, from its config.

    A multiplier of None means none (MPT); 0.0 is a multiplier.
    """
    text = config.get_text_config()
    scale = next((x for x in (getattr(text, name, None) for name in _MULTIPLIERS) if x is not None), None)
    scaling = getattr(text, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if text.model_type in _MULTIPLY_BY_LOGITS_SCALING else 1 / scaling
    return LogitTransform(temperature, 1.0 if scale is None else scale, getattr(text, "final_logit_softcapping", None))
