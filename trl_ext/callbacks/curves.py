"""Draws what a run has logged to PNG files: learning curves, completion lengths, importance ratios."""

import os
import re
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

_OF_A_FUNCTION = re.compile(r"rewards/(.+)/mean")

# File -> the plots on it, each with what is drawn: (name in the logs, what the legend says)
FIGURES: dict[str, dict[str, list[tuple[str, str]]]] = {
    "learning_curves.png": {
        "loss": [("loss", "training"), ("eval_loss", "evaluation")],
        "reward": [("reward", "training"), ("eval_reward", "evaluation")],
        "reward margin": [("rewards/margins", "training"), ("eval_rewards/margins", "evaluation")],
        "pairs whose chosen is preferred (share)": [
            ("rewards/accuracies", "training"),
            ("eval_rewards/accuracies", "evaluation"),
        ],
        "KL to the reference (nats a token)": [("kl", "training"), ("eval_kl", "evaluation")],
        "entropy (nats a token)": [("entropy", "training"), ("eval_entropy", "evaluation")],
        "norm of the gradient": [("grad_norm", "training")],
    },
    "completion_lengths.png": {
        "length of completions (tokens)": [
            ("completions/max_length", "longest"),
            ("completions/mean_length", "mean"),
            ("completions/min_length", "shortest"),
        ],
        "completions that were cut (share)": [("completions/clipped_ratio", "training")],
    },
    "importance_ratios.png": {
        "ratios policy / old policy that were clipped (share)": [
            ("clip_ratio/region_mean", "either side"),
            ("clip_ratio/low_mean", "below"),
            ("clip_ratio/high_mean", "above"),
        ],
        "ratio policy / sampler": [
            ("sampling/importance_sampling_ratio/max", "largest"),
            ("sampling/importance_sampling_ratio/mean", "mean"),
            ("sampling/importance_sampling_ratio/min", "smallest"),
        ],
    },
}


class CurvesCallback(TrainerCallback):
    """Draws the logs at each save and at the end of training, for those without a dashboard.

    The first process writes `learning_curves.png`, and with GRPO `completion_lengths.png` and `importance_ratios.png`.
    A resumed run draws the logs of the whole run. It needs matplotlib.

    Args:
        folder (`str`, *optional*): where they are written; `None` is `output_dir`.

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
    """Write the figures for which `logs` have something; the paths of those."""
    written = []
    for file, plots in FIGURES.items():
        if "reward" in plots:
            plots = {"loss": plots["loss"], "reward": plots["reward"], **_of_functions(logs), **plots}
        lines = {title: _lines(logs, series) for title, series in plots.items()}
        lines = {title: drawn for title, drawn in lines.items() if drawn}
        if lines:
            folder.mkdir(parents=True, exist_ok=True)
            written.append(_figure(lines, folder / file))
    return written


def _of_functions(logs: list[dict[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """The plot of GRPO's reward functions, where there are several."""
    found = (_OF_A_FUNCTION.fullmatch(name) for entry in logs for name in entry)
    series = {match[0]: match[1] for match in found if match}
    return {"reward of each function": list(series.items())} if len(series) > 1 else {}


def _lines(logs: list[dict[str, Any]], series: list[tuple[str, str]]) -> dict[str, list[tuple[int, float]]]:
    """By what the legend says, the points of each of `series` that was logged: step and value."""
    points = {said: [(x["step"], x[name]) for x in logs if x.get(name) is not None] for name, said in series}
    return {said: drawn for said, drawn in points.items() if drawn}


def _figure(plots: dict[str, dict[str, list[tuple[int, float]]]], path: Path) -> Path:
    from matplotlib.figure import Figure  # not pyplot, which would choose a window system
    from matplotlib.ticker import MaxNLocator

    # Read on a phone too, at half of its width in pixels
    figure = Figure(figsize=(5, 0.5 + 1.9 * len(plots)), layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(len(plots), sharex=True, squeeze=False)[:, 0], plots.items(), strict=True
    ):
        for said, points in lines.items():
            axes.plot(*zip(*points, strict=True), label=said, marker="." if len(points) < 30 else None)
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
