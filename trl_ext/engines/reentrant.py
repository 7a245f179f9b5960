"""Reentrant gradient checkpointing under DDP: an error before the first step where the first backward would fail.

Reentrant checkpointing hides a layer's parameters from the outer graph. DDP's search for unused parameters follows that
graph: it counts them as done, and stops when their gradients come all the same (torch, "mark a variable ready only
once").
"""

from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer


def check_checkpointing(wrapped: nn.Module) -> None:
    """Raise `ValueError` if DDP cannot train the model that it has `wrapped`."""
    ddp = getattr(wrapped, "_orig_mod", wrapped)  # torch.compile's wrapper is the outermost
    if not isinstance(ddp, DistributedDataParallel) or not ddp.find_unused_parameters or ddp.static_graph:
        return
    for name, module in ddp.module.named_modules():
        if _is_reentrant(module) and any(param.requires_grad for param in module.parameters()):
            raise ValueError(
                f"`gradient_checkpointing_kwargs={{'use_reentrant': True}}` under DDP with "
                "`ddp_find_unused_parameters=True`, which is the default for a PEFT model: the first backward would "
                f"fail, because DDP takes what is trained in `{name}` for unused. Set "
                '`gradient_checkpointing_kwargs={"use_reentrant": False}`, or `ddp_find_unused_parameters=False`.'
            )


def _is_reentrant(module: nn.Module) -> bool:
    if not isinstance(module, GradientCheckpointingLayer) or not module.gradient_checkpointing:
        return False
    function = module._gradient_checkpointing_func
    return isinstance(function, partial) and bool(function.keywords.get("use_reentrant", True))  # torch's default
