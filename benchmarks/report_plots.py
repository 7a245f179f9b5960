"""The plots of benchmarks/RESULTS.md, legible on a phone."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator
from report_runs import Run

WIDTH = 5.0  # inches, at 200 dots each
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
# Without Liger's GRPO loss, which is measured at one shape, and so slow that it would compress the scale of the others
LOOKS = {
    "trl_ext": ("o", "#0b6e4f"),
    "trl_ext_torch": ("o", "#8bc6ae"),
    "trl": ("s", "#c1292e"),
    "liger": ("D", "#235789"),
    "cut_cross_entropy": ("^", "#e08e0b"),
    "torch_linear_cross_entropy": ("v", "#7b4fa3"),
    "logits": ("P", "#777777"),
    "logits_compiled": ("X", "#bbbbbb"),
}
MOST_ROWS = 16


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def draw_times(runs: list[Run], titles: dict[str, str], names: dict[str, str], path: Path) -> None:
    """Draw each subject's time divided by that of the bare products, with a row for each shape and a line at 1."""
    label = "time over the matrix products' alone"
    _draw_shapes(runs, titles, names, lambda run, name: run.over(name, "matmul"), label, path, limit=1)


def draw_peaks(runs: list[Run], titles: dict[str, str], names: dict[str, str], path: Path) -> None:
    """Draw each subject's peak memory, with a row for each shape."""
    _draw_shapes(
        runs, titles, names, lambda run, name: run.lines.get(name, {}).get("peak_mib"), "peak memory in MiB", path
    )


def draw_errors(worst: dict[str, dict[str, float | None]], names: dict[str, str], path: Path) -> None:
    """Draw each kind of error, with a row for each subject."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 1.6 + 0.3 * len(worst)), layout="constrained")
        kinds = next(iter(worst.values()))
        for kind, marker in zip(kinds, "os^", strict=True):
            points = [(errors[kind], row) for row, errors in enumerate(worst.values()) if errors[kind] is not None]
            if points:
                axes.scatter(*zip(*points, strict=True), marker=marker, label=kind, zorder=3)
        axes.set_xscale("log")
        axes.set_yticks(range(len(worst)), [names[name] for name in worst])
        axes.set_ylim(len(worst) - 0.5, -0.5)
        axes.set_xlabel("error against float64, log scale; lower is better")
        figure.legend(loc="outside lower center", ncols=1, frameon=False)
        save(figure, path)


def draw_curves(run: Run, names: dict[str, str], path: Path) -> None:
    """Draw the loss and the gradient norm of every subject of a run against its steps."""
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(2, 1, figsize=(WIDTH, 4.6), sharex=True, layout="constrained")
        for axes, what in zip(grid, ("loss", "grad_norm"), strict=True):
            for (name, line), style in zip(run.lines.items(), ("-", "--"), strict=True):
                axes.plot(line[what], style, color=LOOKS[name][1], label=names[name], linewidth=2)
            axes.set_ylabel(what)
        grid[0].legend(frameon=False)
        grid[1].set_xlabel("step")
        save(figure, path)


def _draw_shapes(
    runs: list[Run],
    titles: dict[str, str],
    names: dict[str, str],
    value: Callable[[Run, str], float | None],
    label: str,
    path: Path,
    limit: float | None = None,
) -> None:
    """Draw a panel for each use in `titles`."""
    measured = [run for run in runs if any(value(run, name) is not None for name in LOOKS)]
    panels = {use: shown for use in titles if (shown := _shown([run for run in measured if run.benchmark == use]))}
    heights = [len(shown) + 2.5 for shown in panels.values()]
    with plt.rc_context(STYLE):
        size = (WIDTH, 1.2 + 0.24 * sum(heights))
        figure, grid = plt.subplots(
            len(panels), figsize=size, height_ratios=heights, sharex=True, squeeze=False, layout="constrained"
        )
        marks: dict[str, Any] = {}
        for axes, (use, shown) in zip(grid[:, 0], panels.items(), strict=True):
            for name, (marker, colour) in LOOKS.items():
                places = [(value(run, name), row) for row, run in enumerate(shown)]
                points = [place for place in places if place[0] is not None]
                if points:
                    marks[names[name]] = axes.scatter(*zip(*points, strict=True), marker=marker, color=colour, zorder=3)
            if limit:
                axes.axvline(limit, color="black", linewidth=1)
            axes.set_xscale("log")
            low, high = axes.get_xlim()
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 20 * low else (1, 3)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_yticks(range(len(shown)), [" x ".join(map(str, run.shape.values())) for run in shown], fontsize=9)
            axes.set_ylim(len(shown) - 0.4, -0.6)
            axes.set_title(titles[use], fontsize=10, loc="left")
        grid[-1, 0].set_xlabel(f"{label}\nlog scale; lower is better\nrows: tokens x hidden size x vocabulary")
        figure.legend(marks.values(), marks.keys(), loc="outside lower center", ncols=2, frameon=False)
        save(figure, path)


def _shown(runs: list[Run]) -> list[Run]:
    """Return the runs that have room: all of them, or those with the most frequent (then largest) number of tokens."""
    tokens = [run.shape["N"] for run in runs]
    most = max(tokens, key=lambda N: (tokens.count(N), N), default=0)
    return runs if len(runs) <= MOST_ROWS else [run for run in runs if run.shape["N"] == most]


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200, metadata={"Software": None})  # the same bytes from the same lines
    plt.close(figure)
