"""The rewards that RPO reads: the data set's columns `chosen_reward` and `rejected_reward`, checked and collated."""

import math
from collections.abc import Iterable
from typing import Any

import torch

REWARD_COLUMNS = ("chosen_reward", "rejected_reward")


def check_reward_columns(names: Iterable[str], where: str) -> None:
    """Raise `ValueError` if a data set has not both columns.

    Args:
        names (`Iterable[str]`): its columns.
        where (`str`): what it is called in the message.
    """
    there = set(names)
    missing = [f"`{column}`" for column in REWARD_COLUMNS if column not in there]
    if missing:
        raise ValueError(
            f"{where} has no column {' and no column '.join(missing)}, which the RPO loss types read: the reward of "
            "each completion. Add a number for each row, or remove RPO from `loss_type`."
        )


def check_reward(value: Any, column: str, where: str) -> float:
    """The reward as a number.

    Args:
        value (`Any`): as the data set has it.
        column (`str`): where it stands.
        where (`str`): which row that is, in the message.

    Raises:
        `ValueError`: it is not a finite number.
    """
    try:
        finite = math.isfinite(value)
    except (TypeError, OverflowError):
        finite = False
    if not finite:
        raise ValueError(
            f"`{column}` of {where} is {value!r}, which is not a finite number. The RPO loss types need the reward of "
            "each completion: fill it in, or remove the row."
        )
    return float(value)


class RewardCollator:
    """A data collator, to whose batches the rewards of their rows are added.

    Args:
        collator (`Any`): the trainer's own; where its batches hold the rewards already, they are taken as they are.
    """

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, examples: list[dict[str, Any]]) -> Any:
        # A collator may take a column away from the examples
        given = {column: [example.get(column) for example in examples] for column in REWARD_COLUMNS}
        batch = self.collator(examples)
        for column, values in given.items():
            if column in batch:
                continue
            places = (f"row {place} of a batch of {len(values)}" for place in range(len(values)))
            batch[column] = torch.tensor(
                [check_reward(x, column, where) for x, where in zip(values, places, strict=True)]
            )
        return batch
