"""The reward of real.py: 1 for the right answer and nothing else."""

from typing import Any


def right_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(x[0]["content"].strip() == right) for x, right in zip(completions, answer, strict=True)]
