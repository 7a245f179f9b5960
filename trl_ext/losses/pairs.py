"""What a loss over pairs is a function of: two log-ratios, their token counts and the rewards of the data set."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """The pairs of a batch; every tensor is `(B,)`.

    Args:
        chosen (`Tensor`): log-ratio of policy to reference of the chosen completion, summed over its tokens.
        rejected (`Tensor`): of the rejected one.
        chosen_tokens (`Tensor`): how many tokens the sum is over.
        rejected_tokens (`Tensor`): of the rejected one.
        chosen_reward (`Tensor`, *optional*): the data set's reward of the chosen completion.
        rejected_reward (`Tensor`, *optional*): of the rejected one.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_reward: Tensor | None = None
    rejected_reward: Tensor | None = None

    @property
    def difference(self) -> Tensor:
        """Chosen minus rejected log-ratio, of sums over tokens."""
        return self.chosen - self.rejected

    @property
    def average_difference(self) -> Tensor:
        """Chosen minus rejected log-ratio, of means over tokens."""
        return self.chosen / self.chosen_tokens.clamp(min=1) - self.rejected / self.rejected_tokens.clamp(min=1)

    @property
    def reward_difference(self) -> Tensor:
        """Chosen minus rejected reward of the data set."""
        if self.chosen_reward is None or self.rejected_reward is None:
            raise ValueError("A batch has no rewards of the data set.")
        return self.chosen_reward - self.rejected_reward


def pairs_of(
    log_probs: Tensor,
    completion_mask: Tensor,
    reference: tuple[Tensor, Tensor],
    rewards: tuple[Tensor, Tensor] | None,
) -> Pairs:
    """The pairs of a batch whose first half is chosen, whose second half is rejected.

    Args:
        log_probs (`Tensor` of shape `(2B, S - 1)`): the policy's, 0 where a position is not scored.
        completion_mask (`Tensor` of shape `(2B, S)`): 1 where a token belongs to the completion.
        reference (`tuple[Tensor, Tensor]`): `(B,)`, the reference's log-probs, summed over the same positions.
        rewards (`tuple[Tensor, Tensor]`, *optional*): `(B,)`, the data set's.
    """
    chosen, rejected = log_probs.sum(1).chunk(2)
    chosen_tokens, rejected_tokens = completion_mask[:, 1:].sum(1).chunk(2)
    ratios = chosen - reference[0], rejected - reference[1]
    return Pairs(*ratios, chosen_tokens, rejected_tokens, *(rewards or (None, None)))
