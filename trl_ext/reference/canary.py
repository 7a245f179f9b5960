"""A few sequences with the log-probs that a reference gave them: they show a later run whether its own is the same."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save
from torch import Tensor

from ..packing.first_batch import multiplies_fp32
from ..packing.support import has_experts
from .segments import digest_of, ignored, read_file, write_file
from .sequences import Sequences
from .weights import ReferenceWeights

FILE = "canary"
_ROWS, _TOKENS = 4, 512
_ARRAYS = ("input_ids", "attention_mask", "completion_mask", "values")


class Tolerance(NamedTuple):
    """How far apart two passes of one reference over the same sequence may be.

    Args:
        off (`float`): of a log-prob x, in units of max(1, |x|).
        share (`float`): of the tokens, which may be further off.
    """

    off: float
    share: float


# In fp32; and in less, where the shape of a batch changes log-probs visibly
EXACT, COARSE = Tolerance(1e-3, 0.0), Tolerance(0.1, 0.1)


def tolerance_of(weights: ReferenceWeights, accelerator: Any) -> Tolerance:
    """How far two passes of the reference over one sequence may be apart."""
    if (
        accelerator.mixed_precision != "no"
        or not multiplies_fp32(accelerator.device)
        or getattr(weights.base, "is_quantized", False)
        or not weights.dtypes <= {torch.float32, torch.float64}
    ):
        return COARSE
    # A router of experts can flip on the last bit, which changes a few tokens by much
    return EXACT._replace(share=COARSE.share) if has_experts(weights.base) else EXACT


@dataclass(frozen=True)
class Canary:
    """A few rows, and what a reference gave them.

    Args:
        identity (`str`): of the reference.
        arrays (`dict[str, ndarray]`):
            `input_ids`, `attention_mask` and `completion_mask` of shape `(R, S)`; `values`, the log-probs, of shape
            `(R, S - 1)`, 0 without a label.
    """

    identity: str
    arrays: dict[str, NDArray[Any]]

    @classmethod
    def of(cls, identity: str, sequences: Sequences, entries: dict[int, NDArray[np.float32]]) -> "Canary | None":
        """Made of rows of a batch that have finite `entries`: the longest four of at most 512 tokens, or the shortest.

        None where no row has any.
        """
        rows = [row for row, values in entries.items() if len(values) and np.isfinite(values).all()]
        rows.sort(key=sequences.length)
        chosen = [row for row in rows if sequences.length(row) <= _TOKENS][-_ROWS:] or rows[:1]
        if not chosen:
            return None
        batch = {name: tensor.cpu().numpy().astype(np.int64) for name, tensor in sequences.part(chosen).items()}
        values = np.zeros_like(batch["input_ids"][:, 1:], np.float32)
        for i, row in enumerate(chosen):
            values[i, batch["completion_mask"][i, 1:] != 0] = entries[row]
        return cls(identity, {**batch, "values": values})

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that follow from all of it."""
        return digest_of(self.identity, {name: self.arrays[name] for name in _ARRAYS})

    @property
    def tokens(self) -> int:
        """Tokens of the pass that checks it, padding among them."""
        return int(self.arrays["input_ids"].size)

    def batch(self, device: torch.device) -> dict[str, Tensor]:
        """Its rows, as TRL's collator would give them."""
        return {name: torch.as_tensor(self.arrays[name], device=device) for name in _ARRAYS[:3]}

    def why_another(self, log_probs: Tensor, tolerance: Tolerance) -> str | None:
        """How `log_probs` of its rows, of shape `(R, S - 1)`, show another reference, or None."""
        labelled = self.arrays["completion_mask"][:, 1:] != 0
        then, now = (x[labelled] for x in (self.arrays["values"], log_probs.float().cpu().numpy()))
        off = np.abs(now - then)
        far = ~(off <= tolerance.off * np.maximum(1, np.abs(then)))
        if far.sum() <= np.ceil(tolerance.share * (len(far) - 1)):  # of few tokens one, but never all
            return None
        return f"{far.sum()} of {len(far)} differ, by up to {off.max():.2g}"

    def write(self, folder: Path) -> None:
        """Write it into `folder`, unless one is there.

        Raises:
            `OSError`: it could not be written.
        """
        if not (folder / FILE).exists():
            write_file(folder / FILE, save(self.arrays, {"digest": self.digest}))

    @classmethod
    def read(cls, folder: Path, identity: str) -> "Canary | None":
        """That of `folder`; None, with a warning, if it is damaged or of another reference."""
        path = folder / FILE
        try:
            metadata, arrays = read_file(path, _ARRAYS)
            canary = cls(identity, arrays)
            if metadata.get("digest") != canary.digest:
                raise ValueError("its checksum does not fit what it holds, for this reference")
        except (SafetensorError, OSError, ValueError) as error:
            ignored(path, error)
            return None
        return canary
