"""The work between the products by Triton's kernels: one launch a tile."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from ..gradients import Coefficients
from ..logits import LogitTransform
from ..statistics import ABSENT, FAR, RunningStatistics
from ..tiles import Tile
from . import triton_kernels


class TritonWork:
    """As `TorchWork`, whose results it equals to fp32 rounding; the product is left as it was."""

    def __init__(self, transform: LogitTransform) -> None:
        self.capped = transform.softcap is not None
        self.scale, self.cap = transform.slope, 0.0
        if transform.softcap is not None:
            self.scale, self.cap = transform.logit_scale / transform.softcap, transform.softcap / transform.temperature
        self._buffers: dict[str, Tensor] = {}

    def fold(
        self, statistics: RunningStatistics, tile: Tile, coefficients: torch.dtype | None, sums_nH: Tensor | None
    ) -> Tensor | None:
        n, v = tile.product.shape
        written = None if coefficients is None else self._buffer("coefficients", tile.product, coefficients)
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
        with _current(tile.product.device):
            triton_kernels.fold[(n,)](
                tile.product,
                _packed(tile.bias),
                _packed(statistics.targets[tile.tokens]),
                *(None if x is None else x[tile.tokens] for x in numbers),
                written,
                sums_nH,
                tile.classes.start,
                v,
                self.scale,
                self.cap,
                ABSENT,
                FAR=FAR,
                HAS_BIAS=tile.bias is not None,
                CAPPED=self.capped,
                ENTROPY=statistics.sum_shifted_exp is not None,
                SQUARES=statistics.sum_sq_exp is not None,
                MEAN=statistics.sum_logits is not None,
                TOP1=statistics.max_before_target is not None,
                COEFFICIENTS=written is not None,
                RESCALES=sums_nH is not None,
                UNITS=0 if sums_nH is None else sums_nH.shape[1],
                **_of_width(v),
            )
        return written

    def gradient(
        self,
        coefficients: Coefficients,
        tile: Tile,
        targets: Tensor,
        *,
        nontarget_grad: torch.dtype | None,
        whole: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        n, v = tile.product.shape
        of_others = None if nontarget_grad is None else self._buffer("coefficients", tile.product, nontarget_grad)
        with_target = None if whole is None else self._buffer("whole", tile.product, whole)
        numbers = (
            coefficients.maximum,
            coefficients.offset,
            coefficients.entropy_slope,
            coefficients.scale,
            coefficients.uniform_grad,
            coefficients.whole_factor,
            coefficients.whole_target,
        )
        with _current(tile.product.device):
            triton_kernels.gradient[(n,)](
                tile.product,
                _packed(tile.bias),
                _packed(targets),
                *(None if x is None else _packed(x[tile.tokens]) for x in numbers),
                of_others,
                with_target,
                tile.classes.start,
                v,
                self.scale,
                self.cap,
                HAS_BIAS=tile.bias is not None,
                CAPPED=self.capped,
                ENTROPY=coefficients.entropy_slope is not None,
                MEAN=coefficients.uniform_grad is not None,
                BRACKET=of_others is not None,
                WHOLE=with_target is not None,
                **_of_width(v),
            )
        return of_others, with_target

    def _buffer(self, name: str, product: Tensor, dtype: torch.dtype) -> Tensor:
        """Of the product's shape; the next tile overwrites it."""
        held = self._buffers.get(name)
        if held is None or held.numel() < product.numel() or held.dtype != dtype:
            self._buffers.pop(name, None)
            held = self._buffers[name] = torch.empty(product.numel(), dtype=dtype, device=product.device)
        return held[: product.numel()].view(product.shape)


def _packed(numbers: Tensor | None) -> Tensor | None:
    """The kernels step from one number to the next: what is given may be a column of something, or expanded."""
    return None if numbers is None else numbers.contiguous()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, wherever the tensors lie."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def _of_width(columns: int) -> dict[str, int]:
    """How a row of so many columns is laid out: at most 32 numbers a thread of an NVIDIA device."""
    width = triton.next_power_of_2(columns)
    # Triton 3.10 fuses multiplications and additions only where it is asked to, and 3.9 warns of that
    return {"COLUMNS": width, "num_warps": min(16, max(1, width // 1024)), "enable_fp_fusion": True}
