"""The check at the start of training that an adapter on the head is what it was taken for, by calling the module."""

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..heads import LogitTransform, Operands, dense_logits, operand_dtype, statistics_dtype
from .head_parts import OtherHead, head_parts
from .head_rows import HeadRows

_TOKENS = 8
# Of a norm. The module rounds its logits and its gradients to the dtype that it computes in.
_ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_adapter(hidden_NH: Tensor, module: nn.Module, rows: HeadRows) -> None:
    """Compare the product of a few tokens, and its gradients, with what `module` makes of them.

    The tiled head is checked against its definition elsewhere; here the definition is, whose parts were read from
    PEFT's layers. Not where an engine has spread the module, whose call it would have to know of.

    Raises:
        `RuntimeError`: they differ by more than rounding.
    """
    if any(isinstance(x, FSDPModule) for x in module.modules()):
        return
    if any(isinstance(x, DTensor) for x in module.parameters()):
        return
    some = torch.linspace(0, len(hidden_NH) - 1, min(len(hidden_NH), _TOKENS), device=hidden_NH.device).long()
    trained = {name: x for name, x in module.named_parameters() if x.requires_grad}

    def with_gradients(product: Tensor, hidden: Tensor) -> dict[str, Tensor | None]:
        upstream = torch.linspace(-1, 1, product.numel(), device=product.device, dtype=product.dtype).cos_()
        inputs = [hidden, *trained.values()]
        gradients = torch.autograd.grad((product * upstream.view_as(product)).sum(), inputs, allow_unused=True)
        named = dict(zip(("gradient of the hidden states", *trained), gradients, strict=True))
        return {"product": product.detach(), **named}

    # The caller's hooks on saved tensors (activation offloading) are for the model's own graph
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        # Anew: what was read for the pass belongs to its graph
        head = head_parts(module)
        if isinstance(head, OtherHead) or head.adapter is None:
            return
        adapter = head.adapter
        own, other = (hidden_NH[some].detach().requires_grad_() for _ in range(2))
        expected = with_gradients(module(own), own)
        dtype = operand_dtype(other, rows.weight)
        term, accumulate = adapter.low_rank(other, rows.weight), statistics_dtype(dtype)
        product = dense_logits(
            *(Operands.of(other, rows.weight, rows.bias, term, adapter.rows), LogitTransform(), dtype, accumulate),
            up_dtype=dtype if term is None else term.dtype,
            replaced=adapter.replaced(),
        )
        found = with_gradients(product, other)
    allowed = max(_ALLOWED[dtype], *(_ALLOWED.get(x.dtype, 0.0) for x in expected.values() if x is not None))
    for name, want in expected.items():
        got = found[name]
        difference = _norm(want if got is None else got if want is None else got.double() - want.double())
        if _norm(want) < float("inf") and not difference <= allowed * _norm(want) + 1e-6:
            raise RuntimeError(
                f"The LM head's adapter is not what it was taken for, {rows.reason}: PEFT's module gives another "
                f"{name}, by {difference:.3g} of {_norm(want):.3g}. Training would be wrong. Leave `lm_head` out of "
                "the adapter, and report this with its configuration and the version of PEFT."
            )


def _norm(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.double().norm())
