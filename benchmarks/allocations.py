"""Peak memory of a run on the CPU, from the allocator's records."""

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], Any], since: str | None = None) -> int:
    """Return the peak memory of `run` in bytes, above what was allocated before it.

    Args:
        since: a `record_function` that `run` enters; only peaks after that count.
    """
    gc.collect()  # otherwise `run` might free memory that was allocated before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    start = 0 if since is None else next(e.start_ns() for e in events if e.name() == since)
    changes = [e for e in events if e.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        held += change.nbytes()
        if change.start_ns() >= start:
            peak = max(peak, held)
    return peak
