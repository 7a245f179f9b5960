"""The files of the store on disk. A file is written completely or not at all, and checked when it is read."""

import contextlib
import hashlib
import json
import logging
import os
import stat
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

logger = logging.getLogger("trl_ext")

Entries = dict[bytes, NDArray[np.float32]]

KEY_BYTES = 16
CHECK_BYTES = 8
_FORMAT = "trl_ext reference log-probs, version 2"
_SUFFIX = ".safetensors"
_UNFINISHED = ".unfinished"
_ABANDONED_AFTER = 3600.0  # seconds; no write takes this long
_OPEN_FILES = 256  # per process

# The index of a file: dtype and number of dimensions of each array, as safetensors names them
_INDEX = {"keys": ("U8", 2), "checks": ("U8", 2), "bounds": ("I64", 1)}


class UnusableFileError(ValueError):
    """A file of the store is damaged, or something else. The message says what is wrong."""


class Segment:
    """The entries of one file. Keys are in memory. Values stay on disk and are checked at each read.

    Up to `_OPEN_FILES` files stay open, so their entries can be read after the files are deleted.

    Args:
        keys (`bytes`), checks (`bytes`): per entry, 16 bytes of key and 8 bytes of checksum of key and values.
        bounds (`ndarray` of shape `(N + 1,)`): entry i is `values[bounds[i]:bounds[i + 1]]`.
        offset (`int`): the offset of the values in the file, in bytes.
    """

    _open = 0

    def __init__(self, path: Path, keys: bytes, checks: bytes, bounds: NDArray[np.int64], offset: int) -> None:
        self.path = path
        self._offset = offset
        self._keys = keys
        self._checks = checks
        self._bounds: Any = memoryview(bounds.data)  # its elements are Python integers, which are faster than numpy's
        self._damaged = False
        self._file: int | None = None
        if Segment._open < _OPEN_FILES:
            with contextlib.suppress(OSError):
                self._file = os.open(path, os.O_RDONLY)
                Segment._open += 1

    def __del__(self, close: Any = os.close) -> None:
        if getattr(self, "_file", None) is not None:
            close(self._file)
            type(self)._open -= 1

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def size(self) -> int:
        """Size of the file in bytes, without its header."""
        return len(self._keys) + len(self._checks) + self._bounds.nbytes + 4 * self._bounds[-1]

    @property
    def keys(self) -> list[bytes]:
        return np.frombuffer(self._keys, f"V{KEY_BYTES}").tolist()  # type: ignore[no-any-return]

    def length(self, i: int) -> int:
        """Return how many log-probs entry `i` has, without reading them."""
        return int(self._bounds[i + 1] - self._bounds[i])

    def entry(self, i: int) -> NDArray[np.float32] | None:
        """Return the log-probs of entry `i`, or None if its checksum is wrong. Raises `OSError` if the file is gone."""
        begin, end = self._bounds[i], self._bounds[i + 1]
        raw = self._read(4 * (end - begin), self._offset + 4 * begin)
        key = self._keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
        if _check(key, raw) == self._checks[i * CHECK_BYTES : (i + 1) * CHECK_BYTES]:
            return np.frombuffer(raw, np.float32)
        if not self._damaged:
            self._damaged = True
            logger.warning(
                "A sequence in %s has a wrong checksum and is scored again. The file's other sequences are used.",
                self.path,
            )
        return None

    def _read(self, count: int, offset: int) -> bytes:
        if self._file is not None:
            return os.pread(self._file, count, offset)
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), count, offset)


def segment_files(folder: Path) -> list[Path]:
    """Return the finished files of `folder`, oldest first. Some may be unusable, see [`read_segment`]."""
    return sorted(folder / name for name in os.listdir(folder) if name.endswith(_SUFFIX))


def write_segment(folder: Path, identity: str, entries: Entries) -> Path:
    """Write `entries` to a new file in `folder` with a unique name, and return its path; see [`write_file`]."""
    values = [np.ascontiguousarray(x, np.float32) for x in entries.values()]
    checks = b"".join(_check(key, x.data) for key, x in zip(entries, values, strict=True))
    arrays: dict[str, NDArray[Any]] = {
        "keys": np.frombuffer(b"".join(entries), np.uint8).reshape(-1, KEY_BYTES),
        "checks": np.frombuffer(checks, np.uint8).reshape(-1, CHECK_BYTES),
        "bounds": np.cumsum([0, *map(len, values)], dtype=np.int64),
    }
    metadata = {"format": _FORMAT, "digest": digest_of(identity, arrays)}
    arrays["values"] = np.concatenate([*values, np.empty(0, np.float32)])
    return write_file(folder / f"{time.time_ns():020d}-{uuid.uuid4().hex}{_SUFFIX}", save(arrays, metadata))


def write_file(path: Path, content: bytes) -> Path:
    """Write a file and return its path. The file gets its name after all of its bytes are on disk.

    If `OSError` is raised, no file remains.
    """
    unfinished = path.with_name(f"{uuid.uuid4().hex}{_UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        _sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # a read-only file system refuses this too, and the first error says more
            unfinished.unlink()
        raise
    return path


def read_segment(path: Path, identity: str) -> Segment:
    """Return the file's entries.

    Raises:
        `FileNotFoundError`: another process has merged the file into a new one.
        `UnusableFileError`: the file's index is damaged, or it is of another reference or format.
    """
    metadata, arrays = read_file(path, _INDEX)
    if metadata.get("format") != _FORMAT:
        raise UnusableFileError("it is not a file of reference log-probs")
    if metadata.get("digest") != digest_of(identity, arrays):
        raise UnusableFileError("its checksum is wrong, so it is damaged or belongs to another reference")
    try:
        values = _header_of_values(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnusableFileError(str(error)) from error
    bounds = np.frombuffer(arrays["bounds"].tobytes(), np.int64)
    count = len(bounds) - 1
    # A right digest only says that these are the bytes that were written
    shapes_fit = arrays["keys"].shape == (count, KEY_BYTES) and arrays["checks"].shape == (count, CHECK_BYTES)
    bounds_fit = shapes_fit and bounds[0] == 0 and (np.diff(bounds) >= 0).all()
    if not bounds_fit or values.get("dtype") != "F32" or values.get("shape") != [int(bounds[-1])]:
        raise UnusableFileError("its index does not fit its values")
    return Segment(path, arrays["keys"].tobytes(), arrays["checks"].tobytes(), bounds, values["offset"])


def read_file(path: Path, arrays_to_read: dict[str, tuple[str, int]]) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Return the metadata and the arrays of a safetensors file that have the dtypes and dimensions of `arrays_to_read`.

    Raises `FileNotFoundError`, or `UnusableFileError` if it is no such file.
    """
    try:
        # Opening a FIFO would wait for a writer
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnusableFileError("it is not a regular file")
        arrays = {}
        with safe_open(path, framework="np") as file:
            for name, (dtype, dimensions) in arrays_to_read.items():
                part = file.get_slice(name)
                if part.get_dtype() != dtype or len(part.get_shape()) != dimensions:
                    raise UnusableFileError(f"its array `{name}` is {part.get_dtype()} of shape {part.get_shape()}")
                arrays[name] = file.get_tensor(name)
            return file.metadata() or {}, arrays
    except FileNotFoundError as error:
        if path.is_symlink():
            raise UnusableFileError("it is a link to a missing file") from error
        raise
    except (SafetensorError, OSError) as error:
        raise UnusableFileError(str(error)) from error


def digest_of(identity: str, arrays: dict[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of `identity` and the bytes of `arrays`, in order."""
    digest = hashlib.sha256(identity.encode())
    for array in arrays.values():
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def remove_abandoned(folder: Path) -> None:
    """Delete the unfinished files of processes that died."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        with contextlib.suppress(OSError):  # another process deleted it first, or owns it
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                path.unlink()


def warn_ignored(files: list[tuple[Path, object]], contents: str) -> None:
    """Warn once that `files` of the store of `contents` are not used. With each comes the reason."""
    path, reason = files[0]
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    which = "them" if more else "it"
    logger.warning("Ignored %s%s in the store of %s: %s. You can delete %s.", path, more, contents, reason, which)


def _check(key: bytes, values: Any) -> bytes:
    digest = hashlib.blake2b(key, digest_size=CHECK_BYTES)
    digest.update(values)
    return digest.digest()


def _header_of_values(path: Path) -> dict[str, Any]:
    """Return dtype and shape of the array `values` of a safetensors file, and its `offset` in the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size)).get("values")
    return {} if header is None else {**header, "offset": 8 + size + header["data_offsets"][0]}


def _sync_folder(folder: Path) -> None:
    """Make the new name durable, if the file system supports it. Otherwise a power cut may lose the file."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        descriptor = os.open(folder, os.O_RDONLY)
        opened.callback(os.close, descriptor)
        os.fsync(descriptor)
