"""A plan's decisions, and the decision on packing."""

import html
import os
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Literal, Self

Action = Literal["run", "reuse", "skip"]

_WIDTH, _WIDEST = 80, 100  # columns of the table without a terminal, and the most that are easy to read


@dataclass(frozen=True)
class Decision:
    """What happens to one pass, and why."""

    # "engine", "generation", "routes", "policy", "old policy", "reference", "micro-batches", "balance", "packing",
    # "head", or "first batch"
    name: str
    action: Action  # "reuse": existing values; "skip": nothing needs them
    reason: str  # for the user
    routine: bool = False  # as in TRL, or nothing that a user must know: only the verbose table has it
    folder: str | None = None  # where values are stored; shown after the reason

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", self.reason[:1].upper() + self.reason[1:])


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """The decisions of one trainer, in the order of the passes, and warnings to show before training."""

    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()
    verbose: bool = False  # whether the table has every decision

    def __getitem__(self, name: str) -> Decision:
        """Return the decision called `name`; raise `KeyError` with the known names if there is none."""
        known = {decision.name: decision for decision in self.decisions}
        if name not in known:
            raise KeyError(f"The plan has no row `{name}`. Choose from: {', '.join(known)}.")
        return known[name]

    def __str__(self) -> str:
        """Return the table, as wide as the terminal."""
        return self.table(min(shutil.get_terminal_size((_WIDTH, 0)).columns, _WIDEST))

    def __repr__(self) -> str:
        return f"{type(self).__name__}:\n{self}"

    def _repr_html_(self) -> str:
        """Return the table for a notebook, in which a plan may be the last value of a cell."""
        lines = [("pass", "action", "reason"), *self._rows()]
        cells = ["".join(f'<td style="text-align: left">{html.escape(text)}</td>' for text in line) for line in lines]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"

    def _rows(self, *, folders: bool = True) -> Iterator[tuple[str, str, str]]:
        """Yield pass, action and reason of each decision that the table has."""
        for decision in self.decisions:
            if decision.routine and not self.verbose:
                continue
            text = decision.reason
            if folders and decision.folder is not None:
                text = f"{text.removesuffix('.')}: {_with_tilde(decision.folder)}"
            yield decision.name, decision.action, text

    def table(self, width: int = _WIDTH, *, folders: bool = True) -> str:
        """Return a table of three columns: pass, action, reason. Without `folders`, it has no local path."""
        lines = []
        for name, action, text in self._rows(folders=folders):
            head = f"{name:<15}{action:<7}"
            lines += textwrap.wrap(
                text,
                width,
                initial_indent=head,
                subsequent_indent=" " * len(head),
                # A path stays in one piece
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(lines)


def _with_tilde(folder: str) -> str:
    """Return `folder`, with `~` for the user's home."""
    home = os.path.join(os.path.expanduser("~"), "")
    return f"~{os.sep}{folder.removeprefix(home)}" if folder.startswith(home) else folder


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known when a plan is made. Fields without a comment are arguments of the trainer's config."""

    @classmethod
    def of(cls, args: Any, options: Any, **circumstances: Any) -> Self:
        """Return the facts of a run.

        Args:
            args (`TrainingArguments`): TRL's config.
            options (`AddedFields`): our fields of the config.
            circumstances (`Any`): the fields that no argument has, and those that TRL reads from the trainer.
        """
        values = dict(circumstances)
        for name in {field.name for field in fields(cls)} - values.keys():
            source = options if hasattr(options, name) else args
            if hasattr(source, name):
                value = getattr(source, name)
                values[name] = value.value if isinstance(value, Enum) else value
        return cls(**values)


BY_LENGTH = "the model's rotary embeddings depend on the longest row of each micro-batch"


def model_reason(model: Any) -> str | None:
    """Return why the gradient depends on which rows share a micro-batch, whatever the loss; `None` if it does not.

    `model` has the fields `has_router_loss` and `positions_by_length`.
    """
    if model.has_router_loss:
        return "the router loss is computed for each micro-batch"
    return BY_LENGTH if model.positions_by_length else None


@dataclass(frozen=True, kw_only=True)
class PackingFacts(Facts):
    """What is known before packing is decided."""

    padding_free: bool | None
    share_prompts: bool | None
    unsupported: str | None  # why one row cannot hold several sequences; `padding_free=False` is a reason, too
    unshared: str | None  # why rows cannot share their leading tokens
    randomness: str | None  # why two passes over the same tokens differ in training
    has_mixers: bool = False  # recurrent layers, which process rows
    has_prompts: bool = True  # False: rows of SFT, whose config has no `disable_dropout` either

    @property
    def switch_off(self) -> str:
        return f"switch dropout off ({'`disable_dropout`, ' * self.has_prompts}`lora_dropout`, `attention_dropout`)"


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """The decision on packing."""

    decision: Decision
    padding_free: bool
    share_in_training: bool  # rows share their leading tokens, in training too


def check_packing_options(facts: PackingFacts) -> None:
    """Raise `ValueError` if the model does not support an option. The first batch can still change the plan."""
    for name, asked in (("padding_free", facts.padding_free), ("share_prompts", facts.share_prompts)):
        if asked and facts.unsupported:
            raise ValueError(f"`{name}=True` is not supported here: {facts.unsupported}. Leave `{name}` at None.")
    if facts.share_prompts and facts.randomness:
        raise ValueError(
            f"`share_prompts=True` is not supported in training: {facts.randomness}, and a shared prompt would have "
            f"one dropout mask for all its completions. Leave `share_prompts` at None, or {facts.switch_off}."
        )


def plan_packing(facts: PackingFacts) -> PackingPlan:
    """Return the plan that follows from `facts`."""
    runs = facts.padding_free is not False and not facts.unsupported
    if not runs:
        against = "`padding_free=False`" if facts.padding_free is False else facts.unsupported
        reason = f"Batches stay padded, as in TRL: {against}."
    elif facts.unshared:
        what = "The prompt of each completion" if facts.has_prompts else "Each row"
        reason = f"Padding is dropped. {what} is computed separately: {facts.unshared}."
    elif facts.randomness:
        reason = (
            f"Padding is dropped. Shared {'prompts' if facts.has_prompts else 'leading tokens'} are computed once in "
            f"evaluation but not in training, because {facts.randomness}. To share them in training too, "
            f"{facts.switch_off}."
        )
    else:
        shared = (
            "a prompt that several completions share is" if facts.has_prompts else "leading tokens that rows share are"
        )
        reason = f"Padding is dropped, and {shared} computed once."
    if runs and facts.has_mixers:
        reason += " Recurrent layers process rows of similar lengths together, with little padding."
    return PackingPlan(
        decision=Decision("packing", "run" if runs else "skip", reason),
        padding_free=runs,
        share_in_training=runs and not facts.unshared and not facts.randomness,
    )


def actions_of(plan: Plan) -> list[tuple[str, Action]]:
    return [(decision.name, decision.action) for decision in plan.decisions]


# Facts that the first batch finds, and facts that say the same as another
_NOT_CHANGED_BY_USERS = {"shares_prompts", "is_packed"}


def changes_of(before: Plan, after: Plan) -> str | None:
    """Return which facts of a plan have changed, for the user; `None` if none has."""
    old, new = (vars(getattr(plan, "facts", Plan(decisions=()))) for plan in (before, after))
    names = [name for name in new if name not in _NOT_CHANGED_BY_USERS and new[name] != old.get(name)]
    changes = ", ".join(f"`{name}` changed from {old.get(name)!r} to {new[name]!r}" for name in names)
    return changes or None
