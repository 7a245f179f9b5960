"""Whether padding and repeated prompts are fed, decided from facts, and why."""

from dataclasses import dataclass

from .plan import Decision

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
