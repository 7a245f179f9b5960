"""What the losses of GRPO and RLOO read for a micro-batch, in place of passes over all rows.

A row or token that was not scored gets values that give it a loss and a gradient of exactly 0. Dimensions: B rows, R
rows that ran, C completion tokens, S tokens of a row.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .batch_keys import (
    OLD_POLICY,
    OLD_POLICY_SAMPLER_RATIO,
    OLD_POLICY_SCORED,
    OLD_POLICY_SUMS,
    TOKEN_KEYS,
    old_policy_entries,
    sampler_log_probs,
)
from .grpo import GRPOPlan
from .non_finite import bounded_old_and_reference, not_finite_rows
from .rows import PolicyScores, ScoredTokens, loss_mask, zero_advantages
from .sampler_ratio import SamplerRatio

_OLD_POLICY_MISSING = (
    "The loss has a token without an old-policy log-prob: its completion was skipped in the first iteration, because "
    "its advantage was zero. Something has changed the advantages since then. Change them in a reward function or "
    "right after generation, not between iterations."
)

PassOutputs = tuple[Tensor, Tensor, Tensor | None]  # of TRL's scoring pass: log-probs, entropies, router loss


@dataclass(frozen=True, kw_only=True)
class SampledLossInputs:
    """What the losses of GRPO and RLOO both read."""

    scores: PolicyScores
    policy_BC: Tensor  # log-probs, with the graph of the training forward
    entries_for_reuse: dict[str, Tensor]  # of the batch, for later iterations over this micro-batch

    @property
    def scored_tokens(self) -> ScoredTokens:
        """The rows that ran and the tokens that were scored."""
        return self.scores.scored_tokens

    @cached_property
    def entropies_BC(self) -> Tensor:
        """With the graph of the training forward, and 0 where nothing was scored."""
        return self.scored_tokens.scatter(self.scores.entropies_RC)


@dataclass(frozen=True, kw_only=True)
class LossInputs(SampledLossInputs):
    """The inputs of GRPO's loss."""

    old_BC: Tensor  # log-probs of the old policy, bounded where the ratio would overflow (see `non_finite.py`)
    reference_BC: Tensor | None  # log-probs of the reference, bounded likewise; None without a KL term
    importance_ratio: Tensor | None  # old policy to sampler, (B, C) or (B, 1), if the loss corrects for the sampler
    sampler_ratio: SamplerRatio | None  # the same with its statistics, if it was computed for this micro-batch

    @classmethod
    def of(cls, batch: dict[str, Any], scores: PolicyScores, plan: GRPOPlan) -> "LossInputs":
        """Return the inputs of the loss for `batch`, from the policy's scores of R of its B rows.

        Raises:
            `ValueError`: the sampler's log-probs are needed but missing.
            `RuntimeError`: a scored token has no log-prob of the old policy.
        """
        facts = plan.facts
        scored_tokens = scores.scored_tokens
        loss_tokens_BC = scored_tokens.tokens_BC
        if "tool_mask" in batch:  # else equal, and a kernel launch less
            # For a subclass's pass, a tool's tokens are scored too; ratio and bounds leave them out
            loss_tokens_BC = loss_tokens_BC & loss_mask(batch)
        policy_BC = scored_tokens.scatter(scores.log_probs_RC)
        stored_old_BC: Tensor | None = batch.get(OLD_POLICY, batch.get("old_per_token_logps"))
        if facts.force_on_policy_ratio:
            stored_old_BC = None
        if stored_old_BC is None:
            # The weights are still those that sampled the completions
            old_BC = policy_BC.detach()
            if facts.trust_sampling_log_probs:
                old_BC = trusted_log_probs(batch, old_BC, loss_tokens_BC)
        else:
            old_BC = stored_old_BC
            # Elsewhere a ratio of exactly 1, without a gradient
            policy_BC = torch.where(scored_tokens.tokens_BC, policy_BC, old_BC)
            unknown_BC = scored_tokens.tokens_BC & ~batch.get(OLD_POLICY_SCORED, scored_tokens.tokens_BC)
            if unknown_BC.any():
                # The plan has changed since these rows were skipped, and their ratio is multiplied by 0
                if facts.beta or not zero_advantages(batch["advantages"])[unknown_BC.any(dim=1)].all():
                    raise RuntimeError(_OLD_POLICY_MISSING)
                old_BC = torch.where(unknown_BC, policy_BC.detach(), old_BC)
        reference_BC = batch.get("ref_per_token_logps")
        if reference_BC is not None:
            # Elsewhere a KL term of exactly 0
            reference_BC = torch.where(scored_tokens.tokens_BC, reference_BC, policy_BC.detach())
        importance_ratio = batch.get(OLD_POLICY_SAMPLER_RATIO, batch.get("importance_sampling_ratio"))
        sampler_ratio = None
        # A checkpoint may hold completions of continuous batching without log-probs, which were not kept before
        has_log_probs = "sampling_per_token_logps" in batch or not facts.generation.keeps_log_probs
        if importance_ratio is None and facts.sampler_ratio is not None and not has_log_probs:
            importance_ratio = torch.ones_like(old_BC[:, :1])
        elif importance_ratio is None and facts.sampler_ratio is not None:
            sampler_ratio = SamplerRatio.of(old_BC, sampler_log_probs(batch), loss_tokens_BC, facts.sampler_ratio)
            importance_ratio = sampler_ratio.ratio
        ratio_scale = None  # where policy and old policy are one, their ratio is 1 and cannot overflow
        if stored_old_BC is not None or facts.trust_sampling_log_probs:
            ratio_scale = batch["advantages"].abs().max()
            if importance_ratio is not None:
                ratio_scale = ratio_scale * importance_ratio.max()
        bounded_old_BC, bounded_reference_BC = bounded_old_and_reference(
            policy_BC,
            old_BC,
            reference_BC,
            loss_tokens_BC,
            ratio_scale,
            of_sequences=plan.of_sequences,
            bounds_ratio=plan.bounds_ratio,
            kl_times_ratio=facts.use_bias_correction_kl,
        )
        entries_for_reuse = {} if importance_ratio is None else {OLD_POLICY_SAMPLER_RATIO: importance_ratio}
        if stored_old_BC is None:
            entries_for_reuse |= old_policy_entries(old_BC, scored_tokens.tokens_BC)
        return cls(
            scores=scores,
            policy_BC=policy_BC,
            old_BC=bounded_old_BC,
            reference_BC=bounded_reference_BC,
            importance_ratio=importance_ratio,
            sampler_ratio=sampler_ratio,
            entries_for_reuse=entries_for_reuse,
        )

    def for_trl(self, batch: dict[str, Any]) -> tuple[dict[str, Any], PassOutputs]:
        """Return the batch that TRL's loss reads, and what its scoring pass returns for that batch."""
        trl_batch = {**batch, "old_per_token_logps": self.old_BC}
        if self.reference_BC is not None:
            trl_batch["ref_per_token_logps"] = self.reference_BC
        if self.importance_ratio is not None:
            trl_batch["importance_sampling_ratio"] = self.importance_ratio
        policy_BC = self.policy_BC
        entropies_BC = self.entropies_BC
        if policy_BC.size(1) == 1:
            # TRL reads a tensor of shape (B, 1) as one value per sequence, and would count masked rows in its metrics
            for key in TOKEN_KEYS:
                if trl_batch.get(key) is not None:
                    trl_batch[key] = pad(trl_batch[key], (0, 1))
            policy_BC = pad(policy_BC, (0, 1))
            entropies_BC = pad(entropies_BC, (0, 1))
        return trl_batch, (policy_BC, entropies_BC, self.scores.router_loss)

    def not_finite(self, batch: dict[str, Any]) -> dict[int, list[str]]:
        """Return each row with a value that is not finite, and what gave the value: passes, ratio or reward."""
        values = {
            "policy": self.policy_BC,
            "old policy": self.old_BC,
            "reference": self.reference_BC,
            "ratio to the sampler": self.importance_ratio,
            "reward": batch["advantages"],
        }
        return not_finite_rows(values, self.scored_tokens.tokens_BC)


@dataclass(frozen=True, kw_only=True)
class RLOOLossInputs(SampledLossInputs):
    """The inputs of RLOO's loss. The policy's log-probs are 0 where nothing was scored."""

    completion_mask_BC: Tensor  # without the rows that did not run
    old_sums_B: Tensor  # log-probs of the old policy, summed over each completion; 0 for rows that did not run
    is_old_policy: bool  # whether the policy's own log-probs are the old policy's

    @classmethod
    def of(cls, batch: dict[str, Any], scores: PolicyScores) -> "RLOOLossInputs":
        scored_tokens = scores.scored_tokens
        policy_BC = scored_tokens.scatter(scores.log_probs_RC)
        completion_mask_BC = batch["completion_mask"]
        old_sums_B = batch.get("old_logps")
        # Asked of the batch, because a user may have changed the schedule since it was generated
        is_old_policy = old_sums_B is None
        entries_for_reuse = {}
        if old_sums_B is None:
            old_sums_B = batch.get(OLD_POLICY_SUMS)
        if old_sums_B is None:
            old_sums_B = (policy_BC.detach() * completion_mask_BC).sum(dim=1)
            entries_for_reuse = {OLD_POLICY_SUMS: old_sums_B}
        if not scored_tokens.all_rows_run:
            # The ratio of a row that does not run is 1, and its entropy does not count
            live_B = torch.zeros(len(scored_tokens.tokens_BC), dtype=torch.bool, device=scored_tokens.rows_R.device)
            live_B[scored_tokens.rows_R] = True
            completion_mask_BC = completion_mask_BC * live_B.unsqueeze(1)
            old_sums_B = old_sums_B.masked_fill(~live_B, 0.0)
        return cls(
            scores=scores,
            policy_BC=policy_BC,
            completion_mask_BC=completion_mask_BC,
            old_sums_B=old_sums_B,
            is_old_policy=is_old_policy,
            entries_for_reuse=entries_for_reuse,
        )

    def for_trl(self, batch: dict[str, Any]) -> tuple[dict[str, Any], PassOutputs]:
        """Return the batch that TRL's loss reads, and what its scoring pass returns for that batch."""
        trl_batch = {**batch, "completion_mask": self.completion_mask_BC, "old_logps": self.old_sums_B}
        return trl_batch, (self.policy_BC, self.entropies_BC, self.scores.router_loss)

    def not_finite(self, batch: dict[str, Any]) -> dict[int, list[str]]:
        """Return each row with a value that is not finite, and what gave the value: passes or reward."""
        values = {"policy": self.policy_BC.detach(), "old policy": self.old_sums_B, "reward": batch["advantages"]}
        return not_finite_rows(values, self.scored_tokens.tokens_BC)


def trusted_log_probs(batch: dict[str, Any], policy_BC: Tensor, loss_tokens_BC: Tensor) -> Tensor:
    """Return the sampler's log-probs as the old policy's, and the policy's where the sampler gave none: `(B, C)`."""
    sampler_BC = sampler_log_probs(batch)
    return torch.where(loss_tokens_BC & ~sampler_BC.isnan(), sampler_BC, policy_BC)


def not_finite_in(
    batch: dict[str, Any], pass_log_probs: list[Tensor], scored_tokens: ScoredTokens
) -> dict[int, list[str]]:
    """Return what `LossInputs.not_finite` returns, for a loss that is not TRL's: its first pass may be of the batch.

    Args:
        pass_log_probs (list of `Tensor`): the log-probs of each pass `(B, S - 1)`.
    """
    rows, columns = scored_tokens.tokens_BC.shape
    policy_BC = None
    for log_probs_BS in pass_log_probs[:1]:
        if len(log_probs_BS) == rows and log_probs_BS.size(1) >= columns:
            policy_BC = log_probs_BS[:, -columns:]
    values = {
        "policy": policy_BC,
        "old policy": batch.get("old_per_token_logps", batch.get("old_logps")),
        "reference": batch.get("ref_per_token_logps"),
        "ratio to the sampler": batch.get("importance_sampling_ratio"),
        "reward": batch["advantages"],
    }
    return not_finite_rows(values, scored_tokens.tokens_BC)
