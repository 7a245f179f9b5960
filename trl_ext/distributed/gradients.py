"""Scaling and tensor-parallel sums of gradients, and a check of gradient checkpointing."""

from functools import partial
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """Return `x`, and multiply its gradient by `factor` in the backward."""
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


# Transformers' style for weights that each rank has whole, but whose gradient on a rank is only that of its heads
_SUMMED_STYLE = "replicated_with_grad_allreduce"
# Modules without transformers' sum, which a second training need not look for
_SUMMED_ONCE: "WeakSet[nn.Module]" = WeakSet()


def sum_gradients_once(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace transformers' sum of replicated gradients: sum over `group` only what each backward adds.

    A norm of attention heads (Qwen3, Gemma 3) is whole on every rank but sees only that rank's heads. Transformers 5.17
    to 5.23 sums its `param.grad` after every backward, so gradient accumulation sums earlier micro-batches again.
    Parameters that FSDP2 also shards stay with transformers, because they have no gradient when a backward begins.

    Raises:
        `RuntimeError`: the plan of `model` says that transformers sums a gradient, but its sum was not found.
    """
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    # The plan's keys are like "model.layers.*.self_attn.q_norm"
    summed_names = tuple(key.rpartition("*.")[2] for key, style in plan.items() if style == _SUMMED_STYLE)
    for name, module in model.named_modules():
        params = [param for param in module.parameters(recurse=False) if param.requires_grad]
        if not params or any(isinstance(param, DTensor) for param in params):
            continue
        if _remove_transformers_sum(module):
            _SUMMED_ONCE.add(module)
            for param in params:
                param.register_hook(partial(_sum_over_ranks, group=group))
        elif name.endswith(summed_names) and module not in _SUMMED_ONCE:
            # The gradients would be summed twice with gradient accumulation
            raise RuntimeError(
                f"`{name}` has gradients that transformers sums over the ranks, but trl_ext did not find where, so it "
                "cannot replace this sum, which is wrong with gradient accumulation. Install a tested version of "
                "transformers, a later trl_ext, or train without tensor parallelism."
            )


def _remove_transformers_sum(module: nn.Module) -> bool:
    """Remove transformers' sum of gradients from `module`. Returns whether there was one."""
    has_sum = False
    hooks: dict[Any, Any] = module._backward_hooks
    for functions, keys in ((hooks, [*hooks]), (vars(module), ["forward"])):
        for key in keys:
            if getattr(functions.get(key), "__qualname__", "").startswith("ReplicatedWithGradAllReduce."):
                del functions[key]
                has_sum = True
    return has_sum


def _sum_over_ranks(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total


def check_checkpointing(wrapped: nn.Module) -> None:
    """Raise `ValueError` if gradient checkpointing is reentrant and DDP searches for unused parameters."""
    ddp = getattr(wrapped, "_orig_mod", wrapped)  # torch.compile's wrapper is the outermost
    if not isinstance(ddp, DistributedDataParallel) or not ddp.find_unused_parameters or ddp.static_graph:
        return
    for name, module in ddp.module.named_modules():
        if _is_reentrant(module) and any(param.requires_grad for param in module.parameters()):
            raise ValueError(
                f"`gradient_checkpointing_kwargs={{'use_reentrant': True}}` does not work under DDP with "
                "`ddp_find_unused_parameters=True`, the default for a PEFT model: DDP would treat the trained "
                f"parameters of `{name}` as unused, and the first backward would fail. Set "
                '`gradient_checkpointing_kwargs={"use_reentrant": False}` or `ddp_find_unused_parameters=False`.'
            )


def _is_reentrant(module: nn.Module) -> bool:
    if not getattr(module, "gradient_checkpointing", False):
        return False
    function = getattr(module, "_gradient_checkpointing_func", None)
    return isinstance(function, partial) and bool(function.keywords.get("use_reentrant", True))  # torch's default
