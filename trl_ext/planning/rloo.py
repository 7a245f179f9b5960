"""RLOO's plan: which log-prob passes run, on which completions, and why."""

from dataclasses import dataclass

from .plan import BY_LENGTH, Decision, Plan
from .sampled import (
    SampledFacts,
    model_row_reason,
    order_reason,
    plan_generation,
    plan_order,
    plan_reference_pass,
    plan_routes,
    reader_of,
)


@dataclass(frozen=True, kw_only=True)
class RLOOFacts(SampledFacts):
    """What is known about a run when its plan is made."""

    samples_policy: bool  # by the arguments, the sampler's distribution is the policy's
    own_loss: str | None  # an overridden method that computes the loss, or a `compute_loss` that does not call ours


@dataclass(frozen=True, kw_only=True, repr=False)
class RLOOPlan(Plan):
    """The decisions and the facts."""

    facts: RLOOFacts
    loss_runs_passes: bool  # a subclass's loss gets TRL's batch and runs its own passes
    reuses_old_policy: bool  # the policy's own log-probs are the old policy's
    skips_masked: bool
    skips_zero_advantages: bool
    keeps_groups_together: bool

    @property
    def reads_sampler_log_probs(self) -> bool:
        """Whether log-probs of continuous batching are compared with the policy's. The loss does not read them."""
        return self.facts.samples_policy and self.facts.randomness is None

    @property
    def zeroes_equal_rewards(self) -> bool:
        """Whether the advantages of groups with equal rewards are set to 0. With a KL term, rewards differ by it."""
        keeps_advantages = self.facts.keeps_advantages_of_equal_rewards or self.facts.beta != 0.0
        return self.skips_zero_advantages and not keeps_advantages


def plan_rloo(facts: RLOOFacts) -> RLOOPlan:
    """Return the plan that follows from `facts`."""
    all_rows_reason = _all_rows_reason(facts)
    old_policy_reason = _old_policy_reason(facts)
    micro_batches = _micro_batches(facts)
    policy = "In training, zero-advantage and fully masked completions are skipped, because their gradient is zero."
    if all_rows_reason is not None:
        policy = f"Every completion is processed, zero-advantage and fully masked ones too: {all_rows_reason}."
    return RLOOPlan(
        decisions=(
            plan_generation(facts),
            *plan_routes(facts),
            Decision("policy", "run", policy),
            _old_policy(old_policy_reason),
            plan_reference_pass(facts),
            micro_batches,
        ),
        facts=facts,
        loss_runs_passes=facts.own_loss is not None,
        reuses_old_policy=old_policy_reason is None,
        skips_masked=all_rows_reason is None,
        skips_zero_advantages=all_rows_reason is None,
        keeps_groups_together=micro_batches.action == "run",
    )


def _all_rows_reason(facts: RLOOFacts) -> str | None:
    """Return why a row without a gradient must run; `None` if it need not."""
    if facts.own_loss is not None:
        return f"this trainer overrides `{facts.own_loss}`, which may send a gradient through any of them"
    if facts.has_own_pass:
        return "this trainer overrides TRL's log-prob pass, which may depend on the whole batch"
    reason = model_row_reason(facts)
    if reason is None and facts.has_images:
        return "a batch with images cannot be split by completion"
    return reason


def _old_policy(reason: str | None) -> Decision:
    """Return the decision on the old policy. `reason`: why its pass runs at generation."""
    if reason is not None:
        return Decision("old policy", "run", f"Scores each generation batch, as in TRL: {reason}.", routine=True)
    return Decision(
        "old policy",
        "reuse",
        "The training forward's log-probs are used: generation and optimizer steps are aligned, so the weights are "
        "those that sampled the completions.",
    )


def _old_policy_reason(facts: RLOOFacts) -> str | None:
    """Return why the old policy's pass runs at generation; `None` if the training forward has the same log-probs."""
    if facts.beta != 0.0:
        return f"the KL term (`beta={facts.beta}`) is part of the reward"
    if facts.num_iterations > 1 or facts.gradient_accumulation_steps % facts.steps_per_generation:
        return (
            "some completions are trained on after the weights have changed "
            f"(`gradient_accumulation_steps={facts.gradient_accumulation_steps}`, "
            f"`steps_per_generation={facts.steps_per_generation}`, `num_iterations={facts.num_iterations}`)"
        )
    if facts.randomness is not None:
        return f"{facts.randomness}, so two passes differ"
    if not facts.epoch_is_known:
        return "an epoch of a streaming data set, and the optimizer step with it, can end after any micro-batch"
    return _reader(facts)


def _reader(facts: RLOOFacts) -> str | None:
    """Return what may read or change a batch; `None` if nothing does."""
    reader = reader_of(facts, facts.own_loss or facts.generation_reader)
    return None if reader is None else f"this trainer {reader}"


def _micro_batches(facts: RLOOFacts) -> Decision:
    """Return the decision on keeping a group's rows together (`"run"`) or not (`"skip"`)."""
    rule = None
    if facts.has_images:
        rule = "a batch with images cannot be split by completion"
    elif facts.has_router_loss:
        rule = "the router loss is computed for each micro-batch, so another order would change the gradient"
    elif facts.positions_by_length:
        rule = BY_LENGTH
    regrouped = (
        "The completions of a group share a micro-batch where there is room, so fewer prompts are computed. The "
        "gradient of the optimizer step is the same."
    )
    stays_because = order_reason(facts, rule=rule, schedule="", reader=_reader(facts))
    return plan_order(facts, stays_because, regrouped)
