"""Pairwise preference losses that TRL does not have, and label smoothing of the `sft` loss."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Pairs:
    """The inputs of a pairwise loss for one batch. Every tensor has the shape `(B,)`.

    Args:
        chosen, rejected (`Tensor`): log-ratios of policy to reference, summed over the tokens of a completion.
        chosen_tokens, rejected_tokens (`Tensor`): number of tokens in each sum.
        chosen_reward, rejected_reward (`Tensor`, *optional*): rewards from the dataset.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_reward: Tensor | None = None
    rejected_reward: Tensor | None = None

    @property
    def difference(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def average_difference(self) -> Tensor:
        """Chosen minus rejected log-ratio, averaged over tokens."""
        return self.chosen / self.chosen_tokens.clamp(min=1) - self.rejected / self.rejected_tokens.clamp(min=1)

    @property
    def reward_difference(self) -> Tensor:
        """Chosen minus rejected reward of the dataset."""
        if self.chosen_reward is None or self.rejected_reward is None:
            raise ValueError("The batch has no `chosen_reward` and `rejected_reward`, which the RPO loss types need.")
        return self.chosen_reward - self.rejected_reward


def pairs_of(log_probs: Tensor, completion_mask: Tensor, reference_2B: Tensor, rewards: tuple[Tensor, ...]) -> Pairs:
    """Return the pairs of a batch whose first half has the chosen completions, and whose second half the rejected ones.

    Args:
        log_probs (`Tensor` of shape `(2B, S - 1)`): policy log-probs, 0 at positions that are not scored.
        completion_mask (`Tensor` of shape `(2B, S)`): 1 where a token belongs to the completion.
        reference_2B (`Tensor` of shape `(2, B)`): reference log-probs summed over the same positions.
        rewards (`tuple[Tensor, ...]`): `(B,)` each, chosen and rejected rewards from the dataset; or empty.
    """
    chosen, rejected = log_probs.sum(1).chunk(2)
    chosen_tokens, rejected_tokens = completion_mask[:, 1:].sum(1).chunk(2)
    return Pairs(chosen - reference_2B[0], rejected - reference_2B[1], chosen_tokens, rejected_tokens, *rewards)


@dataclass(frozen=True)
class LossOptions:
    """The config values that a pairwise loss reads.

    Args:
        beta (`float`): `DPOConfig.beta`: beta in the papers, tau in IPO.
        label_smoothing (`float`): `DPOConfig.label_smoothing`: in cDPO, the probability that a label is flipped.
        reward_scale (`float`): RPO's eta, a factor on the rewards of the dataset.
        rpo_average_log_probs (`bool`): whether RPO averages log-ratios over tokens instead of summing them.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    reward_scale: float = 1.0
    rpo_average_log_probs: bool = False


def rpo_margins(pairs: Pairs, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return the policy's and the rewards' margin in RPO, `(B,)` each: beta * log-ratio and eta * reward difference."""
    difference = pairs.average_difference if options.rpo_average_log_probs else pairs.difference
    return options.beta * difference, options.reward_scale * pairs.reward_difference


def _bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(Bernoulli(sigmoid p) || Bernoulli(sigmoid q)), finite for finite logits."""
    log_p, log_not_p = logsigmoid(p), logsigmoid(-p)
    return log_p.exp() * (log_p - logsigmoid(q)) + log_not_p.exp() * (log_not_p - logsigmoid(-q))


def _rpo(distance: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Pairs, LossOptions], Tensor]:
    """Return the RPO loss with a `distance` between the policy's margin and the rewards' margin."""
    # Section 3.3.2 of the Nemotron-4 340B report, https://huggingface.co/papers/2406.11704
    return lambda pairs, options: distance(*rpo_margins(pairs, options))


def _ipo_sum(pairs: Pairs, options: LossOptions) -> Tensor:
    # Equation 17 of the IPO paper, with sums over tokens, https://huggingface.co/papers/2310.12036
    return (pairs.difference - 1 / (2 * options.beta)) ** 2


def _cdpo(pairs: Pairs, options: LossOptions) -> Tensor:
    # https://ericmitchell.ai/cdpo.pdf: cross-entropy with labels flipped at this rate
    margin, flipped = options.beta * pairs.difference, options.label_smoothing
    return -(1 - flipped) * logsigmoid(margin) - flipped * logsigmoid(-margin)


PREFERENCE_LOSSES: dict[str, Callable[[Pairs, LossOptions], Tensor]] = {
    "rpo_forward_kl": _rpo(_bernoulli_kl),
    "rpo_backward_kl": _rpo(lambda policy, rewards: _bernoulli_kl(rewards, policy)),
    "rpo_squared": _rpo(lambda policy, rewards: (policy - rewards) ** 2),
    "ipo_sum": _ipo_sum,
    "cdpo": _cdpo,
}
"""Loss type -> function that returns each pair's loss, `(B,)`. As in NeMo-Aligner, forward is KL(policy || rewards)."""

READ_REWARDS = frozenset({"rpo_forward_kl", "rpo_backward_kl", "rpo_squared"})
"""The loss types that need rewards in the dataset."""

READ_LABEL_SMOOTHING = frozenset({"cdpo"})
REFUSE_LABEL_SMOOTHING = frozenset({"ipo_sum"})
"""The loss types that are not the log-likelihood of a label."""

CONVENTIONS = ("pytorch", "megatron")


def smoothing_term(
    log_probs: Tensor, mean_log_probs: Tensor, mask: Tensor, smoothing: float, convention: str, vocabulary: int
) -> Tensor:
    """Return the scalar that label smoothing adds to the mean negative log-prob of the tokens in `mask`.

    PyTorch smooths the target over K classes: a token's loss is (1 - a) (-log p_t) + a (-mean log p), which is
    -log p_t + a (log p_t - mean log p). Megatron gives 1 - a to the target and a / (K - 1) to every other class, which
    equals PyTorch's smoothing with a K / (K - 1) (Megatron-LM issue 5522).

    Args:
        log_probs (`Tensor`): log-probs of the targets, of any shape.
        mean_log_probs (`Tensor`): same shape, mean log-prob over the whole vocabulary.
        mask (`Tensor`): same shape, nonzero where a token counts.
        smoothing (`float`): a, in [0, 1).
        convention (`str`): `"pytorch"` or `"megatron"`.
        vocabulary (`int`): K, the size of the whole vocabulary, even if a rank holds only a part.
    """
    if convention == "megatron":
        smoothing *= vocabulary / (vocabulary - 1)
    is_scored = mask.bool()
    return smoothing * (log_probs[is_scored] - mean_log_probs[is_scored]).mean()
