"""Preference losses over pairs that TRL does not have, and label smoothing per token."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Pairs:
    """What a loss over pairs reads of a batch; every tensor is `(B,)`.

    Args:
        chosen, rejected (`Tensor`): log-ratios of policy to reference, summed over the tokens of a completion.
        chosen_tokens, rejected_tokens (`Tensor`): how many tokens the sums are over.
        chosen_reward, rejected_reward (`Tensor`, *optional*): the data set's rewards of the completions.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_reward: Tensor | None = None
    rejected_reward: Tensor | None = None

    @property
    def difference(self) -> Tensor:
        """Chosen minus rejected log-ratio, summed over tokens."""
        return self.chosen - self.rejected

    @property
    def average_difference(self) -> Tensor:
        """Chosen minus rejected log-ratio, averaged over tokens."""
        return self.chosen / self.chosen_tokens.clamp(min=1) - self.rejected / self.rejected_tokens.clamp(min=1)

    @property
    def reward_difference(self) -> Tensor:
        """Chosen minus rejected reward of the data set."""
        if self.chosen_reward is None or self.rejected_reward is None:
            raise ValueError("A batch has no rewards of the data set.")
        return self.chosen_reward - self.rejected_reward


def pairs_of(
    log_probs: Tensor, completion_mask: Tensor, reference: tuple[Tensor, Tensor], rewards: tuple[Tensor, ...]
) -> Pairs:
    """The pairs of a batch whose first half is chosen and whose second half is rejected.

    Args:
        log_probs (`Tensor` of shape `(2B, S - 1)`): the policy's, 0 at positions that are not scored.
        completion_mask (`Tensor` of shape `(2B, S)`): 1 where a token belongs to the completion.
        reference (`tuple[Tensor, Tensor]`): `(B,)`, the reference's log-probs, summed over the same positions.
        rewards (`tuple[Tensor, ...]`): `(B,)`, the data set's of chosen and rejected completions; or empty.
    """
    chosen, rejected = log_probs.sum(1).chunk(2)
    chosen_tokens, rejected_tokens = completion_mask[:, 1:].sum(1).chunk(2)
    return Pairs(chosen - reference[0], rejected - reference[1], chosen_tokens, rejected_tokens, *rewards)


@dataclass(frozen=True)
class LossOptions:
    """The arguments that a loss over pairs reads.

    Args:
        beta (`float`): TRL's; the beta of the papers, and tau in IPO.
        label_smoothing (`float`): TRL's; in cDPO the probability that a label is flipped.
        reward_scale (`float`): RPO's eta, which multiplies the data set's rewards.
        rpo_average_log_probs (`bool`): whether RPO averages log-ratios over tokens. Otherwise it sums them.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    reward_scale: float = 1.0
    rpo_average_log_probs: bool = False


def rpo_margins(pairs: Pairs, options: LossOptions) -> tuple[Tensor, Tensor]:
    """RPO's two margins, each `(B,)`: beta times the difference of log-ratios, and eta times that of the rewards."""
    difference = pairs.average_difference if options.rpo_average_log_probs else pairs.difference
    return options.beta * difference, options.reward_scale * pairs.reward_difference


def _bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(Bernoulli(sigmoid p) || Bernoulli(sigmoid q)), finite for finite logits."""
    log_p, log_not_p = logsigmoid(p), logsigmoid(-p)
    return log_p.exp() * (log_p - logsigmoid(q)) + log_not_p.exp() * (log_not_p - logsigmoid(-q))


def _rpo(distance: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Pairs, LossOptions], Tensor]:
    """RPO with a `distance` of the policy's margin to the rewards'."""
    # Section 3.3.2 of the Nemotron-4 340B report, https://huggingface.co/papers/2406.11704
    return lambda pairs, options: distance(*rpo_margins(pairs, options))


def _ipo_sum(pairs: Pairs, options: LossOptions) -> Tensor:
    # Equation 17 of the IPO paper as it stands, https://huggingface.co/papers/2310.12036
    return (pairs.difference - 1 / (2 * options.beta)) ** 2


def _cdpo(pairs: Pairs, options: LossOptions) -> Tensor:
    # https://ericmitchell.ai/cdpo.pdf: the cross-entropy with labels of which this share is flipped
    margin, flipped = options.beta * pairs.difference, options.label_smoothing
    return -(1 - flipped) * logsigmoid(margin) - flipped * logsigmoid(-margin)


PREFERENCE_LOSSES: dict[str, Callable[[Pairs, LossOptions], Tensor]] = {
    "rpo_forward_kl": _rpo(_bernoulli_kl),
    "rpo_backward_kl": _rpo(lambda policy, rewards: _bernoulli_kl(rewards, policy)),
    "rpo_squared": _rpo(lambda policy, rewards: (policy - rewards) ** 2),
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
        mean_log_probs (`Tensor`): same shape, the mean over the whole vocabulary.
        mask (`Tensor`): same shape, nonzero where a token counts.
        smoothing (`float`): a, in [0, 1).
        convention (`str`): `"pytorch"` or `"megatron"`.
        vocabulary (`int`): K, also where a rank holds only some of the classes.
    """
    if convention == "megatron":
        smoothing *= vocabulary / (vocabulary - 1)
    counted = mask.bool()
    return smoothing * (log_probs[counted] - mean_log_probs[counted]).mean()
