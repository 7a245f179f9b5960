"""The command `compare`: a few steps of TRL's trainer and of ours with the same arguments and seed, side by side."""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from ..config import with_help
from ..version import __version__
from . import CommandError, ReportedError
from .arguments import OneLineParser, dataclasses_of, parse
from .commands import Process
from .compared import JOB, RESULT, WEIGHTS, Job, RunResult, StepCost
from .launch import asks_for_one_process
from .line import Line

LIBRARIES = ("trl", "trl_ext")
# The largest relative difference that rounding explains. A value near 0 is compared with the largest that the run
# logged for it, and the weights with the norm of their change. In bf16 TRL rounds logits: DPO of SmolLM2-135M, with 160
# tokens a row, differs by 0.14, 0.80 and 0.10. There only gross errors can be told from rounding.
TOLERANCES = {
    "float32": {"loss": 1e-4, "metrics": 1e-3, "weights": 1e-2},
    "lower precision": {"loss": 3e-1, "metrics": 1.5, "weights": 5e-1},
}
_SMALLEST = 1e-2  # scale of a logged value
# GRPO's and RLOO's metrics that are means over other rows in ours: where it skips rows, and in several micro-batches
# (docs/following.md#changed)
_MEANS_OF_SCORED_ROWS = ("entropy", "vespo/")
_MEANS_OF_MICRO_BATCHES = (*_MEANS_OF_SCORED_ROWS, "kl", "clip_ratio/", "cispo_clip_ratio", "sampling/")
# What is no result of the training. In RLOO with a KL term, rounding decides the last one
_NO_RESULT = {"step_time", "epoch", "total_flos", "learning_rate", "frac_reward_zero_std"}
_ROWS = 256


@with_help
@dataclass
class CompareArguments:
    """The arguments of `compare` alone."""

    steps: int = 5
    """Optimizer steps of each run."""

    rounds: int = 1
    """Runs of each library, in turns. Times are medians over all runs."""


@dataclass
class Comparison:
    """What separates the runs of TRL and ours.

    Attributes:
        steps (`int`): how many were compared: those before the first sample that differs.
        loss (`float`): the largest relative difference.
        metrics (`dict[str, float]`): the same for each metric that both log, without those of `of_other_rows`.
        of_other_rows (`list[str]`): metrics that are means over other rows in ours.
        weights (`float`): the norm of the difference, relative to that of their change.
        initial (`bool`): whether both began with the same weights.
        samples (`list[bool]`): for each call of `generate`, whether both returned the same tokens.
        only (`dict[str, list[str]]`): the metrics that one library alone logs.
    """

    steps: int
    loss: float
    metrics: dict[str, float]
    of_other_rows: list[str]
    weights: float
    initial: bool
    samples: list[bool]
    only: dict[str, list[str]]

    def beyond(self, tolerances: dict[str, float]) -> list[str]:
        """Return what differs by more than rounding."""
        measured = {"loss": self.loss, "metrics": max(self.metrics.values(), default=0.0), "weights": self.weights}
        if not all(self.samples):
            measured.pop("weights")  # they are trained on other samples
        names = [name for name, value in measured.items() if not value <= tolerances[name]]
        return names + ["initial weights"] * (not self.initial) + ["samples"] * (not all(self.samples))


def run(line: Line, process: Process) -> int:
    """Print what differs and what each library takes. Return 1 if more than rounding differs."""
    arguments = _arguments(line)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runs: dict[str, list[RunResult]] = {library: [] for library in LIBRARIES}
        for number in range(arguments.rounds):
            for library in LIBRARIES:
                print(f"{library}, {arguments.steps} steps ...", file=sys.stderr, flush=True)
                job = Job(line.method, library, _without_own(line), arguments.steps, _ROWS)
                runs[library].append(run_alone(job, folder / f"{library}-{number}"))
        stock, ours = (runs[library][0] for library in LIBRARIES)
        comparison = compare(stock, ours, *(folder / f"{library}-0" / WEIGHTS for library in LIBRARIES))
    is_fp32 = stock.precision == ours.precision == "float32"
    tolerances = TOLERANCES["float32" if is_fp32 else "lower precision"]
    for row in report(line.method, runs, comparison, tolerances):
        print(row)
    return int(bool(comparison.beyond(tolerances)))


def _arguments(line: Line) -> CompareArguments:
    parser = OneLineParser((*dataclasses_of(line.method), CompareArguments), prog=line.prog)
    parsed_arguments = parse(parser, line, may_launch=True, predicts=True)
    launch_arguments = [*parsed_arguments.launch_of_file, *parsed_arguments.launch]
    if launch_arguments and not asks_for_one_process(launch_arguments):
        raise CommandError(
            f"`{launch_arguments[0]}` is for `accelerate launch`, which `compare` does not run. Remove it: `compare` "
            "runs in one process."
        )
    arguments: CompareArguments = parsed_arguments.command
    for name in ("steps", "rounds"):
        if getattr(arguments, name) < 1:
            raise CommandError(f"`--{name}` must be 1 or more, got {getattr(arguments, name)}.")
    return arguments


def _without_own(line: Line) -> list[str]:
    """Return the words of the training alone."""
    words: list[str] = []
    skips = False
    for word in line.all_words:
        name = word.partition("=")[0]
        if name in ("--steps", "--rounds"):
            skips = "=" not in word
        elif skips:
            skips = False
        else:
            words.append(word)
    return words


def run_alone(job: Job, folder: Path) -> RunResult:
    """Run in a process of its own, so that neither library's memory or changes count for the other."""
    folder.mkdir()
    (folder / JOB).write_text(json.dumps(asdict(job)))
    code = "from trl_ext.cli.compared import main; main()"
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if child.returncode:
        last_lines = "\n".join(child.stdout.strip().splitlines()[-12:])
        raise ReportedError(f"The run of {job.library} failed:\n{last_lines}")
    content = json.loads((folder / RESULT).read_text())
    return RunResult(**content | {"steps": [StepCost(**step) for step in content["steps"]]})


def compare(stock: RunResult, ours: RunResult, stock_weights: Path, our_weights: Path) -> Comparison:
    """Compare what two runs logged and trained. After a sample that differs, both train on other tokens."""
    samples = [x == y for x, y in zip_longest(stock.samples, ours.samples)]
    calls_per_step = max(1, len(samples) // max(1, len(stock.log)))
    steps = samples.index(False) // calls_per_step if False in samples else len(stock.log)
    differences: dict[str, float] = {}
    names = [{name for entry in run.log for name in entry} for run in (stock, ours)]
    for name in (names[0] & names[1]) - _NO_RESULT:
        differences[name] = _largest_difference(name, stock.log, ours.log, steps)
    prefixes = _prefixes_of_other_rows(ours)
    of_other_rows = sorted(name for name in differences if name.startswith(prefixes))
    weights = [torch.load(file, weights_only=True) for file in (stock_weights, our_weights)]
    squares = [(weights[1][name].double() - x.double()).square().sum().item() for name, x in weights[0].items()]
    return Comparison(
        steps=steps,
        loss=differences.pop("loss"),
        metrics={name: x for name, x in differences.items() if name not in of_other_rows},
        of_other_rows=of_other_rows,
        weights=_ratio(sum(squares) ** 0.5, stock.change),
        initial=stock.initial_weights == ours.initial_weights,
        samples=samples,
        only={"trl": sorted(names[0] - names[1]), "trl_ext": sorted(names[1] - names[0])},
    )


def _ratio(distance: float, change: float) -> float:
    if not distance:
        return 0.0
    return distance / change if change else math.inf


def _prefixes_of_other_rows(ours: RunResult) -> tuple[str, ...]:
    """Return how the names of metrics begin that are means over other rows in ours."""
    if ours.micro_batches > 1 and ours.samples:
        return _MEANS_OF_MICRO_BATCHES
    skips_rows = any(entry.get("skipped/rows") for entry in ours.log)
    return _MEANS_OF_SCORED_ROWS if skips_rows else ()


def _largest_difference(name: str, stock: list[dict[str, float]], ours: list[dict[str, float]], steps: int) -> float:
    pairs = [(x[name], y[name]) for x, y in zip(stock, ours, strict=True) if name in x and name in y]
    scale = max([_SMALLEST, *(abs(value) for pair in pairs for value in pair if math.isfinite(value))])
    return max((_difference(x, y, scale) for x, y in pairs[:steps]), default=0.0)


def _difference(x: float, y: float, scale: float) -> float:
    """Return the relative difference: infinite if only one is NaN, which `max` could drop."""
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    return abs(x - y) / scale if math.isfinite(x) and math.isfinite(y) else math.inf


def report(
    method: str, runs: dict[str, list[RunResult]], comparison: Comparison, tolerances: dict[str, float]
) -> Iterator[str]:
    """Yield the lines of the report."""
    stock, ours = (runs[library][0] for library in LIBRARIES)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    yield f"{method}, {len(stock.steps)} steps, {ours.precision}, {ours.device}; {versions}, trl_ext {__version__}"
    yield f"\n{'':36}{'TRL':>12}{'trl_ext':>12}{'TRL / ours':>12}"
    first = slice(0, 1)
    later = slice(1, None) if len(stock.steps) > 1 else first
    unit = "CPU s" if ours.device == "cpu" else "s"
    yield _row("tokens in a step, median", _median(runs, later, lambda x: x.tokens), ",.0f")
    yield _row("tokens in the first step", _median(runs, first, lambda x: x.tokens), ",.0f")
    yield _row(f"{unit} in a step, median", _median(runs, later, lambda x: x.seconds), ".3f")
    yield _row(f"{unit} in the first step", _median(runs, first, lambda x: x.seconds), ".3f")
    if stock.samples:
        yield _row(f"{unit} of generation in a step", _median(runs, later, lambda x: x.generation_seconds), ".3f")
    peaks = [statistics.median(x.peak_mib or 0 for x in runs[library]) for library in LIBRARIES]
    if all(peaks):
        yield _row("peak MiB, trainer and steps", peaks, ",.0f")
    if stock.samples:
        yield "Tokens and times of steps do not include generation."
    yield ""
    limits = {name: f"{value:.1e} (rounding: up to {tolerances[name]:.2g})" for name, value in _measured(comparison)}
    worst = max(comparison.metrics, key=comparison.metrics.__getitem__, default="none")
    yield f"{'largest difference of the loss':36}{limits['loss']}"
    yield f"{f'of {len(comparison.metrics)} metrics, in {worst}':35} {limits['metrics']}"
    yield f"{'of weights, relative to change':36}{limits['weights']}"
    if comparison.samples:
        equal = sum(comparison.samples)
        yield f"{'equal samples':36}{equal} of {len(comparison.samples)} calls of `generate`"
    if comparison.of_other_rows:
        yield f"not compared, because trl_ext averages over other rows: {', '.join(comparison.of_other_rows)}"
    for library, names in comparison.only.items():
        if names:
            yield f"logged only by {library}: {', '.join(names)}"
    beyond = comparison.beyond(tolerances)
    is_strict = tolerances is TOLERANCES["float32"]
    agreement = "Equal up to rounding" if is_strict else "No gross difference"
    yield f"\n{'Beyond rounding: ' + ', '.join(beyond) if beyond else agreement}."
    if not is_strict:
        yield "TRL rounds logits in lower precision. To compare strictly, add --bf16 false --dtype float32."
    if beyond and ours.drops_out:
        yield "Dropout draws other random numbers in trl_ext. To compare, set it to 0 (for LoRA: --lora_dropout 0)."
    if beyond and any(entry.get("frac_reward_zero_std") for entry in ours.log):
        yield (
            "Some groups have equal rewards, for which TRL's advantages can be rounding noise. To keep this noise in "
            "trl_ext, add --zero_advantages_of_equal_rewards false."
        )


def _measured(comparison: Comparison) -> list[tuple[str, float]]:
    metrics = max(comparison.metrics.values(), default=0.0)
    return [("loss", comparison.loss), ("metrics", metrics), ("weights", comparison.weights)]


def _median(runs: dict[str, list[RunResult]], part: slice, value: Callable[[StepCost], Any]) -> list[float]:
    return [statistics.median(value(step) for run in runs[x] for step in run.steps[part]) for x in LIBRARIES]


def _row(label: str, values: list[float], style: str) -> str:
    stock, ours = values
    ratio = f"{stock / ours:>12.2f}" if ours else ""
    return f"{label:36}{stock:>12{style}}{ours:>12{style}}{ratio}"
