"""Reference log-probs of a batch from the store, and from one reference pass for the rows that are not in it yet."""

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

_MOST = 8  # that are looked at, the newest first


@dataclass(frozen=True)
class Variants:
    """The folders of one reference.

    A model can be changed in memory in ways that its identity does not show. So a folder is only used by a run whose
    reference gives the log-probs of the canary in it.

    Args:
        root (`Path`): where all references have their folders.
        identity (`str`): of the reference.
        open (`Callable`): name and canary of a folder -> its store. Every rank calls it.
        tolerance (`Tolerance`): how far the reference may be from a canary.
        padded (`Callable`): within `padded()`, the reference is fed padded batches.
        is_main (`bool`): whether this is the rank that decides for all.
    """

    root: Path
    identity: str
    open: Callable[[str, Canary], DiskStore]
    tolerance: Tolerance
    padded: Callable[[], AbstractContextManager[None]]
    is_main: bool

    def known(self) -> list[tuple[str, Canary]]:
        """Name and canary of each folder of the reference, on the main process."""
        if not self.is_main:
            return []
        written: list[tuple[float, Path]] = []
        with suppress(OSError):  # a folder that cannot be read
            for path in self.root.glob(f"{self.identity}-*/{FILE}"):
                with suppress(OSError):  # deleted since
                    written.append((path.stat().st_mtime, path.parent))
        newest = [folder for _, folder in sorted(written, reverse=True)[:_MOST]]
        canaries = ((folder.name, Canary.read(folder, self.identity)) for folder in newest)
        return [(name, canary) for name, canary in canaries if canary is not None]

    def begin(self, canary: Canary) -> DiskStore:
        """A store that is not there yet."""
        return self.open(f"{self.identity}-{canary.digest[:16]}", canary)


logger = logging.getLogger("trl_ext")

Pass = Callable[[dict[str, Any]], Tensor]


class Answer(NamedTuple):
    """Reference log-probs of one batch.

    Args:
        log_probs (`Tensor` of shape `(2B, S - 1)`): fp32; 0 where a position is not labelled or was not asked for.
        passes (`int`): reference passes that ran, checks of a canary among them; the same on every rank.
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
    ranks, so one pass runs on each of them if any misses a row. One exchange of four integers a batch settles that,
    whatever the ranks' stores hold.

    Args:
        store (`MemoryStore`): where entries are kept, or, with `variants`, until one of these is open.
        identity (`str`): of the reference, a part of each key.
        gather_counts (`Callable`): a list of integers -> such lists of all ranks.
        gather (`Callable`): an object -> those of all ranks.
        agreed (`Callable`):
            An object of this rank, such as the entries that it found for a batch -> that of the first of the ranks that
            get the same batch and must feed the same rows.
        variants (`Variants`, *optional*):
            The stores on disk. The first batch shows which of them it is: the one whose canary the reference agrees
            with, as the first rank finds, or a new one.

    Attributes:
        canary (`Canary`, *optional*): of the store on disk that is open.
    """

    canary: Canary | None = None

    def __init__(
        self,
        store: MemoryStore,
        identity: str,
        gather_counts: Callable[[list[int]], list[list[int]]],
        gather: Callable[[Any], list[Any]],
        agreed: Callable[[Any], Any] = lambda found: found,
        variants: Variants | None = None,
    ) -> None:
        self.store, self.identity = store, identity
        self._gather_counts, self._gather, self._agreed = gather_counts, gather, agreed
        self._variants, self._searched = variants, False

    def __call__(self, batch: dict[str, Any], reference_pass: Pass, wanted: bool = True) -> Answer:
        """Reference log-probs of `batch`; every rank calls it, each with its own batch.

        Args:
            batch (`dict[str, Tensor]`): see [`Sequences`].
            reference_pass (`Callable`): such a batch -> log-probs of shape `(rows, width - 1)`, 0 without a label.
            wanted (`bool`): whether this rank needs them; another may.
        """
        sequences = Sequences(batch, self.identity)
        rows, device = sequences.shape[0], batch["input_ids"].device
        checks = self._search(sequences, reference_pass, wanted)
        found = self._agreed(self.store.of(sequences)) if wanted else {}
        missing = [row for row in range(rows) if row not in found] if wanted else []
        fed = missing if missing or sequences.keys is None else [sequences.shortest()]
        counts = self._gather_counts([len(missing), batch["input_ids"].numel(), sequences.size(fed), sum(checks)])
        runs = any(count[0] for count in counts)
        tokens_of_batch, tokens, tokens_of_checks = (sum(count[i] for count in counts) for i in (1, 2, 3))
        if not runs:
            log_probs = self._in_place(sequences, found, device, wanted)
            return Answer(log_probs, len(checks), tokens_of_checks, tokens_of_batch)
        fresh = reference_pass(sequences.fed(fed))
        scored = {}
        if sequences.keys is not None:
            scored = {row: sequences.values_of(row, fresh[i]) for i, row in enumerate(missing)}
            fresh = self._in_place(sequences, found | scored, device, wanted)
        # A reference that overflowed in this pass is not taken for one that always does
        finite = {row: values for row, values in scored.items() if np.isfinite(values).all()}
        for entries in self._gather({sequences.keys[row]: x for row, x in finite.items()} if sequences.keys else {}):
            self.store.add(entries)
        self._begin(sequences, finite)
        return Answer(fresh.float(), 1 + len(checks), tokens + tokens_of_checks, tokens_of_batch)

    def holds(self, batch: dict[str, Any]) -> bool:
        """Whether no row of `batch` would have to be fed."""
        sequences = Sequences(batch, self.identity)
        return len(self._agreed(self.store.of(sequences))) == sequences.shape[0]

    def why_another(self, reference_pass: Pass, device: torch.device) -> str | None:
        """How the reference shows that it is not the one whose values are on disk, or None. Every rank calls it."""
        if self._variants is None or self.canary is None:
            return None
        return self._why_not(self.canary, self._variants, reference_pass, device)

    def _why_not(self, canary: Canary, variants: Variants, reference_pass: Pass, device: torch.device) -> str | None:
        with variants.padded():
            log_probs = reference_pass(canary.batch(device))
        why: str | None = self._of_first(canary.why_another(log_probs, variants.tolerance))
        return why

    def _search(self, sequences: Sequences, reference_pass: Pass, wanted: bool) -> list[int]:
        """Before any value is read from disk: open the store that is this reference's, if it is there.

        Returns:
            `list[int]`: the tokens that this rank has fed in each of the passes that it took.
        """
        if self._variants is None or self._searched:
            return []
        if not any(count[0] for count in self._gather_counts([int(wanted and sequences.keys is not None)])):
            return []
        self._searched = True
        fed, others = [], []
        for name, canary in self._of_first(self._variants.known()):
            fed.append(canary.tokens)
            why = self._why_not(canary, self._variants, reference_pass, sequences.batch["input_ids"].device)
            if why is None:
                self.canary, self.store = canary, self._variants.open(name, canary)
                return fed
            others.append(why)
        if others and self._variants.is_main:
            logger.warning(
                "Stored reference log-probs are not used, because the reference gives others now: of a few that were "
                "computed again, %s. Its weights, configuration and code are those of the run that stored them, so it "
                "was changed in memory, or a library or the device computes differently. Every sequence is scored "
                "again, and stored apart.",
                others[0],
            )
        return fed

    def _begin(self, sequences: Sequences, scored: dict[int, Any]) -> None:
        """After a pass: open a new store on disk, if none was found and there is a row to know it by."""
        if self._variants is None or not self._searched or self.canary is not None:
            return
        every = self._gather(Canary.of(self._variants.identity, sequences, scored))
        self.canary = self._agreed(next((canary for canary in every if canary is not None), None))
        if self.canary is not None:
            held, self.store = self.store, self._variants.begin(self.canary)
            self.store.take(held)

    def _of_first(self, value: Any) -> Any:
        return self._agreed(self._gather(value)[0])

    def _in_place(self, sequences: Sequences, values: dict[int, Any], device: torch.device, wanted: bool) -> Tensor:
        if sequences.keys is None or not wanted:
            rows, width = sequences.shape
            return torch.zeros(rows, width - 1, device=device)
        return sequences.filled(values, device)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Within, random numbers may be drawn that training does not see."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
