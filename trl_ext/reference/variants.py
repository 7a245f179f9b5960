"""The stores on disk of one reference: a folder for each set of log-probs that it was seen to give."""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from .canary import FILE, Canary, Tolerance
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
