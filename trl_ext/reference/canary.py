"""The canary: a few sequences with stored reference log-probs, with which a later run checks its reference."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from ..packing.first_batch import multiplies_fp32
from ..packing.support import has_experts
from .segments import UnusableFileError, digest_of, read_file, warn_ignored, write_file
from .sequences import NEEDED, Sequences
from .weights import ReferenceWeights

FILE = "canary"
_ROWS = 4
_TOKENS = 512
# Dtype and number of dimensions of each array, as safetensors names them
_ARRAYS = {**dict.fromkeys(NEEDED, ("I64", 2)), "values": ("F32", 2)}


class Tolerance(NamedTuple):
    """How much two passes of one reference over the same sequence may differ."""

    off: float  # difference of a log-prob x, in units of max(1, |x|)
    share: float  # share of the tokens that may differ by more


# For fp32, and for lower precision, where log-probs depend visibly on the shape of the batch
EXACT = Tolerance(1e-3, 0.0)
COARSE = Tolerance(0.1, 0.1)


def tolerance_of(weights: ReferenceWeights, accelerator: Any) -> Tolerance:
    """Return the tolerance for this reference on this device."""
    if (
        accelerator.mixed_precision != "no"
        or not multiplies_fp32(accelerator.device)
        or getattr(weights.base, "is_quantized", False)
        or not weights.dtypes <= {torch.float32, torch.float64}
    ):
        return COARSE
    # Rounding can change a router's choice of experts, which changes a few tokens a lot
    return EXACT._replace(share=COARSE.share) if has_experts(weights.base) else EXACT


@dataclass(frozen=True)
class Canary:
    """A few rows and their log-probs."""

    identity: str  # of the reference
    # `input_ids`, `attention_mask`, `completion_mask`: `(R, S)`; `values`: log-probs, `(R, S - 1)`, 0 without a label
    arrays: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, identity: str, sequences: Sequences, entries: dict[int, NDArray[np.float32]]) -> "Canary | None":
        """Choose the 4 longest rows of at most 512 tokens, else the shortest row; `None` without finite `entries`."""
        rows = [row for row, values in entries.items() if len(values) and np.isfinite(values).all()]
        rows.sort(key=lambda row: sequences.lengths[row])
        canary_rows = [row for row in rows if sequences.lengths[row] <= _TOKENS][-_ROWS:] or rows[:1]
        if not canary_rows:
            return None
        batch = {name: tensor.cpu().numpy().astype(np.int64) for name, tensor in sequences.subset(canary_rows).items()}
        values = np.zeros_like(batch["input_ids"][:, 1:], np.float32)
        for i, row in enumerate(canary_rows):
            values[i, batch["completion_mask"][i, 1:] != 0] = entries[row]
        return cls(identity, {**batch, "values": values})

    @property
    def digest(self) -> str:
        """The SHA-256 of identity and arrays, in hexadecimal digits."""
        return digest_of(self.identity, {name: self.arrays[name] for name in _ARRAYS})

    @property
    def tokens(self) -> int:
        """The tokens of the pass that checks the canary, including padding."""
        return int(self.arrays["input_ids"].size)

    def batch(self, device: torch.device) -> dict[str, Tensor]:
        """Return the rows as a batch like those of TRL's collator."""
        return {name: torch.as_tensor(self.arrays[name], device=device) for name in NEEDED}

    def difference(self, log_probs: Tensor, tolerance: Tolerance) -> str | None:
        """Return how `log_probs` `(R, S - 1)` differ from the canary's; None if they are within `tolerance`."""
        labelled = self.arrays["completion_mask"][:, 1:] != 0
        then, now = (x[labelled] for x in (self.arrays["values"], log_probs.float().cpu().numpy()))
        off = np.abs(now - then)
        far = ~(off <= tolerance.off * np.maximum(1, np.abs(then)))
        if far.sum() <= np.ceil(tolerance.share * (len(far) - 1)):  # rounded up, but never all tokens
            return None
        return f"{far.sum()} of {len(far)} differ, by up to {off.max():.2g}"

    def write(self, folder: Path) -> None:
        """Write the canary to `folder`, unless it has one. Raises `OSError` like [`write_file`]."""
        if not (folder / FILE).exists():
            write_file(folder / FILE, save(self.arrays, {"digest": self.digest}))

    @classmethod
    def read(cls, folder: Path, identity: str, tokens: int | None = None) -> "Canary | None":
        """Return the canary of `folder`; None, with a warning, if it is unusable or of another reference.

        `tokens`: how many token ids the reference has, if that is known. On a GPU, a pass over another id would end
        the run.
        """
        path = folder / FILE
        try:
            metadata, arrays = read_file(path, _ARRAYS)
            canary = cls(identity, arrays)
            if metadata.get("digest") != canary.digest:
                raise UnusableFileError("its checksum is wrong, so it is damaged or belongs to another reference")
            if not canary._is_scorable(tokens):
                raise UnusableFileError("its sequences cannot be scored")
        except (FileNotFoundError, UnusableFileError) as error:
            warn_ignored([(path, error)], "reference log-probs")
            return None
        return canary

    def _is_scorable(self, tokens: int | None) -> bool:
        """Whether the arrays are sequences with log-probs, like those that [`Canary.of`] returns."""
        ids, attended, labelled = (self.arrays[name] for name in NEEDED)
        rows, width = ids.shape
        if not rows or width < 2 or attended.shape != ids.shape or labelled.shape != ids.shape:
            return False
        values = self.arrays["values"]
        if values.shape != (rows, width - 1) or not np.isfinite(values).all():
            return False
        ids_fit = ids.min() >= 0 and (tokens is None or ids.max() < tokens)
        return bool(ids_fit and (labelled[:, 1:] != 0).any())
