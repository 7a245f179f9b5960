"""What GRPO's loss reads for a micro-batch, and a micro-batch's metrics."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..losses.loss_types import METRICS_OF_ROWS
from .grpo import GRPOPlan
from .non_finite import bounded_old_and_reference, not_finite_rows
from .rows import ScoredTokens, loss_mask, zero_advantages
from .sampler_ratio import SamplerRatio

_NOT_REMEMBERED = (
    "The loss has a token without an old-policy log-prob: its completion was skipped in the first iteration, because "
    "its advantage was zero. Something has changed the advantages since then. Change them in a reward function or "
    "right after generation, not between iterations."
)


@dataclass(frozen=True)
class LossInputs:
    """What TRL's loss gets for B rows of C completion tokens."""

    policy_BC: Tensor  # log-probs with the graph of the training forward
    entropies_BC: Tensor  # 0 where nothing was scored
    old_BC: Tensor  # log-probs of the old policy, bounded where the ratio would overflow (see `non_finite.py`)
    reference_BC: Tensor | None  # log-probs of the reference, bounded likewise
    ratio: Tensor | None  # the ratio of old policy to sampler, if the loss corrects for it
    formed: SamplerRatio | None  # details of `ratio`, if it was computed here
    scored: ScoredTokens  # the rows that ran and the tokens that were scored
    kept: dict[str, Tensor]  # what later iterations over the micro-batch need

    @classmethod
    def of(
        cls, inputs: dict[str, Any], scored: ScoredTokens, policy_RC: Tensor, entropies_RC: Tensor, plan: GRPOPlan
    ) -> "LossInputs":
        """Return the inputs, from TRL's micro-batch and the results of the policy's pass over R of its rows.

        Raises:
            `ValueError`: the sampler's log-probs are needed but missing.
        """
        facts = plan.facts
        remembered_BC = inputs.get(OLD_POLICY, inputs.get("old_per_token_logps"))
        if facts.force_on_policy_ratio:
            remembered_BC = None
        in_loss_BC = scored.tokens_BC
        if "tool_mask" in inputs:  # for a subclass's loss, a tool's tokens are scored too
            in_loss_BC = in_loss_BC & loss_mask(inputs)
        if remembered_BC is None:
            policy_BC = scored.spread(policy_RC)
            old_BC = policy_BC.detach()
            if facts.trust_sampling_log_probs:
                old_BC = trusted_log_probs(inputs, old_BC, in_loss_BC)
        else:
            old_BC = remembered_BC
            policy_BC = torch.where(scored.tokens_BC, scored.spread(policy_RC), old_BC)
            unknown_BC = scored.tokens_BC & ~inputs.get(SCORED, scored.tokens_BC)
            if unknown_BC.any():
                # The plan has changed since these rows were skipped, and their ratio is multiplied by 0
                if facts.beta or not zero_advantages(inputs["advantages"])[unknown_BC.any(dim=1)].all():
                    raise RuntimeError(_NOT_REMEMBERED)
                old_BC = torch.where(unknown_BC, policy_BC.detach(), old_BC)
        reference_BC = inputs.get("ref_per_token_logps")
        if reference_BC is not None:
            reference_BC = torch.where(scored.tokens_BC, reference_BC, policy_BC.detach())
        ratio, formed = inputs.get(SAMPLER_RATIO, inputs.get("importance_sampling_ratio")), None
        if facts.sampler_ratio is not None and ratio is None:
            formed = SamplerRatio.of(old_BC, sampler_log_probs(inputs), in_loss_BC, facts.sampler_ratio)
            ratio = formed.ratio
        scale = None
        if remembered_BC is not None or facts.trust_sampling_log_probs:  # otherwise the old policy is the policy
            scale = inputs["advantages"].abs().max() * (1.0 if ratio is None else ratio.max())
        bounded_old_BC, reference_BC = bounded_old_and_reference(
            *(policy_BC, old_BC, reference_BC, in_loss_BC, scale),
            of_sequences=plan.of_sequences,
            bounds_ratio=plan.bounds_ratio,
            kl_times_ratio=facts.kl_times_ratio,
        )
        kept = {} if ratio is None else {SAMPLER_RATIO: ratio}
        if remembered_BC is None:
            kept |= kept_log_probs(old_BC, scored.tokens_BC)
        entropies_BC = scored.spread(entropies_RC)
        return cls(policy_BC, entropies_BC, bounded_old_BC, reference_BC, ratio, formed, scored, kept)

    def given_to_loss(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return `inputs` with these log-probs and this ratio."""
        given = {**inputs, "old_per_token_logps": self.old_BC}
        if self.reference_BC is not None:
            given["ref_per_token_logps"] = self.reference_BC
        if self.ratio is not None:
            given["importance_sampling_ratio"] = self.ratio
        return given

    def not_finite(self, inputs: dict[str, Any]) -> dict[int, list[str]]:
        """Return each row with a value that is not finite, and what gave the value: passes, ratio or reward."""
        values = {
            "policy": self.policy_BC,
            "old policy": self.old_BC,
            "reference": self.reference_BC,
            "ratio to the sampler": self.ratio,
            "reward": inputs["advantages"],
        }
        return not_finite_rows(values, self.scored.tokens_BC)


# Entries of ours: the old policy's log-probs `(B, C)`, 0 where nothing was scored; a mask of the scored tokens; and the
# ratio to the sampler, 1 where nothing was scored. TRL's names would promise a value for every token
OLD_POLICY = "old_policy_log_probs"
SCORED = "old_policy_scored"
SAMPLER_RATIO = "old_policy_sampler_ratio"

# Entries of TRL's micro-batch with a column for each token of the completion
BY_TOKEN = (
    *("completion_ids", "completion_mask", "tool_mask"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
)


def with_padding(inputs: dict[str, Any], *scored_BC: Tensor) -> tuple[dict[str, Any], list[Tensor]]:
    """Return a micro-batch whose completions have one token, and its scored tensors, with a column of padding added.

    TRL reads a tensor of shape (B, 1) as one value per sequence, and would count masked rows in its metrics.
    """
    padded = {name: pad(inputs[name], (0, 1)) for name in BY_TOKEN if inputs.get(name) is not None}
    return {**inputs, **padded}, [pad(x, (0, 1)) for x in scored_BC]


def kept_log_probs(log_probs_BC: Tensor, tokens_BC: Tensor) -> dict[str, Tensor]:
    """Return the entries of a micro-batch that keep the old policy's log-probs, 0 where nothing was scored."""
    return {OLD_POLICY: log_probs_BC, SCORED: tokens_BC}


def has_old_policy(inputs: dict[str, Any]) -> bool:
    """Return whether a micro-batch has the old policy's log-probs, of all tokens or of the scored ones."""
    return OLD_POLICY in inputs or "old_per_token_logps" in inputs


def with_scored(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's micro-batch with the names of `kept_log_probs`.

    Earlier checkpoints have TRL's name, with `SCORED`, or with NaN for "not scored" and inf for NaN.
    """
    old_BC = inputs.get("old_per_token_logps")
    scored_BC = inputs.get(SCORED)
    # Without either, every token was scored, because code of the user may read it
    if old_BC is None or (scored_BC is None and not old_BC.isnan().any()):
        return inputs
    kept = {name: x for name, x in inputs.items() if name != "old_per_token_logps"}
    if scored_BC is not None:
        return kept | kept_log_probs(old_BC, scored_BC)
    return kept | kept_log_probs(old_BC.nan_to_num(0.0, torch.nan, -torch.inf), ~old_BC.isnan())


def prompt_of(inputs: dict[str, Any], row: int) -> list[int]:
    """Return the token ids of a row's prompt."""
    ids: list[int] = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
    return ids


def sampler_log_probs(inputs: dict[str, Any]) -> Tensor:
    """Return the sampler's log-probs of the completions: `(B, C)`, NaN where it gave none."""
    if "sampling_per_token_logps" not in inputs:
        raise ValueError(
            "`vllm_importance_sampling_correction` or `trust_sampling_log_probs` needs the sampler's log-probs, but "
            "the `rollout_func` returned None as `logprobs`. Return the log-probs, or switch the option off."
        )
    log_probs: Tensor = inputs["sampling_per_token_logps"]
    return log_probs


def trusted_log_probs(inputs: dict[str, Any], policy_BC: Tensor, in_loss_BC: Tensor) -> Tensor:
    """Return the sampler's log-probs as the old policy's, and the policy's where the sampler gave none: `(B, C)`."""
    sampler_BC = sampler_log_probs(inputs)
    return torch.where(in_loss_BC & ~sampler_BC.isnan(), sampler_BC, policy_BC)


def not_finite_in(inputs: dict[str, Any], passes: list[Tensor], scored: ScoredTokens) -> dict[int, list[str]]:
    """Return what `LossInputs.not_finite` returns, for a loss that is not TRL's: its first pass may be of the batch.

    Args:
        passes (list of `Tensor`): the log-probs of each pass `(B, S - 1)`.
    """
    rows, columns = scored.tokens_BC.shape
    of_batch = [x[:, -columns:] for x in passes[:1] if len(x) == rows and x.size(1) >= columns]
    values = {
        "policy": of_batch[0] if of_batch else None,
        "old policy": inputs.get("old_per_token_logps", inputs.get("old_logps")),
        "reference": inputs.get("ref_per_token_logps"),
        "ratio to the sampler": inputs.get("importance_sampling_ratio"),
        "reward": inputs["advantages"],
    }
    return not_finite_rows(values, scored.tokens_BC)


class MicroBatchTotals(NamedTuple):
    """Sums over the rows of a micro-batch on all ranks."""

    entropy: float  # over scored tokens
    scored_tokens: float
    scored_rows: float  # rows with a scored token
    rows: float
    skipped_rows: float
    skipped_tokens: float
    with_gradient: float  # tokens in passes with a gradient
    without_gradient: float
    head: float  # tokens that the head scored

    def correct(self, metrics: dict[str, list[float]]) -> None:
        """Turn TRL's latest `metrics` into means over scored rows; remove them if no rank has scored a row."""
        skipped = self.rows - self.scored_rows
        if not skipped:
            return
        replace_last(metrics, "entropy", self.entropy / self.scored_tokens if self.scored_tokens else None)
        for name in METRICS_OF_ROWS:
            if metrics.get(name):
                # A row that was not scored has a ratio of 1, and counts as 1
                mean = (metrics[name][-1] * self.rows - skipped) / self.scored_rows if self.scored_rows else None
                replace_last(metrics, name, mean)


def totals_of_rank(loss_inputs: LossInputs, skipped_tokens: int, ran: list[int]) -> Tensor:
    """Return this rank's `MicroBatchTotals`: `(9,)`, fp32. `ran` has the values of the last three fields."""
    tokens_BC, entropies_BC = loss_inputs.scored.tokens_BC, loss_inputs.entropies_BC.detach()
    rows = len(tokens_BC)
    counts = [rows, rows - len(loss_inputs.scored.rows_R), skipped_tokens, *ran]
    sums = [x.sum(dtype=torch.float32).view(1) for x in (entropies_BC, tokens_BC, tokens_BC.any(dim=1))]
    on_host = torch.empty(len(counts), pin_memory=entropies_BC.is_cuda).copy_(torch.tensor(counts))
    return torch.cat([*sums, on_host.to(entropies_BC.device, non_blocking=True)])


def replace_last(metrics: dict[str, list[float]], name: str, value: float | None) -> None:
    """Replace the latest value of a metric. `None` removes it: a log without any other value has no such metric."""
    if name not in metrics:  # a subclass's loss
        return
    metrics[name].pop()
    if value is not None:
        metrics[name].append(value)
    elif not metrics[name]:
        del metrics[name]
