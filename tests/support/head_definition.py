"""The definition of the head in float64, to which the tests compare the head."""

from typing import NamedTuple

import torch
from torch import Tensor

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "mean_log_probs")
FROZEN = ALL[:-1]  # what a frozen weight is read once for


class Defined(NamedTuple):
    """Every output of the head, and the logits."""

    log_probs: Tensor
    entropy: Tensor
    log_sum_sq_probs: Tensor
    mean_logits: Tensor
    is_top1: Tensor
    mean_log_probs: Tensor
    logits: Tensor


def defined(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    kept: Tensor | None = None,
) -> Defined:
    """Compute all outputs from operands of any dtype, cast to float64; differentiable.

    `kept` (N, V), if given, marks the classes that have a probability; means over the vocabulary then mean nothing.
    """
    logits = hidden.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    if kept is not None:
        logits = logits.masked_fill(~kept, -1e300)
    log_p = logits - logits.logsumexp(-1, keepdim=True)
    p = log_p.exp()
    return Defined(
        log_p.gather(-1, targets[..., None])[..., 0],
        -(p * log_p).sum(-1),
        p.square().sum(-1).log(),
        logits.mean(-1),
        logits.argmax(-1) == targets,
        log_p.mean(-1),
        logits,
    )


def has_one_maximum(logits: Tensor) -> Tensor:
    """Return whether the largest logit is larger than all others by more than rounding. A softcap makes some equal."""
    if logits.size(-1) == 1:
        return torch.ones_like(logits[..., 0], dtype=torch.bool)
    first, second = logits.detach().topk(2).values.unbind(-1)
    return first - second > 1e-12 * first.abs().clamp(min=1.0)


def log_p_where_certain(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log p of the target in float64 from its log-odds, exact even if p rounds to 1."""
    target = logits.gather(-1, targets[..., None])
    others = logits.scatter(-1, targets[..., None], -torch.inf).logsumexp(-1, keepdim=True)
    return -torch.nn.functional.softplus(others - target)[..., 0]


def floats_apart(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference, in float64."""
    return float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0


def relative(a: Tensor, b: Tensor) -> float:
    """Return ||a - b|| / ||b||, in float64."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())
