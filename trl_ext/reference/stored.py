"""Reference log-probs of a batch, from the store and, for rows that the store lacks, from one reference pass."""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .canary import FILE, Canary, Tolerance
from .sequences import Sequences
from .store import DiskStore, MemoryStore

logger = logging.getLogger("trl_ext")

_MOST_FOLDERS = 8  # only the newest ones are checked

# A batch of shape `(rows, width)` -> log-probs of shape `(rows, width - 1)`, 0 without a label
ReferencePass = Callable[[dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Variants:
    """The folders on disk of one reference.

    The identity does not cover every change to a model in memory. So a run uses a folder only if its reference
    reproduces the log-probs of the folder's canary.
    """

    root: Path  # has the folders of all references
    identity: str
    open: Callable[[str, Canary], DiskStore]  # opens a store by folder name and canary; every rank calls it
    tolerance: Tolerance
    padded: Callable[[], AbstractContextManager[None]]  # returns a context in which batches stay padded
    is_main: bool  # the first rank, which decides for all
    tokens: int | None = None  # how many token ids the reference has, if that is known

    def stored_canaries(self) -> list[tuple[str, Canary]]:
        """Return name and canary of each folder of the reference, on the first rank; an empty list on the others."""
        if not self.is_main:
            return []
        dated_folders: list[tuple[float, Path]] = []
        with suppress(OSError):  # the folder cannot be read
            for path in self.root.glob(f"{self.identity}-*/{FILE}"):
                with suppress(OSError):  # deleted since
                    dated_folders.append((path.stat().st_mtime, path.parent))
        newest = [folder for _, folder in sorted(dated_folders, reverse=True)[:_MOST_FOLDERS]]
        canaries = ((folder.name, Canary.read(folder, self.identity, self.tokens)) for folder in newest)
        return [(name, canary) for name, canary in canaries if canary is not None]


class BatchLogProbs(NamedTuple):
    """Reference log-probs of one batch, and their cost. Token counts cover all ranks and include padding."""

    log_probs: Tensor  # fp32 `(R, S - 1)` for R rows; 0 without a label, and if not `is_needed`
    passes: int  # passes that ran, including canary checks; the same on every rank
    tokens: int  # tokens of these passes
    tokens_of_batch: int


class StoredReference:
    """Returns reference log-probs from a store, and adds those that are missing.

    Rows change rank between epochs, so every rank keeps every entry. A pass of a sharded model needs all ranks, so if
    any rank lacks a row, every rank runs one pass. The ranks exchange four integers per batch to decide that.

    Args:
        store (`MemoryStore`): the store; with `variants`, used only until a store on disk is open.
        identity (`str`): the identity of the reference, a part of each key.
        gather_counts (`Callable`), gather (`Callable`): gather a list of integers, or an object, from all ranks.
        agree (`Callable`):
            Returns on all ranks with the same batch the first one's object, because their passes need the same rows.
        variants (`Variants`, *optional*):
            The stores on disk. At the first batch, the first rank chooses the store whose canary the reference
            reproduces, or a new one.
    """

    canary: Canary | None = None  # of the open store on disk

    def __init__(
        self,
        store: MemoryStore,
        identity: str,
        gather_counts: Callable[[list[int]], list[list[int]]],
        gather: Callable[[Any], list[Any]],
        agree: Callable[[Any], Any] = lambda value: value,
        variants: Variants | None = None,
    ) -> None:
        self.store = store
        self.identity = identity
        self._gather_counts = gather_counts
        self._gather = gather
        self._agree = agree
        self._variants = variants
        self._has_searched = False

    def __call__(self, batch: dict[str, Any], reference_pass: ReferencePass, is_needed: bool = True) -> BatchLogProbs:
        """Return the reference log-probs of `batch`, see [`Sequences`]. Every rank calls it with its own batch.

        `is_needed`: whether this rank needs the log-probs. If not, it only takes part in passes for other ranks.
        """
        sequences = Sequences(batch, self.identity)
        rows, width = sequences.shape
        checks = self._search(sequences, reference_pass, is_needed)
        stored = self._agree(self.store.find(sequences)) if is_needed else {}
        missing = [row for row in range(rows) if row not in stored] if is_needed else []
        # A rank that lacks no row takes part with its shortest one, because other ranks may wait for its forward
        rows_to_run = missing if missing or sequences.keys is None else [int(sequences.lengths.argmin())]
        part = batch if sequences.keys is None or len(rows_to_run) == rows else sequences.subset(rows_to_run)
        sizes = [batch["input_ids"].numel(), part["input_ids"].numel(), sum(checks)]
        counts = self._gather_counts([len(missing), *sizes])
        tokens_of_batch, tokens, tokens_of_checks = (sum(count[i] for count in counts) for i in (1, 2, 3))
        log_probs = torch.zeros(rows, width - 1, device=batch["input_ids"].device)
        fresh: dict[int, Any] = {}
        runs = any(count[0] for count in counts)
        if runs:
            part_log_probs = reference_pass(part)
            if sequences.keys is None:
                log_probs = part_log_probs.float()
            else:
                fresh = sequences.values_of(missing, part_log_probs)
            self._add(sequences, fresh)
        if is_needed and sequences.keys is not None:
            log_probs = sequences.filled(stored | fresh, log_probs.device)
        tokens = tokens_of_checks + (tokens if runs else 0)
        return BatchLogProbs(log_probs, runs + len(checks), tokens, tokens_of_batch)

    def holds(self, batch: dict[str, Any]) -> bool:
        """Whether the store has every row of `batch`."""
        sequences = Sequences(batch, self.identity)
        return len(self._agree(self.store.find(sequences))) == sequences.shape[0]

    def difference(
        self, reference_pass: ReferencePass, device: torch.device, canary: Canary | None = None
    ) -> str | None:
        """Return how the reference differs from `canary` (by default the open store's), or None. All ranks call it."""
        canary = canary or self.canary
        if canary is None or self._variants is None:
            return None
        with self._variants.padded():
            log_probs = reference_pass(canary.batch(device))
        return self._of_first(canary.difference(log_probs, self._variants.tolerance))

    def _search(self, sequences: Sequences, reference_pass: ReferencePass, is_needed: bool) -> list[int]:
        """Open this reference's store on disk, if there is one. Return how many tokens each pass for this took."""
        if self._variants is None or self._has_searched:
            return []
        if not any(count[0] for count in self._gather_counts([int(is_needed and sequences.keys is not None)])):
            return []
        self._has_searched = True
        tokens: list[int] = []
        differences: list[str] = []
        for name, canary in self._of_first(self._variants.stored_canaries()):
            tokens.append(canary.tokens)
            difference = self.difference(reference_pass, sequences.batch["input_ids"].device, canary)
            if difference is None:
                self.canary = canary
                self.store = self._variants.open(name, canary)
                return tokens
            differences.append(difference)
        if differences and self._variants.is_main:
            logger.warning(
                "Stored reference log-probs are not used, because the reference now computes other values: of a few "
                "tokens compared, %s. Its weights, configuration and code on disk have not changed, so the model was "
                "changed in memory, or a library or the device computes differently. The reference scores every "
                "sequence again, into a new folder.",
                differences[0],
            )
        return tokens

    def _add(self, sequences: Sequences, fresh: dict[int, Any]) -> None:
        """Store the results of a pass. Open a new store on disk if none was found and a row can be its canary."""
        # Values that are not finite are not stored, because another pass may not overflow
        finite = {row: values for row, values in fresh.items() if np.isfinite(values).all()}
        keys = sequences.keys or []
        for entries in self._gather({keys[row]: values for row, values in finite.items()}):
            self.store.add(entries)
        if self._variants is None or not self._has_searched or self.canary is not None:
            return
        canaries = self._gather(Canary.of(self._variants.identity, sequences, finite))
        self.canary = self._agree(next((canary for canary in canaries if canary is not None), None))
        if self.canary is not None:
            name = f"{self._variants.identity}-{self.canary.digest[:16]}"
            memory_store = self.store
            self.store = self._variants.open(name, self.canary)
            self.store.take(memory_store)

    def _of_first(self, value: Any) -> Any:
        return self._agree(self._gather(value)[0])


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random state on exit, so that random draws in the `with` block do not change training."""
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
