"""What a run allocates on the CPU, by the allocator's own records."""

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], Any], since: str | None = None) -> int:
    """The most memory that `run` held at a time, beyond what was allocated before it.

    Args:
        since: a `record_function` that `run` enters; only what is held after that counts.
    """
    gc.collect()  # what is freed while it runs must be its own
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
