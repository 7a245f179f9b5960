"""The metrics of a micro-batch of GRPO and RLOO: what was skipped and processed, TRL's means without rows that did not
run, and the sampler's metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compat import sampled as internals
from ..compat.overrides import PASS
from ..compat.replaced import unrecorded_pass
from ..distributed.ranks import Ranks
from ..losses.loss_types import METRICS_OF_ROWS
from ..planning.batch_keys import sampler_log_probs
from ..planning.loss_inputs import LossInputs, RLOOLossInputs, SampledLossInputs
from ..planning.rows import ScoredTokens, loss_mask, padded_tokens
from ..planning.sampler_ratio import (
    TRL_SAMPLER_METRICS,
    RatioRule,
    SamplerRatio,
    largest_difference,
    sampler_metrics,
)
from ..sampler.check import SamplerCheck
from ..scoring.scorer import Scorer

# RLOO has no ratio to the sampler in its loss
_UNBOUNDED = RatioRule("token_truncate", lowest=None, highest=None)


@dataclass(frozen=True)
class MicroBatchTotals:
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
    checks: float  # tokens in checks of the first batch

    @classmethod
    def of(cls, loss_inputs: SampledLossInputs, host_counts: dict[str, int], ranks: Ranks) -> "MicroBatchTotals":
        """Return the totals, from this rank's loss inputs and the counts that it knows without its device.

        All of them are one tensor in one collective, so the host waits for the device once in a micro-batch.
        """
        entropies_BC = loss_inputs.entropies_BC.detach()
        tokens_BC = loss_inputs.scored_tokens.tokens_BC
        device_sums = {
            "entropy": entropies_BC.sum(dtype=torch.float32),
            "scored_tokens": tokens_BC.sum(dtype=torch.float32),
            "scored_rows": tokens_BC.any(dim=1).sum(dtype=torch.float32),
        }
        on_host = torch.empty(len(host_counts), pin_memory=entropies_BC.is_cuda)
        on_host.copy_(torch.tensor(list(host_counts.values())))
        on_device = on_host.to(entropies_BC.device, non_blocking=True)
        sums = ranks.reduce(torch.cat([*(x.view(1) for x in device_sums.values()), on_device]))
        return cls(**dict(zip([*device_sums, *host_counts], sums.tolist(), strict=True)))

    def correct(self, metrics: dict[str, list[float]]) -> None:
        """Turn TRL's latest `metrics` into means over scored rows; remove them if no rank has scored a row."""
        unscored_rows = self.rows - self.scored_rows
        if not unscored_rows:
            return
        entropy = self.entropy / self.scored_tokens if self.scored_tokens else None
        internals.replace_latest(metrics, "entropy", entropy)
        for name in METRICS_OF_ROWS:
            if metrics.get(name):
                # A row that was not scored has a ratio of 1, and counts as 1
                scored_sum = metrics[name][-1] * self.rows - unscored_rows
                internals.replace_latest(metrics, name, scored_sum / self.scored_rows if self.scored_rows else None)


class SampledMetrics:
    """Records what each micro-batch skipped and processed, and the sampler's metrics.

    Args:
        trainer (`GRPOTrainer` or `RLOOTrainer`): whose logs get the metrics.
    """

    def __init__(self, trainer: Any, ranks: Ranks, scorer: Scorer, buffer: internals.Buffer) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.scorer = scorer
        self.buffer = buffer
        self.skipped_tokens = 0  # on this rank, since the last micro-batch was recorded
        self.added_padding = 0  # columns that this rank's rows have beyond TRL's, because rows moved between ranks
        self._sampler_check = SamplerCheck(trainer)

    @property
    def _mode(self) -> str:
        return "train" if self.trainer.model.training else "eval"

    def count_skipped_pass(self, batch: dict[str, Any]) -> None:
        """Count a pass over `batch` that stock TRL would run and ours does not."""
        self.trainer.skip_counts.add(self._mode, passes=1)
        self.skipped_tokens += padded_tokens(batch)
        self.count_padding(batch)

    def count_padding(self, batch: dict[str, Any]) -> None:
        """Keep padding that TRL's batch does not have out of the skipped tokens of a pass over `batch`."""
        if self.trainer.model.training:
            self.skipped_tokens -= self.added_padding * len(batch["completion_ids"])

    def record_grpo(self, loss_inputs: LossInputs) -> None:
        """Record a micro-batch of GRPO, after TRL's loss has logged its metrics."""
        totals = self._record(loss_inputs)
        if self.trainer.model.training:
            totals.correct(internals.mode_metrics(self.trainer))
        if loss_inputs.sampler_ratio is not None:
            self.record_sampler_ratio(loss_inputs.sampler_ratio)

    def record_rloo(self, batch: dict[str, Any], loss_inputs: RLOOLossInputs) -> None:
        """Record a micro-batch of RLOO, after TRL's loss has logged its metrics: means over the rows that ran."""
        totals = self._record(loss_inputs)
        if self.trainer.model.training and not totals.scored_tokens:
            internals.replace_latest(internals.mode_metrics(self.trainer), "entropy", None)
        training = self.trainer.model.training
        samples_are_of_policy = not training or self.buffer.sampled_at_step == self.trainer.state.global_step
        if samples_are_of_policy and "sampling_per_token_logps" in batch:
            self._record_mismatch(
                loss_inputs.policy_BC.detach(), sampler_log_probs(batch), loss_inputs.scored_tokens.tokens_BC
            )

    def record_subclass_loss(self) -> None:
        """Record a micro-batch whose loss a subclass computes, with passes of its own."""
        tokens = self.scorer.take_counts()
        skipped_tokens = self.skipped_tokens + tokens.skipped
        self.skipped_tokens = 0
        self.trainer._count_tokens(self.ranks.sum_counts([skipped_tokens, *tokens[1:]]))

    def _record(self, loss_inputs: SampledLossInputs) -> MicroBatchTotals:
        scored_tokens = loss_inputs.scored_tokens
        tokens = self.scorer.take_counts()
        host_counts = {
            "rows": len(scored_tokens.tokens_BC),
            "skipped_rows": scored_tokens.skipped_rows,
            "skipped_tokens": self.skipped_tokens + tokens.skipped,
            "with_gradient": tokens.with_gradient,
            "without_gradient": tokens.without_gradient,
            "head": tokens.head,
            "checks": tokens.checks,
        }
        self.skipped_tokens = 0
        totals = MicroBatchTotals.of(loss_inputs, host_counts, self.ranks)
        self.trainer.token_counts.add(
            self._mode,
            with_gradient=int(totals.with_gradient),
            without_gradient=int(totals.without_gradient),
            head=int(totals.head),
            checks=int(totals.checks),
        )
        skipped_tokens = int(totals.skipped_tokens)
        self.trainer.skip_counts.add(self._mode, passes=0, rows=int(totals.skipped_rows), tokens=skipped_tokens)
        return totals

    def record_sampler_ratio_of(self, batch: dict[str, Any]) -> None:
        """Record the ratio to the sampler for a generation batch that TRL's own passes have scored."""
        rule = self.trainer.plan.facts.sampler_ratio
        old_BC = batch.get("old_per_token_logps")
        if rule is not None and old_BC is not None:
            ratio = SamplerRatio.of(old_BC, sampler_log_probs(batch), loss_mask(batch), rule)
            self.record_sampler_ratio(ratio, logged_by_trl=True)

    def record_sampler_ratio(self, ratio: SamplerRatio, *, logged_by_trl: bool = False) -> None:
        """Log the metrics of the ratio of old policy to sampler, and check that vLLM has the policy's weights."""
        trainer = self.trainer
        plan = trainer.plan
        statistics: Tensor = self.ranks.accelerator.gather(ratio.statistics().unsqueeze(0))
        metrics = sampler_metrics(statistics)
        for name, value in metrics.items():
            if not (logged_by_trl and name in TRL_SAMPLER_METRICS):
                internals.mode_metrics(trainer)[name].append(value)
        is_truncated = bool(plan.facts.truncated_sampling) and not plan.keeps_sampling_mask
        self._check_sampler(statistics, is_truncated=is_truncated)

    def _record_mismatch(self, policy_BC: Tensor, sampler_BC: Tensor, tokens_BC: Tensor) -> None:
        """Log how far the sampler's log-probs are from the policy's, and check that both have the same weights."""
        ratio = SamplerRatio.of(policy_BC, sampler_BC, tokens_BC, _UNBOUNDED)
        statistics: Tensor = self.ranks.accelerator.gather(ratio.statistics().unsqueeze(0))
        for name, value in sampler_metrics(statistics).items():
            if "ratio" not in name:  # the loss has no ratio
                internals.mode_metrics(self.trainer)[name].append(value)
        self._check_sampler(statistics, is_truncated=False)

    def record_mismatch_without_routes(
        self, policy_BC: Tensor, batch: dict[str, Any], scored_tokens: ScoredTokens
    ) -> None:
        """Log how far the sampler's log-probs are from those that the policy has with routes of its own."""
        ratio = SamplerRatio.of(policy_BC, sampler_log_probs(batch), scored_tokens.tokens_BC, _UNBOUNDED)
        statistics: Tensor = self.ranks.accelerator.gather(ratio.statistics().unsqueeze(0))
        mismatch = sampler_metrics(statistics).get("sampling/mismatch_kl")
        if mismatch is not None:
            internals.mode_metrics(self.trainer)["routes/mismatch_kl_without"].append(mismatch)

    def _check_sampler(self, statistics: Tensor, *, is_truncated: bool) -> None:
        """Check the sampler's log-probs, from the `SamplerRatio.statistics` of each rank."""
        difference = largest_difference(statistics)
        # Older weights give other log-probs: `check_sent_weights` then looks at those of another completion
        is_comparable = not is_truncated and not self.buffer.sampler_is_older and self._samples_policy
        if difference is not None and self.trainer.model.training and is_comparable:
            self._sampler_check.observe(difference, self.buffer.sampled_at_step)

    @property
    def _samples_policy(self) -> bool:
        # A repetition penalty and random draws make the log-probs differ even if the weights are the same
        return self.trainer.args.repetition_penalty == 1.0 and self.trainer.plan.facts.randomness is None

    def check_sent_weights(self, sample: Callable[[], tuple[list[int], list[int], list[float]] | None]) -> None:
        """Check that a sampler which has just got the policy's weights has them. All ranks call it.

        Args:
            sample (`Callable`): returns the token ids of a prompt and of a completion, and the log-prob of each of the
                latter; `None` except in the first process, or without log-probs.
        """
        trainer = self.trainer
        is_truncated = bool(trainer.plan.facts.truncated_sampling)
        if is_truncated or not self._samples_policy or trainer.args.sampler_check == "off":
            return
        sampled = next(filter(None, self.ranks.gather_objects(sample())), None)
        if sampled is None:  # `generate` returns no log-probs
            return
        prompt_ids, completion_ids, log_probs = sampled
        ids_1S = torch.tensor([prompt_ids + completion_ids], device=self.ranks.device)
        with unrecorded_pass(trainer):
            policy_1C, _, _ = getattr(trainer, PASS)(
                trainer.model, ids_1S, torch.ones_like(ids_1S), len(completion_ids)
            )
        difference = (policy_1C - policy_1C.new_tensor([log_probs])).abs().mean()
        self._sampler_check.observe(float(difference), trainer.state.global_step)
