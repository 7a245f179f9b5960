"""What a run allocates on the CPU, by the allocator's own records."""

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most memory that `run` held at a time, beyond what was allocated before it."""
    gc.collect()  # what is freed while it runs must be its own
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    changes = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak
