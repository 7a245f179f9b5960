"""The GPU memory of a step."""

import gc
from collections.abc import Callable
from typing import Any

import torch


def allocated_by(step: Callable[[], Any]) -> int:
    """Return the peak of device memory during `step`, above what was allocated before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
