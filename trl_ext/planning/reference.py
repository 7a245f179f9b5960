"""Where reference log-probs come from: the store, a pass for each micro-batch, or nowhere; and why."""

from dataclasses import dataclass
from typing import Literal

from .plan import Decision, Facts, Plan

Source = Literal["store", "pass", "nothing"]

# What the reference is. For a PEFT policy, `PolicyReference.describe` says it
REFERENCES = {
    "model": "the model given as `ref_model`",
    "copy": "a copy of the policy before training",
    "loaded": "the policy's checkpoint, loaded a second time",
    "initial": "the policy as it is before training",
}


@dataclass(frozen=True, kw_only=True)
class ReferenceFacts(Facts):
    """What is known about the reference when the plan is made."""

    reference: str  # a key of `REFERENCES`, or which weights of a PEFT policy are the reference
    precompute_ref_log_probs: bool
    reference_store: str
    folder: str  # of the store on disk
    not_storable: str | None  # why a sequence's token ids do not determine its reference log-probs
    drifts: str | None  # why the reference changes as the policy is trained
    varies: str | None  # why two passes of the reference over the same sequence differ
    uncacheable: str | None  # why a later run cannot tell the reference from another one
    own_loss: str | None  # a subclass's `compute_loss` that does not call ours


@dataclass(frozen=True, kw_only=True, repr=False)
class ReferencePlan(Plan):
    """The decisions, the facts, and where the reference log-probs of a batch come from."""

    facts: ReferenceFacts
    source: Source  # "pass": TRL's own pass, in every micro-batch
    durable: bool = False  # the store outlives the run

    @property
    def gone_in_training(self) -> bool:
        """Whether the reference exists only before training starts."""
        return self.source == "store" and self.facts.drifts is not None


def left_to_own_loss(own_loss: str) -> tuple[Decision, Decision]:
    """Return the decisions on policy and reference if a subclass's `compute_loss` does not call ours."""
    reason = f"Left to {own_loss}, which does not call `super().compute_loss(...)`."
    return Decision("policy", "run", reason), Decision("reference", "run", reason)


def plan_reference(facts: ReferenceFacts, needed: str = "") -> tuple[Source, Decision, bool]:
    """Return source and decision, and whether the store outlives the run. `needed`: why the reference is needed."""
    what = f"{needed}The reference ({REFERENCES.get(facts.reference, facts.reference)})"
    against = '`reference_store="off"`' if facts.reference_store == "off" else facts.not_storable
    # Log-probs precomputed before training stay valid, whatever happens to the reference later
    if against is None and not facts.precompute_ref_log_probs:
        against = facts.drifts or facts.varies
    if against is not None:
        reason = f"{what} runs on every micro-batch, as in TRL, because {against}."
        return "pass", Decision("reference", "run", reason), False
    # Log-probs that vary from pass to pass are for this run alone
    durable = facts.reference_store == "disk" and not facts.varies and not facts.uncacheable
    when = "before training starts" if facts.precompute_ref_log_probs else "when it first appears"
    if durable:
        when += " or in an earlier run"
        place = "on disk"
    elif facts.reference_store == "disk":
        place = f"in memory, for this run only, because {facts.varies or facts.uncacheable}"
    else:
        place = "in memory"
    reason = f"{what} scores each sequence once, {when}. The log-probs are kept {place}."
    return "store", Decision("reference", "reuse", reason, folder=facts.folder if durable else None), durable
