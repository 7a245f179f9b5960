"""The ways to lower the precision of fp32 matrix products, and to restore it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers.utils.import_utils import enable_tf32

_BACKENDS: Any = torch.backends

WAYS = {
    "set_float32_matmul_precision-high": partial(torch.set_float32_matmul_precision, "high"),
    "set_float32_matmul_precision-medium": partial(torch.set_float32_matmul_precision, "medium"),
    "cuda.matmul.allow_tf32": partial(setattr, _BACKENDS.cuda.matmul, "allow_tf32", True),
    "fp32_precision": partial(setattr, _BACKENDS, "fp32_precision", "tf32"),
    "cuda.matmul.fp32_precision": partial(setattr, _BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
    "mkldnn.matmul.fp32_precision": partial(setattr, _BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
    "tf32=True": partial(enable_tf32.__wrapped__, True),  # what transformers does for its argument, which needs a GPU
}


def fp32_switches() -> tuple[str, str, str]:
    """Return the settings of all backends, of CUDA and of the CPU; `torch.get_float32_matmul_precision` may raise."""
    return _BACKENDS.fp32_precision, _BACKENDS.cuda.matmul.fp32_precision, _BACKENDS.mkldnn.matmul.fp32_precision


@contextmanager
def fewer_digits(way: str) -> Iterator[None]:
    """Lower the precision by the `way` of `WAYS` in the `with` block."""
    before = fp32_switches()
    try:
        WAYS[way]()
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        _BACKENDS.fp32_precision, _BACKENDS.cuda.matmul.fp32_precision, _BACKENDS.mkldnn.matmul.fp32_precision = before
        assert fp32_switches() == before
        assert torch.get_float32_matmul_precision() == "highest"
