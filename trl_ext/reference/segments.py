"""One file of the store on disk: written whole or not at all, and read only if every byte of it is what was written."""

import contextlib
import hashlib
import logging
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

logger = logging.getLogger("trl_ext")

KEY_BYTES = 16
_FORMAT = "trl_ext reference log-probs, version 1"
_SUFFIX = ".safetensors"
_UNFINISHED = ".unfinished"
_ABANDONED_AFTER = 3600.0  # seconds: no write takes so long, so its process has died


@dataclass
class Segment:
    """The entries of one file; the values stay on disk until they are asked for.

    Args:
        keys (`list[bytes]`): of 16 bytes each.
        bounds (`ndarray` of shape `(N + 1,)`): entry i is `values[bounds[i]:bounds[i + 1]]`.
        values (`Any`): fp32, sliced out of the mapped file.
    """

    keys: list[bytes]
    bounds: NDArray[np.int64]
    values: Any

    def entry(self, i: int) -> NDArray[np.float32]:
        """The log-probs of entry `i`."""
        values: NDArray[np.float32] = self.values[int(self.bounds[i]) : int(self.bounds[i + 1])]
        return values


def segment_files(folder: Path) -> list[Path]:
    """The finished files of `folder`, oldest first."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(_SUFFIX))


def write_segment(folder: Path, identity: str, entries: dict[bytes, NDArray[np.float32]]) -> Path:
    """Write `entries` to a new file of `folder` that no other process writes, and return its path.

    Raises:
        `OSError`: the file could not be written; then none is there.
    """
    lengths = [len(values) for values in entries.values()]
    arrays: dict[str, NDArray[Any]] = {
        "keys": np.frombuffer(b"".join(entries), dtype=np.uint8).reshape(-1, KEY_BYTES),
        "bounds": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "values": np.concatenate([*entries.values(), np.empty(0, np.float32)]).astype(np.float32),
    }
    metadata = {"format": _FORMAT, "digest": _digest(identity, arrays)}
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex}"
    path, unfinished = folder / f"{name}{_SUFFIX}", folder / f"{name}{_UNFINISHED}"
    try:
        with unfinished.open("wb") as file:
            file.write(save(arrays, metadata))
            file.flush()
            os.fsync(file.fileno())
        # The name appears when all bytes are on disk: a kill before leaves no file that reads as good
        unfinished.rename(path)
        _sync_folder(folder)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return path


def read_segment(path: Path, identity: str) -> Segment | None:
    """The file's entries, or None, with a warning, if any byte of it is missing, changed or of another reference."""
    try:
        file: Any = safe_open(path, framework="np")
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError("it is not a file of a store")
        arrays = {name: file.get_tensor(name) for name in ("keys", "bounds", "values")}
        if metadata.get("digest") != _digest(identity, arrays):
            raise ValueError("its checksum does not fit what it holds, for this reference")
    except (SafetensorError, OSError, ValueError) as error:
        logger.warning("Ignored %s in the store of reference log-probs: %s. It can be deleted.", path, error)
        return None
    keys = [key.tobytes() for key in arrays["keys"]]
    return Segment(keys, arrays["bounds"], file.get_slice("values"))


def remove_abandoned(folder: Path) -> None:
    """Delete what processes that died while writing have left."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        try:
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                path.unlink()
        except OSError:
            pass  # another process was first, or may not be touched


def _digest(identity: str, arrays: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(identity.encode())
    for name in ("keys", "bounds", "values"):
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make the new name durable, where the file system can; without it a power cut costs the file, not its truth."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
