"""Whether a model's dropout is active, so that two passes over the same tokens differ."""

from torch import nn


def has_dropout(model: nn.Module) -> bool:
    """Whether some dropout of `model` has a probability above 0 in training.

    transformers' attention takes its probability from an attribute (`attention_dropout`, `attn_dropout`, ...) instead
    of a module.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False
