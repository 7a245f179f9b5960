"""DPO's plan: whether the reference runs, is read from the store, or is not needed, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..losses.loss_types import dpo_loss_type
from .non_finite import steps_in_backward
from .plan import Decision, model_reason
from .reference import ReferenceFacts, ReferencePlan, Source, left_to_own_loss, plan_reference


@dataclass(frozen=True, kw_only=True)
class DPOFacts(ReferenceFacts):
    """What is known about a run when its plan is made."""

    metric_for_best_model: str | None
    balance: bool
    max_tokens_per_micro_batch: int | None
    optim: str
    loss_types: tuple[str, ...]  # those of TRL's trainer
    datasets: tuple[str, ...]  # names of the data sets that are known
    with_columns: tuple[str, ...]  # names of those with the user's own reference log-probs
    overrides_loss: bool  # a subclass overrides `_compute_loss`
    # Micro-batches
    is_packed: bool  # a forward has no padding
    processes: int  # that train
    has_images: bool  # batches can hold images, which are not split by row
    has_router_loss: bool  # in TRL's loss
    own_step: str | None  # an overridden method that gets whole micro-batches
    positions_by_length: bool = False  # the model's positions depend on the longest row of a forward pass
    noise_of_batch: str | None = None  # what draws noise that may depend on the rows of a batch


@dataclass(frozen=True, kw_only=True, repr=False)
class DPOPlan(ReferencePlan):
    """The decisions, the facts, and where the reference log-probs of a batch without user columns come from."""

    facts: DPOFacts
    balances: bool = False  # pairs move between the ranks and micro-batches of an optimizer step
    splits: bool = False  # a micro-batch runs in parts of at most `max_tokens_per_micro_batch`
    merges: bool = False  # the pairs of an optimizer step run together, in parts


def plan_dpo(facts: DPOFacts) -> DPOPlan:
    """Return the plan that follows from `facts`."""
    has_columns = bool(facts.with_columns)
    has_only_columns = has_columns and set(facts.with_columns) == set(facts.datasets)
    if has_only_columns:
        # The store may never be needed, so nothing is hashed for it
        facts = replace(facts, reference_store=facts.reference_store.replace("disk", "memory"))
    source, reference, durable = _reference(facts)
    policy = Decision("policy", "run", "Scores every pair, as in TRL.", routine=True)
    names = " and ".join(f"`{name}`" for name in facts.with_columns)
    columns_reason = (
        f"Rows of {names} have reference log-probs (`ref_chosen_logps`, `ref_rejected_logps`). For other data: "
        f"{reference.reason[0].lower()}{reference.reason[1:]}"
    )
    if facts.own_loss is not None:
        policy, reference = left_to_own_loss(facts.own_loss)
    elif has_only_columns:
        reference = Decision("reference", "reuse", columns_reason)
    elif has_columns:
        reference = replace(reference, reason=columns_reason)
    parts = _parts(facts, policy)
    balance = _balance(facts)
    return DPOPlan(
        decisions=(parts.policy, reference, balance),
        facts=facts,
        source=source,
        durable=durable,
        balances=balance.action == "run",
        splits=parts.splits,
        merges=parts.merges,
    )


@dataclass(frozen=True)
class _Parts:
    """The decision on the policy's pass, with `splits` and `merges` of the plan."""

    policy: Decision
    splits: bool = False
    merges: bool = False


def _parts(facts: DPOFacts, policy: Decision) -> _Parts:
    budget = facts.max_tokens_per_micro_batch
    if budget is None:
        return _Parts(policy)
    reason = _micro_batch_reason(facts)
    if not _overrides_loss(facts) and not all(dpo_loss_type(name).is_known for name in facts.loss_types):
        # No error: the loss may be separable by pair, and then the user can do nothing about it
        unused = f"`max_tokens_per_micro_batch={budget}` limits only the reference's pass: {reason}."
        return _Parts(replace(policy, reason=f"{policy.reason} {unused}", routine=False))
    if steps_in_backward(facts.optim):
        reason = f"the optimizer `{facts.optim}` would step after the backward of each part"
    if reason is not None:
        raise ValueError(
            f"`max_tokens_per_micro_batch={budget}` is not supported here: {reason}. Leave "
            "`max_tokens_per_micro_batch` at None."
        )
    merges = facts.own_step is None
    which = "The micro-batches of an optimizer step run together," if merges else "Each micro-batch runs"
    parts = f"{which} in parts of one pair, or of at most {budget} tokens (`max_tokens_per_micro_batch`)."
    return _Parts(Decision("policy", "run", parts), splits=True, merges=merges)


def _balance(facts: DPOFacts) -> Decision:
    """Return the decision on moving pairs between ranks and micro-batches."""
    has_one_rank = facts.processes == 1
    reason = _micro_batch_reason(facts)
    if has_one_rank:
        reason = "there is one rank"
    elif not facts.balance:
        reason = "`balance=False`"
    elif reason is None and facts.own_step is not None:
        reason = f"this trainer overrides `{facts.own_step}`, which may depend on the whole micro-batch"
    elif reason is None and not facts.is_packed:
        reason = "batches stay padded, so each pair has as many tokens as the longest"
    if reason is not None:
        return Decision("balance", "skip", f"Pairs stay where they are: {reason}.", routine=has_one_rank)
    moved = (
        "Within an optimizer step, pairs move between ranks and micro-batches, so that all have about the same cost. "
        "The gradient of the step is the same."
    )
    return Decision("balance", "run", moved)


def micro_batch_reason(loss_types: Sequence[str], model: Any) -> str | None:
    """Return why the gradient of TRL's loss depends on which pairs share a micro-batch; `None` if it does not.

    `model` has the fields `has_router_loss` and `positions_by_length`.
    """
    for name in loss_types:
        if dpo_loss_type(name).of_whole_batch is not None:
            return f"the loss type '{name}' {dpo_loss_type(name).of_whole_batch}"
    return model_reason(model)


def _micro_batch_reason(facts: DPOFacts) -> str | None:
    """Return why the gradient depends on which pairs share a micro-batch, or why pairs cannot change micro-batches."""
    loss_types = facts.loss_types
    if _overrides_loss(facts):
        # TRL computes no loss that is unknown; the override is the reason below
        loss_types = tuple(name for name in loss_types if dpo_loss_type(name).is_known)
    reason = micro_batch_reason(loss_types, facts)
    if reason is not None:
        return reason
    if facts.noise_of_batch is not None:
        return f"{facts.noise_of_batch}, which may depend on the rows of a batch"
    if facts.has_images:
        return "a batch with images cannot be split by pair"
    if _overrides_loss(facts):
        return "this trainer overrides the loss, which may depend on the whole micro-batch"
    return None


def _overrides_loss(facts: DPOFacts) -> bool:
    return facts.own_loss is not None or facts.overrides_loss


def _reference(facts: DPOFacts) -> tuple[Source, Decision, bool]:
    """Return source and decision for batches without user columns, and whether the store outlives the run."""
    needed = ""
    if not any(dpo_loss_type(name).needs_reference for name in facts.loss_types):
        reference_draws = facts.varies is not None and not facts.precompute_ref_log_probs
        if "rewards/" in (facts.metric_for_best_model or ""):
            needed = f"Needed for `metric_for_best_model={facts.metric_for_best_model!r}`. "
        elif facts.noise_of_batch is not None and reference_draws:
            needed = "Not needed for the loss, but without it the policy's random draws would differ from TRL's. "
        else:
            reason = (
                "The loss type 'sft' needs no reference, and `metric_for_best_model` is none of the `rewards/*`. The "
                "logs do not have these metrics."
            )
            return "nothing", Decision("reference", "skip", reason), False
    return plan_reference(facts, needed)
