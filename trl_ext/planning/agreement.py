"""What all ranks plan by if code of the user runs on some of them only, such as a callback that the main process adds.

Ranks with different plans would run different collectives, and wait for each other forever.
"""

from collections.abc import Sequence
from typing import Any

# Facts on code of the user, and what it makes of the model. One rank's code decides for all
_OF_CODE = frozenset(
    {
        "batch_reader",
        "generation_reader",
        "overridden_below",
        "own_step",
        "unknown_mask",
        "has_own_loss",
        "own_loss",
        "overrides_loss",
        "bypasses_loss",
        "has_own_pass",
        "has_entropy_bonus",
        "trains_expert_modules",
        "not_storable",
        "drifts",
        "varies",
        "uncacheable",
    }
)
# Facts that follow from others or from the model's randomness, a path, which may differ between nodes, and the rows of
# `generate`: other rows on some ranks change no collective
_NOT_COMPARED = frozenset(
    {
        "generation",
        "shares_prompts",
        "is_packed",
        "own_reference",
        "randomness",
        "draws_for_batch",
        "noise_of_batch",
        "folder",
    }
)


def compared(facts: Any) -> dict[str, Any]:
    """Return the facts that must be the same on all ranks."""
    return {name: x for name, x in vars(facts).items() if name not in _NOT_COMPARED}


def agreed(facts_of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts on code that differ between ranks, with the values for all ranks.

    Raises:
        `ValueError`: another fact differs.
    """
    differing = {}
    for name, first in facts_of_ranks[0].items():
        values = [facts[name] for facts in facts_of_ranks]
        rank = next((rank for rank, value in enumerate(values) if value != first), None)
        if rank is None:
            continue
        if name not in _OF_CODE:
            raise ValueError(
                f"`{name}` is {first!r} on rank 0 and {values[rank]!r} on rank {rank}, but all ranks train one model. "
                f"Set `{name}` to the same value on all ranks."
            )
        differing[name] = next(value for value in values if value)
    return differing
