"""Check and collate the dataset columns `chosen_reward` and `rejected_reward`, which the RPO losses read."""

import math
from collections.abc import Collection
from typing import Any

import torch

REWARD_COLUMNS = ("chosen_reward", "rejected_reward")


def check_reward_columns(names: Collection[str], where: str) -> None:
    """Raise `ValueError` unless both columns are in `names`. `where` names the dataset in the message."""
    missing_columns = [f"`{column}`" for column in REWARD_COLUMNS if column not in names]
    if missing_columns:
        message = (
            f"{where} has no column {' and no column '.join(missing_columns)}. The RPO loss types need a reward for "
        )
        message += "each completion. Add a number for each row, or remove RPO from `loss_type`."
        raise ValueError(message[0].upper() + message[1:])


def check_reward(value: Any, column: str, where: str) -> float:
    """Return the reward as a float. Raise `ValueError` if it is not finite; `where` names its row in the message."""
    try:
        finite = math.isfinite(value)
    except (TypeError, OverflowError):
        finite = False
    if not finite:
        raise ValueError(
            f"`{column}` must be a finite number, got {value!r} in {where}. The RPO loss types need a reward for each "
            "completion. Fill it in, or remove the row."
        )
    return float(value)


class RewardCollator:
    """Makes batches with `collator`, and adds the rewards of the rows unless a batch already has them."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, examples: list[dict[str, Any]]) -> Any:
        # Read first, because a collator may remove a column from the examples
        rewards = {column: [example.get(column) for example in examples] for column in REWARD_COLUMNS}
        batch = self.collator(examples)
        for column, values in rewards.items():
            if column not in batch:
                places = ((x, column, f"row {row} of a batch of {len(values)}") for row, x in enumerate(values))
                batch[column] = torch.tensor([check_reward(*x) for x in places])
        return batch
