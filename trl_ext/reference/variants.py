"""The stores on disk of one reference: a folder for each set of log-probs that it was seen to give."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from .canary import FILE, Canary, Tolerance
from .sequences import Sequences
from .store import DiskStore

_MOST = 8  # that are looked at, the newest first


@dataclass(frozen=True)
class Variants:
    """The folders of one reference.

    A model can be changed in memory in ways that its identity does not show. So a folder is only used by a run whose
    reference gives the log-probs of the canary in it.

    Args:
        root (`Path`): where all references have their folders.
        identity (`str`): of the reference.
        loaded_as (`str`):
            Its identity without what memory alone shows. A folder of this name was written before there were canaries.
        open (`Callable`): name and canary of a folder -> its store. Every rank calls it.
        tolerance (`Tolerance`): how far the reference may be from a canary.
        padded (`Callable`): within `padded()`, the reference is fed padded batches.
        is_main (`bool`): whether this is the rank that decides for all.
    """

    root: Path
    identity: str
    loaded_as: str
    open: Callable[[str, Canary], DiskStore]
    tolerance: Tolerance
    padded: Callable[[], AbstractContextManager[None]]
    is_main: bool

    def known(self, sequences: Sequences) -> list[tuple[str, Canary]]:
        """Name and canary of each folder that may be this run's, on the main process.

        The canary of a folder that has none is made of what it holds of `sequences`.
        """
        found: list[tuple[float, str, Canary]] = []
        if not self.is_main:
            return []
        old = self.root / self.loaded_as
        for folder in (*self.root.glob(f"{self.identity}-*"), old):
            try:
                written = (folder / FILE).stat().st_mtime
                canary = Canary.read(folder)
            except OSError:
                if folder is not old or not old.is_dir():
                    continue
                store = DiskStore(old, self.loaded_as, writes=False)
                written, canary = 0.0, Canary.of(self.identity, sequences, store.of(sequences))
            if canary is not None and canary.identity == self.identity:
                found.append((written, folder.name, canary))
        found.sort(key=lambda x: x[0], reverse=True)
        return [(name, canary) for _, name, canary in found[:_MOST]]

    def begin(self, canary: Canary) -> DiskStore:
        """A store that is not there yet."""
        return self.open(f"{self.identity}-{canary.digest[:16]}", canary)
