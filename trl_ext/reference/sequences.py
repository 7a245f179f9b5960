"""The sequences of a batch and their keys, and data set columns with reference log-probs."""

import hashlib
import math
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")

# The entries of a batch that identify a sequence in the store. Batches with other model inputs are not stored
NEEDED = ("input_ids", "attention_mask", "completion_mask")
_OF_PAIRS = {*COLUMNS, "chosen_reward", "rejected_reward"}

_WHAT_TO_DO = (
    "Set it to the sum of the reference's log-probs over the completion, or remove `ref_chosen_logps` and "
    "`ref_rejected_logps`: then the trainer computes them."
)


class Sequences:
    """The rows of one batch.

    Args:
        batch (`dict[str, Tensor]`):
            From TRL's collator: `input_ids`, `attention_mask` and `completion_mask` of shape `(2B, S)`.
        identity (`str`): the identity of the reference, a part of each key.

    Attributes:
        keys (`list[bytes]`, *optional*):
            16 bytes per row, from its token ids and masks up to its last token. `None` if the batch has other model
            inputs, which the keys would not include.
        lengths (`ndarray`): number of columns of each row up to its last token; set only if there are keys.
        labels (`ndarray`): number of scored positions of each row; set only if there are keys.
    """

    def __init__(self, batch: dict[str, Any], identity: str) -> None:
        self.batch = batch
        self.keys: list[bytes] | None = None
        self.shape: tuple[int, int] = tuple(batch["input_ids"].shape)
        if not {*NEEDED} <= batch.keys() <= {*NEEDED, *_OF_PAIRS} or batch["attention_mask"].shape != self.shape:
            return
        ids, attended, labelled = torch.stack([batch[name] for name in NEEDED]).cpu().numpy()
        self._labelled = labelled[:, 1:] != 0
        self.labels = self._labelled.sum(axis=1)
        columns = np.arange(1, self.shape[1] + 1)
        # Padding on the left counts, because it shifts the positions
        self.lengths = np.where((attended != 0) | (labelled != 0), columns, 0).max(axis=1, initial=1)
        marks = (attended != 0) + 2 * (labelled != 0)
        self.keys = [_key(identity, ids[row, :length], marks[row, :length]) for row, length in enumerate(self.lengths)]

    def subset(self, rows: list[int]) -> dict[str, Tensor]:
        """Return token ids and masks of these rows, as wide as the longest of them."""
        width = int(self.lengths[rows].max())
        index = torch.as_tensor(rows, device=self.batch["input_ids"].device)
        return {name: self.batch[name][index, :width] for name in NEEDED}

    def values_of(self, rows: list[int], log_probs: Tensor) -> dict[int, NDArray[np.float32]]:
        """Return the entries of `rows`: their `log_probs`, of at most `S - 1` positions, at the labelled positions."""
        on_host = log_probs.float().cpu().numpy()
        return {row: of_row[self._labelled[row, : len(of_row)]] for row, of_row in zip(rows, on_host, strict=False)}

    def filled(self, values: dict[int, NDArray[np.float32]], device: torch.device) -> Tensor:
        """Return fp32 `(2B, S - 1)`: the values at labelled positions, 0 elsewhere. Every row needs values."""
        rows, width = self.shape
        missing = sorted({*range(rows)} - values.keys())
        if missing:
            raise RuntimeError(
                f"Rows {missing} of a batch have no reference log-probs, because the ranks disagree about which rows "
                "are missing. Set `reference_store='off'` to train without the store."
            )
        log_probs = np.zeros((rows, width - 1), np.float32)
        for row, entry in values.items():
            log_probs[row, self._labelled[row]] = entry
        return torch.from_numpy(log_probs).to(device)


def _key(identity: str, ids: NDArray[Any], marks: NDArray[Any]) -> bytes:
    digest = hashlib.blake2b(identity.encode(), digest_size=16)
    digest.update(ids.astype(np.int64).tobytes())
    digest.update(marks.astype(np.int8).tobytes())
    return digest.digest()


def have_columns(names: Any, where: str) -> bool:
    """Whether both columns are in `names`. Raises `ValueError` if only one is."""
    missing = {*COLUMNS} - {*names}
    if len(missing) == 1:
        (present,) = {*COLUMNS} - missing
        raise ValueError(
            f"{where} has the column `{present}` but not `{missing.pop()}`. Add the missing column, or remove "
            f"`{present}`: then the trainer computes both."
        )
    return not missing


def check_column_values(dataset: Any, where: str) -> None:
    """Raise `ValueError` if a row of a map-style data set has no finite number in one of the columns."""
    for column in COLUMNS:
        for row, value in enumerate(dataset[column]):
            _check(value, f"row {row} of {where}", column)


def check_batch(batch: dict[str, Any]) -> None:
    """Raise `ValueError` if a value in the columns of a collated batch is not finite."""
    for column in COLUMNS:
        if not torch.isfinite(batch[column]).all():
            raise ValueError(f"`{column}` must contain finite numbers, got {batch[column]} in a batch. {_WHAT_TO_DO}")


class CheckedCollator:
    """The trainer's data collator, which first checks the columns in the rows of a streaming data set."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, examples: list[dict[str, Any]]) -> Any:
        if not set(COLUMNS).isdisjoint(examples[0]):
            for example, column in product(examples, COLUMNS):
                _check(example.get(column), "a row of a streaming data set", column)
        return self.collator(examples)


def _check(value: Any, where: str, column: str) -> None:
    with suppress(TypeError):
        if math.isfinite(value):
            return
    raise ValueError(f"`{column}` must be a finite number, got {value!r} in {where}. {_WHAT_TO_DO}")
