"""The tiled head: logits in tiles, statistics online, the gradient in as few products as it needs.

`scan` runs over the tiles once. `FrozenHead` forms the gradient of the hidden states in that same pass, which is
possible because d log p / dh does not depend on the gradient that will come in (2 products). `TrainedHead` recomputes
each tile in the backward (4 products, 3 where the weight is frozen: only the entropy, the mean log-prob or an adapter
asked for it). Without a gradient there is one.

Where the rows of the weight lie on several ranks, `Exchange` brings tokens, statistics and sums together, and the loops
are the same.

Dimensions: N tokens, H hidden size, V vocabulary, M tokens scored together with other ranks'.
"""

from typing import Any

import torch
from torch import Tensor

from .adapted import Operands
from .outputs import LinearLogProbs
from .products import exact_arithmetic, refuse_second_derivative, statistics_dtype
from .scan import Head, gathered, joined, scan
from .trained import TrainedHead


def score(head: Head, x: Operands, targets: Tensor) -> LinearLogProbs:
    """Per-token results without a gradient."""
    scored = []
    with torch.no_grad(), head.readable(), exact_arithmetic(x.hidden.device):
        for part in head.parts(x.hidden):
            targets_M = part.gathered(targets)
            statistics = scan(head, gathered(x, part), head.rows(x.weight, x.bias, targets_M), targets_M)
            head.shard.exchange.combine_(statistics)
            scored.append(part.own_results(statistics.results(head.outputs)))
    return joined(scored)


class FrozenHead(torch.autograd.Function):
    """Log-probs whose gradient goes to the hidden states alone, formed in the forward.

    d log p_t / dh = (1 - p_t) (c_t W_t - sum_{v != t} q_v c_v W_v), with q the softmax over the others and c = dz/dx.
    Neither factor cancels when the target is nearly certain. It is kept in fp32 in the place of the hidden states. So
    the backward exchanges nothing with other ranks.
    """

    @staticmethod
    def forward(ctx: Any, head: Head, targets: Tensor, x: Operands, hidden: Tensor) -> LinearLogProbs:
        ctx.set_materialize_grads(False)
        x = x._replace(hidden=hidden)
        scored, gradients = [], []
        with head.readable(), exact_arithmetic(hidden.device):
            for part in head.parts(hidden):
                together, targets_M = gathered(x, part), part.gathered(targets)
                shape, dtype = together.hidden.shape, statistics_dtype(head.dtype)
                gradient_MH = torch.empty(shape, dtype=dtype, device=hidden.device)
                rows = head.rows(x.weight, x.bias, targets_M)
                statistics = scan(head, together, rows, targets_M, others_NH=gradient_MH)
                rescale = head.shard.exchange.combine_(statistics)
                others_share = torch.sigmoid(-statistics.log_odds)[:, None]
                factor = -others_share / statistics.sum_exp[:, None]
                gradient_MH.mul_(factor * rescale)
                slope = head.transform.derivative(statistics.target_logit)
                head.add_targets_(gradient_MH, others_share[:, 0] * slope, rows, targets_M, x.rows)
                gradients.append(part.summed(gradient_MH))
                scored.append(part.own_results(statistics.results(head.outputs)))
        ctx.save_for_backward(gradients[0] if len(gradients) == 1 else torch.cat(gradients))
        ctx.hidden_dtype = hidden.dtype
        results = joined(scored)
        ctx.mark_non_differentiable(*(x for x in results[1:] if x is not None))
        return results

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        if grad_log_probs is None:
            return None, None, None, None
        (gradient_NH,) = ctx.saved_tensors
        grad_hidden = torch.empty(gradient_NH.shape, dtype=ctx.hidden_dtype, device=gradient_NH.device)
        torch.mul(gradient_NH, grad_log_probs[:, None], out=grad_hidden)
        return None, None, None, grad_hidden


def tiled_log_probs(head: Head, x: Operands, targets: Tensor, *, entropy_requires_grad: bool = False) -> LinearLogProbs:
    """Per-token results tile by tile; chooses the path by what needs a gradient, which changes no result.

    Whether a gradient is recorded is read here: inside an autograd function grad mode is always off.
    """
    entropy_grad = entropy_requires_grad and "entropy" in head.outputs
    mean_grad = "mean_log_probs" in head.outputs
    differentiable = "log_probs" in head.outputs or entropy_grad or mean_grad
    needed = [tensor is not None and tensor.requires_grad for tensor in x]
    if not torch.is_grad_enabled() or not differentiable or not any(needed):
        return score(head, x, targets)
    if any(needed[1:]) or entropy_grad or mean_grad:
        return LinearLogProbs(*TrainedHead.apply(head, targets, entropy_grad, *x))
    return LinearLogProbs(*FrozenHead.apply(head, targets, x, x.hidden))
