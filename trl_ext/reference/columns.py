"""The user's own reference log-probs, in the columns `ref_chosen_logps` and `ref_rejected_logps` of a data set."""

import math
from typing import Any

import torch

COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")

_WHAT_TO_DO = (
    "Fill it with the sum of the reference's log-probs over the completion, or remove both columns to have the "
    "reference run."
)


def have_columns(names: Any, where: str) -> bool:
    """Whether both columns are among `names`.

    Raises:
        `ValueError`: only one is.
    """
    there = [column for column in COLUMNS if column in names]
    if len(there) == 1:
        missing = next(column for column in COLUMNS if column not in there)
        raise ValueError(
            f"{where} has the column `{there[0]}` but not `{missing}`. Reference log-probs are needed for both: add "
            "the other column, or remove this one to have the reference run."
        )
    return len(there) == 2


def check_column_values(dataset: Any, where: str) -> None:
    """Raise `ValueError` if a row of a map-style data set has no finite number in one of the columns."""
    for column in COLUMNS:
        for row, value in enumerate(dataset[column]):
            _check(value, f"row {row} of {where}", column)


def check_batch(batch: dict[str, Any]) -> None:
    """Raise `ValueError` if a value that was collated is not finite."""
    for column in COLUMNS:
        if not torch.isfinite(batch[column]).all():
            raise ValueError(f"A batch has a value in `{column}` that is not finite: {batch[column]}. {_WHAT_TO_DO}")


class CheckedCollator:
    """A data collator for rows that come one by one, which says what is wrong with a row that has no reference value.

    Args:
        collator (`Any`): the trainer's own, which would fail on such a row without a word about it.
    """

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, examples: list[dict[str, Any]]) -> Any:
        if any(column in examples[0] for column in COLUMNS):
            for example in examples:
                for column in COLUMNS:
                    _check(example.get(column), "a row of a streaming data set", column)
        return self.collator(examples)


def _check(value: Any, where: str, column: str) -> None:
    try:
        finite = math.isfinite(value)
    except TypeError:
        finite = False
    if not finite:
        raise ValueError(f"`{column}` of {where} is {value!r}, which is not a finite number. {_WHAT_TO_DO}")
