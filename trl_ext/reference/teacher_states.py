"""The store of a teacher's last hidden states: one entry per sequence, and the teacher's head.

The files are those of the store of reference log-probs. An entry has the bytes of the hidden states, as fp32 words that
need not be numbers. Dimensions: B rows, S columns, N scored tokens, n of one row, H hidden size.
"""

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from .segments import Entries, write_file
from .store import DiskStore

logger = logging.getLogger("trl_ext")

_HEAD = "head"  # a folder, because the store reads every file of its own


class _States(DiskStore):
    """The entries of one teacher. They are too large to stay in memory if the disk is full."""

    contents = "hidden states of the teacher"
    consequence = "The teacher computes them in each epoch"
    option = "teacher_store_dir"

    def add(self, entries: Entries) -> None:
        if self._writes:
            super().add(entries)

    def _stop_writing(self, error: OSError) -> None:
        super()._stop_writing(error)
        self._in_memory = {}


class StoredHead(nn.Module):
    """The head of a stored teacher: the weight `(V, H)` and the bias `(V,)`, and how its product becomes logits."""

    def __init__(self, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensors["weight"], requires_grad=False)
        bias = tensors.get("bias")
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.logit_scale = float(metadata["logit_scale"])
        self.softcap = float(metadata["softcap"]) if metadata["softcap"] else None
        self.dtype: torch.dtype = getattr(torch, metadata["dtype"])  # of the hidden states
        self.keeps_padding = metadata["keeps_padding"] == "True"
        self.vocabulary = int(metadata["vocabulary"])

    def write(self, folder: Path) -> None:
        """Write the head to a file of `folder`."""
        path = folder / _HEAD / "head.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": self.weight.detach().cpu().contiguous()}
        if self.bias is not None:
            tensors["bias"] = self.bias.detach().cpu().contiguous()
        metadata = {
            "identity": folder.name,
            "logit_scale": repr(self.logit_scale),
            "softcap": "" if self.softcap is None else repr(self.softcap),
            "dtype": str(self.dtype).removeprefix("torch."),
            "keeps_padding": str(self.keeps_padding),
            "vocabulary": str(self.vocabulary),
        }
        digest = _digest_of(metadata, tensors)
        write_file(path, save(tensors, {**metadata, "digest": digest}))

    @classmethod
    def read(cls, folder: Path) -> "StoredHead | None":
        """Return the head in `folder`; `None` if there is none, or the file is damaged."""
        path = folder / _HEAD / "head.safetensors"
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            logger.warning("Ignored %s: %s. The teacher is loaded.", path, error)
            return None
        digest = metadata.pop("digest", None)
        if digest != _digest_of(metadata, tensors) or metadata.get("identity") != folder.name:
            logger.warning("Ignored %s: its checksum is wrong. The teacher is loaded.", path)
            return None
        return cls(tensors, metadata)


class TeacherStates:
    """The hidden states of one teacher on disk.

    Args:
        root (`Path`): the folder of all teachers.
        identity (`str`): the identity of this teacher; the name of its folder, and a part of each key.
        head (`StoredHead`): its head, which says what the entries are.
        merges (`bool`): whether this process merges files. One of the ranks that share a file system is enough.
    """

    def __init__(self, root: Path, identity: str, head: StoredHead, *, merges: bool = True) -> None:
        self.folder = root / identity
        self.head = head
        self._identity = identity
        self._store = _States(self.folder, identity)
        self._store._merges = self._store._merges and merges

    def keys(self, ids_BS: Tensor, mask_BS: Tensor, labels_BS: Tensor) -> list[bytes]:
        """Return the key of each row: of its tokens, and of which of them are scored."""
        ids, mask, labels = (x.cpu().numpy() for x in (ids_BS, mask_BS, labels_BS))
        return [self._key(*row) for row in zip(ids, mask != 0, labels != -100, strict=True)]

    def _key(self, ids_S: NDArray[Any], mask_S: NDArray[Any], is_scored_S: NDArray[Any]) -> bytes:
        digest = hashlib.blake2b(self._identity.encode(), digest_size=16)
        if self.head.keeps_padding:  # the states depend on the column of a token
            digest.update(int(mask_S.argmax()).to_bytes(8, "little"))
        digest.update(ids_S[mask_S].astype(np.int64).tobytes())
        digest.update(is_scored_S[mask_S].tobytes())
        return digest.digest()

    def get(self, key: bytes, tokens: int) -> Tensor | None:
        """Return the states of one row, `(n, H)` with n `tokens`; `None` if they are not stored."""
        words = self._store.get(key)
        width, dtype = self.head.weight.shape[1], self.head.dtype
        if words is None or len(words) != self._words(tokens):
            return None
        raw_bytes = words.view(np.uint8)[: tokens * width * dtype.itemsize]
        return torch.from_numpy(raw_bytes.copy()).view(dtype).view(tokens, width)

    def is_listed(self, key: bytes, tokens: int) -> bool:
        """Return whether the index of a file has the states of one row. They are not read, so may be damaged."""
        return self._store.length(key) == self._words(tokens)

    def _words(self, tokens: int) -> int:
        """Return the number of fp32 words that hold the states of one row."""
        return -(-tokens * self.head.weight.shape[1] * self.head.dtype.itemsize // 4)

    def add(self, states: dict[bytes, Tensor]) -> None:
        """Store the states of rows, `(n, H)` each."""
        self._store.add({key: _as_words(states_nH) for key, states_nH in states.items()})

    def flush(self) -> None:
        """Write new entries to disk, and find those of other processes."""
        self._store.flush()


def _as_words(states_nH: Tensor) -> NDArray[np.float32]:
    raw_bytes = states_nH.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.pad(raw_bytes, (0, -len(raw_bytes) % 4)).view(np.float32)


def _digest_of(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(repr(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a saved model, by its path in `folder`; not of its training's checkpoints."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(("checkpoint-", ".")) for part in name.parts):
            with path.open("rb") as file:
                digests[str(name)] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
