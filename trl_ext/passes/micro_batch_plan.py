"""Whether a group's rows are kept in one micro-batch, and micro-batches fed in parts: decided from facts, and why."""

import math
from typing import TYPE_CHECKING

from .non_finite import steps_in_backward
from .plan import Decision

if TYPE_CHECKING:
    from .grpo import GRPOFacts


def plan_micro_batches(facts: "GRPOFacts") -> tuple[Decision, bool]:
    """What is said of micro-batches, and whether a group's rows are kept together.

    Raises:
        `ValueError`: an option asks for what would change the gradient, or share no prompt.
    """
    decision = _groups(facts)
    together = decision.action == "run"
    budget = facts.max_tokens_per_micro_batch
    if budget is None:
        return decision, together
    against = why_micro_batches_count(facts)
    consequence = "parts of a micro-batch have another gradient"
    if steps_in_backward(facts.optimizer):
        against = f"the optimizer `{facts.optimizer}` steps in every backward"
        consequence = "it would step after each part of a micro-batch"
    if against is not None:
        raise ValueError(
            f"`max_tokens_per_micro_batch={budget}` cannot be had here: {against}, so {consequence}. Leave "
            "`max_tokens_per_micro_batch` at None."
        )
    parts = f" Each micro-batch is fed in parts of at most {budget} tokens, with a forward and a backward of their own."
    return Decision(decision.name, "run", decision.reason + parts), together


def _groups(facts: "GRPOFacts") -> Decision:
    if facts.keep_groups_together is False:
        return Decision("micro-batches", "skip", "rows in TRL's order (`keep_groups_together=False`).")
    if facts.steps_per_generation == 1:
        return Decision("micro-batches", "skip", "rows in TRL's order: a generation batch is one micro-batch.")
    against = _why_rows_stay(facts)
    if against is not None:
        if facts.keep_groups_together:
            raise ValueError(
                f"`keep_groups_together=True` cannot be had here: {against}. Leave `keep_groups_together` at None, "
                "which takes TRL's order then."
            )
        return Decision("micro-batches", "skip", f"rows in TRL's order: {against}.")
    return Decision(
        "micro-batches",
        "run",
        f"a group's rows are kept together, as far as there is room, within {_steps_share(facts)} micro-batches that "
        "meet the same optimizer step: fewer prompts are fed, and the gradient of the step is the same. What is logged "
        "as a mean over micro-batches is one over others.",
    )


def _steps_share(facts: "GRPOFacts") -> int:
    """How many micro-batches of a generation batch surely meet the same optimizer step."""
    return math.gcd(facts.steps_per_generation, facts.gradient_accumulation_steps)


def _why_rows_stay(facts: "GRPOFacts") -> str | None:
    """Why rows keep the micro-batch that TRL's order gives them."""
    rule = why_micro_batches_count(facts)
    if rule is not None:
        return f"{rule}, so other micro-batches have another gradient"
    if not facts.shares_prompts:
        return "prompts are not shared in training, so nothing would be saved"
    if _steps_share(facts) == 1:
        return (
            "no two micro-batches of a generation batch surely meet the same optimizer step "
            f"(`gradient_accumulation_steps`={facts.gradient_accumulation_steps}, "
            f"`steps_per_generation`={facts.steps_per_generation})"
        )
    if not facts.epoch_is_known:
        return "where an epoch of a streaming data set ends, and an optimizer step with it, is not known beforehand"
    if facts.own_step is not None and not facts.keep_groups_together:
        return (
            f"this trainer has a `{facts.own_step}` of its own, which may look at a micro-batch as a whole "
            "(`keep_groups_together=True` says that it does not)"
        )
    return None


def why_micro_batches_count(facts: "GRPOFacts") -> str | None:
    """Why the gradient of a window depends on which rows share a micro-batch."""
    if facts.has_own_loss:
        return "this trainer has a loss of its own, of which nothing is known"
    if facts.loss_type == "bnpo":
        return "the loss `bnpo` is normalised by the tokens of each micro-batch"
    if facts.has_entropy_bonus:
        return "the entropy bonus is a mean over the tokens of each micro-batch"
    if facts.has_router_loss:
        return "the router loss is formed for each micro-batch"
    if facts.top_entropy_quantile < 1.0:
        return f"tokens are selected in each micro-batch (top_entropy_quantile={facts.top_entropy_quantile})"
    if facts.has_images:
        return "rows of a batch with images are not told apart"
    return None
