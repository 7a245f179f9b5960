"""Gradients over ranks, and what the backward pass keeps: scaling, partial sums, checkpointing, offloading."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """`x`, or a view of it, whose gradient is multiplied by `factor`."""
    if factor == 1.0 or not x.requires_grad:
        return x
    return cast(Tensor, _ScaleGrad.apply(x, factor))  # type: ignore[no-untyped-call]


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


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


_SMALLEST = 1024  # bytes; less is not worth a copy


@contextmanager
def activations_on_host(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within, what autograd saves on `device` for a backward lies in host memory, pinned if `device` is another.

    The weights of `model` stay where they are, as do small tensors, expanded and sharded ones. Values are
    the same bit for bit; a backward frees its copies, and so does a graph of which none is taken.
    """
    weights = {param.data_ptr() for param in model.parameters() if not isinstance(param.data, DTensor)}
    pinned = device.type != "cpu"

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        stays = isinstance(tensor, DTensor) or tensor.device.type != device.type or tensor.nbytes < _SMALLEST
        if stays or 0 in tensor.stride() or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=pinned)
        copy.copy_(tensor)
        return tensor.device, copy

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        where, copy = packed
        # With the strides that it had, by which kernels are chosen
        back = torch.empty_strided(copy.size(), copy.stride(), dtype=copy.dtype, device=where)
        return back.copy_(copy, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
