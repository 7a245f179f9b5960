"""The inputs of the heads in a benchmark, and their results in float64 from the plain definition.

Dimensions: N tokens, H hidden size, V vocabulary; n tokens and r rows of the weight whose gradients are checked.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPE = torch.bfloat16
CHECKED_TOKENS = 512
CHECKED_ROWS = 256
SLICE = 8192  # rows of the weight that are cast to float64 at a time
TOKENS = 4096  # that are multiplied with a slice at a time


class Inputs(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (N,)
    upstream: Tensor  # (N,), fp32: the incoming gradient, different for every token


class Reference(NamedTuple):
    """Float64 log-probs of all tokens, and gradients of some tokens and some rows of the weight."""

    log_probs: Tensor  # (N,)
    tokens: Tensor  # (n,)
    grad_hidden: Tensor  # (n, H)
    rows: Tensor  # (r,)
    grad_weight: Tensor  # (r, H)


class Results(NamedTuple):
    """The results of one call of a head: log-probs (N,), if it returns them, and the requested gradients."""

    log_probs: Tensor | None
    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None


def fresh_inputs(N: int, H: int, V: int, device: torch.device, seed: int) -> Inputs:
    """Draw inputs whose logits have standard deviation 4, with targets from very unlikely to nearly certain."""
    generator = torch.Generator(device).manual_seed(seed)
    on_device: dict[str, Any] = {"device": device, "generator": generator}
    hidden = torch.randn(N, H, dtype=DTYPE, **on_device)
    weight = torch.randn(V, H, dtype=DTYPE, **on_device).mul_(4 / H**0.5)
    targets = torch.randint(V, (N,), **on_device)
    # Adding the target's row of the weight to a hidden state raises the target's logit, and hardly changes others
    row_NH = weight[targets].float()
    raised_by = 24 * torch.rand(N, 1, **on_device)
    hidden = (hidden + raised_by * row_NH / row_NH.square().sum(-1, keepdim=True)).to(DTYPE)
    return Inputs(hidden, weight, targets, torch.randn(N, **on_device))


def float64_reference(inputs: Inputs) -> Reference:
    """Compute the definition, in slices of the vocabulary to save memory."""
    hidden, weight, targets, upstream = inputs.hidden.double(), inputs.weight, inputs.targets, inputs.upstream.double()
    device, count = hidden.device, len(hidden)
    log_sum_N = torch.full((count,), -torch.inf, dtype=torch.float64, device=device)
    for rows_VH in _slices(weight):
        for start in range(0, count, TOKENS):
            some = slice(start, start + TOKENS)
            of_slice = (hidden[some] @ rows_VH.t()).logsumexp(-1)
            log_sum_N[some] = torch.logaddexp(log_sum_N[some], of_slice)
    target_logits = [(hidden[i] * weight[targets[i]].double()).sum(-1) for i in torch.arange(count).split(TOKENS)]
    log_probs = torch.cat(target_logits) - log_sum_N

    # d log p_t / dz_v = [v = t] - p_v
    tokens = torch.randperm(count, device=device)[:CHECKED_TOKENS]
    grad_hidden = weight[targets[tokens]].double()
    for rows_VH in _slices(weight):
        probs = (hidden[tokens] @ rows_VH.t() - log_sum_N[tokens, None]).exp_()
        grad_hidden -= probs @ rows_VH
    grad_hidden *= upstream[tokens, None]

    # Half of the rows are targets, the others random
    of_targets = targets[tokens[: CHECKED_ROWS // 2]]
    rows = torch.cat([of_targets, torch.randperm(len(weight), device=device)[: CHECKED_ROWS // 2]]).unique()
    coefficients = (hidden @ weight[rows].double().t() - log_sum_N[:, None]).exp_().neg_()
    coefficients += targets[:, None] == rows
    grad_weight = (coefficients * upstream[:, None]).t() @ hidden
    return Reference(log_probs, tokens, grad_hidden, rows, grad_weight)


def errors(results: Results, reference: Reference) -> dict[str, float | None]:
    """Return the largest error of a log-prob, and ||gradient - float64|| / ||float64|| of the checked gradients.

    Raises:
        `FloatingPointError`: a result is not finite.
    """
    found: dict[str, float | None] = dict.fromkeys(("max_error", "gradient_error", "weight_gradient_error"))
    if results.log_probs is not None:
        found["max_error"] = (results.log_probs - reference.log_probs).abs().max().item()
    if results.grad_hidden is not None:
        found["gradient_error"] = _relative(results.grad_hidden[reference.tokens], reference.grad_hidden)
    if results.grad_weight is not None:
        found["weight_gradient_error"] = _relative(results.grad_weight[reference.rows], reference.grad_weight)
    for name, error in found.items():
        if error is not None and not error < torch.inf:
            raise FloatingPointError(f"its {name} is {error}")
    return found


def _relative(found: Tensor, true: Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


def _slices(weight: Tensor) -> Iterator[Tensor]:
    for rows_VH in weight.split(SLICE):
        yield rows_VH.double()
