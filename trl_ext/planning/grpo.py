"""GRPO's plan: which log-prob passes run, on which rows, in which micro-batches, and why.

A row is dead if its gradient is zero: its advantage is 0 and nothing else sends a gradient through it, or it has no
token in the loss.
"""

from dataclasses import dataclass, replace
from typing import Any

from ..losses.loss_types import grpo_loss_type
from .non_finite import steps_in_backward
from .plan import Decision, Plan, model_reason
from .sampled import (
    VLLM,
    SampledFacts,
    micro_batches_of_a_step,
    model_row_reason,
    order_reason,
    plan_generation,
    plan_order,
    plan_reference_pass,
    plan_routes,
    reader_of,
)
from .sampler_ratio import RatioRule

_ANY_ORDER = "if this code does not depend on the whole micro-batch, set `keep_groups_together=True`"


@dataclass(frozen=True, kw_only=True)
class GRPOFacts(SampledFacts):
    """What GRPO's plan depends on."""

    num_generations: int
    loss_type: str
    top_entropy_quantile: float
    balance: bool
    max_tokens_per_micro_batch: int | None
    force_on_policy_ratio: bool
    trust_sampling_log_probs: bool
    keep_sampling_mask: bool
    per_device_train_batch_size: int
    optim: str
    generation_lag: int
    sample_ahead: bool | None
    samples_ahead: bool  # the next generation batch is sampled and rewarded while one trains
    samples_in_process: bool  # so that only rewards run while a batch trains
    dynamic_sampling: bool
    dynamic_sampling_max_draws: int
    importance_sampling_level: str
    use_bias_correction_kl: bool
    scale_rewards: str
    multi_objective_aggregation: str
    processes: int  # that train
    has_entropy_bonus: bool  # a term of the loss that reads every row
    # The sampler
    sampler_ratio: RatioRule | None  # None: the loss does not correct for the sampler
    sampler_gives_log_probs: bool
    truncated_sampling: tuple[str, ...]  # arguments that truncate the sampling distribution
    unknown_mask: str | None  # why it is not known which tokens the sampler could choose
    # What code of the user overrides
    bypasses_loss: bool  # its `compute_loss` does not call ours
    has_own_loss: bool  # TRL's loss, so any row or token may count

    @property
    def max_draws(self) -> int:
        """The most generation batches drawn to fill one."""
        return self.dynamic_sampling_max_draws if self.dynamic_sampling else 1


@dataclass(frozen=True, kw_only=True, repr=False)
class GRPOPlan(Plan):
    """The decisions, the facts, and what follows from them for each batch."""

    facts: GRPOFacts
    skips_masked: bool  # rows without a token in the loss
    skips_zero_advantages: bool  # zero-advantage rows, in training
    zeroes_equal_rewards: bool  # the advantages of groups whose rewards are all identical become 0
    of_sequences: bool  # the loss exponentiates one ratio per completion, instead of one per token
    bounds_ratio: bool  # the loss bounds the ratio itself, and reads it without a gradient
    loss_runs_passes: bool  # the loss gets TRL's batch and runs its own passes, because nothing is known of it
    trl_scores_old_policy: bool  # stock TRL scores every generation batch
    scores_at_generation: bool  # every row is scored as in stock TRL, before rows are shuffled and split
    gives_trls_batches: bool  # every row is scored before the loss, as in stock TRL
    keeps_groups_together: bool
    balances: bool  # rows move between ranks, within an optimizer step
    merges: bool  # micro-batches of an optimizer step run together, in parts of at most `max_tokens_per_micro_batch`
    keeps_sampling_mask: bool  # log-probs are normalised over the tokens that the sampler could choose

    @property
    def reads_sampler_log_probs(self) -> bool:
        """Whether the loss reads the log-probs of the sampler."""
        return self.facts.sampler_ratio is not None or self.facts.trust_sampling_log_probs


def plan_grpo(facts: GRPOFacts) -> GRPOPlan:
    """Return the plan of a GRPO trainer.

    Raises:
        `ValueError`: the schedule, the sampler or the loss does not support an option.
    """
    check_options(facts)
    if facts.generation_lag:
        _check_correction(facts)
    if facts.generation.keeps_log_probs and not _corrects_for_continuous_batching(facts):
        facts = replace(facts, sampler_ratio=None)
    # A trusted sampler is the old policy, so that the ratio is 1
    corrects = facts.sampler_ratio is not None and not facts.trust_sampling_log_probs
    loss_type = grpo_loss_type(facts.loss_type)
    skips_zero_advantages = _zero_advantage_reason(facts) is None
    misaligned = facts.gradient_accumulation_steps % (facts.steps_per_generation * facts.num_iterations) != 0
    micro_batches, balance = _micro_batches(facts), _balance(facts)
    merges = facts.max_tokens_per_micro_batch is not None and _merge_reason(facts) is None
    unknown = "this trainer overrides TRL's log-prob pass" if facts.has_own_pass else facts.unknown_mask
    keeps_mask = facts.keep_sampling_mask and bool(facts.truncated_sampling) and unknown is None
    warnings = []
    if facts.keep_sampling_mask and facts.truncated_sampling and unknown is not None:
        warnings.append(f"`keep_sampling_mask=True` has no effect, because {unknown}.")
    if facts.sample_ahead and not facts.samples_ahead:
        warnings.append(
            "`sample_ahead=True` has no effect, because no two generation batches share an optimizer step: "
            "`steps_per_generation` times `num_iterations` is not below `gradient_accumulation_steps`."
        )
    if facts.sampler_ratio is not None and facts.truncated_sampling and not keeps_mask:
        advice = "Set `keep_sampling_mask=True`, sample" if unknown is None else "Sample"
        warnings.append(
            "The importance ratio to the sampler is biased: completions are drawn from a truncated distribution "
            f"({', '.join(facts.truncated_sampling)}), but the policy's log-probs are those of the full one. {advice} "
            "without truncation, or set `vllm_importance_sampling_correction=False`."
        )
    return GRPOPlan(
        decisions=(
            _generation(facts, corrects),
            *plan_routes(facts, is_read_again=_trl_scores_old_policy(facts, misaligned)),
            _policy(facts, keeps_mask),
            _old_policy(facts, misaligned),
            plan_reference_pass(facts),
            _in_parts(facts, micro_batches, merges),
            balance,
        ),
        warnings=tuple(warnings),
        facts=facts,
        skips_masked=_all_rows_reason(facts) is None,
        skips_zero_advantages=skips_zero_advantages,
        zeroes_equal_rewards=_zeroes_equal_rewards(facts),
        of_sequences=facts.importance_sampling_level == "sequence" and not loss_type.reads_token_ratios,
        bounds_ratio=loss_type.bounds_ratio and not facts.has_own_loss,
        loss_runs_passes=facts.has_own_loss or _has_unknown_loss(facts),
        trl_scores_old_policy=_trl_scores_old_policy(facts, misaligned),
        scores_at_generation=facts.generation_reader is not None or _draws(facts),
        gives_trls_batches=_reader(facts) is not None or _draws(facts),
        keeps_groups_together=micro_batches.action == "run",
        balances=balance.action == "run",
        merges=merges,
        keeps_sampling_mask=keeps_mask,
    )


def _generation(facts: GRPOFacts, corrects: bool) -> Decision:
    if not facts.samples_ahead:
        return plan_generation(facts, corrects_for_sampler=corrects)
    decision = plan_generation(facts)
    if not facts.generation_lag:
        ahead = (
            "Where generation batches share an optimizer step, the next one is sampled and rewarded while one trains."
        )
        return Decision("generation", "run", f"{decision.reason} {ahead}", routine=True)
    ahead = (
        "While a generation batch trains, the next one is sampled and rewarded, with the weights from before "
        "(`generation_lag=1`)."
    )
    if facts.samples_in_process:
        ahead = (
            "The next generation batch is sampled before one trains, with the weights from before, and rewarded "
            "meanwhile (`generation_lag=1`)."
        )
    if not corrects:
        return Decision("generation", "run", f"{decision.reason} {ahead} The loss does not correct for their age.")
    assert facts.sampler_ratio is not None
    ahead += (
        " The loss is multiplied by the ratio of old policy to sampler "
        f"(`vllm_importance_sampling_mode={facts.sampler_ratio.mode!r}`)."
    )
    if facts.sampler_ratio.mode == "sequence_mask":
        ahead += (
            " This mode drops a completion whose ratio is too large, and older weights make it larger. If "
            '`sampling/importance_sampling_ratio_clipped_share` is high, set "token_truncate".'
        )
    return Decision("generation", "run", f"{decision.reason} {ahead}")


def check_options(facts: Any) -> None:
    """Raise `ValueError` for options that the schedule does not allow. `facts`: a `GRPOFacts`, or those read here."""
    devices = facts.per_device_train_batch_size * facts.processes
    rollout = devices * facts.steps_per_generation
    training = devices * facts.gradient_accumulation_steps
    if facts.force_on_policy_ratio and (rollout != training or facts.num_iterations != 1):
        raise ValueError(
            "`force_on_policy_ratio=True` needs completions that the current weights sampled, but a generation batch "
            f"has {rollout} completions (`steps_per_generation={facts.steps_per_generation}`), an optimizer step takes "
            f"{training} (`gradient_accumulation_steps={facts.gradient_accumulation_steps}`), and `num_iterations` is "
            f"{facts.num_iterations}. Set `steps_per_generation` to {facts.gradient_accumulation_steps} and "
            "`num_iterations` to 1, or leave `force_on_policy_ratio` off."
        )
    if facts.trust_sampling_log_probs and not facts.sampler_gives_log_probs:
        raise ValueError(
            "`trust_sampling_log_probs=True` uses the sampler's log-probs as the old policy's, but `generate` "
            "returns none. Sample with vLLM (`use_vllm=True`), continuous batching ("
            "`use_transformers_continuous_batching=True`) or a `rollout_func`, or leave `trust_sampling_log_probs` off."
        )
    if facts.trust_sampling_log_probs and facts.bypasses_loss:
        raise ValueError(
            "`trust_sampling_log_probs=True` needs a `compute_loss` that calls `super().compute_loss(...)`. Call it, "
            "or leave the option off."
        )
    if not facts.dynamic_sampling or facts.dynamic_sampling_max_draws == 1:
        return
    if (rows := facts.per_device_train_batch_size * facts.steps_per_generation) % facts.num_generations:
        raise ValueError(
            "`dynamic_sampling=True` replaces whole groups, so each rank must hold whole groups, but its "
            f"{rows} completions (`per_device_train_batch_size` x `steps_per_generation`) are not a multiple of "
            f"`num_generations={facts.num_generations}`. Change one of these."
        )
    if facts.scale_rewards == "batch" or facts.multi_objective_aggregation == "normalize_then_sum":
        raise ValueError(
            "`dynamic_sampling=True` mixes groups of several generation batches, but with `scale_rewards='batch'` or "
            "`multi_objective_aggregation='normalize_then_sum'` an advantage depends on the other groups of its batch. "
            "Use `scale_rewards='group'` and `multi_objective_aggregation='sum_then_normalize'`."
        )
    if facts.has_images:
        raise ValueError("`dynamic_sampling=True` does not support vision-language models. Leave it off.")


def _reader(facts: GRPOFacts) -> str | None:
    reader = reader_of(facts, facts.generation_reader)
    if reader is None and _has_unknown_loss(facts):
        return f"has the loss `{facts.loss_type}`, which is unknown to this release of trl_ext"
    return reader


def _has_unknown_loss(facts: GRPOFacts) -> bool:
    """Return whether TRL computes a loss that this release does not know. Nothing is assumed of it."""
    return not facts.has_own_loss and not grpo_loss_type(facts.loss_type).is_known


def _zeroes_equal_rewards(facts: GRPOFacts) -> bool:
    return not facts.keeps_advantages_of_equal_rewards and _zero_advantage_reason(facts) is None


def _all_rows_reason(facts: GRPOFacts) -> str | None:
    """Return why even fully masked rows can change the gradient; `None` if they cannot."""
    if facts.has_own_loss:
        return "this trainer overrides the loss, which may send a gradient through any of them"
    if _has_unknown_loss(facts):
        unknown = f"the loss `{facts.loss_type}` is unknown to this release of trl_ext"
        return f"{unknown}, and may send a gradient through any of them"
    if facts.has_own_pass:
        return "this trainer overrides TRL's log-prob pass, which may depend on the whole batch"
    return model_row_reason(facts)


def _zero_advantage_reason(facts: GRPOFacts) -> str | None:
    """Return why a zero-advantage row can still have a gradient, or change that of other rows; `None` if it cannot."""
    reason = _all_rows_reason(facts)
    if reason is not None:
        return reason
    if facts.beta != 0.0:
        return f"the KL term (`beta={facts.beta}`) sends a gradient through them"
    if facts.has_entropy_bonus:
        return "the entropy bonus sends a gradient through them"
    if facts.top_entropy_quantile < 1.0:
        return f"their entropies count in the quantile (`top_entropy_quantile={facts.top_entropy_quantile}`)"
    return None


def _draws(facts: GRPOFacts) -> bool:
    """Return whether a pass at another time, or over other rows, would make other random draws than TRL's."""
    return facts.randomness is not None and not facts.force_on_policy_ratio


def _policy(facts: GRPOFacts, keeps_mask: bool) -> Decision:
    reason = _zero_advantage_reason(facts)
    if _all_rows_reason(facts) is not None:
        rows = f"Every completion is processed, zero-advantage and fully masked ones too: {reason}."
    elif reason is not None:
        rows = f"Zero-advantage completions are processed, because {reason}. Fully masked completions are skipped."
    else:
        images = " (except in batches with images)" if facts.has_images else ""
        equal = "counts as zero-advantage (`zero_advantages_of_equal_rewards`)"
        if not facts.zero_advantages_of_equal_rewards:
            equal = "keeps the rounding noise of TRL's advantages (`zero_advantages_of_equal_rewards=False`)"
        elif facts.overridden_below is not None:
            equal = f"keeps its advantages, because this trainer overrides TRL's `{facts.overridden_below}`"
        rows = (
            f"In training, zero-advantage and fully masked completions are skipped{images}, because their gradient is "
            f"zero. A group whose rewards are all equal {equal}."
        )
    if facts.max_draws > 1:
        rows += f" Before that, `dynamic_sampling` replaces zero-advantage groups, with up to {facts.max_draws} draws."
    if keeps_mask:
        arguments = " and ".join(f"`{x}`" for x in facts.truncated_sampling)
        rows += (
            f" The log-probs of every pass and the entropy are normalised over the tokens that {arguments} left to the "
            "sampler (`keep_sampling_mask`)."
        )
    return Decision("policy", "run", rows)


def _trl_scores_old_policy(facts: GRPOFacts, misaligned: bool) -> bool:
    # TRL does not correct for continuous batching
    return misaligned or (facts.sampler_ratio is not None and not facts.generation.keeps_log_probs)


def _corrects_for_continuous_batching(facts: GRPOFacts) -> bool:
    """Return whether the loss corrects for continuous batching: only where this costs no pass. TRL's loss does not."""
    rule = facts.sampler_ratio
    return rule is not None and not (
        (facts.loss_type == "vespo" and rule.mode.startswith("sequence"))  # an error with vLLM
        or facts.has_own_pass
        or facts.has_own_loss
        or facts.overridden_below is not None
        or _reader(facts) is not None
        or _draws(facts)
    )


def _check_correction(facts: GRPOFacts) -> None:
    """Raise `ValueError` if the loss is asked to correct for the age of the weights, and would not."""
    reason = None
    if facts.sampler_ratio is None:
        return
    if facts.generation.keeps_log_probs and not _corrects_for_continuous_batching(facts):
        reason = "the loss does not correct for continuous batching in this run"
    elif facts.generation.sampler != VLLM and (facts.has_own_loss or _has_unknown_loss(facts)):
        reason = "this trainer's loss is not one that trl_ext knows, and TRL's correct only for vLLM"
    if reason is not None:
        raise ValueError(
            f"`generation_lag=1` is not supported here: {reason}, so it ignores the age of the weights. Leave "
            "`generation_lag` unset, or accept the bias with `vllm_importance_sampling_correction=False`."
        )


def _old_policy(facts: GRPOFacts, misaligned: bool) -> Decision:
    if facts.trust_sampling_log_probs:
        reason = (
            "The sampler's log-probs replace the old policy's (`trust_sampling_log_probs`). This is an approximation: "
            "the difference between the two biases the ratio."
        )
        return Decision("old policy", "skip", reason)
    trl_scores = _trl_scores_old_policy(facts, misaligned)
    aligned = "as in TRL, because generation and optimizer steps are aligned."
    if facts.bypasses_loss and not trl_scores:
        return Decision("old policy", "skip", f"Not needed, {aligned}", routine=True)
    if not trl_scores and not facts.force_on_policy_ratio:
        return Decision("old policy", "reuse", f"The training forward's log-probs are used, {aligned}", routine=True)
    if trl_scores and _draws(facts):
        reason = f"Runs on every generation batch, as in TRL: {facts.randomness}, so two passes differ."
        return Decision("old policy", "run", reason)
    if trl_scores and (reader := _reader(facts)) is not None:
        reason = f"Runs on every generation batch, as in TRL, because this trainer {reader}."
        return Decision("old policy", "run", reason)
    reused = "The training forward's log-probs are used while the weights are those that sampled the completions"
    if facts.force_on_policy_ratio:
        reused = "The training forward's log-probs are used, so the ratio is exactly 1 (`force_on_policy_ratio`)"
    if facts.num_iterations > 1:
        reused += ", and kept for the later iterations"
    if facts.sampler_ratio is not None:
        reused += ". The ratio to the sampler is computed from these log-probs"
    reused += "."
    # If optimizer steps take whole generation batches, no micro-batch waits. But a streaming epoch may end inside one
    slices_wait = facts.gradient_accumulation_steps % facts.steps_per_generation != 0 or not facts.epoch_is_known
    if misaligned and facts.steps_per_generation > 1 and slices_wait:
        reused += " Micro-batches that wait for a later optimizer step are scored just before the weights change."
    return Decision("old policy", "reuse", reused)


def _micro_batches(facts: GRPOFacts) -> Decision:
    """Return the decision on keeping a group's rows together (`"run"`) or not (`"skip"`)."""
    regrouped = (
        "The completions of a group are kept together in a micro-batch where there is room, so fewer prompts are "
        "computed. The gradient of the optimizer step is the same. Averages over micro-batches in the logs can "
        "differ."
    )
    return plan_order(facts, _order_reason(facts), regrouped)


def _balance(facts: GRPOFacts) -> Decision:
    """Return the decision on moving completions between ranks."""
    reason = None
    if facts.processes == 1:
        reason = "there is one rank"
    elif facts.fixed_order is not None:
        reason = facts.fixed_order
    elif not facts.balance:
        reason = "`balance=False`"
    elif facts.generation_reader is not None or facts.bypasses_loss:
        reason = "this trainer overrides methods that make or read generation batches"
    elif facts.draws_for_batch:
        reason = f"{facts.randomness}, which may depend on the rows of a batch"
    elif (rule := _micro_batch_reason(facts)) is not None:
        reason = rule if facts.has_images else f"{rule}, so moving them would change the gradient"
    elif facts.batch_reader is not None and not facts.keep_groups_together:
        reason = f"this trainer {facts.batch_reader} ({_ANY_ORDER})"
    if reason is not None:
        return Decision("balance", "skip", f"Completions stay on their rank: {reason}.", routine=facts.processes == 1)
    moved = (
        "Within an optimizer step, completions move between ranks, so that all have about the same cost. The "
        "gradient of the step is the same."
    )
    return Decision("balance", "run", moved)


def _merge_reason(facts: GRPOFacts) -> str | None:
    """Return why each micro-batch runs apart; `None` if those of an optimizer step run together."""
    if _has_unknown_loss(facts):
        return f"the loss `{facts.loss_type}` {grpo_loss_type(facts.loss_type).of_whole_batch}"
    if facts.keep_groups_together is False:
        return "`keep_groups_together=False`"
    if facts.batch_reader is not None and not facts.keep_groups_together:
        return f"this trainer {facts.batch_reader}"
    if facts.generation_reader is not None or facts.bypasses_loss:
        return "this trainer overrides methods that make or read generation batches"
    if not facts.epoch_is_known:
        return "an epoch of a streaming data set can end after any micro-batch"
    if micro_batches_of_a_step(facts) == 1:
        return "no two micro-batches of a generation batch are certain to share an optimizer step"
    return None


def _in_parts(facts: GRPOFacts, decision: Decision, merges: bool) -> Decision:
    budget = facts.max_tokens_per_micro_batch
    if budget is None:
        return decision
    reason = _micro_batch_reason(facts)
    if _has_unknown_loss(facts):
        # No error: the loss may be separable by row, and then the user can do nothing about it
        apart = f"`max_tokens_per_micro_batch={budget}` limits only passes without a gradient: {reason}."
        return Decision(decision.name, "skip", apart if decision.routine else f"{decision.reason} {apart}")
    if reason is not None and not facts.has_images:
        reason += ", so splitting a micro-batch would change the gradient"
    if facts.draws_for_batch:
        reason = f"{facts.randomness}, which may depend on the rows of a batch"
    if steps_in_backward(facts.optim):
        reason = f"the optimizer `{facts.optim}` would step after the backward of each part of a micro-batch"
    if reason is not None:
        raise ValueError(
            f"`max_tokens_per_micro_batch={budget}` is not supported here: {reason}. Leave "
            "`max_tokens_per_micro_batch` at None."
        )
    which = "The micro-batches of an optimizer step run together," if merges else "Each micro-batch runs"
    parts = f"{which} in parts of one row, or of at most {budget} tokens (`max_tokens_per_micro_batch`)."
    return Decision(decision.name, "run", parts if decision.routine or merges else f"{decision.reason} {parts}")


def _order_reason(facts: GRPOFacts) -> str | None:
    """Return why rows stay in the micro-batches that TRL's order gives them; `None` if they are regrouped."""
    rule = _micro_batch_reason(facts)
    if rule is not None and not facts.has_images:
        rule += ", so another order would change the gradient"
    schedule = (
        f" (`gradient_accumulation_steps={facts.gradient_accumulation_steps}`, "
        f"`steps_per_generation={facts.steps_per_generation}`)"
    )
    reader = _reader(facts)
    return order_reason(
        facts,
        rule=rule,
        schedule=schedule,
        reader=None if reader is None else f"this trainer {reader} ({_ANY_ORDER})",
    )


def _micro_batch_reason(facts: GRPOFacts) -> str | None:
    """Return why the gradient depends on which rows share a micro-batch, or why rows cannot change micro-batches."""
    if facts.has_images:
        return "a batch with images cannot be split by completion"
    if facts.has_own_loss:
        return "this trainer overrides the loss, which may depend on the whole micro-batch"
    return micro_batch_reason(facts.loss_type, facts.has_entropy_bonus, facts.top_entropy_quantile, facts)


def micro_batch_reason(loss_type: str, has_entropy_bonus: bool, top_entropy_quantile: float, model: Any) -> str | None:
    """Return why the gradient of TRL's loss depends on which rows share a micro-batch; `None` if it does not.

    `model` has the fields `has_router_loss` and `positions_by_length`.
    """
    of_whole_batch = grpo_loss_type(loss_type).of_whole_batch
    if of_whole_batch is not None:
        return f"the loss `{loss_type}` {of_whole_batch}"
    if has_entropy_bonus:
        return "the entropy bonus is a mean over the tokens of each micro-batch"
    if top_entropy_quantile < 1.0 and not model.has_router_loss:
        return f"tokens are selected within each micro-batch (`top_entropy_quantile={top_entropy_quantile}`)"
    return model_reason(model)
