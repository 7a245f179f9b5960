"""Measure time and memory of single calls, and a device's two ceilings: matmul rate and memory bandwidth."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from allocations import peak_bytes

Step = Callable[[], Any]


def milliseconds(step: Step, device: torch.device) -> float:
    """Return the time of one call that starts on an idle device; on the CPU, the process time."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begun = time.process_time()
    step()
    return 1e3 * (time.process_time() - begun)


def peak_mib(step: Step, device: torch.device) -> float:
    """Return the peak memory of one call, above what was allocated before."""
    if device.type != "cuda":
        return peak_bytes(step) / 2**20
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def in_turns(steps: dict[str, Step], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the milliseconds of each step in each round, after one round of warm-up. The steps take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(1 + rounds):
        for name in order:
            times[name].append(milliseconds(steps[name], device))
        # After-effects of a step, such as heat, then affect each of the others in turn
        order = order[1:] + order[:1]
    return {name: spent[1:] for name, spent in times.items()}


class Ceilings(NamedTuple):
    """A device's measured limits: bf16 FLOP/s in a large product, and bytes/s, read and written, in a large copy."""

    flops: float
    bandwidth: float

    def __str__(self) -> str:
        return f"ceilings: {self.flops / 1e12:.3g} TFLOP/s in a product, {self.bandwidth / 1e12:.3g} TB/s in a copy"


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure the medians of 20 calls after warm-up, on random numbers, because a GPU multiplies zeros faster."""
    N, H, V = (8192, 8192, 16384) if device.type == "cuda" else (256, 512, 1024)
    hidden = torch.randn(N, H, dtype=torch.bfloat16, device=device)
    weight = torch.randn(V, H, dtype=torch.bfloat16, device=device)
    size = 2**31 if device.type == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    steps: dict[str, Step] = {"product": lambda: hidden @ weight.t(), "copy": lambda: target.copy_(source)}
    seconds = {name: statistics.median(spent) / 1e3 for name, spent in in_turns(steps, 20, device).items()}
    return Ceilings(2 * N * H * V / seconds["product"], 2 * size / seconds["copy"])
