"""Reference log-probs of a batch from the store, and from one reference pass for the rows that are not in it yet."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .sequences import Sequences
from .store import Entries, MemoryStore

Pass = Callable[[dict[str, Any]], Tensor]


class Answer(NamedTuple):
    """Reference log-probs of one batch.

    Args:
        log_probs (`Tensor` of shape `(2B, S - 1)`): fp32; 0 where a position is not labelled or was not asked for.
        passes (`int`): reference passes that ran: 0 or 1, the same on every rank.
        tokens (`int`): tokens that were fed to them, padding among them, over all ranks.
        tokens_of_batch (`int`): tokens of the batch, padding among them, over all ranks.
    """

    log_probs: Tensor
    passes: int
    tokens: int
    tokens_of_batch: int


class StoredReference:
    """One store, filled as batches are asked for.

    Rows change rank from epoch to epoch, so every rank keeps every entry; and a pass of a sharded model needs all
    ranks, so one pass runs on each of them if any misses a row. One exchange of three integers a batch settles that,
    whatever the ranks' stores hold.

    Args:
        store (`MemoryStore`): where entries are kept.
        identity (`str`): of the reference.
        gather_counts (`Callable`): a list of integers -> such lists of all ranks.
        gather_entries (`Callable`): entries -> entries of all ranks.
        agreed (`Callable`):
            The entries that this rank found for a batch -> those of the first of the ranks that get the same batch and
            must feed the same rows.
    """

    def __init__(
        self,
        store: MemoryStore,
        identity: str,
        gather_counts: Callable[[list[int]], list[list[int]]],
        gather_entries: Callable[[Entries], list[Entries]],
        agreed: Callable[[Any], Any] = lambda found: found,
    ) -> None:
        self.store, self.identity = store, identity
        self._gather_counts, self._gather_entries, self._agreed = gather_counts, gather_entries, agreed

    def __call__(self, batch: dict[str, Any], reference_pass: Pass, wanted: bool = True) -> Answer:
        """Reference log-probs of `batch`; every rank calls it, each with its own batch.

        Args:
            batch (`dict[str, Tensor]`): see [`Sequences`].
            reference_pass (`Callable`): such a batch -> log-probs of shape `(rows, width - 1)`, 0 without a label.
            wanted (`bool`): whether this rank needs them; another may.
        """
        sequences = Sequences(batch, self.identity)
        rows = sequences.shape[0]
        found = self._found(sequences) if wanted else {}
        missing = [row for row in range(rows) if row not in found] if wanted else []
        fed = missing if missing or sequences.keys is None else [sequences.shortest()]
        counts = self._gather_counts([len(missing), batch["input_ids"].numel(), sequences.size(fed)])
        runs = any(count[0] for count in counts)
        tokens, tokens_of_batch = (sum(count[i] for count in counts) for i in (2, 1))
        device = batch["input_ids"].device
        if not runs:
            return Answer(self._in_place(sequences, found, device, wanted), 0, 0, tokens_of_batch)
        fresh = reference_pass(sequences.fed(fed))
        new: Entries = {}
        if sequences.keys is not None:
            scored = {row: sequences.values_of(row, fresh[i]) for i, row in enumerate(missing)}
            fresh = self._in_place(sequences, found | scored, device, wanted)
            # A reference that overflowed in this pass is not taken for one that always does
            new = {sequences.keys[row]: values for row, values in scored.items() if np.isfinite(values).all()}
        for entries in self._gather_entries(new):
            self.store.add(entries)
        return Answer(fresh.float(), 1, tokens, tokens_of_batch)

    def holds(self, batch: dict[str, Any]) -> bool:
        """Whether no row of `batch` would have to be fed."""
        sequences = Sequences(batch, self.identity)
        return len(self._found(sequences)) == sequences.shape[0]

    def _found(self, sequences: Sequences) -> dict[int, Any]:
        found = {}
        for row, key in enumerate(sequences.keys or []):
            values = self.store.get(key)
            if values is not None and len(values) == sequences.labels_in(row):
                found[row] = values
        agreed: dict[int, Any] = self._agreed(found)
        return agreed

    def _in_place(self, sequences: Sequences, values: dict[int, Any], device: torch.device, wanted: bool) -> Tensor:
        if sequences.keys is None or not wanted:
            rows, width = sequences.shape
            return torch.zeros(rows, width - 1, device=device)
        return sequences.filled(values, device)
