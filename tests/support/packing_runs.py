"""Runs and records one scoring forward and backward, and compares two of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packing_batches import Batch
from token_counts import as_of_a_library


@dataclass(frozen=True)
class Seen:
    """The results of one scoring forward, and the gradients of a loss that weights every token differently."""

    fields: dict[str, Tensor]  # `(B, S - 1)`
    label_mask: Tensor
    loss: Tensor
    aux_loss: Tensor | None
    gradients: dict[str, Tensor]
    fed: int  # tokens that entered the input embedding


def see(model: Any, batch: Batch, grad: bool = True, through: Any = None, **call: Any) -> Seen:
    """Score `batch` and, with `grad`, run the backward from log-probs, entropy and router loss.

    Args:
        through: the wrapper of `model`, which is called instead of it.
    """
    model.zero_grad(set_to_none=True)
    fed: list[int] = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, args, output: fed.append(args[0].numel()))
    try:
        out = (model if through is None else through)(**batch.inputs, fused_lm_head=True, **call)
    finally:
        hook.remove()
    fields = {name: getattr(out, name) for name in ("log_probs", "entropy") if getattr(out, name) is not None}
    if grad:
        rng = torch.Generator().manual_seed(11)
        weights = [torch.randn(out.log_probs.shape, generator=rng, dtype=torch.float64) for _ in fields]
        total = sum((x.double() * w).sum() for x, w in zip(fields.values(), weights, strict=True))
        if out.aux_loss is not None:
            total = total + 50 * out.aux_loss
        total.backward()
    gradients = {name: x.grad.detach() for name, x in model.named_parameters() if x.grad is not None}
    fields = {name: x.detach() for name, x in fields.items()}
    return Seen(fields, out.label_mask, out.loss.detach(), out.aux_loss, gradients, sum(fed))


def apart(ours: Seen, other: Seen) -> dict[str, float]:
    """Return the largest relative differences: over a log-prob or entropy (at least 1), or the largest gradient."""
    assert torch.equal(ours.label_mask, other.label_mask)
    assert ours.fields.keys() == other.fields.keys()
    assert ours.gradients.keys() == other.gradients.keys()
    assert (ours.aux_loss is None) == (other.aux_loss is None)
    found = {name: _relative(x, other.fields[name]) for name, x in ours.fields.items()}
    found["loss"] = _relative(ours.loss, other.loss)
    if other.aux_loss is not None:
        found["aux_loss"] = _relative(ours.aux_loss, other.aux_loss)
    # Relative to the model's largest gradient: the gradient of GPT-2's key bias is only rounding error, as is every
    # gradient if experts are balanced and the loss has no other term.
    scale = max([0.1, *(float(x.abs().max()) for x in other.gradients.values())])
    for name, gradient in other.gradients.items():
        difference = (ours.gradients[name].double() - gradient.double()).abs().max()
        found[f"gradient of {name}"] = float(difference) / scale
    return found


def _relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    assert a.shape == b.shape
    return float(((a - b).abs() / b.abs().clamp(min=1)).max()) if a.numel() else 0.0


def assert_same(ours: Seen, other: Seen, tolerance: float) -> None:
    for name, distance in apart(ours, other).items():
        assert distance <= tolerance, name  # also true for NaN


@dataclass
class Call:
    """One scoring forward of a model: its padded batch, and the tokens that it processed."""

    batch: Batch
    grad: bool
    training: bool
    router: bool
    fed: int = 0


def watch(model: Any, calls: list[Call]) -> None:
    """Record every later scoring forward of `model` (the one inside PEFT), but no generation."""
    inside: list[Call] = []

    def begin(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        inside.clear()
        if kwargs.get("fused_lm_head"):
            batch = Batch(kwargs["input_ids"], kwargs["attention_mask"], kwargs["labels"])
            inside.append(
                Call(batch, torch.is_grad_enabled(), module.training, kwargs.get("output_router_logits", False))
            )
            calls.append(inside[0])

    def fed(module: Any, args: Any, output: Tensor) -> None:
        if inside:
            inside[0].fed += args[0].numel()

    model.register_forward_pre_hook(as_of_a_library(begin), with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(as_of_a_library(fed))
