"""The README's picture: errors, times relative to the device's limit, memory and whole steps, all on one device.

A panel without measurements is left out.
"""

from math import prod
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator
from report_plots import LOOKS, STYLE, WIDTH, save
from report_runs import Run

FROZEN = "head_frozen_fwd_bwd"
USES = {
    "head_nograd": "no gradient",
    FROZEN: "frozen weight",
    "head_trained_fwd_bwd": "trained weight",
}
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


def over_limit(runs: list[Run]) -> dict[str, Bars]:
    """Return each head's time at the largest shape, divided by the device's limit, by use."""
    found = {}
    for use, title in USES.items():
        run = _largest(runs, use)
        lines = {} if run is None else {name: run.lines[name] for name in LOOKS if name in run.lines}
        bars = {name: line["median_ms"] / max(line["products_ms"], line["bytes_ms"]) for name, line in lines.items()}
        found |= {title: bars} if bars else {}
    return found


def peaks(runs: list[Run]) -> dict[str, Bars]:
    """Return the peak memory of each head at the largest shape in MiB, by use."""
    found = {}
    for use, title in USES.items():
        run = _largest(runs, use)
        lines = {} if run is None else run.lines
        bars = {name: lines[name]["peak_mib"] for name in LOOKS if lines.get(name, {}).get("peak_mib") is not None}
        found |= {title: bars} if bars else {}
    return found


def step_times(runs: list[Run]) -> Bars:
    """Return the time of our whole steps divided by that of TRL's, by benchmark."""
    return {STEPS[run.benchmark]: run.over("trl_ext", "trl") for run in runs if run.benchmark in STEPS}


def step_peaks(runs: list[Run]) -> Bars:
    """Return the peak memory of our whole steps divided by that of TRL's, by benchmark."""
    return {
        STEPS[run.benchmark]: run.lines["trl_ext"]["peak_mib"] / run.lines["trl"]["peak_mib"]
        for run in runs
        if run.benchmark in STEPS
    }


def draw_overview(runs: list[Run], names: dict[str, str], path: Path) -> None:
    """Draw all panels for which one device has measurements: marks for the LM head, then bars for whole steps."""
    device = shown_device(runs)
    here = [run for run in runs if run.device == device]
    heads: list[tuple[str, str, dict[str, Bars], bool]] = [
        ("Error of the LM head's log-probs against float64", "largest error, bf16", _named(largest_errors(here)), True),
        (f"Time of the LM head\n{_shape(here)}", "time over the device's limit", over_limit(here), True),
        (f"Peak memory of the LM head\n{_shape(here)}", "MiB", peaks(here), False),
    ]
    steps = [
        (f"Time of a training step, without generation\n{_model(here)}", "time over TRL's", step_times(here)),
        (f"Peak memory of the same steps\n{_model(here)}", "memory over TRL's", step_peaks(here)),
    ]
    panels = [*(x for x in heads if x[2]), *(x for x in steps if x[2])]
    with plt.rc_context(STYLE):
        heights = [len(panel[2]) + 4.2 for panel in panels]
        figure, grid = plt.subplots(
            len(panels),
            figsize=(WIDTH, 1.4 + 0.22 * sum(heights)),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        marks: dict[str, Any] = {}
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            if len(panel) == 4:
                marks |= draw_marks(axes, *panel, names=names)
            else:
                draw_bars(axes, *panel)
        figure.suptitle(f"{device}, {max(run.date for run in here)[:10]}", fontsize=10, color="#555555")
        if marks:
            figure.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=2, frameon=False)
        save(figure, path)


def draw_error(runs: list[Run], names: dict[str, str], path: Path) -> None:
    """Draw the panel of the errors alone, over all devices."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 2.4), layout="constrained")
        errors = _named(largest_errors(runs))
        marks = draw_marks(axes, "", "largest error of a log-prob against float64\nbf16", errors, True, names=names)
        figure.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=2, frameon=False)
        save(figure, path)


def draw_marks(
    axes: Any, title: str, label: str, rows: dict[str, Bars], log: bool, *, names: dict[str, str]
) -> dict[str, Any]:
    """Draw a row for each entry of `rows`, with a mark for each subject; return the marks by the subject's name."""
    marks = {}
    looks = {name: look for name, look in LOOKS.items() if any(name in values for values in rows.values())}
    for place, (name, (marker, colour)) in enumerate(looks.items()):
        # A single row has the room to part equal values
        shift = 0.0 if len(rows) > 1 else 0.8 * ((place + 0.5) / len(looks) - 0.5)
        points = [(values[name], row + shift) for row, values in enumerate(rows.values()) if name in values]
        if points:
            marks[names[name]] = axes.scatter(*zip(*points, strict=True), marker=marker, color=colour, zorder=3)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        least = min(min(values.values()) for values in rows.values())
        if least > 1e-2:  # less than two decades: powers of ten alone would leave the axis without numbers
            axes.set_xlim(1, None)
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(0, None)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(f"{label}{', log scale' if log else ''}; lower is better")
    return marks


def draw_bars(axes: Any, title: str, label: str, bars: Bars) -> None:
    """Draw a bar from zero for each step, the smallest first; the line at 1 is TRL."""
    order = sorted(bars, key=lambda name: bars[name])
    drawn = axes.barh(order, [bars[name] for name in order], color=LOOKS["trl_ext"][1], height=0.7, zorder=3)
    axes.bar_label(drawn, [f"{bars[name]:.2f}" for name in order], padding=3)
    axes.axvline(1, color=LOOKS["trl"][1], linewidth=1.5, zorder=3)
    axes.set_xlim(0, max(*bars.values(), 1.0) * 1.1)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(f"{label} (red line); lower is better")


def _named(bars: Bars) -> dict[str, Bars]:
    return {"worst shape": bars} if bars else {}


def _shape(runs: list[Run]) -> str:
    largest = _largest(runs, FROZEN)
    return "" if largest is None else "{N} tokens, hidden size {H}, vocabulary {V}".format(**largest.shape)


def _model(runs: list[Run]) -> str:
    """The model of the steps, which all have the same."""
    found = {
        "hidden size {hidden}, {layers} layers, vocabulary {vocabulary}".format(**run.shape)
        for run in runs
        if run.benchmark in STEPS and "hidden" in run.shape
    }
    return "; ".join(sorted(found))


def _largest(runs: list[Run], use: str) -> Run | None:
    return max((run for run in runs if run.benchmark == use), key=lambda x: prod(x.shape.values()), default=None)
