"""The operations on a tile between the matrix products by Triton kernels, with one launch per tile."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from ..gradients import Coefficients
from ..logits import LogitTransform
from ..statistics import ABSENT, FAR, Finished, RunningStatistics
from . import triton_kernels
from .work import Tile

_TOKENS = 1024  # of a program of `finish`


class TritonWork:
    """Computes the same as `TorchWork` up to fp32 rounding, but overwrites only the absent numbers of the product.

    A tile with `absent` must have no softcap, which would bound the number that is written there.
    """

    def __init__(self, transform: LogitTransform) -> None:
        self.scale, self.cap = transform.slope, 0.0
        if transform.softcap is not None:
            self.scale, self.cap = transform.logit_scale / transform.softcap, transform.softcap / transform.temperature
        self.capped = transform.softcap is not None
        self._buffers: dict[str, Tensor] = {}

    def fold(
        self, statistics: RunningStatistics, tile: Tile, coefficients: torch.dtype | None, sums_nH: Tensor | None
    ) -> Tensor | None:
        n, v = tile.product.shape
        self._leave_out(tile)
        written = self._buffer("coefficients", tile.product, coefficients)
        numbers = (
            *(statistics.max, statistics.shift, statistics.sum_exp, statistics.target_logit),
            *(statistics.sum_shifted_exp, statistics.sum_sq_exp, statistics.sum_logits, statistics.max_before_target),
        )
        with _current(tile.product.device):
            triton_kernels.fold[(n,)](
                *(tile.product, _packed(tile.bias), _packed(statistics.targets[tile.tokens])),
                *(None if x is None else x[tile.tokens] for x in numbers),
                *(written, sums_nH, tile.classes.start, v, tile.product.stride(0), self.scale, self.cap, ABSENT),
                FAR=FAR,
                CAPPED=self.capped,
                UNITS=0 if sums_nH is None else sums_nH.shape[1],
                **_of_width(v),
            )
        return written

    def finish(
        self, statistics: RunningStatistics, outputs: tuple[str, ...], group: dist.ProcessGroup | None = None
    ) -> Finished:
        combined = None if group is None else statistics.combine_(group)
        held = (statistics.max, statistics.sum_exp.log(), statistics.target_logit, statistics.shift, statistics.sum_exp)
        # Not views of one tensor: the caller may write into a result
        rescale, log_odds, log_p, entropy = (torch.empty_like(statistics.max) for _ in range(4))
        written = entropy if statistics.sum_shifted_exp is not None else None
        with _current(statistics.max.device):
            triton_kernels.finish[(triton.cdiv(len(rescale), _TOKENS),)](
                *(*held, statistics.sum_shifted_exp, rescale, log_odds, log_p, written, len(rescale), ABSENT),
                BLOCK=_TOKENS,
            )
        if statistics.sum_sq_exp is not None:
            statistics.sum_sq_exp = statistics.sum_sq_exp * rescale.square()
        results = statistics.results(outputs, log_odds, log_p, written)
        return Finished(rescale if combined is None else combined, log_odds, results)

    def gradient(
        self,
        coefficients: Coefficients,
        tile: Tile,
        targets: Tensor,
        *,
        nontarget_grad: torch.dtype | None,
        grad_logits: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        n, v = tile.product.shape
        self._leave_out(tile)
        written = (
            self._buffer("coefficients", tile.product, nontarget_grad),
            self._buffer("grad_logits", tile.product, grad_logits),
        )
        numbers = (
            *(coefficients.maximum, coefficients.offset, coefficients.entropy_slope, coefficients.scale),
            *(coefficients.uniform_grad, coefficients.scaled_row_factor, coefficients.scaled_target),
        )
        with _current(tile.product.device):
            triton_kernels.gradient[(n,)](
                *(tile.product, _packed(tile.bias), _packed(targets)),
                *(None if x is None else _packed(x[tile.tokens]) for x in numbers),
                *(*written, tile.classes.start, v, tile.product.stride(0), self.scale, self.cap),
                CAPPED=self.capped,
                **_of_width(v),
            )
        return written

    def _leave_out(self, tile: Tile) -> None:
        """Overwrite the absent numbers of the product, so that their logits are `ABSENT`."""
        if tile.absent is not None:
            tile.product.masked_fill_(tile.absent, ABSENT / self.scale)

    def _buffer(self, name: str, product: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """Return a buffer of the product's shape and stride, which the next tile overwrites; None if no dtype."""
        if dtype is None:
            return None
        held, (rows, columns), stride = self._buffers.get(name), product.shape, product.stride(0)
        if held is None or len(held) < rows * stride or held.dtype != dtype:
            self._buffers.pop(name, None)  # freed before the new one is allocated
            held = self._buffers[name] = product.new_empty(rows * stride, dtype=dtype)
        return held[: rows * stride].view(rows, stride)[:, :columns]


def _packed(numbers: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor, as the kernels need it: the caller's may be a column of another, or expanded."""
    return None if numbers is None else numbers.contiguous()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current device. Triton launches there, whatever the device of the tensors."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def _of_width(columns: int) -> dict[str, int]:
    """Return launch options for rows of so many columns: at most 32 numbers per thread of an NVIDIA device."""
    width = triton.next_power_of_2(columns)
    # Triton 3.10 fuses multiply-adds only on request; 3.9 warns about this change
    return {"COLUMNS": width, "num_warps": min(16, max(1, width // 1024)), "enable_fp_fusion": True}
