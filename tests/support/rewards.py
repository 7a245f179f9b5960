"""Reward functions by name: some return different rewards within a group, some equal ones."""

from collections.abc import Callable
from typing import Any

from tiny import prompt_text


def id_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return a different real number for each completion of a group."""
    return [sum(token * 37 % 101 for token in ids) / (101 * len(ids)) for ids in completion_ids]


def short_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Prefer short completions, and return None for those of three tokens."""
    return [None if len(ids) == 3 else 1.0 / len(ids) for ids in completion_ids]


def half_dead_reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """As `id_reward`, but 0.5 for all completions of every second prompt, whose advantages are then zero."""
    scores = id_reward(completion_ids)
    return [0.5 if _odd(prompt) else score for prompt, score in zip(prompts, scores, strict=True)]


def _odd(prompt: str | list[dict[str, str]]) -> bool:
    """Return whether the prompt is an odd row of its dataset."""
    return bool(int(prompt_text(prompt).split()[0][1:]) % 2)


def dead_reward(prompts: list[Any], **_: Any) -> list[float]:
    """Return the same value for every completion of a prompt, exact in fp32, so TRL's advantages are exactly 0."""
    return [float(_odd(prompt)) for prompt in prompts]


def tenths_reward(prompts: list[Any], **_: Any) -> list[float]:
    """Return one value for all completions of a prompt, inexact in fp32, so TRL's advantages are rounding errors."""
    return [0.1 if _odd(prompt) else 0.7 for prompt in prompts]


def half_tenths_reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """As `id_reward`, but 0.7 for every completion of every second prompt."""
    scores = id_reward(completion_ids)
    return [0.7 if _odd(prompt) else score for prompt, score in zip(prompts, scores, strict=True)]


def unscorable_reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """As `id_reward`, but None for the completions of every second prompt."""
    scores = id_reward(completion_ids)
    return [None if _odd(prompt) else score for prompt, score in zip(prompts, scores, strict=True)]


def tenths_missing_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Return 0.7, but None for completions of three tokens."""
    return [None if len(ids) == 3 else 0.7 for ids in completion_ids]


def step_up_reward(prompts: list[Any], **_: Any) -> list[float]:
    """Return 0.5 for each fourth completion, else 0. With half of `step_down_reward`, the sum is 0.5 for all."""
    return [0.5 * (place % 4 == 3) for place in range(len(prompts))]


def step_down_reward(prompts: list[Any], **_: Any) -> list[float]:
    """Return 0 for each fourth completion, else 1."""
    return [float(place % 4 != 3) for place in range(len(prompts))]


REWARDS: dict[str, Callable[..., list[float | None]]] = {
    "id": id_reward,
    "short": short_reward,
    "half_dead": half_dead_reward,
    "dead": dead_reward,
    "tenths": tenths_reward,
    "half_tenths": half_tenths_reward,
    "unscorable": unscorable_reward,
    "tenths_missing": tenths_missing_reward,
    "step_up": step_up_reward,
    "step_down": step_down_reward,
}
NOISY_REWARDS = {"tenths", "half_tenths", "tenths_missing"}  # for which TRL's advantages of equal rewards are not 0


def dead_on_rank_1(prompts_of_a_rank: int) -> Callable[..., list[float]]:
    """Return the same reward for all completions of the prompts that rank 1 gets.

    Each rank gets consecutive prompts of a generation batch, and the prompt of row i begins with "wi".
    """

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores = id_reward(completion_ids)
        rows = [int(prompt.split()[0][1:]) for prompt in prompts]
        return [0.5 if row // prompts_of_a_rank % 2 else score for row, score in zip(rows, scores, strict=True)]

    return reward
