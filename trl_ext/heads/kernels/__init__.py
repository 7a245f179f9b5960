"""The work between the products of a tile: by Triton's kernels where they run, by torch elsewhere."""

from typing import Protocol

import torch
from torch import Tensor

from ..coefficients import Coefficients
from ..logits import LogitTransform
from ..statistics import RunningStatistics
from ..tiles import Tile
from .choice import why_not_triton
from .torch_work import TorchWork

KERNELS = ("torch", "triton")

__all__ = ["KERNELS", "TileWork", "TorchWork", "check_kernels", "why_not_triton", "work_of"]


class TileWork(Protocol):
    """As `TorchWork`, which says what the methods compute."""

    def fold(
        self, statistics: RunningStatistics, tile: Tile, coefficients: torch.dtype | None, sums_nH: Tensor | None
    ) -> Tensor | None: ...

    def gradient(
        self,
        coefficients: Coefficients,
        tile: Tile,
        targets: Tensor,
        *,
        bracket: torch.dtype | None,
        whole: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None]: ...


def work_of(kernels: str | None, device: torch.device, statistics: torch.dtype, transform: LogitTransform) -> TileWork:
    """What works on tiles of `device`; None chooses. The kernels know fp32 alone: statistics in float64 are torch's."""
    chosen = kernels or ("torch" if device.type == "cpu" or why_not_triton(device) else "triton")
    if chosen == "torch" or statistics == torch.float64:
        return TorchWork(transform)
    from .triton_work import TritonWork

    return TritonWork(transform)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a device is tried as it is, not traced
def check_kernels(kernels: str | None, device: torch.device, name: str = "kernels") -> None:
    """Raise `ValueError` where the argument `name` is none of `KERNELS`, or asks for kernels that do not run there."""
    if kernels is not None and kernels not in KERNELS:
        raise ValueError(f"`{name}` must be None or one of {list(KERNELS)}, got {kernels!r}.")
    reason = why_not_triton(device) if kernels == "triton" else None
    if reason is not None:
        raise ValueError(f"`{name}='triton'` cannot be had: {reason}. Leave it None, which chooses what runs.")
