"""The uses of a head that are measured: the call that is timed, its matrix products, and the bytes that it must move.

Dimensions: N tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from head_inputs import DTYPE, Inputs, Results
from head_subjects import Head
from timing import Ceilings, Step

Shape = dict[str, int]


@dataclass(frozen=True)
class Use:
    """The outputs and gradients of a use, and the matrix products that it needs if logits are not kept."""

    products: tuple[str, ...]
    grad_hidden: bool = False
    grad_weight: bool = False
    outputs: tuple[str, ...] = ("log_probs",)


FROZEN = ("logits", "grad_hidden")
TRAINED = ("logits", "logits", "grad_hidden", "grad_weight")
WITH_ENTROPY = ("log_probs", "entropy")
USES = {
    "head_nograd": Use(("logits",)),
    "head_frozen_fwd_bwd": Use(FROZEN, grad_hidden=True),
    "head_trained_fwd_bwd": Use(TRAINED, grad_hidden=True, grad_weight=True),
}
ENTROPY_USES = {
    "head_nograd_entropy": Use(("logits",), outputs=WITH_ENTROPY),
    "head_frozen_fwd_bwd_entropy": Use(FROZEN, grad_hidden=True, outputs=WITH_ENTROPY),
    "head_trained_fwd_bwd_entropy": Use(TRAINED, grad_hidden=True, grad_weight=True, outputs=WITH_ENTROPY),
}


def step_of(head: Head, use: Use, inputs: Inputs) -> Callable[[], Results]:
    """Return the call to measure: `head`, and the gradients of `use`."""
    hidden = inputs.hidden.detach().requires_grad_(use.grad_hidden)
    weight = inputs.weight.detach().requires_grad_(use.grad_weight)
    wanted = [tensor for tensor in (hidden, weight) if tensor.requires_grad]
    given = inputs._replace(hidden=hidden, weight=weight)

    def step() -> Results:
        with torch.set_grad_enabled(bool(wanted)):
            result = head(given, use.outputs)
        per_token = result.ndim > 0
        upstream = inputs.upstream.to(result.dtype) if per_token else None
        gradients = torch.autograd.grad(result, wanted, upstream) if wanted else ()
        return Results(result.detach() if per_token else None, *gradients)

    return step


def matmul_step(use: Use, inputs: Inputs) -> Step:
    """Return a call of only the matrix products of `use`."""
    hidden, weight = inputs.hidden, inputs.weight
    # Random like all other operands, because a GPU multiplies zeros faster
    coefficients_NV = torch.randn(len(hidden), len(weight), dtype=DTYPE, device=hidden.device)
    operands = {
        "logits": (hidden, weight.t()),
        "grad_hidden": (coefficients_NV, weight),
        "grad_weight": (coefficients_NV.t(), hidden),
    }

    def step() -> None:
        for name in use.products:
            torch.mm(*operands[name])

    return step


def limits(use: Use, shape: Shape, ceilings: Ceilings) -> dict[str, float]:
    """Return the milliseconds of the products, and of the bytes, at the device's ceilings."""
    N, H, V = shape.values()
    flops = 2 * N * H * V * len(use.products)
    # Operands and their gradients; per token an int64 target, and fp32 outputs and incoming gradient
    elements = N * H * (1 + use.grad_hidden) + V * H * (1 + use.grad_weight)
    per_token = 8 + 4 * len(use.outputs) + 4 * use.grad_hidden
    moved = DTYPE.itemsize * elements + N * per_token
    return {"products_ms": 1e3 * flops / ceilings.flops, "bytes_ms": 1e3 * moved / ceilings.bandwidth}
