"""Plots a run's logs as PNG files: learning curves, completion lengths, importance ratios."""

import os
import re
from itertools import cycle
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

Series = list[tuple[str, str]]  # the lines of a plot: (name in the logs, label in the legend)


def _both(name: str) -> Series:
    return [(name, "training"), (f"eval_{name}", "evaluation")]


# File -> its plots, by title
FIGURES: dict[str, dict[str, Series]] = {
    "learning_curves.png": {
        "loss": _both("loss"),
        "reward": _both("reward"),
        "reward margin": _both("rewards/margins"),
        "pairs where chosen is preferred (share)": _both("rewards/accuracies"),
        "KL to the reference (nats a token)": _both("kl"),
        "entropy (nats a token)": _both("entropy"),
        "gradient norm": [("grad_norm", "training")],
    },
    "completion_lengths.png": {
        "completion length (tokens)": [
            ("completions/max_length", "longest"),
            ("completions/mean_length", "mean"),
            ("completions/min_length", "shortest"),
        ],
        "truncated completions (share)": [("completions/clipped_ratio", "training")],
    },
    "importance_ratios.png": {
        "clipped ratios, policy / old policy (share)": [
            ("clip_ratio/region_mean", "at either bound"),
            ("clip_ratio/low_mean", "at the lower bound"),
            ("clip_ratio/high_mean", "at the upper bound"),
        ],
        "ratio policy / sampler": [
            ("sampling/importance_sampling_ratio/max", "largest"),
            ("sampling/importance_sampling_ratio/mean", "mean"),
            ("sampling/importance_sampling_ratio/min", "smallest"),
        ],
    },
}


class CurvesCallback(TrainerCallback):
    """Plots the logs at each save and at the end of training, for runs without a dashboard.

    The first process writes `learning_curves.png`, and with GRPO `completion_lengths.png` and `importance_ratios.png`.
    A resumed run plots the logs of the whole run. Needs matplotlib.

    Args:
        folder (`str`, *optional*): where to write them. `None`: `output_dir`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """

    def __init__(self, folder: str | None = None) -> None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ImportError(
                "`CurvesCallback` draws with matplotlib, which is not installed: `pip install matplotlib`."
            ) from None
        self.folder = folder

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            draw(state.log_history, Path(self.folder or args.output_dir))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_save(args, state, control)


def draw(logs: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write the figures that `logs` have data for, and return their paths."""
    written = []
    for file, plots in FIGURES.items():
        if "reward" in plots:
            plots = {"loss": plots["loss"], "reward": plots["reward"], **_reward_functions(logs), **plots}
        lines = {title: drawn for title, series in plots.items() if (drawn := _lines(logs, series))}
        if lines:
            folder.mkdir(parents=True, exist_ok=True)
            written.append(_figure(lines, folder / file))
    return written


def _reward_functions(logs: list[dict[str, Any]]) -> dict[str, Series]:
    """Return a plot of GRPO's reward functions, by title, if there are several."""
    found = (re.fullmatch(r"rewards/(.+)/mean", name) for entry in logs for name in entry)
    series = {match[0]: match[1] for match in found if match}
    return {"reward of each function": list(series.items())} if len(series) > 1 else {}


def _lines(logs: list[dict[str, Any]], series: Series) -> dict[str, list[tuple[int, float]]]:
    """Return label -> points (step, value) for each line of `series` that is in the logs."""
    points = {label: [(x["step"], x[name]) for x in logs if x.get(name) is not None] for name, label in series}
    return {label: drawn for label, drawn in points.items() if drawn}


def _figure(plots: dict[str, dict[str, list[tuple[int, float]]]], path: Path) -> Path:
    from matplotlib.figure import Figure  # not pyplot, which would choose a window system
    from matplotlib.ticker import MaxNLocator

    # Narrow enough to read on a phone
    figure = Figure(figsize=(5, 0.5 + 1.9 * len(plots)), layout="constrained")
    every = figure.subplots(len(plots), sharex=True, squeeze=False)[:, 0]
    for axes, (title, lines) in zip(every, plots.items(), strict=True):
        # Lines that coincide stay visible: the first is solid
        for (label, points), style in zip(lines.items(), cycle(("-", "--", ":")), strict=False):
            marker = "." if len(points) < 30 else None
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, linestyle=style)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.grid(alpha=0.3)
        if "(share)" in title:
            axes.set_ylim(bottom=0)
        if len(lines) > 1:
            axes.legend(fontsize="small")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    unfinished = path.with_suffix(".unfinished")
    figure.savefig(unfinished, dpi=160, format="png")
    os.replace(unfinished, path)
    return path
