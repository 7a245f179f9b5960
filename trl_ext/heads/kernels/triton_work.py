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
        self.scale = transform.slope
        self.cap = 0.0
        self.is_capped = transform.softcap is not None
        if transform.softcap is not None:
            self.scale = transform.logit_scale / transform.softcap
            self.cap = transform.softcap / transform.temperature
        self._buffers: dict[str, Tensor] = {}

    def fold(
        self, statistics: RunningStatistics, tile: Tile, coefficients: torch.dtype | None, sums_nH: Tensor | None
    ) -> Tensor | None:
        n, v = tile.product.shape
        self._mask_absent(tile)
        buffer = self._buffer("coefficients", tile.product, coefficients)
        numbers = (
            statistics.max,
            statistics.shift,
            statistics.sum_exp,
            statistics.target_logit,
            statistics.sum_shifted_exp,
            statistics.sum_sq_exp,
            statistics.sum_logits,
            statistics.max_before_target,
        )
        with _on_device(tile.product.device):
            triton_kernels.fold[(n,)](
                tile.product,
                _contiguous(tile.bias),
                _contiguous(statistics.targets[tile.tokens]),
                *(None if x is None else x[tile.tokens] for x in numbers),
                buffer,
                sums_nH,
                tile.classes.start,
                v,
                tile.product.stride(0),
                self.scale,
                self.cap,
                ABSENT,
                FAR=FAR,
                CAPPED=self.is_capped,
                UNITS=0 if sums_nH is None else sums_nH.shape[1],
                **_launch_options(v),
            )
        return buffer

    def finish(
        self, statistics: RunningStatistics, outputs: tuple[str, ...], group: dist.ProcessGroup | None = None
    ) -> Finished:
        rank_rescale = None if group is None else statistics.combine_(group)
        # Not views of one tensor: the caller may write into a result
        rescale, log_odds, log_p, entropy = (torch.empty_like(statistics.max) for _ in range(4))
        has_entropy = statistics.sum_shifted_exp is not None
        with _on_device(statistics.max.device):
            triton_kernels.finish[(triton.cdiv(len(rescale), _TOKENS),)](
                statistics.max,
                statistics.sum_exp.log(),
                statistics.target_logit,
                statistics.shift,
                statistics.sum_exp,
                statistics.sum_shifted_exp,
                rescale,
                log_odds,
                log_p,
                entropy if has_entropy else None,
                len(rescale),
                ABSENT,
                BLOCK=_TOKENS,
            )
        if statistics.sum_sq_exp is not None:
            statistics.sum_sq_exp = statistics.sum_sq_exp * rescale.square()
        results = statistics.results(outputs, log_odds, log_p, entropy if has_entropy else None)
        return Finished(rescale if rank_rescale is None else rank_rescale, log_odds, results)

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
        self._mask_absent(tile)
        nontarget_buffer = self._buffer("coefficients", tile.product, nontarget_grad)
        logits_buffer = self._buffer("grad_logits", tile.product, grad_logits)
        numbers = (
            coefficients.maximum,
            coefficients.offset,
            coefficients.entropy_slope,
            coefficients.scale,
            coefficients.uniform_grad,
            coefficients.scaled_row_factor,
            coefficients.scaled_target,
        )
        with _on_device(tile.product.device):
            triton_kernels.gradient[(n,)](
                tile.product,
                _contiguous(tile.bias),
                _contiguous(targets),
                *(None if x is None else _contiguous(x[tile.tokens]) for x in numbers),
                nontarget_buffer,
                logits_buffer,
                tile.classes.start,
                v,
                tile.product.stride(0),
                self.scale,
                self.cap,
                CAPPED=self.is_capped,
                **_launch_options(v),
            )
        return nontarget_buffer, logits_buffer

    def _mask_absent(self, tile: Tile) -> None:
        """Overwrite the absent numbers of the product, so that their logits are `ABSENT`."""
        if tile.absent is not None:
            tile.product.masked_fill_(tile.absent, ABSENT / self.scale)

    def _buffer(self, name: str, product: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """Return a buffer of the product's shape and stride, which the next tile overwrites; None if no dtype."""
        if dtype is None:
            return None
        rows, columns = product.shape
        stride = product.stride(0)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < rows * stride or buffer.dtype != dtype:
            del buffer
            self._buffers.pop(name, None)  # freed before the new one is allocated
            buffer = product.new_empty(rows * stride, dtype=dtype)
            self._buffers[name] = buffer
        return buffer[: rows * stride].view(rows, stride)[:, :columns]


def _contiguous(numbers: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor, as the kernels need it: the caller's may be a column of another, or expanded."""
    return None if numbers is None else numbers.contiguous()


def _on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current device. Triton launches there, whatever the device of the tensors."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def _launch_options(columns: int) -> dict[str, int]:
    """Return launch options for rows of so many columns: at most 32 numbers per thread of an NVIDIA device."""
    width = triton.next_power_of_2(columns)
    # Triton 3.10 fuses multiply-adds only on request; 3.9 warns about this change
    return {"COLUMNS": width, "num_warps": min(16, max(1, width // 1024)), "enable_fp_fusion": True}
