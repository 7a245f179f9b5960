"""Preference losses that TRL does not have, and label smoothing per token."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from .pairs import Pairs


@dataclass(frozen=True)
class LossOptions:
    """The arguments that a loss over pairs reads.

    Args:
        beta (`float`): TRL's; the paper's beta, and tau of IPO.
        label_smoothing (`float`): TRL's; cDPO's probability that a label is flipped.
        reward_scale (`float`): RPO's eta, by which the data set's rewards are multiplied.
        rpo_average_log_probs (`bool`): whether RPO reads means over tokens, in the place of sums.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    reward_scale: float = 1.0
    rpo_average_log_probs: bool = False


def margin_of(pairs: Pairs, options: LossOptions) -> tuple[Tensor, Tensor]:
    """RPO's two margins, each `(B,)`: beta times the difference of log-ratios, and eta times that of the rewards."""
    difference = pairs.average_difference if options.rpo_average_log_probs else pairs.difference
    return options.beta * difference, options.reward_scale * pairs.reward_difference


def _bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(Bernoulli(sigmoid p) || Bernoulli(sigmoid q)), finite for finite logits."""
    log_p, log_not_p = logsigmoid(p), logsigmoid(-p)
    return log_p.exp() * (log_p - logsigmoid(q)) + log_not_p.exp() * (log_not_p - logsigmoid(-q))


def _rpo_forward_kl(pairs: Pairs, options: LossOptions) -> Tensor:
    policy, target = margin_of(pairs, options)
    return _bernoulli_kl(policy, target)


def _rpo_backward_kl(pairs: Pairs, options: LossOptions) -> Tensor:
    # Section 3.3.2 of the Nemotron-4 340B report, https://huggingface.co/papers/2406.11704
    policy, target = margin_of(pairs, options)
    return _bernoulli_kl(target, policy)


def _rpo_squared(pairs: Pairs, options: LossOptions) -> Tensor:
    policy, target = margin_of(pairs, options)
    return (policy - target) ** 2


def _ipo_sum(pairs: Pairs, options: LossOptions) -> Tensor:
    # Equation 17 of the IPO paper as it stands, https://huggingface.co/papers/2310.12036
    return (pairs.difference - 1 / (2 * options.beta)) ** 2


def _cdpo(pairs: Pairs, options: LossOptions) -> Tensor:
    # https://ericmitchell.ai/cdpo.pdf: the cross-entropy of labels of which this share is flipped
    margin, flipped = options.beta * pairs.difference, options.label_smoothing
    return -(1 - flipped) * logsigmoid(margin) - flipped * logsigmoid(-margin)


PREFERENCE_LOSSES: dict[str, Callable[[Pairs, LossOptions], Tensor]] = {
    "rpo_forward_kl": _rpo_forward_kl,
    "rpo_backward_kl": _rpo_backward_kl,
    "rpo_squared": _rpo_squared,
    "ipo_sum": _ipo_sum,
    "cdpo": _cdpo,
}
"""Loss type -> the loss of each pair, `(B,)`. As in NeMo-Aligner, forward is KL(policy || rewards)."""

READ_REWARDS = frozenset({"rpo_forward_kl", "rpo_backward_kl", "rpo_squared"})
"""The loss types that need the data set's rewards."""


CONVENTIONS = ("pytorch", "megatron")


def smoothing_term(
    log_probs: Tensor, mean_log_probs: Tensor, mask: Tensor, smoothing: float, convention: str, vocabulary: int
) -> Tensor:
    """What label smoothing adds to the mean negative log-prob of the tokens in `mask`; a scalar.

    With K classes, PyTorch gives a / K to every class and 1 - a more to the target; Megatron gives the target 1 - a and
    every other class a / (K - 1), which is PyTorch's with a K / (K - 1) for a (Megatron-LM issue 5522). In PyTorch's a
    token's loss is (1 - a) (-log p_t) + a (-mean log p), that is -log p_t and a (log p_t - mean log p) more.

    Args:
        log_probs (`Tensor`): of the targets.
        mean_log_probs (`Tensor`): of the same shape, the mean over the whole vocabulary.
        mask (`Tensor`): of the same shape, nonzero where a token counts.
        smoothing (`float`): a, in [0, 1).
        convention (`str`): `"pytorch"` or `"megatron"`.
        vocabulary (`int`): K, also where a rank holds a part of the classes.
    """
    if convention == "megatron":
        smoothing *= vocabulary / (vocabulary - 1)
    counted = mask.bool()
    return smoothing * (log_probs[counted] - mean_log_probs[counted]).mean()
