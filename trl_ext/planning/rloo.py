"""RLOO's plan: which log-prob passes run, on which completions, and why."""

import math
from dataclasses import dataclass

from .plan import BY_LENGTH, Decision, Plan


@dataclass(frozen=True, kw_only=True)
class RLOOFacts:
    """What is known about a run when its plan is made."""

    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    beta: float
    own_reference: str | None  # which weights of a PEFT policy are the reference; None: a separate model
    epoch_is_known: bool  # the data set has a length
    shares_prompts: bool  # the rows of a forward share their prompt
    randomness: str | None  # why two passes over the same tokens differ
    draws_for_batch: bool  # the draws can depend on the rows of a forward
    has_images: bool
    has_router_loss: bool
    trains_expert_modules: bool
    positions_by_length: bool  # the model's positions depend on the longest row of a forward pass
    generation_reader: str | None  # an overridden method that makes or reads generation batches, or scores them
    overridden_below: str | None  # such a method below ours: in a class between ours and TRL's, or in place of TRL's
    batch_reader: str | None  # what may read or change a micro-batch, such as "overrides `compute_loss`, which ..."
    own_pass: str | None  # TRL's log-prob pass, if it is overridden
    own_loss: str | None  # an overridden method that computes the loss, or a `compute_loss` that does not call ours
    keep_groups_together: bool | None  # a field of our config
    zero_advantages_of_equal_rewards: bool  # likewise


@dataclass(frozen=True, kw_only=True)
class RLOOPlan(Plan):
    """The decisions and the facts."""

    facts: RLOOFacts
    reuses_old_policy: bool  # the policy's own log-probs are the old policy's
    skips_masked: bool
    skips_zero_advantages: bool
    keeps_groups_together: bool

    @property
    def zeroes_equal_rewards(self) -> bool:
        """Whether the advantages of groups with equal rewards are set to 0. With a KL term, rewards differ by it."""
        facts = self.facts
        # An override below ours may have changed the advantages, on purpose
        is_on = facts.zero_advantages_of_equal_rewards and facts.overridden_below is None
        return self.skips_zero_advantages and is_on and facts.beta == 0.0


def plan_rloo(facts: RLOOFacts) -> RLOOPlan:
    """Return the plan that follows from `facts`."""
    every, old, order = _every_row_reason(facts), _old_policy_reason(facts), _order_reason(facts)
    policy = "In training, zero-advantage and fully masked completions are skipped, because their gradient is zero."
    if every is not None:
        policy = f"Every completion is processed, zero-advantage and fully masked ones too: {every}."
    reuse = "The training forward's log-probs are used: generation and optimizer steps are aligned, so the weights are "
    old_policy = Decision("old policy", "reuse", f"{reuse}the same.")
    if old is not None:
        old_policy = Decision("old policy", "run", f"Scores each generation batch, as in TRL: {old}.", routine=True)
    reference = Decision("reference", "skip", "Not needed: `beta` is 0, so there is no KL term.", routine=True)
    if facts.beta != 0.0:
        what = "The reference" if facts.own_reference is None else f"The reference ({facts.own_reference})"
        scores = f"{what} scores each generation batch once, for the KL term (`beta={facts.beta}`)."
        reference = Decision("reference", "run", scores, routine=facts.own_reference is None)
    together = "The completions of a group share a micro-batch where there is room, so fewer prompts are computed."
    micro_batches = Decision("micro-batches", "run", f"{together} The gradient of the optimizer step is the same.")
    if order is not None:
        nothing_to_save = facts.steps_per_generation == 1 or not facts.shares_prompts
        if facts.keep_groups_together and facts.steps_per_generation > 1:
            raise ValueError(
                f"`keep_groups_together=True` is not supported here: {order}. Leave `keep_groups_together` at None, "
                "which then keeps TRL's order."
            )
        stays = f"Completions stay in TRL's order: {order}."
        micro_batches = Decision("micro-batches", "skip", stays, routine=nothing_to_save)
    return RLOOPlan(
        decisions=(Decision("policy", "run", policy), old_policy, reference, micro_batches),
        facts=facts,
        reuses_old_policy=old is None,
        skips_masked=every is None,
        skips_zero_advantages=every is None,
        keeps_groups_together=order is None,
    )


def _every_row_reason(facts: RLOOFacts) -> str | None:
    """Return why a row without a gradient must run; `None` if it need not."""
    if facts.own_loss is not None:
        return f"this trainer overrides `{facts.own_loss}`, which may send a gradient through any of them"
    if facts.own_pass is not None:
        return "this trainer overrides TRL's log-prob pass, which may depend on the whole batch"
    if facts.has_router_loss:
        return "the router loss counts their tokens"
    if facts.trains_expert_modules:
        return "in TRL, an expert that only such completions reach has a gradient of 0, instead of none"
    if facts.draws_for_batch:
        return f"{facts.randomness}, which may depend on them"
    if facts.has_images:
        return "a batch with images cannot be split by completion"
    return None


def _old_policy_reason(facts: RLOOFacts) -> str | None:
    """Return why the old policy's pass runs at generation; `None` if the training forward has the same log-probs."""
    if facts.beta != 0.0:
        return f"the KL term (`beta={facts.beta}`) is part of the reward"
    if facts.num_iterations > 1 or facts.gradient_accumulation_steps % facts.steps_per_generation:
        return (
            "completions train after the weights have changed "
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
    method = facts.own_loss or facts.generation_reader
    if method is not None:
        return f"this trainer overrides `{method}`, which may read or change the log-probs"
    return None if facts.batch_reader is None else f"this trainer {facts.batch_reader}"


def _order_reason(facts: RLOOFacts) -> str | None:
    """Return why rows stay in the micro-batches that TRL's order gives them; `None` if they are regrouped."""
    if facts.keep_groups_together is False:
        return "`keep_groups_together=False`"
    if facts.steps_per_generation == 1:
        return "a generation batch is one micro-batch"
    if facts.has_images:
        return "a batch with images cannot be split by completion"
    if facts.has_router_loss:
        return "the router loss is computed for each micro-batch, so another order would change the gradient"
    if facts.positions_by_length:
        return BY_LENGTH
    if not facts.shares_prompts:
        return "prompts are not shared in training, so another order saves nothing"
    if math.gcd(facts.steps_per_generation, facts.gradient_accumulation_steps) == 1:
        return "no two micro-batches of a generation batch are certain to share an optimizer step"
    if not facts.epoch_is_known:
        return "an epoch of a streaming data set, and the optimizer step with it, can end after any micro-batch"
    return None if facts.keep_groups_together else _reader(facts)
