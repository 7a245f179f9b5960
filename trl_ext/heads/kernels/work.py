"""What runs on a tile between the matrix products: the torch version, and the choice of torch or Triton."""

import math
import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, Union

import torch
import torch.distributed as dist
from torch import Tensor

from ..gradients import Coefficients
from ..logits import LinearLogProbs, LogitTransform
from ..statistics import ABSENT, Finished, RunningStatistics

if TYPE_CHECKING:
    from .triton_work import TritonWork

KERNELS = ("torch", "triton")


def row_stride(columns: int) -> int:
    """Return the elements from one row of a tile to the next: an odd number of columns gets padding at the end."""
    return -(-columns // 64) * 64


def as_tile(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """Return a (rows, columns) view of a flat buffer, each row aligned like the first one."""
    stride = row_stride(columns)
    return buffer[: rows * stride].view(rows, stride)[:, :columns]


class Tile(NamedTuple):
    """The product x = h W^T of some tokens and consecutive classes, and its operands.

    `product` (n, v), a view by `as_tile`, includes the low-rank term of `down` (n, R) and `up` (v, R), but not yet
    `bias` (v,), which may have any dtype. The next tile overwrites `product`. `absent` (n, v), if given, marks
    logits that count as `ABSENT` and get no gradient.
    """

    tokens: slice
    classes: slice
    product: Tensor
    bias: Tensor | None
    hidden: Tensor
    weight: Tensor
    down: Tensor | None
    up: Tensor | None
    absent: Tensor | None = None


class TorchWork:
    """The operations on a tile between the matrix products, in torch. They overwrite the product.

    Args:
        transform (`LogitTransform`): maps the product to the logits.
    """

    def __init__(self, transform: LogitTransform) -> None:
        self.transform = transform
        self._scratch: Tensor | None = None

    def fold(
        self, statistics: RunningStatistics, tile: Tile, coefficients: torch.dtype | None, sums_nH: Tensor | None
    ) -> Tensor | None:
        """Fold a tile into `statistics`.

        Args:
            coefficients (`torch.dtype`, *optional*): if given, return exp(z - shift) dz/dx divided by the slope, of
                shape (n, v) and this dtype, 0 for the target.
            sums_nH (`Tensor` of shape `(n, H)`, *optional*): sums of earlier tiles in units of exp(shift), which are
                rescaled where the shift moves.
        """
        logits, scratch = self._logits(tile)
        # Before `fold_`, which overwrites the logits
        softcap_derivative = self.transform.softcap_derivative(logits) if coefficients is not None else None
        if tile.absent is not None:
            logits.masked_fill_(tile.absent, ABSENT)
        rescale = statistics.fold_(tile.tokens, tile.classes.start, logits, scratch)
        # On other devices the condition would wait for the device
        if sums_nH is not None and (sums_nH.device.type != "cpu" or bool((rescale != 1).any())):
            sums_nH.mul_(rescale)
        if coefficients is None:
            return None
        return (scratch if softcap_derivative is None else scratch.mul_(softcap_derivative)).to(coefficients)

    def finish(
        self, statistics: RunningStatistics, outputs: tuple[str, ...], group: dist.ProcessGroup | None = None
    ) -> Finished:
        """Combine the ranks of `group`, and return what follows. All tiles must have been added."""
        return statistics.finish_(outputs, group)

    def gradient(
        self,
        coefficients: Coefficients,
        tile: Tile,
        targets: Tensor,
        *,
        nontarget_grad: torch.dtype | None,
        grad_logits: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return `nontarget_grad` and `grad_logits` of `Coefficients` for a tile: (n, v) each, None if no dtype.

        `targets` (n,) are class ids.
        """
        logits, scratch = self._logits(tile)
        local = targets - tile.classes.start
        nontarget = coefficients.nontarget_grad_(tile.tokens, local, logits, scratch)
        if tile.absent is not None:
            nontarget.masked_fill_(tile.absent, 0.0)
        result = nontarget.to(nontarget_grad) if nontarget_grad is not None else None
        if grad_logits is None:
            return result, None
        if result is nontarget:
            nontarget = logits.copy_(nontarget)
        return result, coefficients.add_target_grad_(tile.tokens, local, nontarget).to(grad_logits)

    def _logits(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Overwrite the product with the logits; return them and a buffer of their shape."""
        rows, columns = tile.product.shape
        if self._scratch is None or len(self._scratch) < rows * row_stride(columns):
            self._scratch = tile.product.new_empty(rows * row_stride(columns))
        if tile.bias is not None:
            tile.product.add_(tile.bias)
        self.transform.apply_(tile.product)
        return tile.product, as_tile(self._scratch, rows, columns)


TileWork = Union[TorchWork, "TritonWork"]


def work_of(kernels: str | None, device: torch.device, statistics: torch.dtype, transform: LogitTransform) -> TileWork:
    """Return the operations by the given kernels; None chooses from the device. Float64 always runs in torch."""
    name = kernels or ("torch" if device.type == "cpu" or triton_unavailable_reason(device) else "triton")
    if name == "torch" or statistics == torch.float64:
        return TorchWork(transform)
    from .triton_work import TritonWork

    return TritonWork(transform)


# Not compiled: this runs the kernels on the device, which tracing would not do
@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_kernels(kernels: str | None, device: torch.device, name: str = "kernels") -> None:
    """Raise `ValueError` unless the argument `name` is None or one of `KERNELS` that runs on `device`."""
    if kernels is not None and kernels not in KERNELS:
        raise ValueError(f"`{name}` must be None or one of {list(KERNELS)}, got {kernels!r}.")
    reason = triton_unavailable_reason(device) if kernels == "triton" else None
    if reason is not None:
        raise ValueError(f"`{name}='triton'` is not available: {reason}. Leave `{name}` at None to use what runs here.")


@cache
def triton_unavailable_reason(device: torch.device) -> str | None:
    """Return why Triton's kernels do not run on `device`; None if they run. Warns if they should run and do not."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "Triton runs on the CPU only with TRITON_INTERPRET=1, for tests"
    if device.type not in ("cuda", "xpu"):
        return f"Triton does not compile for a device of type {device.type!r}"
    try:
        off_by = _difference(device)
        wrong = None if off_by < 1e-4 else f"Triton's kernels differ from torch by {off_by:.1e} on {device}"
    except torch.OutOfMemoryError:
        raise  # not cached: the next call may have more memory
    except Exception as error:  # from the compiler, the driver or a missing C compiler
        wrong = f"Triton's kernels fail on {device}: {type(error).__name__}: {error}"
    if wrong is not None:
        # Estimated like the table in benchmarks/RESULTS.md
        cost = "Results are the same, but the head takes an estimated 1.6 to 2 times as long"
        warnings.warn(
            f"The LM head runs in torch: {wrong}. {cost}. `trl-ext doctor` tests the kernels again.", stacklevel=2
        )
    return wrong


def _difference(device: torch.device) -> float:
    """Return the largest relative difference of Triton and torch in a small problem; infinity if there is a NaN."""
    from .triton_work import TritonWork

    transform = LogitTransform(0.7, 1.3, 30.0)
    pairs = zip(*(_numbers(work(transform), transform, device) for work in (TorchWork, TritonWork)), strict=True)
    off_by = [float((x - exact).abs().max()) / (float(exact.abs().max()) or 1.0) for exact, x in pairs]
    return math.inf if any(map(math.isnan, off_by)) else max(off_by)


def _numbers(work: TileWork, transform: LogitTransform, device: torch.device) -> list[Tensor]:
    """Return coefficients, sums, results and a gradient of two tiles; the second tile moves the shift."""
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = 8
    width = 300
    units = 48

    def normal(size: int) -> Tensor:
        # The caller may have set another default device and dtype
        return torch.randn(tokens, size, generator=generator, device="cpu", dtype=torch.float32).to(device)

    sums_nH = normal(units)
    upstream_n2 = normal(2)
    targets = torch.arange(tokens, device=device) * (2 * width // tokens)
    first, second = (
        Tile(slice(0, tokens), slice(i * width, (i + 1) * width), product, None, sums_nH, sums_nH, None, None)
        for i, product in enumerate([3 * normal(width), 30 * normal(width)])
    )
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    statistics = RunningStatistics(targets, 2 * width, outputs, torch.float32)
    second_copy = second._replace(product=second.product.clone())
    work.fold(statistics, first, None, None)
    fold_coefficients = work.fold(statistics, second, torch.float32, sums_nH)
    numbers = [None if fold_coefficients is None else fold_coefficients.clone(), sums_nH.clone()]
    rescale, log_odds, results = work.finish(statistics, outputs)
    coefficients = Coefficients(
        statistics.shift,
        statistics.sum_exp,
        statistics.target_logit,
        results.entropy,
        LinearLogProbs(upstream_n2[:, 0], upstream_n2[:, 1]),
        transform,
        2 * width,
    )
    coefficients.use_unit(coefficients.unit())
    gradients = work.gradient(
        coefficients, second_copy, targets, nontarget_grad=torch.float32, grad_logits=torch.float32
    )
    numbers += [rescale, log_odds, *results, *gradients]
    return [x.double().cpu() for x in numbers if x is not None]
