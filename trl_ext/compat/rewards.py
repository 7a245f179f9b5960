"""Reward functions that say for which completions they gave NaN: TRL makes NaN of None too, which is no mistake."""

import functools
import math
from collections.abc import Iterable
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
            return _noted(await reward(*positional, **keywords), noted)

        return awaited

    @functools.wraps(reward)
    def called(*positional: Any, **keywords: Any) -> list[Any]:
        return _noted(reward(*positional, **keywords), noted)

    return called


def _noted(rewards: Iterable[Any], noted: set[int]) -> list[Any]:
    given = list(rewards)
    noted.update(place for place, value in enumerate(given) if value is not None and math.isnan(value))
    return given
