"""Make the last tables and plots of benchmarks/RESULTS.md, from the lines of curves.py.

    python benchmarks/report_curves.py

The distance of a run from fp32 is the mean over its steps of the difference to stock TRL's fp32 run with the same seed,
divided by the standard deviation of these fp32 runs over seeds, also the mean over steps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from curves import CLIP_RANGES, CURVES, FOLDER, lines_in
from report import DOCS, IMAGES, PAGE, table, with_part
from report_plots import STYLE, WIDTH, save
from scipy import stats

BEGIN = "<!-- made by benchmarks/report_curves.py -->"
TRUTH, OTHERS = "trl_fp32", ("ours_fp32", "trl_bf16", "ours_bf16")
NAMES = {"trl_fp32": "TRL, fp32", "ours_fp32": "ours, fp32", "trl_bf16": "TRL, bf16", "ours_bf16": "ours, bf16"}
COLOURS = {"ours_fp32": "#777777", "trl_bf16": "#c1292e", "ours_bf16": "#0b6e4f"}
METRICS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "rewards/margins": "reward margin",
    "kl": "KL",
    "clip_ratio/region_mean": "clip fraction",
    "reward": "reward",
}
OVER_STEPS = {"dpo": "rewards/margins", "grpo": "kl", "gspo": "kl"}  # the metric that is drawn against the steps
LEVEL = 0.05

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, and its 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Estimate":
        """Return the estimate from a value per seed."""
        error = stats.sem(values) if len(values) > 1 else 0.0
        half = error * stats.t.ppf(1 - LEVEL / 2, len(values) - 1) if error > 0 else 0.0
        return cls(float(values.mean()), float(values.mean() - half), float(values.mean() + half))

    def text(self, form: str = ".2g", scale: float = 1.0) -> str:
        mean, low, high = (format(scale * x, form) for x in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"


def paired_p(first: np.ndarray, second: np.ndarray) -> float:
    """Return the p-value of an exact paired permutation test: the signs of the differences are equally likely."""
    differences = first - second
    if not differences.any():
        return 1.0
    found = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
    return float(found.pvalue)


@dataclass(frozen=True)
class Group:
    """The runs of one task, method and kind of tuning: by arm and seed."""

    task: str
    method: str
    tuning: str
    runs: dict[str, dict[int, dict[str, Any]]]

    @property
    def name(self) -> str:
        return f"{self.task.split('-')[0]}, {'LoRA' if self.tuning == 'lora' else 'full'}"

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds that every arm has."""
        return sorted(set.intersection(*(set(of_arm) for of_arm in self.runs.values())))

    def curves(self, arm: str, metric: str) -> np.ndarray:
        """Return the values `(seeds, steps)`."""
        return np.array([self.runs[arm][seed]["curves"][metric] for seed in self.seeds])

    def differences(self, arm: str, metric: str) -> np.ndarray:
        """Return the absolute differences from fp32 over the spread of fp32's seeds, `(seeds, steps)`."""
        truth = self.curves(TRUTH, metric)
        spread = truth.std(axis=0, ddof=1).mean()
        return np.abs(self.curves(arm, metric) - truth) / spread

    def accuracy(self, arm: str) -> np.ndarray:
        """Return the share of held-out problems that each seed's final model solves."""
        found = (self.runs[arm][seed]["accuracy"] for seed in self.seeds)
        return np.array([x[max(x, key=int)] for x in found])


def groups_of(lines: Lines) -> list[Group]:
    found: dict[tuple[str, str, str], Group] = {}
    for line in lines:
        if line["benchmark"] == "curves":
            key = line["task"], line["method"], line["tuning"]
            runs = found.setdefault(key, Group(*key, {arm: {} for arm in NAMES})).runs
            runs[line["arm"]][line["seed"]] = line
    methods = list(CURVES)
    return sorted((x for x in found.values() if len(x.seeds) > 1), key=lambda x: (methods.index(x.method), x.name))


@dataclass(frozen=True)
class Comparison:
    """How far the arms of a group are from fp32 in one metric."""

    group: Group
    metric: str
    distances: dict[str, Estimate]
    p: float  # of TRL's bf16 head against ours


def comparisons_of(groups: Iterable[Group]) -> Iterator[Comparison]:
    for group in groups:
        for metric in CURVES[group.method]:
            if not group.curves(TRUTH, metric).std(axis=0).any():
                continue  # it is the same for all seeds
            found = {arm: group.differences(arm, metric).mean(axis=1) for arm in OTHERS}
            distances = {arm: Estimate.of(values) for arm, values in found.items()}
            yield Comparison(group, metric, distances, paired_p(found["trl_bf16"], found["ours_bf16"]))


def corrected(comparisons: list[Comparison]) -> list[float]:
    """Return the p-values, adjusted for the number of comparisons (Benjamini and Hochberg)."""
    return [float(p) for p in stats.false_discovery_control([x.p for x in comparisons])] if comparisons else []


def verdict(comparisons: list[Comparison]) -> str:
    """Return how often each head is closer to fp32."""
    signs = [x.distances["trl_bf16"].mean - x.distances["ours_bf16"].mean for x in comparisons]
    significant = [sign for sign, p in zip(signs, corrected(comparisons), strict=True) if p < LEVEL]
    ours, theirs = sum(x > 0 for x in significant), sum(x < 0 for x in significant)
    return (
        f"{len(comparisons)} comparisons: bf16 with our head is closer to fp32 in {sum(x > 0 for x in signs)}, with "
        f"TRL's in {sum(x < 0 for x in signs)}. After correction for their number, {ours} and {theirs} of these are "
        f"significant (p < {LEVEL:g})."
    )


def distances_table(comparisons: list[Comparison], adjusted: dict[int, float]) -> str:
    rows = [
        [
            x.group.name,
            METRICS[x.metric],
            *(x.distances[arm].text() for arm in OTHERS),
            f"{adjusted[id(x)]:.2g}",
        ]
        for x in comparisons
    ]
    return table(["task, tuning", "metric", *(NAMES[arm] for arm in OTHERS), "p"], rows)


def accuracy_table(groups: list[Group]) -> str:
    """Return held-out accuracies in percent, and differences from fp32 in points."""
    rows = []
    for group in groups:
        found = {arm: group.accuracy(arm) for arm in NAMES}
        changes = [Estimate.of(found[arm] - found[TRUTH]).text("+.1f", 100) for arm in OTHERS]
        p = paired_p(found["trl_bf16"], found["ours_bf16"])
        rows.append([group.method.upper(), group.name, f"{100 * found[TRUTH].mean():.1f}", *changes, f"{p:.2g}"])
    return table(["method", "task, tuning", "TRL, fp32", *(NAMES[arm] for arm in OTHERS), "p"], rows)


def ratios_table(lines: Lines, benchmark: str) -> str:
    """Return the largest log-ratio, and the shares of ratios outside the clip ranges."""
    tokens, completions = CLIP_RANGES.values()
    rows = [
        [
            line["task"].replace("-", ", ") + " tokens" * ("-" in line["task"]),
            NAMES[line["arm"]],
            f"{line['counts']['tokens']:,}",
            f"{line['largest']:.1e}",
            f"{line['outside']['tokens']:.2%}",
            f"{line['outside']['completions']:.2%}",
        ]
        for line in lines
        if line["benchmark"] == benchmark and line["arm"] in ("trl_bf16", "ours_bf16")
    ]
    header = [
        "task",
        "head",
        "tokens",
        "largest",
        f"tokens outside ±{tokens:g}",
        f"completions outside ±{completions:g}",
    ]
    return table(header, sorted(rows))


def sections(lines: Lines) -> str:
    """Return the generated part of the page."""
    groups = groups_of(lines)
    comparisons = list(comparisons_of(groups))
    adjusted = {id(x): p for x, p in zip(comparisons, corrected(comparisons), strict=True)}
    text = ["### In training", verdict(comparisons)]
    for method in dict.fromkeys(group.method for group in groups):
        of_method = [x for x in comparisons if x.group.method == method]
        text += [f"#### {method.upper()}", f"![Distances from fp32, {method.upper()}]({IMAGES}/exactness-{method}.png)"]
        text += [distances_table(of_method, adjusted)]
        text += [f"![{method.upper()} over steps]({IMAGES}/exactness-{method}-steps.png)"]
    text += ["### Held-out accuracy", accuracy_table(groups)]
    text += ["### The head alone", ratios_table(lines, "head")]
    text += ["### On-policy steps", ratios_table(lines, "on_policy")]
    return "\n\n".join([*text, origin(lines)])


def origin(lines: Lines) -> str:
    runs = [line for line in lines if line["benchmark"] == "curves"]
    versions = {(name, of) for line in runs for name, of in line["versions"].items() if of and name != "commit"}
    named = ", ".join(f"{name} {of}" for name, of in sorted(versions))
    minutes = sum(line["cpu_seconds"] for line in runs) / 60
    seeds = {len(group.seeds) for group in groups_of(lines)}
    per_arm = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else str(*seeds)
    return f"{len(runs)} runs, {per_arm} seeds of each arm, {minutes:.0f} minutes of CPU time; {named}."


def draw_distances(comparisons: list[Comparison], path: Path) -> None:
    """Draw the distance of each arm with its interval, with a row for each group and metric."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 1.3 + 0.3 * len(comparisons)), layout="constrained")
        for row, x in enumerate(comparisons):
            for offset, arm in zip((-0.22, 0, 0.22), OTHERS, strict=True):
                found = x.distances[arm]
                ends = [[found.mean - found.low], [found.high - found.mean]]
                label = NAMES[arm] if row == 0 else None
                axes.errorbar(found.mean, row + offset, xerr=ends, fmt="o", ms=3, color=COLOURS[arm], label=label)
        axes.set_yticks(range(len(comparisons)), [f"{x.group.name}: {METRICS[x.metric]}" for x in comparisons])
        axes.set_ylim(len(comparisons) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("distance from TRL in fp32\n1: a standard deviation between seeds")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        save(figure, path)


def draw_steps(groups: list[Group], metric: str, path: Path) -> None:
    """Draw the mean distance of each arm against the steps, with a panel for each group."""
    with plt.rc_context(STYLE):
        rows = (len(groups) + 1) // 2
        figure, grid = plt.subplots(rows, 2, figsize=(WIDTH, 2.2 * rows + 0.6), squeeze=False, layout="constrained")
        for axes, group in zip(grid.flat, groups, strict=False):
            for arm in OTHERS:
                label = NAMES[arm] if group is groups[0] else None
                axes.plot(group.differences(arm, metric).mean(axis=0), color=COLOURS[arm], label=label)
            axes.set_title(group.name, fontsize=10, loc="left")
            axes.set_ylim(bottom=0)
        for axes in grid[-1]:
            axes.set_xlabel("step")
        figure.supylabel(f"distance from fp32: {METRICS[metric]}", fontsize=10)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        save(figure, path)


def main() -> None:
    lines = lines_in(FOLDER)
    groups = groups_of(lines)
    images = DOCS / "images"
    for method in dict.fromkeys(group.method for group in groups):
        of_method = [group for group in groups if group.method == method]
        draw_distances(list(comparisons_of(of_method)), images / f"exactness-{method}.png")
        draw_steps(of_method, OVER_STEPS[method], images / f"exactness-{method}-steps.png")
    PAGE.write_text(with_part(PAGE.read_text(), sections(lines), BEGIN))
    print(f"wrote {PAGE}, from {len(lines)} lines")


if __name__ == "__main__":
    main()
