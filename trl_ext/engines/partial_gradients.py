"""Sums gradients of which each rank of a tensor-parallel group has a part, each once, also while they accumulate."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_OF_TRANSFORMERS = "ReplicatedWithGradAllReduce."  # how the name of its functions begins


def sum_gradients_once(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum over `group` the gradient that each backward adds, in the place of transformers.

    A norm of single heads (Qwen3, Gemma 3) is whole on every rank, and sees the heads of its rank alone. Transformers
    5.17 to 5.23 sums its `param.grad` after every backward: with gradient accumulation, what is the ranks' sum already
    is summed again. Parameters that FSDP2 shards besides are left to it: they have no gradient when a backward begins.
    """
    for module in model.modules():
        params = [param for param in module.parameters(recurse=False) if param.requires_grad]
        if params and not any(isinstance(param, DTensor) for param in params) and _taken_from_transformers(module):
            for param in params:
                param.register_hook(partial(_summed, group=group))


def _taken_from_transformers(module: nn.Module) -> bool:
    """Take from `module` what sums its gradients; whether there was any."""
    own: dict[str, Any] = vars(module)
    forward = "forward" in own and _is_transformers(own["forward"])
    if forward:
        del own["forward"]
    hooks = [key for key, hook in module._backward_hooks.items() if _is_transformers(hook)]
    for key in hooks:
        del module._backward_hooks[key]
    return forward or bool(hooks)


def _is_transformers(function: Any) -> bool:
    return getattr(function, "__qualname__", "").startswith(_OF_TRANSFORMERS)


def _summed(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total
