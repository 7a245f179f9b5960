"""The plan of a DPO run: whether the reference is run, read from the store, or not needed, and why."""

import dataclasses
from dataclasses import dataclass, replace
from typing import Literal

from .plan import Decision, Plan

# Of a reference that is not the policy with another adapter, or with other values in it
REFERENCES = {"model": "a separate model", "initial": "the policy as it is before training"}


@dataclass(frozen=True, kw_only=True)
class DPOFacts:
    """What the plan of a DPO run is made from.

    Args:
        loss_types (`tuple[str, ...]`): TRL's `loss_type`.
        best_metric (`str`, *optional*): TRL's `metric_for_best_model`.
        reference (`str`): a key of `REFERENCES`, or what of a PEFT policy is the reference, in words.
        datasets (`tuple[str, ...]`): names of the data sets, as far as they are known when the plan is made.
        with_columns (`tuple[str, ...]`): those whose rows bring the user's own reference log-probs.
        precompute (`bool`): TRL's `precompute_ref_log_probs`.
        storage (`str`): `"disk"`, `"memory"` or `"off"`.
        folder (`str`): where the store lies on disk.
        not_storable (`str`, *optional*): why a sequence's token ids do not determine its reference log-probs.
        drifts (`str`, *optional*): why the reference changes as the policy is trained.
        varies (`str`, *optional*): why two passes of the reference over the same sequence differ.
        uncacheable (`str`, *optional*): why the reference cannot be told from another one of a later run.
        own_loss (`str`, *optional*): the `compute_loss` of a subclass, where it does not call ours.
    """

    loss_types: tuple[str, ...]
    best_metric: str | None
    reference: str
    datasets: tuple[str, ...]
    with_columns: tuple[str, ...]
    precompute: bool
    storage: str
    folder: str
    not_storable: str | None
    drifts: str | None
    varies: str | None
    uncacheable: str | None
    own_loss: str | None


@dataclass(frozen=True, kw_only=True)
class DPOPlan(Plan):
    """The decisions of a DPO run.

    Args:
        source (`str`):
            Where the reference log-probs of a batch without user columns come from: `"store"`, `"pass"` (TRL's own, in
            every micro-batch) or `"nothing"` (they are not needed).
        durable (`bool`): whether the store outlives the run.
        gone_in_training (`bool`): whether the reference exists only before training starts.
    """

    source: Literal["store", "pass", "nothing"]
    durable: bool = False
    gone_in_training: bool = False


def plan_dpo(facts: DPOFacts) -> DPOPlan:
    """The plan that follows from `facts`."""
    policy = Decision("policy", "run", "its gradient trains it, and evaluation needs its loss.")
    columns = ""
    if facts.with_columns:
        names = " and ".join(f"`{name}`" for name in facts.with_columns)
        columns = f"Rows of {names} bring theirs in `ref_chosen_logps` and `ref_rejected_logps`. "
        if set(facts.with_columns) == set(facts.datasets):
            # The store may never be needed: nothing is hashed for it
            other = _without_columns(dataclasses.replace(facts, storage=facts.storage.replace("disk", "memory")))
            reason = f"{columns}For other data, given to `evaluate()`: {other['reference'].reason}"
            return replace(other, decisions=(policy, Decision("reference", "reuse", reason)), durable=False)
    plan = _without_columns(facts)
    if facts.own_loss is not None:
        left = f"left to {facts.own_loss}, which does not call `super().compute_loss(...)`."
        return replace(plan, decisions=(Decision("policy", "run", left), Decision("reference", "run", left)))
    decision = plan["reference"]
    reference = Decision("reference", decision.action, columns + decision.reason)
    return replace(plan, decisions=(policy, reference))


def _without_columns(facts: DPOFacts) -> DPOPlan:
    def plan(action: Literal["run", "reuse", "skip"], reason: str, **fields: object) -> DPOPlan:
        return DPOPlan(decisions=(Decision("reference", action, reason),), **fields)  # type: ignore[arg-type]

    wants_rewards = "rewards/" in (facts.best_metric or "")
    if set(facts.loss_types) == {"sft"} and not wants_rewards:
        return plan(
            "skip",
            'the loss `["sft"]` does not read it. The metrics `rewards/*` are absent from the logs; naming one of them '
            "in `metric_for_best_model` brings them back.",
            source="nothing",
        )
    needed = f"needed for `metric_for_best_model={facts.best_metric!r}`; " if set(facts.loss_types) == {"sft"} else ""
    what = REFERENCES.get(facts.reference, facts.reference)
    every = f"{needed}it is {what}, run on every micro-batch, because"
    if facts.storage == "off":
        return plan("run", f'{every} `reference_store="off"`.', source="pass")
    # EngineRequest for beforehand, the reference is what it is before training: fixed, whatever happens to it later
    if facts.not_storable or (not facts.precompute and (facts.drifts or facts.varies)):
        return plan("run", f"{every} {facts.not_storable or facts.drifts or facts.varies}.", source="pass")
    # Values that vary are this run's alone
    durable = facts.storage == "disk" and not facts.varies and not facts.uncacheable
    place = "and its per-token values are kept in memory"
    if facts.storage == "disk" and not durable:
        place += f", for this run only, because {facts.varies or facts.uncacheable}"
    if durable:
        place = (
            f"unless an earlier run with the same reference has done so; per-token values are kept in {facts.folder} "
            "for later runs"
        )
    when = "before training" if facts.precompute else "the first time it is met"
    return plan(
        "reuse",
        f"{needed}it is {what}, and does not change. Each sequence is scored once, {when}, {place}.",
        source="store",
        durable=durable,
        gone_in_training=facts.drifts is not None,
    )
