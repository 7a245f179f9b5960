"""The check at the start of training: the tiled head against the dense definition, on a few tokens of the first batch.

A fused path that nobody checked has trained on wrong numbers before (design: positive log-probs, a collapsed reward).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..heads import LinearLogProbs

_TOKENS = 8
# Of the values, relative to max(1, |mean logit|, |log p|); the head is exact to about 1e-6
_VALUES = 1e-4
# Of the gradient's norm; on CUDA its half-precision products are good to 2e-3
_GRADIENT = 2e-2


def check_against_dense(
    score: Callable[..., LinearLogProbs], hidden_NH: Tensor, weight: Tensor, targets_N: Tensor
) -> None:
    """Raise `RuntimeError` if the tiled head disagrees with the dense one, in values or in the gradient of log p.

    `score` is the head to be checked but for its first four arguments; at most 8 tokens are looked at, spread over
    the batch.
    """
    some = torch.linspace(0, len(targets_N) - 1, min(_TOKENS, len(targets_N)), device=targets_N.device).long()
    targets = targets_N[some]
    results: dict[str, dict[str, Tensor]] = {}
    with torch.enable_grad():
        for head in ("tiled", "dense"):
            hidden = hidden_NH[some].detach().requires_grad_()
            scored = score(head, hidden, weight.detach(), targets)
            assert scored.log_probs is not None
            (gradient,) = torch.autograd.grad(scored.log_probs.sum(), hidden)
            # Which of several equal logits is the first may turn on the last bit
            results[head] = {k: v for k, v in scored._asdict().items() if v is not None and k != "is_top1"}
            results[head]["gradient of the hidden states"] = gradient
    for name, dense in results["dense"].items():
        tiled = results["tiled"][name].detach().float()
        dense = dense.detach().float()
        difference = (tiled - dense).abs()
        if name.startswith("gradient"):
            off = difference.norm() / dense.norm().clamp(min=1e-6) / _GRADIENT
        else:
            off = (difference / dense.abs().clamp(min=1)).amax() / _VALUES
        # A model that has itself gone to NaN is not the head's doing
        if dense.isfinite().all() and not off <= 1:
            raise RuntimeError(
                f"The tiled head disagrees with the dense definition on the first batch: {name} {tiled.tolist()} "
                f"instead of {dense.tolist()} (largest difference {float(difference.max()):.3g}). Training would be "
                'wrong. Set `head="dense"` in the config to go on without the tiled head, and report this with the '
                "model's name and the output of `trl env`."
            )
