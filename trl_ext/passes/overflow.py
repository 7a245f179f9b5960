"""Log-ratios bounded where their exponentials overflow, by moving the value that has no gradient.

In fp32 exp(x) is inf above x = 88.7. In the branch of the loss that clipping leaves out, autograd then multiplies a
gradient of 0 by inf: a finite loss has a NaN for its gradient (trl #3015, #6637). Moving the old policy's or the
reference's log-prob instead of the policy's keeps the gradient of losses that read the policy's log-probs themselves.

Dimensions: B rows, C completion tokens.
"""

import torch
from torch import Tensor

BOUND = 40.0  # exp(40) is 2e17: a sum of squares of such gradients, their norm, is finite too


def bounded_log_ratios(log_ratio: Tensor) -> Tensor:
    """`log_ratio` as it is, or, where the sum of its exponentials overflows, at most `BOUND`."""
    return torch.where(log_ratio.exp().sum().isfinite(), log_ratio, log_ratio.clamp(max=BOUND))


def bounded_old_and_reference(
    policy_BC: Tensor,
    old_BC: Tensor,
    reference_BC: Tensor | None,
    tokens_BC: Tensor,
    scale: Tensor,
    *,
    of_sequences: bool,
    bounds_ratio: bool,
    kl_times_ratio: bool,
) -> tuple[Tensor, Tensor | None]:
    """`old_BC` and `reference_BC` as they are, or, where GRPO's loss would overflow, moved towards the policy.

    The ratio of policy to old policy, and that of reference to policy in the KL term, are looked at apart, each in sum
    over the micro-batch.

    Args:
        policy_BC, old_BC, reference_BC (`Tensor` of shape `(B, C)`): log-probs.
        tokens_BC (`Tensor`, bool): the tokens of the loss.
        scale (`Tensor`, scalar): the largest factor of the ratio in the loss.
        of_sequences (`bool`): whether the mean log-ratio of a row is exponentiated, instead of each token's. Its
            tokens are moved by one amount.
        bounds_ratio (`bool`): whether the loss bounds the ratio itself, and reads it without a gradient: it is left as
            it is, since a mask of far rows reads the same values.
        kl_times_ratio (`bool`): whether the KL term is multiplied by the ratio.
    """
    policy_BC = policy_BC.detach()
    log_ratio_BC = torch.where(tokens_BC, policy_BC - old_BC, 0.0)
    seen = log_ratio_BC
    if of_sequences:
        seen = log_ratio_BC.sum(dim=1, keepdim=True) / tokens_BC.sum(dim=1, keepdim=True).clamp(min=1)
    ratio_BC = torch.where(tokens_BC, seen.exp(), 0.0)
    too_large = ~(ratio_BC.sum() * scale.clamp(min=1.0)).isfinite() & (not bounds_ratio)
    if reference_BC is not None:
        log_kl_BC = torch.where(tokens_BC, reference_BC - policy_BC, 0.0)
        kl_BC = log_kl_BC.exp() * ratio_BC if kl_times_ratio else torch.where(tokens_BC, log_kl_BC.exp(), 0.0)
        kl_too_large = ~kl_BC.sum().isfinite()
        reference_BC = torch.where(kl_too_large & (log_kl_BC > BOUND), policy_BC + BOUND, reference_BC)
        if kl_times_ratio:
            too_large = too_large | kl_too_large
    excess = (seen - BOUND).clamp(min=0.0)
    moved_BC = policy_BC - BOUND
    if of_sequences:  # by one amount, but where that is infinite
        moved_BC = torch.where(excess.isfinite(), old_BC + excess, moved_BC)
    return torch.where(too_large & tokens_BC & (excess > 0), moved_BC, old_BC), reference_BC
