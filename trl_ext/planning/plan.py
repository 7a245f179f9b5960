"""A plan's decisions, the decision on packing, and the counts that a run logs."""

import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

Action = Literal["run", "reuse", "skip"]

_WIDTH = 118


@dataclass(frozen=True)
class Decision:
    """What happens to one pass, and why."""

    name: str  # "policy", "old policy", "reference", "micro-batches", "packing", "engine" or "head"
    action: Action  # "reuse": existing values; "skip": nothing needs them
    reason: str  # for the user


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions of one trainer, in the order of the passes, and warnings for before training."""

    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Decision:
        """The decision called `name`."""
        return next(decision for decision in self.decisions if decision.name == name)

    def __str__(self) -> str:
        """A table of three columns: pass, action, reason."""
        lines = []
        for decision in self.decisions:
            head = f"{decision.name:<15}{decision.action:<7}"
            lines += textwrap.wrap(
                decision.reason,
                _WIDTH,
                initial_indent=head,
                subsequent_indent=" " * len(head),
                # A path stays in one piece
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(lines)


_DROPOUT = "dropout is active, and a shared prompt would have one dropout mask for all its completions"
_REMEDY = (
    "Set `disable_dropout=True`, and the dropout of the adapter (`lora_dropout`) to 0, to share prompts in training."
)


@dataclass(frozen=True, kw_only=True)
class PackingFacts:
    """What is known before packing is decided."""

    padding_free: bool | None  # the options; None: if supported
    share_prompts: bool | None
    unsupported: str | None  # why one row cannot hold several sequences; `padding_free=False` is a reason, too
    unshared: str | None  # why rows cannot share their leading tokens
    active_dropout: bool  # two passes over the same tokens differ in training


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """The decision on packing."""

    decision: Decision
    padding_free: bool
    share_in_training: bool  # rows share their leading tokens, in training too
    warnings: tuple[str, ...] = ()


def check_packing_options(facts: PackingFacts) -> None:
    """Raise `ValueError` if the model does not support an option. The first batch may still change the plan."""
    for name, asked in (("padding_free", facts.padding_free), ("share_prompts", facts.share_prompts)):
        if asked and facts.unsupported:
            raise ValueError(f"`{name}=True` is not supported here: {facts.unsupported}. Leave `{name}` at None.")
    if facts.share_prompts and facts.active_dropout:
        raise ValueError(f"`share_prompts=True` is not supported in training: {_DROPOUT}. {_REMEDY}")


def plan_packing(facts: PackingFacts) -> PackingPlan:
    """The plan that follows from `facts`."""
    runs = facts.padding_free is not False and not facts.unsupported
    warnings: tuple[str, ...] = ()
    computed = "no padding is computed, and no token after the last scored one"
    once = "leading tokens that rows have in common are computed once"
    if not runs:
        against = "`padding_free=False`" if facts.padding_free is False else facts.unsupported
        reason = f"the padded batch is computed whole: {against}."
    elif facts.unshared:
        reason = f"{computed}. Each row computes its own prompt: {facts.unshared}."
    elif facts.active_dropout:
        reason = f"{computed}. In evaluation {once}; not in training, because {_DROPOUT}."
        warnings = (f"Prompts are not shared in training: {_DROPOUT}. {_REMEDY}",)
    else:
        reason = f"{computed}; {once}."
    return PackingPlan(
        decision=Decision("packing", "run" if runs else "skip", reason),
        padding_free=runs,
        share_in_training=runs and not facts.unshared and not facts.active_dropout,
        warnings=warnings,
    )


class SkipCounts:
    """What was skipped since the last log, for `"train"` and `"eval"` apart."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = defaultdict(set)
        self._totals: dict[str, Counter[str]] = {}

    def add(self, mode: str, **counts: int) -> None:
        """Add the `passes`, `rows` and `tokens` that one micro-batch skipped."""
        self._known[mode].update(counts)
        self._totals.setdefault(mode, Counter()).update(counts)

    def take(self, mode: str) -> dict[str, float]:
        """The totals by their names in the logs; absent, not zero, where nothing was counted."""
        totals = self._totals.pop(mode, None)
        return {} if totals is None else {f"skipped/{name}": float(totals[name]) for name in sorted(self._known[mode])}


class TokenCounts:
    """What was computed since the last log, for `"train"` and `"eval"` apart."""

    NAMES = ("tokens_fed/with_gradient", "tokens_fed/without_gradient", "head/tokens")

    def __init__(self) -> None:
        self._totals: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, mode: str, counts: list[int]) -> None:
        """Add the counts of one micro-batch, in the order of `NAMES`."""
        self._totals[mode].update(dict(zip(self.NAMES, counts, strict=True)))

    def take(self, mode: str) -> dict[str, float]:
        """The totals by their names in the logs, without those that are zero."""
        return {name: float(count) for name, count in self._totals.pop(mode, {}).items() if count}
