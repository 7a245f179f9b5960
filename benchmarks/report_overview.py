"""The README's picture: errors, times beside the device's limit, memory and whole steps, measured on one device.

A panel without measurements is left out.
"""

from math import prod
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from report_plots import LOOKS, STYLE, WIDTH, save
from report_runs import Run

FROZEN = "head_frozen_fwd_bwd"
STEPS = {
    "grpo_step_lora": "GRPO, LoRA",
    "grpo_step_full": "GRPO, full",
    "dpo_step_lora_epoch_1": "DPO, LoRA",
    "dpo_step_lora_epoch_2": "DPO, 2nd epoch",
}
Bars = dict[str, float]  # by subject


def shown_device(runs: list[Run]) -> str:
    """Return the device to show: a GPU before a CPU, and of several the one with the newest run."""
    return max(runs, key=lambda run: (not run.device.startswith("CPU"), run.date)).device


def largest_errors(runs: list[Run]) -> Bars:
    """Return each head's largest error of a log-prob, over all shapes and uses."""
    found: Bars = {}
    for run in runs:
        for name, line in run.lines.items() if run.benchmark.startswith("head_") else ():
            if name in LOOKS and line.get("max_error") is not None:
                found[name] = max(found.get(name, 0.0), line["max_error"])
    return found


def over_limit(runs: list[Run]) -> Bars:
    """Return each head's time over the device's limit: forward and backward, frozen weight, largest shape."""
    run = _largest(runs)
    lines = {} if run is None else {name: run.lines[name] for name in LOOKS if name in run.lines}
    return {name: line["median_ms"] / max(line["products_ms"], line["bytes_ms"]) for name, line in lines.items()}


def peaks(runs: list[Run]) -> Bars:
    """Return each head's peak memory in MiB: forward and backward, frozen weight, largest shape."""
    run = _largest(runs)
    lines = {} if run is None else run.lines
    return {name: lines[name]["peak_mib"] for name in LOOKS if lines.get(name, {}).get("peak_mib") is not None}


def step_times(runs: list[Run]) -> Bars:
    """Return the time of our whole steps over that of TRL's, by benchmark."""
    return {STEPS[run.benchmark]: run.over("trl_ext", "trl") for run in runs if run.benchmark in STEPS}


def step_peaks(runs: list[Run]) -> Bars:
    """Return the peak memory of our whole steps over that of TRL's, by benchmark."""
    return {
        STEPS[run.benchmark]: run.lines["trl_ext"]["peak_mib"] / run.lines["trl"]["peak_mib"]
        for run in runs
        if run.benchmark in STEPS
    }


def draw_overview(runs: list[Run], names: dict[str, str], path: Path) -> None:
    """Draw all panels that have measurements, of one device."""
    device = shown_device(runs)
    here = [run for run in runs if run.device == device]
    largest = _largest(here)
    shape = "" if largest is None else f"\nfrozen weight, N x H x V {' x '.join(map(str, largest.shape.values()))}"
    panels = [
        (
            "largest error of a log-prob against float64\nbf16; bars are logarithmic",
            largest_errors(here),
            "{:.0e}",
            True,
            None,
        ),
        (f"time of the head, the device's limit = 1{shape}", over_limit(here), "{:.1f}", False, 1.0),
        (f"most memory of the head, MiB{shape}", peaks(here), "{:.0f}", False, None),
        ("time of a step without generation, TRL's = 1", step_times(here), "{:.2f}", False, 1.0),
        ("most memory of such a step, TRL's = 1", step_peaks(here), "{:.2f}", False, 1.0),
    ]
    shown = [panel for panel in panels if panel[1]]
    with plt.rc_context({**STYLE, "axes.grid": False}):
        heights = [len(bars) + 2.4 for _, bars, *_ in shown]
        figure, grid = plt.subplots(
            len(shown),
            figsize=(WIDTH, 0.6 + 0.24 * sum(heights)),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        for axes, panel in zip(grid[:, 0], shown, strict=True):
            draw_bars(axes, *panel, names=names)
        figure.suptitle(f"{device}, {max(run.date for run in here)[:10]}", fontsize=9, color="#555555")
        save(figure, path)


def draw_error(runs: list[Run], names: dict[str, str], path: Path) -> None:
    """Draw only the panel of the errors, over all devices."""
    bars = largest_errors(runs)
    with plt.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = plt.subplots(figsize=(WIDTH, 0.8 + 0.26 * len(bars)), layout="constrained")
        draw_bars(axes, "largest error of a log-prob (bars are logarithmic)", bars, "{:.0e}", True, None, names=names)
        save(figure, path)


def draw_bars(
    axes: Any, title: str, bars: Bars, form: str, log: bool, limit: float | None, *, names: dict[str, str]
) -> None:
    """Draw a bar with its value for each subject, the smallest first, and a line at `limit`."""
    order = sorted(bars, key=lambda name: bars[name])
    values = [bars[name] for name in order]
    colours = [LOOKS[name][1] if name in LOOKS else LOOKS["trl_ext"][1] for name in order]
    if log:
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 3, max(values) * 12)
    else:
        axes.set_xlim(0, max(*values, limit or 0) * 1.15)
    drawn = axes.barh([names.get(name, name) for name in order], values, color=colours, height=0.7)
    axes.bar_label(drawn, [form.format(value) for value in values], padding=3, fontweight="bold")
    if limit is not None:
        axes.axvline(limit, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.minorticks_off()
    axes.set_title(title, fontsize=10, loc="left")


def _largest(runs: list[Run]) -> Run | None:
    return max((run for run in runs if run.benchmark == FROZEN), key=lambda x: prod(x.shape.values()), default=None)
