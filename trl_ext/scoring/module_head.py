"""Log-probs from the head's own forward, called on tiles of tokens, where only that knows what the head computes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..heads import LinearLogProbs, LogitTransform, log_probs_of, log_probs_of_product

# Elements of one tile of the product: wide, because an adapter may form something as large as the weight in each call
_ELEMENTS = {"cuda": 2**25, "cpu": 2**20}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def score_by_module(
    lm_head: nn.Module,
    hidden_NH: Tensor,
    targets_N: Tensor,
    *,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    vocabulary: int,
    head: str,
    entropy_requires_grad: bool,
    chunk_size: int | None,
) -> LinearLogProbs:
    """Per-token results from the logits that `lm_head` gives, in its own precision and with its own dropout.

    A tile's product is made again in the backward, with the same random numbers. At least one tile is called, so that
    every parameter has a gradient also where there is no token.

    Args:
        vocabulary (`int`): V, for the size of a tile.
        head (`str`): `"dense"` makes one tile of all tokens, and takes log-probs by their definition.
    """
    if head == "dense":
        product = lm_head(hidden_NH)
        logits_NV = transform(product.to(torch.float64 if product.dtype == torch.float64 else torch.float32))
        return log_probs_of(logits_NV, targets_N, outputs, entropy_requires_grad=entropy_requires_grad)

    def scored(hidden_nH: Tensor, targets_n: Tensor) -> Any:
        return log_probs_of_product(
            lm_head(hidden_nH), targets_n, transform, outputs, entropy_requires_grad=entropy_requires_grad
        )

    fitting = _ELEMENTS["cpu" if hidden_NH.device.type == "cpu" else "cuda"] // vocabulary
    n = max(1, min(fitting, chunk_size or fitting))
    found = []
    for first in range(0, max(1, len(hidden_NH)), n):
        tile = hidden_NH[first : first + n], targets_N[first : first + n]
        recorded = torch.is_grad_enabled()
        found.append(checkpoint(scored, *tile, use_reentrant=False) if recorded else scored(*tile))
    return LinearLogProbs(*(None if x[0] is None else torch.cat(x) for x in zip(*found, strict=True)))
