"""The store of per-token reference log-probs, with one entry per sequence, in memory or on disk."""

import logging
import math
import time
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .canary import Canary
from .segments import (
    Entries,
    Segment,
    UnusableFileError,
    read_segment,
    remove_abandoned,
    segment_files,
    warn_ignored,
    write_segment,
)
from .sequences import Sequences

logger = logging.getLogger("trl_ext")

# How many files of similar size are merged, and the most bytes of the result. An entry is written about log n times
_MERGED = 8
_LARGEST = 128 * 2**20


class MemoryStore:
    """Entries in memory, which are lost when the process ends."""

    def __init__(self) -> None:
        self._in_memory: Entries = {}

    def get(self, key: bytes) -> NDArray[np.float32] | None:
        """Return the log-probs at the labelled positions of the sequence with this key, or None."""
        return self._in_memory.get(key)

    def find(self, sequences: Sequences) -> dict[int, NDArray[np.float32]]:
        """Return the stored log-probs of a batch, by row; rows that are not stored are absent."""
        entries = {}
        for row, key in enumerate(sequences.keys or []):
            values = self.get(key)
            if values is None:
                continue
            if len(values) == sequences.labels[row] and np.isfinite(values).all():
                entries[row] = values
            else:
                self._forget(key)  # no run of ours has written this: `add` replaces it
        return entries

    def _forget(self, key: bytes) -> None:
        self._in_memory.pop(key, None)

    def add(self, entries: Entries) -> None:
        """Store `entries`. A key that is already stored keeps its value."""
        for key, values in entries.items():
            if self.get(key) is None:
                self._in_memory[key] = values

    def take(self, other: "MemoryStore") -> None:
        """Store the entries that `other` has in memory."""
        self.add(other._in_memory)

    def flush(self) -> None:
        """Write new entries to disk, if the store is on disk."""


class DiskStore(MemoryStore):
    """Entries in the files of a folder, to which several processes and runs may write at once.

    An entry stays in memory until it is on disk: written by this process or, without `writes`, by another rank. If the
    disk is full or read-only, this run keeps its entries in memory, and later runs do not find them. A subclass may
    store values of another kind.

    Args:
        folder (`Path`): the folder of this reference; created if missing.
        identity (`str`): the identity of the reference. Files of other references are ignored.
        writes (`bool`): whether this process writes. One of the ranks that share a file system is enough.
        canary (`Canary`, *optional*): written before any entries, if the folder has no canary.
        flush_bytes (`int`), flush_seconds (`float`): flush after so many new bytes, or after so many seconds.
    """

    contents = "reference log-probs"  # in warnings
    consequence = "They stay in memory"
    option = "reference_store_dir"

    def __init__(
        self,
        folder: Path,
        identity: str,
        writes: bool = True,
        canary: Canary | None = None,
        flush_bytes: int = 32 * 2**20,
        flush_seconds: float = 30.0,
    ) -> None:
        super().__init__()
        self.folder = folder
        self._identity = identity
        self._writes = writes
        self._merges = writes
        self._warns = writes  # one of the ranks that share a file system is enough
        self._flush_bytes = flush_bytes
        self._flush_seconds = flush_seconds
        self._new_bytes = 0
        self._flushed_at = time.monotonic()
        self._scanned: set[str] = set()
        # Entries are numbered across files: `_places` has the number of each key's, `_starts` of each file's first
        self._files: list[Segment | None] = []
        self._starts: list[int] = []
        self._entries = 0
        self._places: dict[bytes, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if writes:
                remove_abandoned(folder)
                if canary is not None:
                    canary.write(folder)
        except OSError as error:
            self._stop_writing(error)
        self._scan_folder()
        self._merge()

    def get(self, key: bytes) -> NDArray[np.float32] | None:
        while (place := self._places.get(key)) is not None:
            number = bisect_right(self._starts, place) - 1
            segment = self._files[number]
            try:
                values = None if segment is None else segment.entry(place - self._starts[number])
            except OSError:
                values = None
            if values is not None:
                return values
            del self._places[key]
            self._scan_folder()  # the file is damaged, or another process merged it into a new one
        return super().get(key)

    def length(self, key: bytes) -> int | None:
        """Return how many values a file's index has for this key, or None. They are not read, so may be damaged."""
        place = self._places.get(key)
        if place is None:
            return None
        number = bisect_right(self._starts, place) - 1
        segment = self._files[number]
        return None if segment is None else segment.length(place - self._starts[number])

    def _forget(self, key: bytes) -> None:
        super()._forget(key)
        self._places.pop(key, None)

    def add(self, entries: Entries) -> None:
        super().add(entries)
        self._new_bytes += sum(values.nbytes for values in entries.values())
        due = self._new_bytes >= self._flush_bytes or time.monotonic() - self._flushed_at >= self._flush_seconds
        if self._in_memory and due:
            self.flush()

    def flush(self) -> None:
        if self._in_memory and self._writes:
            try:
                write_segment(self.folder, self._identity, self._in_memory)
            except OSError as error:
                self._stop_writing(error)
        self._scan_folder()
        self._merge()
        self._new_bytes = 0
        self._flushed_at = time.monotonic()

    def _scan_folder(self) -> None:
        """Open new files, including those of other ranks and runs, and forget deleted ones."""
        try:
            files = segment_files(self.folder)
        except OSError:
            return
        listed = {path.name for path in files}
        was_merged = False  # whether another process merged a file after the folder was listed
        unusable: list[tuple[Path, object]] = []
        for path in files:
            if path.name in self._scanned:
                continue
            self._scanned.add(path.name)
            try:
                segment = read_segment(path, self._identity)
            except FileNotFoundError:
                was_merged = True
                continue
            except UnusableFileError as error:
                unusable.append((path, error))
                continue
            # Newer files come later and replace damaged entries
            self._places.update(zip(segment.keys, range(self._entries, self._entries + len(segment)), strict=False))
            self._files.append(segment)
            self._starts.append(self._entries)
            self._entries += len(segment)
        if unusable and self._warns:
            warn_ignored(unusable, self.contents)
        for number, opened in enumerate(self._files):
            if opened is not None and opened.path.name not in listed and not self._reads(number, opened):
                self._files[number] = None
        self._in_memory = {key: values for key, values in self._in_memory.items() if key not in self._places}
        if was_merged:
            self._scan_folder()

    def _reads(self, number: int, segment: Segment) -> bool:
        """Whether `get` reads an entry from this file."""
        first = self._starts[number]
        return any(first <= self._places.get(key, -1) < first + len(segment) for key in segment.keys)

    def _merge(self) -> None:
        """Merge several small files into one, and delete them when the new file is on disk."""
        while self._merges and (segments := _to_merge([x for x in self._files if x is not None])):
            try:
                entries: Entries = {}
                for segment in segments:
                    pairs = ((key, segment.entry(i)) for i, key in enumerate(segment.keys))
                    entries |= {key: values for key, values in pairs if values is not None}
                write_segment(self.folder, self._identity, entries)
                for segment in segments:
                    segment.path.unlink(missing_ok=True)
            except FileNotFoundError:
                return self._scan_folder()  # another process merged first
            except OSError:
                self._merges = False  # a full disk, or files of another user: they stay unmerged
                return self._scan_folder()
            self._files = [None if segment in segments else segment for segment in self._files]
            self._scan_folder()

    def _stop_writing(self, error: OSError) -> None:
        self._writes = False
        self._merges = False
        if not self._warns:
            return
        logger.warning(
            "Cannot write %s to %s (%s). %s, and later runs will not find them. Set `%s` to use another folder.",
            self.contents,
            self.folder,
            error,
            self.consequence,
            self.option,
        )


def _to_merge(segments: list[Segment]) -> list[Segment]:
    """Return the oldest files of about the same size, if there are enough of them."""
    tiers: dict[int, list[Segment]] = {}
    for segment in segments:
        tiers.setdefault(int(math.log(segment.size, _MERGED)), []).append(segment)
    for _, tier in sorted(tiers.items()):
        sizes = accumulate(segment.size for segment in tier)
        similar = [segment for segment, size in zip(tier, sizes, strict=True) if size <= _LARGEST]
        if len(similar) >= _MERGED:
            return similar
    return []
