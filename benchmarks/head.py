"""Measure the head (hidden states to log-probs) beside its peers: time, peak memory and error against float64.

    python benchmarks/head.py --device cuda          # as much of the grid as its budget allows on one GPU, no network
    python benchmarks/head.py --device cuda --sweep  # which tile sizes are fastest for ours
    python benchmarks/head.py --device cpu           # small shapes, under 20 seconds: that it runs, and the errors
    python benchmarks/head.py --device cpu --shape 512 2048 32000  # one shape, N x H x V

First it measures the device's ceilings, a large product and a large copy. Of every shape and use it then says how long
the use's products take at that rate and its bytes at that bandwidth. The longer of the two is the limit, and of ours it
says what share of the limit it reaches.

Every line it adds to benchmarks/results/<date>-<device>.jsonl is one subject at one shape in one use: `head_nograd` (a
forward), `head_frozen_fwd_bwd` (forward and backward to the hidden states, as with LoRA), `head_trained_fwd_bwd` (to
the weight too), and at the first shape each of these with the entropy as well (`_entropy`), as GRPO asks for it. In one
run all subjects get the same fresh inputs and take turns, so that a slow spell of the machine hits all of them: compare
subjects of one run only. What each subject is stands in `head_subjects.py`; a new one is a function there.

- median_ms, min_ms, max_ms: of `ROUNDS` calls, each begun on an idle device, by CUDA events; on the CPU the time that
  the process itself takes, on one thread.
- peak_mib: the most memory allocated above what was before the call, results included.
- max_error: the largest |log p - float64| over all tokens, with the same bf16 inputs.
- gradient_error, weight_gradient_error: ||gradient - float64|| / ||float64|| of some tokens' hidden states, and of some
  rows of the weight. The results are bf16, so that even an exact head is off by 1.7e-3.
- products_ms, bytes_ms: the use's products (1; 2; 4, since the logits are made once for the normalizer and once more
  for the gradient) at the measured rate, and its inputs and results, once each, at the measured bandwidth.
- The subject `matmul` is these products as the library makes them, each as one call, with results in bf16.

Dimensions: N tokens, H hidden size, V vocabulary.
"""

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from head_inputs import DTYPE, Inputs, Reference, Results, errors, float64_reference, fresh_inputs
from head_subjects import SUBJECTS, Head, load
from head_tiles import SHAPES, sweep
from head_uses import ENTROPY_USES, USES, Shape, Use, limits, matmul_step, step_of
from results import FOLDER, add, new_run, origin
from timing import Ceilings, Step, in_turns, measure_ceilings, peak_mib

FIRST = {"N": 8192, "H": 4096, "V": 131072}
# The numbers of tokens in the order in which they are measured
GRID = {"N": (8192, 2048, 32768), "H": (1024, 2048, 4096, 8192), "V": (32000, 131072, 151936, 262144)}
SMALL = ({"N": 128, "H": 256, "V": 4096}, {"N": 96, "H": 64, "V": 4099})
ROUNDS = 10


class Problem(NamedTuple):
    """A shape with fresh inputs, and what they give in float64."""

    shape: Shape
    inputs: Inputs
    reference: Reference


def first_calls(
    name: str, use: Use, problem: Problem, heads: dict[str, Head], device: torch.device
) -> tuple[dict[str, Step], dict[str, dict[str, Any]]]:
    """The steps of the subjects that can do this, and the errors and peak memory of each; of others a line says why."""
    # First, so that its operands are there when the others are tried
    bare = matmul_step(use, problem.inputs)
    bare()
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for subject, head in heads.items():
        try:
            step = step_of(head, use, problem.inputs)
            # This first call compiles, and takes the libraries' workspaces: the peak is that of the second
            of_errors = errors(step(), problem.reference)
            found[subject] = {"peak_mib": peak_mib(step, device)} | of_errors
            steps[subject] = step
        except torch.OutOfMemoryError:
            print(f"left out: {subject} in {name} at {problem.shape}, out of memory")
        except Exception as error:  # a peer's; the others go on
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"left out: {subject} in {name} at {problem.shape}, {what}")
            if device.type == "cuda":
                _still_works(device, subject)
    return steps | {"matmul": bare}, found | {"matmul": {"peak_mib": None} | errors(Results(None), problem.reference)}


def _still_works(device: torch.device, subject: str) -> None:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise SystemExit(f"{subject} left the device unusable; run again with `--without {subject}`.") from error


def measure(
    name: str, use: Use, problem: Problem, heads: dict[str, Head], device: torch.device, ceilings: Ceilings
) -> list[dict[str, Any]]:
    """One run: all subjects in one use at one shape, on the same inputs; a line for each that could do it."""
    run = new_run()
    steps, found = first_calls(name, use, problem, heads, device)
    times = in_turns(steps, ROUNDS, device)
    return [
        {
            "benchmark": name,
            "shape": problem.shape,
            "subject": subject,
            "run": run,
            "median_ms": statistics.median(times[subject]),
            "min_ms": min(times[subject]),
            "max_ms": max(times[subject]),
            **found[subject],
            **limits(use, problem.shape, ceilings),
            "dtype": str(DTYPE).removeprefix("torch."),
        }
        for subject in steps
    ]


def measure_shape(
    shape: Shape, first: bool, heads: dict[str, Head], device: torch.device, ceilings: Ceilings
) -> Iterator[list[dict[str, Any]]]:
    """The lines of one use after another at a shape; the first shape has more of them, and more subjects."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    inputs = fresh_inputs(**shape, device=device, seed=int(new_run(), 16))
    problem = Problem(shape, inputs, float64_reference(inputs))
    for name, use in (USES | ENTROPY_USES if first else USES).items():
        able = {}
        for subject, head in heads.items():
            what = SUBJECTS[subject]
            if (
                (first or what.everywhere)
                and (what.scores or use.grad_hidden)
                and (what.entropy or "entropy" not in use.outputs)
            ):
                able[subject] = head
        yield measure(name, use, problem, able, device, ceilings)


def table(lines: list[dict[str, Any]]) -> str:
    """One run for a reader. "/ trl" and "/ matmul" are the median over theirs: below 1 is faster."""
    row = "{:<28}{:>10}{:>20}{:>7}{:>9}{:>10}{:>10}{:>11}{:>11}".format
    measured = {line["subject"]: line for line in lines}
    first = lines[0]
    text = [
        " ".join([f"\n{first['benchmark']}", *(f"{name}={size}" for name, size in first["shape"].items())])
        + f": products {first['products_ms']:.3g} ms, bytes {first['bytes_ms']:.3g} ms",
        row("", "median ms", "min - max", "/ trl", "/ matmul", "peak MiB", "max error", "dH error", "dW error"),
    ]
    for subject, line in measured.items():
        median, spread = f"{line['median_ms']:.3f}", f"{line['min_ms']:.3f} - {line['max_ms']:.3f}"
        over = [line["median_ms"] / measured[x]["median_ms"] if x in measured else None for x in ("trl", "matmul")]
        values = [*over, *(line[x] for x in ("peak_mib", "max_error", "gradient_error", "weight_gradient_error"))]
        forms = (".2f", ".2f", ".1f", ".1e", ".1e", ".1e")
        cells = ["-" if x is None else format(x, form) for x, form in zip(values, forms, strict=True)]
        text.append(row(f" {subject}", median, spread, *cells))
    for subject in ("trl_ext_torch", "trl_ext"):
        if subject in measured:
            reached = max(first["products_ms"], first["bytes_ms"]) / measured[subject]["median_ms"]
            text.append(f" {subject} reaches {reached:.0%} of the limit")
    return "\n".join(text)


def shapes_in_order() -> list[Shape]:
    """The judged shape, then every hidden size and vocabulary at its number of tokens, then those at the others."""
    grid = [
        dict(zip(GRID, (N, H, V), strict=True))
        for N in GRID["N"]
        for H, V in sorted(product(GRID["H"], GRID["V"]), key=prod)
    ]
    return [FIRST, *(shape for shape in grid if shape != FIRST)]


def measure_all(
    shapes: Iterable[Shape], heads: dict[str, Head], device: torch.device, folder: Path, budget: float
) -> None:
    """Measure one shape after another as long as the budget, in seconds, is expected to last, and add the lines."""
    begun = time.monotonic()
    ceilings, about = measure_ceilings(device), origin(device.type)
    print(f"{about}\n{ceilings}")
    seconds_per_work, first, skipped, path = 0.0, True, [], None
    for shape in shapes:
        # As long as the last shape took for its size
        started, work = time.monotonic(), prod(shape.values())
        if started - begun + seconds_per_work * work > budget:
            skipped.append("x".join(map(str, shape.values())))
            continue
        try:
            for lines in measure_shape(shape, first, heads, device, ceilings):
                print(table(lines), flush=True)
                path = add([line | about for line in lines], folder)
        except torch.OutOfMemoryError:
            print(f"left out: the rest of {shape}, out of memory")
        first, seconds_per_work = False, (time.monotonic() - started) / work
    print(f"\nadded to {path or folder}, {time.monotonic() - begun:.0f} s")
    if skipped:
        print(f"left out: {', '.join(skipped)} (N x H x V), past the budget of {budget:g} s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--sweep", action="store_true", help="only try tile sizes of ours, and say which is fastest")
    parser.add_argument("--without", nargs="*", default=[], choices=SUBJECTS, help="subjects to leave out")
    parser.add_argument("--shape", type=int, nargs=3, metavar=tuple(FIRST), help="measure this shape alone")
    parser.add_argument("--budget", type=float, default=200, help="seconds; leaves out shapes that take more")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder to write to")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here. `--device cpu` needs none.")
    if options.device == "cpu":
        # At small shapes threads wait for one another, on a busy machine for most of the time
        torch.set_num_threads(1)
    device = torch.device(options.device)
    shapes = shapes_in_order() if options.device == "cuda" else list(SMALL)
    if options.shape:
        shapes = [dict(zip(FIRST, options.shape, strict=True))]
    if options.sweep:
        for shape in SHAPES if options.device == "cuda" else SMALL[:1]:
            sweep(shape, device)
        return
    measure_all(shapes, load(device, options.without), device, options.results, options.budget)


if __name__ == "__main__":
    main()
