"""Finds the fastest tile sizes of our head on a device, for each use at some shapes."""

import statistics
from itertools import product
from typing import Any

import torch
from head_inputs import fresh_inputs
from head_subjects import ours
from head_uses import USES, Shape, step_of
from results import new_run
from timing import Step, in_turns, peak_mib

SHAPES = (
    {"N": 8192, "H": 4096, "V": 131072},
    {"N": 2048, "H": 4096, "V": 131072},
    {"N": 8192, "H": 1024, "V": 151936},
    {"N": 8192, "H": 8192, "V": 262144},
)
TOKENS = (1024, 2048, 4096, 8192)
COLUMNS = (512, 1024, 2048, 4096, 8192)
ROUNDS = 5


def sweep(shape: Shape, device: torch.device) -> None:
    """Print, for each use, the time and peak memory of every pair of sizes and of the default sizes."""
    inputs = fresh_inputs(**shape, device=device, seed=int(new_run(), 16))
    pairs = [{"chunk_size": tokens, "tile_columns": columns} for tokens, columns in product(TOKENS, COLUMNS)]
    kernels = "triton" if device.type == "cuda" else "torch"
    for name, use in USES.items():
        steps: dict[str, Step] = {}
        peaks: dict[str, float | None] = {}
        for options in [{}, *pairs]:
            label = " x ".join(map(str, options.values())) or "chosen"
            step = step_of(ours(kernels=kernels, **options), use, inputs)
            try:
                step()
                peaks[label] = peak_mib(step, device)
                steps[label] = step
            except torch.OutOfMemoryError:
                print(f"left out: {label} in {name} at {shape}, out of memory")
        medians = {label: statistics.median(spent) for label, spent in in_turns(steps, ROUNDS, device).items()}
        print(_table(f"{name} {shape}", medians, peaks), flush=True)


def _table(title: str, medians: dict[str, float], peaks: dict[str, float | None]) -> str:
    row: Any = "{:<20}{:>10}{:>10}".format
    lines = [f"\n{title}", row("tokens x columns", "median ms", "peak MiB")]
    for label in sorted(medians, key=medians.__getitem__):
        peak = peaks[label]
        lines.append(row(label, f"{medians[label]:.3f}", "-" if peak is None else f"{peak:.0f}"))
    return "\n".join(lines)
