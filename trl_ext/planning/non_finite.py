"""Losses that are not finite: which rows cause them, and bounds on exponentials that would overflow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..losses.loss_types import dpo_loss_type

ON_NON_FINITE_LOSS = ("stop", "skip")


def not_finite_rows(values: dict[str, Tensor | None], tokens_BC: Tensor) -> dict[int, list[str]]:
    """Return the rows with a value that is not finite at one of `tokens_BC`, each with these values' names in order.

    `values` have shape `(B,)`, `(B, 1)` or `(B, C)`; those of other shapes, which code of the user has scored, are
    left out. If several are not finite at one token, only the first is named.
    """
    rows: dict[int, list[str]] = {}
    named_BC = torch.zeros_like(tokens_BC)
    for name, value in values.items():
        if value is None:
            continue
        wide = value.detach().view(len(value), -1)
        if len(wide) != len(tokens_BC) or wide.shape[1] not in (1, tokens_BC.shape[1]):
            continue
        # TRL replaces an infinite advantage by the largest number
        bad = ~wide.isfinite() | (wide.abs() == torch.finfo(wide.dtype).max)
        bad_BC = bad & tokens_BC & ~named_BC
        named_BC |= bad_BC
        for row in bad_BC.any(dim=1).nonzero().flatten().tolist():
            rows.setdefault(row, []).append(name)
    return rows


def labelled(inputs: dict[str, Tensor]) -> Tensor:
    """Return a mask of the tokens in the loss of DPO or KTO, at the positions that predict them: `(R, S - 1)`, bool."""
    return inputs["completion_mask"][:, 1:].bool()


def prompt_of(inputs: dict[str, Tensor], row: int) -> list[int]:
    """Return the token ids of the prompt in a row of a batch of DPO or KTO."""
    prompt_S = inputs["attention_mask"][row].bool() & ~inputs["completion_mask"][row].bool()
    ids: list[int] = inputs["input_ids"][row][prompt_S].tolist()
    return ids


def steps_in_backward(optimizer: str) -> bool:
    """Whether an optimizer, given its name in transformers, steps in every backward."""
    return optimizer in ("lomo", "adalomo") or optimizer.endswith("_layerwise")


def why_not_skipped(*, engine: str | None, precision: str | None, optimizer: str) -> str | None:
    """Return why training with accelerate's mixed `precision` cannot skip a step after its backward, or `None`."""
    if engine is not None and engine.startswith("DeepSpeed"):
        return f"{engine} takes optimizer steps in the backward pass"
    if steps_in_backward(optimizer):
        return f"the optimizer `{optimizer}` steps in the backward pass"
    if precision == "fp16":
        return "the gradient scaler of fp16 skips steps with non-finite gradients itself, and must see these gradients"
    return None


def check_first_rewards(
    rewards_BF: Tensor, weights_F: Tensor, names: Sequence[str], *, bounds: Sequence[float | None] | None = None
) -> None:
    """Raise `ValueError` if a completion of the first generation batch has an infinite reward.

    Args:
        rewards_BF (`Tensor`): NaN where a reward function gave None or NaN.
        weights_F (`Tensor`): weights of the reward functions.
        bounds (`Sequence`, *optional*): the lowest and the highest reward, to which RLOO clips the weighted sum.
    """
    reward_B = (rewards_BF * weights_F.to(rewards_BF.device)).nansum(dim=1)
    if bounds:
        reward_B = reward_B.clamp(min=bounds[0], max=bounds[1])
    # Infinities of opposite signs are NaN
    is_bad_B = ~reward_B.isfinite()
    if is_bad_B.any():
        row = int(is_bad_B.nonzero()[0])
        raise ValueError(
            f"`reward_funcs`: completion {row} of the first generation batch got {rewards_BF[row].tolist()} from "
            f"{list(names)}. Return a finite number for each completion, or None where a function does not apply."
        )


BOUND = 40.0  # exp(40) is 2e17: a sum of squares of such gradients, their norm, is finite too


def bounded_log_ratios(log_ratio: Tensor) -> Tensor:
    """Return `log_ratio`, clamped to at most `BOUND` if the sum of its exponentials overflows."""
    return torch.where(log_ratio.exp().sum().isfinite(), log_ratio, log_ratio.clamp(max=BOUND))


def bounded_old_and_reference(
    policy_BC: Tensor,
    old_BC: Tensor,
    reference_BC: Tensor | None,
    tokens_BC: Tensor,
    scale: Tensor | None,
    *,
    of_sequences: bool,
    bounds_ratio: bool,
    kl_times_ratio: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return `old_BC` and `reference_BC`, brought closer to the policy where GRPO's loss would overflow.

    Two sums over the micro-batch are checked separately: that of the ratio of policy to old policy, and in the KL term
    that of the ratio of reference to policy.

    Args:
        tokens_BC (`Tensor`, bool): the tokens of the loss.
        scale (`Tensor`, scalar, *optional*): the largest factor of the ratio in the loss; None if the ratio is 1.
        of_sequences, bounds_ratio (`bool`): as in `GRPOPlan`. The tokens of a sequence with one ratio change alike. A
            ratio that the loss bounds stays: the off-policy mask reads it too.
        kl_times_ratio (`bool`): the KL term is multiplied by the ratio (`use_bias_correction_kl`).
    """
    policy_BC = policy_BC.detach()
    unread_BC = ~tokens_BC
    if scale is not None:
        log_ratio_BC = (policy_BC - old_BC).masked_fill(unread_BC, 0.0)
        log_ratio = log_ratio_BC
        if of_sequences:
            log_ratio = log_ratio_BC.sum(dim=1, keepdim=True) / tokens_BC.sum(dim=1, keepdim=True).clamp(min=1)
        ratio_BC = log_ratio.exp().masked_fill(unread_BC, 0.0)
        too_large = ~(ratio_BC.sum() * scale.clamp(min=1.0) < torch.inf) & (not bounds_ratio)
    if reference_BC is not None:
        log_kl_BC = (reference_BC - policy_BC).masked_fill(unread_BC, -torch.inf)
        kl_times_ratio &= scale is not None
        kl_BC = log_kl_BC.exp() * ratio_BC if kl_times_ratio else log_kl_BC.exp()
        kl_too_large = ~(kl_BC.sum() < torch.inf)
        reference_BC = torch.where(kl_too_large & (log_kl_BC > BOUND), policy_BC + BOUND, reference_BC)
        if kl_times_ratio:
            too_large = too_large | kl_too_large
    if scale is None:
        return old_BC, reference_BC
    excess = (log_ratio - BOUND).clamp(min=0.0)
    moved_BC = policy_BC - BOUND
    if of_sequences:  # by the same amount, unless it is infinite
        moved_BC = torch.where(excess.isfinite(), old_BC + excess, moved_BC)
    return torch.where(too_large & tokens_BC & (excess > 0), moved_BC, old_BC), reference_BC


_LARGEST_OF_ALPHA = 80.0  # the limit to which TRL clamps exponents of `alpha_divergence`


@dataclass(frozen=True)
class PairExponential:
    """The exponential of a pair's log-ratios in one of DPO's loss types."""

    divergence: str  # TRL's `f_divergence_type`
    power: float | None  # of a divergence whose scores are (exp(power * log-ratio) - 1) / power
    degree: int  # the power to which the loss raises the scores
    of_margin: bool  # the loss has exp(-beta * margin), where the margin is chosen minus rejected score
    beta: float
    weight: float  # the factor of the exponential in the loss

    @classmethod
    def of(
        cls, loss_type: str, divergence: str, *, alpha: float, beta: float, label_smoothing: float, weight: float
    ) -> "PairExponential | None":
        """Return the exponential of a loss type, or `None` if the loss has none that can overflow."""
        power = {"forward_kl": -1.0, "alpha_divergence": alpha - 1.0}.get(divergence)
        if power is not None and abs(power) < 1e-6:  # TRL's limit case
            divergence, power = "reverse_kl", None
        loss = dpo_loss_type(loss_type)
        overflows = (divergence == "forward_kl" and loss.degree) or (power is not None and loss.degree > 1)
        if not (loss.exponentiates_margin or overflows):
            return None
        if loss.divides_by_true_labels:
            weight = weight / (1 - 2 * label_smoothing)
        return cls(divergence, power, loss.degree, loss.exponentiates_margin, beta, weight)

    def bounded(self, ratio_2B: Tensor) -> Tensor:
        """Return the log-ratios, brought nearer to 0 in the pairs that make the sum over the micro-batch overflow.

        If the loss exponentiates both log-ratios of a pair, both change by the same amount. So their order stays the
        same, and with it the direction of the gradient.
        """
        weight = max(1.0, abs(self.weight))
        if self.power is not None:
            factor = self.degree * weight * max(1.0, self.beta) / min(1.0, abs(self.power))
            exponent_2B = self.power * ratio_2B
            size_2B = self._exponents(ratio_2B).exp().pow(self.degree) * factor
            excess_B = (exponent_2B.amax(0) - BOUND / self.degree).clamp(min=0.0)
            ratio_2B = torch.where(_at_fault(size_2B.amax(0)), (exponent_2B - excess_B) / self.power, ratio_2B)
        if not self.of_margin:
            return ratio_2B
        margin_B = self._margins(ratio_2B)
        at_fault_B = _at_fault((-self.beta * margin_B).exp() * weight)
        return torch.where(at_fault_B, self._with_margin_at_bound(ratio_2B, margin_B), ratio_2B)

    def _exponents(self, ratio_2B: Tensor) -> Tensor:
        assert self.power is not None
        exponent_2B = self.power * ratio_2B
        return exponent_2B.clamp(max=_LARGEST_OF_ALPHA) if self.divergence == "alpha_divergence" else exponent_2B

    def _margins(self, ratio_2B: Tensor) -> Tensor:
        if self.power is not None:
            scores_2B = self._exponents(ratio_2B).exp() / self.power
        else:
            scores_2B = logsigmoid(ratio_2B) if self.divergence == "js_divergence" else ratio_2B
        return scores_2B[0] - scores_2B[1]

    def _with_margin_at_bound(self, ratio_2B: Tensor, margin_B: Tensor) -> Tensor:
        """Return the log-ratios of pairs with their margins raised to -`BOUND` / beta."""
        margin = -BOUND / self.beta
        if self.power is not None:
            return (self._exponents(ratio_2B) - (margin_B / margin).log()) / self.power
        chosen_B, rejected_B = ratio_2B
        if self.divergence == "js_divergence":
            score_B = logsigmoid(rejected_B) + margin
            chosen_B = score_B - (-score_B.expm1()).log()  # the inverse of logsigmoid
        else:
            chosen_B = rejected_B + margin
        return torch.stack([chosen_B, rejected_B])


def _at_fault(size_B: Tensor) -> Tensor:
    """Return which of `size_B` make their sum overflow."""
    return ~size_B.sum().isfinite() & ~size_B.mul(len(size_B)).isfinite()


def bounded_pairs(policy_2B: Tensor, reference_2B: Tensor, exponential: PairExponential) -> Tensor | None:
    """Return `reference_2B`, brought closer to the policy where DPO's loss would overflow; `None` if it does not.

    Both are log-probs of chosen and rejected completions, without a gradient. Pairs that are not finite do not change.
    """
    ratio_2B = policy_2B - reference_2B
    ratio_2B = torch.where(ratio_2B.isfinite().all(dim=0), ratio_2B, 0.0)
    bounded_2B = exponential.bounded(ratio_2B)
    moved_2B = bounded_2B != ratio_2B
    return torch.where(moved_2B, policy_2B - bounded_2B, reference_2B) if moved_2B.any() else None
