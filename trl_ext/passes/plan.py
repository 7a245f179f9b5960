"""The plan: for each log-prob pass whether it runs, is skipped or is reused, and the reason in words.

It is made once, from the arguments, and everything else asks it; nothing else decides whether a pass is needed.
"""

import textwrap
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
