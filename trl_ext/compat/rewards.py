"""What reward functions return: NaN is noted, since TRL makes NaN of None too, which is no mistake; no numbers stop."""

import functools
import math
from typing import Any

from torch import nn
from trl.trainer.utils import is_async_callable


def noting_nan(reward: Any, noted: set[int]) -> Any:
    """The reward function, which puts into `noted` the places of completions that it gives NaN; a model as it is."""
    if isinstance(reward, nn.Module):
        return reward
    if is_async_callable(reward):

        @functools.wraps(reward)
        async def awaited(*positional: Any, **keywords: Any) -> list[Any]:
            return _noted(await reward(*positional, **keywords), reward, keywords["completions"], noted)

        return awaited

    @functools.wraps(reward)
    def called(*positional: Any, **keywords: Any) -> list[Any]:
        return _noted(reward(*positional, **keywords), reward, keywords["completions"], noted)

    return called


def _noted(rewards: Any, reward: Any, completions: list[Any], noted: set[int]) -> list[Any]:
    try:
        given = list(rewards)
        noted.update(place for place, value in enumerate(given) if value is not None and math.isnan(value))
        fits = len(given) == len(completions)
    except TypeError:
        fits = False
    if not fits:
        name = getattr(reward, "__name__", type(reward).__name__)
        raise TypeError(
            f"`reward_funcs`: `{name}` returned {rewards!r:.80} for {len(completions)} completions. Return a list with "
            "a number for each of them, or None where the function does not apply."
        )
    return given
