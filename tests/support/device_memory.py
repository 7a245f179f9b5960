"""The GPU memory of a step."""

import gc
from collections.abc import Callable
from typing import Any

import torch


def allocated_by(step: Callable[[], Any]) -> int:
    """Return the peak of device memory that `step` requests, above what was requested before.

    Not of what is allocated: as free blocks happen to be, each large tensor may get up to 1 MiB more.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = _requested("current")
    step()
    torch.cuda.synchronize()
    return _requested("peak") - before


def _requested(which: str) -> int:
    bytes_requested: int = torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]
    return bytes_requested
