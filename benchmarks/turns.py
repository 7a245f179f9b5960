"""Measure time, memory and tokens of each optimizer step; stock TRL and ours take turns at the same training.

A line's milliseconds are those of whole optimizer steps, with the device synchronized at both ends; on the CPU they are
process time on one thread, so that other load on the machine matters less. `tokens` counts the tokens, padding
included, at the input embeddings; `no_grad_forwards` counts passes of the old policy and the reference. Both are means
over the measured `steps`. `peak_mib` is the peak memory of a step, model and optimizer included; on the CPU it is that
of a whole training, measured from the allocator's records in a separate round.
"""

import argparse
import gc
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import results
import torch
import trl
from allocations import peak_bytes
from steps import Case, Shape, trainer_of
from transformers import PrinterCallback, TrainerCallback

import trl_ext

SUBJECTS = {"trl": trl, "trl_ext": trl_ext}
WARM_UP_STEPS = 2

Line = dict[str, Any]


@dataclass
class Step:
    """The measurements of one optimizer step."""

    milliseconds: float = 0.0
    peak_mib: float | None = None
    tokens: int = 0
    no_grad_forwards: int = 0


class Steps(TrainerCallback):
    """Measures the optimizer steps of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self.taken: list[Step] = []
        self._tokens = 0
        self._no_grad_forwards = 0
        others = (getattr(trainer, name, None) for name in ("ref_model", "teacher_model"))
        for model in filter(None, (trainer.model, *others)):
            model.get_input_embeddings().register_forward_hook(self._count)
        trainer.add_callback(self)

    def _count(self, module: Any, args: Any, output: Any) -> None:
        # A hook that may do more than observe would make our trainers pad as TRL does
        self._tokens += args[0].numel()
        if not torch.is_grad_enabled():
            self._no_grad_forwards += 1

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.taken.append(Step())
        self._tokens = 0  # DPO's trainer may have scored before the first step
        self._no_grad_forwards = 0
        self._begun = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.taken[-1].milliseconds = 1e3 * (now() - self._begun)
        self.taken[-1].tokens = self._tokens
        self.taken[-1].no_grad_forwards = self._no_grad_forwards
        if torch.cuda.is_available():
            self.taken[-1].peak_mib = torch.cuda.max_memory_allocated() / 2**20


def now() -> float:
    """Return the time in seconds, after synchronizing the device; on the CPU, process time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def train(library: Any, case: Case) -> tuple[list[Step], list[dict[str, float]]]:
    """Run one training; return its optimizer steps and its logs. Nothing of it stays in memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(library, case, folder)
        steps = Steps(trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return steps.taken, trainer.state.log_history


def line_of(benchmark: str, shape: dict[str, Any], subject: str, run: str, milliseconds: list[float]) -> Line:
    timed = (statistics.median(milliseconds), min(milliseconds), max(milliseconds)) if milliseconds else (None,) * 3
    return {
        "benchmark": benchmark,
        "shape": shape,
        "subject": subject,
        "run": run,
        **dict(zip(("median_ms", "min_ms", "max_ms"), timed, strict=True)),
        "peak_mib": None,
        "max_error": None,
    }


def peak_of(steps: list[Step]) -> float | None:
    return max((step.peak_mib for step in steps if step.peak_mib is not None), default=None)


def measure(case: Case, deadline: float) -> list[Line]:
    """Return a line for each subject, and for each epoch if there are several.

    After the second round, another starts only if it would end before `deadline`, a time of `time.monotonic`.
    """
    taken: dict[str, list[list[Step]]] = {name: [] for name in SUBJECTS}
    for number in range(case.shape.rounds):
        begun = time.monotonic()
        for name, library in SUBJECTS.items():
            taken[name].append(train(library, case)[0])
        if number and 2 * time.monotonic() - begun > deadline:
            break
    whole = {} if torch.cuda.is_available() else {x: peak_bytes(partial(train, y, case)) for x, y in SUBJECTS.items()}
    run, lines = results.new_run(), []
    steps_of_epoch = case.shape.steps // case.epochs
    for epoch in range(case.epochs):
        first = max(WARM_UP_STEPS, epoch * steps_of_epoch)
        benchmark = case.benchmark + (f"_epoch_{epoch + 1}" if case.epochs > 1 else "")
        for name, rounds in taken.items():
            steps = [step for steps in rounds for step in steps[first : (epoch + 1) * steps_of_epoch]]
            line = line_of(benchmark, shape_of(case), name, run, [step.milliseconds for step in steps])
            line["peak_mib"] = whole[name] / 2**20 if whole else peak_of(steps)
            line["tokens"] = statistics.fmean(step.tokens for step in steps)
            line["no_grad_forwards"] = statistics.fmean(step.no_grad_forwards for step in steps)
            lines.append({**line, "steps": len(steps)})
    return lines


def sizes_of(shape: Shape) -> dict[str, Any]:
    return {name: size for name, size in asdict(shape).items() if name not in ("steps", "rounds")}


def shape_of(case: Case) -> dict[str, Any]:
    """Return the sizes and arguments that are needed to run the case again."""
    return {**sizes_of(case.shape), "lora": case.lora, "dead_share": case.dead_share, **case.config, **case.ours}


def begin(doc: str | None, budget: float) -> argparse.Namespace:
    """Parse the command line, turn off logs and progress bars, and use one thread on the CPU."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to check that it runs")
    parser.add_argument("--only", default="", help="run only benchmarks whose name contains this")
    parser.add_argument("--budget", type=float, default=budget, help="seconds; benchmarks beyond it are left out")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder to write to")
    chosen = parser.parse_args()
    # Progress bars and plans would break the table
    logging.getLogger("trl_ext").setLevel(logging.WARNING)
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore", FutureWarning)  # from libraries
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    return chosen


def take(measurements: dict[str, Callable[[float], list[Line]]], chosen: argparse.Namespace) -> None:
    """Run the measurements, each in an equal share of the remaining time, and write the lines of each immediately.

    A measurement is left out if the last one took longer than the remaining time, or if the device runs out of memory.
    """
    end = time.monotonic() + chosen.budget
    names = [name for name in measurements if chosen.only in name]
    origin = results.origin(device())
    print(f"{origin}\n{'':<44}{'before ms':>11}{'after ms':>11}{'ratio':>7}  tokens, peak MiB")
    took = 0.0
    for number, name in enumerate(names):
        begun = time.monotonic()
        if begun + took > end:
            print(f"left out: {name}, past the budget of {chosen.budget:g} s")
            continue
        try:
            lines = measurements[name](begun + (end - begun) / (len(names) - number))
        except torch.OutOfMemoryError as error:
            print(f"left out: {name}, {error}")
            continue
        took = time.monotonic() - begun
        if lines:
            results.add([line | origin for line in lines], chosen.results)
            show(lines)
    print(f"{chosen.budget + time.monotonic() - end:.0f} s; the lines are in {chosen.results}")


def show(lines: list[Line]) -> None:
    """Print pairs of lines of one benchmark, with the first one's time over the second's: higher is better."""
    for before, after in zip(lines[::2], lines[1::2], strict=True):
        tokens = f"{before['tokens']:.0f} -> {after['tokens']:.0f}"
        times, peaks = ([line[what] for line in (before, after)] for what in ("median_ms", "peak_mib"))
        timed = " " * 29 if None in times else f"{times[0]:>11.1f}{times[1]:>11.1f}{times[0] / times[1]:>7.2f}"
        held = "" if None in peaks else f"  {peaks[0]:.0f} -> {peaks[1]:.0f}"
        print(f"{before['benchmark']:<44}{timed}  {tokens}{held}", flush=True)
