"""What a plan is made of, whether batches are packed, and the counts that a run logs."""

import textwrap
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

Action = Literal["run", "reuse", "skip"]

_WIDTH = 118


@dataclass(frozen=True)
class Decision:
    """What happens to one pass.

    Args:
        name (`str`): `"policy"`, `"old policy"` or `"reference"`; of what is fed, `"micro-batches"` or `"packing"`;
            of how, `"engine"` or `"head"`.
        action (`str`): `"run"`, `"reuse"` (values that were formed elsewhere) or `"skip"` (nothing needs them).
        reason (`str`): why, in words, for the user.
    """

    name: str
    action: Action
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions of one trainer, in the order in which the passes are met.

    Args:
        decisions (`tuple[Decision, ...]`): one for each pass.
        warnings (`tuple[str, ...]`): what the user should know before training.
    """

    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Decision:
        """The decision on the pass called `name`."""
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


_DROPOUT = "dropout is active, and one shared prompt would mean one dropout mask for all its completions"
_REMEDY = (
    "Set `disable_dropout=True`, and the dropout of the adapter (`lora_dropout`) to 0, to share prompts in training."
)


@dataclass(frozen=True, kw_only=True)
class PackingFacts:
    """What is decided from.

    Args:
        padding_free, share_prompts (`bool`, *optional*): the options; `None` stands for "where it can".
        unsupported (`str`, *optional*): why tokens of several sequences are not fed in one row; `padding_free=False` is
            a reason, too.
        unshared (`str`, *optional*): why leading tokens that rows have in common cannot be fed once.
        active_dropout (`bool`): whether two passes over the same tokens differ in training.
    """

    padding_free: bool | None
    share_prompts: bool | None
    unsupported: str | None
    unshared: str | None
    active_dropout: bool


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """What was decided.

    Args:
        decision (`Decision`): `"run"` or `"skip"`, and the reason.
        padding_free (`bool`): no padding is fed.
        share_in_training (`bool`): leading tokens that several rows have in common are fed once, in training too.
        warnings (`tuple[str, ...]`): what the user should know before training.
    """

    decision: Decision
    padding_free: bool
    share_in_training: bool
    warnings: tuple[str, ...] = ()


def check_packing_options(facts: PackingFacts) -> None:
    """Raise `ValueError` if an option asks for what the model cannot give.

    It is asked before training. What the first batch shows is said in a warning, and the plan follows it.
    """
    for name, asked in (("padding_free", facts.padding_free), ("share_prompts", facts.share_prompts)):
        if asked and facts.unsupported:
            raise ValueError(f"`{name}=True` cannot be had here: {facts.unsupported}. Leave `{name}` at None.")
    if facts.share_prompts and facts.active_dropout:
        raise ValueError(f"`share_prompts=True` cannot be had in training: {_DROPOUT}. {_REMEDY}")


def plan_packing(facts: PackingFacts) -> PackingPlan:
    """The plan that follows from `facts`."""
    if facts.padding_free is False:
        return _unpacked("every token of the padded batch is fed (`padding_free=False`).")
    if facts.unsupported:
        return _unpacked(f"every token of the padded batch is fed: {facts.unsupported}.")
    free = "no padding is fed, nor a token after which nothing is scored"
    if facts.unshared:
        return _packed(f"{free}. Each row feeds its own prompt: {facts.unshared}.", shares=False)
    once = "leading tokens that several rows have in common are fed once"
    if facts.active_dropout:
        return _packed(
            f"{free}. In evaluation {once}; not in training, because {_DROPOUT}.",
            shares=False,
            warnings=(f"Prompts are not shared in training: {_DROPOUT}. {_REMEDY}",),
        )
    return _packed(f"{free}; {once}.", shares=True)


def _unpacked(reason: str) -> PackingPlan:
    return PackingPlan(decision=Decision("packing", "skip", reason), padding_free=False, share_in_training=False)


def _packed(reason: str, *, shares: bool, warnings: tuple[str, ...] = ()) -> PackingPlan:
    decision = Decision("packing", "run", reason)
    return PackingPlan(decision=decision, padding_free=True, share_in_training=shares, warnings=warnings)


class SkipCounts:
    """Totals for `"train"` and `"eval"` apart."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = defaultdict(set)
        self._totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, mode: str, *, passes: int | None = None, rows: int | None = None, tokens: int | None = None) -> None:
        """Count what one micro-batch left out; a quantity that is `None` is not spoken of."""
        for name, count in (("passes", passes), ("rows", rows), ("tokens", tokens)):
            if count is not None:
                self._known[mode].add(name)
                self._totals[mode][name] += count

    def take(self, mode: str) -> dict[str, float]:
        """Totals since the last call, as `skipped/passes`, `skipped/rows` and `skipped/tokens`.

        Empty where nothing was counted since: an absent total is not a total of zero.
        """
        totals = self._totals.pop(mode, None)
        if totals is None:
            return {}
        return {f"skipped/{name}": float(totals[name]) for name in sorted(self._known[mode])}


class TokenCounts:
    """Totals for `"train"` and `"eval"` apart."""

    NAMES = ("tokens_fed/with_gradient", "tokens_fed/without_gradient", "head/tokens")

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, mode: str, counts: list[int]) -> None:
        """Count one micro-batch: the tokens of passes with a gradient, of those without, and those scored."""
        for name, count in zip(self.NAMES, counts, strict=True):
            self._totals[mode][name] += count

    def take(self, mode: str) -> dict[str, float]:
        """Totals since the last call, by their names in the logs; what is zero is left out."""
        return {name: float(count) for name, count in self._totals.pop(mode, {}).items() if count}
