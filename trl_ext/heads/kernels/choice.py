"""Which kernels work on a tile: torch's or Triton's."""

import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..gradients import Coefficients, Upstream
from ..logits import LogitTransform
from ..statistics import RunningStatistics
from ..tiles import Tile
from .torch_work import TorchWork

KERNELS = ("torch", "triton")


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
        nontarget_grad: torch.dtype | None,
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


if TYPE_CHECKING:
    from .triton_work import TritonWork


@cache
def why_not_triton(device: torch.device) -> str | None:
    """Why the kernels cannot be used on `device`; None where they can. Warns where they should run, and do not."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "on the CPU Triton runs under TRITON_INTERPRET=1 alone, for tests"
    if device.type not in ("cuda", "xpu"):
        return f"Triton does not compile for a device of type {device.type!r}"
    try:
        off_by = _difference(device)
        wrong = None if off_by < 1e-4 else f"on {device} its kernels are off by {off_by:.1e} from torch's results"
    except torch.OutOfMemoryError:
        raise  # the next time there may be memory
    except Exception as error:  # whatever the compiler, the driver or a missing C compiler may raise
        wrong = f"on {device} its kernels fail: {type(error).__name__}: {error}"
    if wrong is not None:
        warnings.warn(f"The head works without Triton, since {wrong}", stacklevel=2)
    return wrong


def _difference(device: torch.device) -> float:
    """The largest difference between the kernels' and torch's numbers in a small problem, relative to the largest."""
    from .triton_work import TritonWork

    transform = LogitTransform(0.7, 1.3, 30.0)
    pairs = zip(*(_numbers(work(transform), transform, device) for work in (TorchWork, TritonWork)), strict=True)
    return max(float((ours - right).abs().max() / right.abs().max()) for right, ours in pairs)


def _numbers(work: "TorchWork | TritonWork", transform: LogitTransform, device: torch.device) -> list[torch.Tensor]:
    """What comes of two tiles, the second of which moves the shift: coefficients, sums, results and a gradient."""
    generator = torch.Generator("cpu").manual_seed(0)
    tokens, width, units = 8, 300, 48

    def numbers_of(size: int) -> torch.Tensor:
        # Whatever the caller's default device and dtype are
        return torch.randn(tokens, size, generator=generator, device="cpu", dtype=torch.float32).to(device)

    sums_nH, given = numbers_of(units), numbers_of(2)
    targets = torch.arange(tokens, device=device) * (2 * width // tokens)
    products = [(3 + 27 * i) * numbers_of(width) for i in range(2)]
    first, second = (
        Tile(slice(0, tokens), slice(i * width, i * width + width), product, None, sums_nH, sums_nH, None, None)
        for i, product in enumerate(products)
    )
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    statistics = RunningStatistics(targets, 2 * width, outputs, torch.float32)
    again = second._replace(product=second.product.clone())
    found = [work.fold(statistics, first, None, None), work.fold(statistics, second, torch.float32, sums_nH), sums_nH]
    found = [None if x is None else x.clone() for x in found]
    statistics.move_to_(statistics.maxima())
    results = statistics.results(outputs)
    numbers = (statistics.max, statistics.sum_exp, statistics.target_logit, results.entropy)
    upstream = Upstream(given[:, 0], given[:, 1])
    coefficients = Coefficients(*numbers, upstream, transform, 2 * width)
    coefficients.use_unit(coefficients.unit())
    found += [*results, *work.gradient(coefficients, again, targets, nontarget_grad=torch.float32, whole=torch.float32)]
    return [x.double().cpu() for x in found if x is not None]
