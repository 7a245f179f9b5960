"""The store of per-token reference log-probs, one entry a sequence: in memory, or on disk for later runs."""

import logging
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .segments import Segment, read_segment, remove_abandoned, segment_files, write_segment

logger = logging.getLogger("trl_ext")

Entries = dict[bytes, NDArray[np.float32]]


class MemoryStore:
    """Entries that end with the process."""

    def __init__(self) -> None:
        self._held: Entries = {}

    def get(self, key: bytes) -> NDArray[np.float32] | None:
        """The log-probs at the labelled positions of the sequence with this key, or None."""
        return self._held.get(key)

    def add(self, entries: Entries) -> None:
        """Keep `entries`; a key that is there already keeps its value."""
        for key, values in entries.items():
            if self.get(key) is None:
                self._held[key] = values

    def flush(self) -> None:
        """Make what was added last beyond the process."""


class DiskStore(MemoryStore):
    """Entries in the files of a folder, which any number of processes and runs may fill at once.

    What was added is held in memory until it is on disk: written by this process, or, where `writes` is False, found in
    a file that another rank wrote. A full or read-only disk costs later runs their hits, never this run its values.

    Args:
        folder (`Path`): of this reference alone; made if missing.
        identity (`str`): of the reference; files of another are ignored.
        writes (`bool`): whether this process writes. One of the ranks that share a file system is enough.
        flush_bytes (`int`): bytes added after which to write without being asked.
        flush_seconds (`float`): seconds after which to write without being asked.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        writes: bool = True,
        flush_bytes: int = 32 * 2**20,
        flush_seconds: float = 30.0,
    ) -> None:
        super().__init__()
        self.folder = folder
        self._identity = identity
        self._writes = writes
        self._flush_bytes, self._flush_seconds = flush_bytes, flush_seconds
        self._bytes, self._flushed_at = 0, time.monotonic()
        self._read: set[str] = set()
        self._segments: list[Segment] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if writes:
                remove_abandoned(folder)
        except OSError as error:
            self._go_on_in_memory(error)
        self._adopt()

    def get(self, key: bytes) -> NDArray[np.float32] | None:
        place = self._places.get(key)
        if place is None:
            return super().get(key)
        segment, entry = place
        return self._segments[segment].entry(entry)

    def add(self, entries: Entries) -> None:
        super().add(entries)
        self._bytes += sum(values.nbytes for values in entries.values())
        if self._held and (
            self._bytes >= self._flush_bytes or time.monotonic() - self._flushed_at >= self._flush_seconds
        ):
            self.flush()

    def flush(self) -> None:
        if self._held and self._writes:
            try:
                write_segment(self.folder, self._identity, self._held)
            except OSError as error:
                self._go_on_in_memory(error)
        self._adopt()
        self._bytes, self._flushed_at = 0, time.monotonic()

    def _adopt(self) -> None:
        """Take in the files that have appeared, also those of other ranks and runs."""
        try:
            files = segment_files(self.folder)
        except OSError:
            return
        for path in files:
            if path.name in self._read:
                continue
            self._read.add(path.name)
            segment = read_segment(path, self._identity)
            if segment is None:
                continue
            self._segments.append(segment)
            for entry, key in enumerate(segment.keys):
                self._places.setdefault(key, (len(self._segments) - 1, entry))
        self._held = {key: values for key, values in self._held.items() if key not in self._places}

    def _go_on_in_memory(self, error: OSError) -> None:
        self._writes = False
        logger.warning(
            "Reference log-probs cannot be written to %s (%s), so they are kept in memory and later runs will not find "
            "them. `reference_store_dir` names another folder.",
            self.folder,
            error,
        )
