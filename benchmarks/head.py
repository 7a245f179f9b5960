"""Measure the LM head (hidden states to log-probs) and its peers: time, peak memory and error against float64.

    python benchmarks/head.py --device cuda          # as much of the grid as its budget allows on one GPU, no network
    python benchmarks/head.py --device cuda --sweep  # which tile sizes are fastest for ours
    python benchmarks/head.py --device cpu           # small shapes, under 20 seconds: that it runs, and the errors
    python benchmarks/head.py --device cpu --shape 512 2048 32000  # one shape, N x H x V

First it measures the device's ceilings: the rate of a large matrix product and the bandwidth of a large copy. For every
shape and use it then computes how long the matrix products take at that rate, and the bytes at that bandwidth. The
longer of the two times is the limit. It prints how close our head gets to the limit.

Each line that it adds to benchmarks/results/<date>-<device>.jsonl is one subject at one shape in one use: `head_nograd`
(forward), `head_frozen_fwd_bwd` (forward, and backward to the hidden states, as with LoRA), `head_trained_fwd_bwd`
(backward to the weight too), and at the first shape each of these with the entropy (`_entropy`), as in GRPO. In one run
all subjects get the same fresh inputs and take turns, so that a slow moment of the machine affects all of them: compare
only subjects of one run. `head_subjects.py` describes the subjects; a new one is a function there.

- median_ms, min_ms, max_ms: time of `ROUNDS` calls, each started on an idle device, by CUDA events; on the CPU, process
  time on one thread.
- peak_mib: peak memory above what was allocated before the call, results included.
- max_error: the largest |log p - float64| over all tokens, with the same bf16 inputs.
- gradient_error, weight_gradient_error: ||gradient - float64|| / ||float64|| for the hidden states of some tokens, and
  for some rows of the weight. Results are bf16, so even an exact head is off by 1.7e-3.
- products_ms, bytes_ms: the matrix products of the use at the measured rate (1; 2; 4, because logits are computed for
  the normalizer and again for the gradient), and its inputs and results, once each, at the measured bandwidth.
- The subject `matmul` runs these products as single library calls, with results in bf16.

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
# Numbers of tokens are measured in this order
# 5000 tokens and 50257 classes divide into no even tiles
GRID = {
    "N": (8192, 5000, 2048, 32768),
    "H": (1024, 2048, 4096, 8192),
    "V": (32000, 50257, 131072, 151936, 262144),
}
SMALL = ({"N": 128, "H": 256, "V": 4096}, {"N": 96, "H": 64, "V": 4099})
ROUNDS = 10


class Problem(NamedTuple):
    """A shape with fresh inputs, and their results in float64."""

    shape: Shape
    inputs: Inputs
    reference: Reference


def first_calls(
    name: str, use: Use, problem: Problem, heads: dict[str, Head], device: torch.device
) -> tuple[dict[str, Step], dict[str, dict[str, Any]]]:
    """Call each subject once; return the steps of those that work, and their errors and peak memory."""
    # First, so that its operands are in memory when the others are tried
    bare = matmul_step(use, problem.inputs)
    bare()
    steps: dict[str, Step] = {}
    found: dict[str, dict[str, Any]] = {}
    for subject, head in heads.items():
        try:
            step = step_of(head, use, problem.inputs)
            # The first call compiles and allocates the libraries' workspaces, so the peak is that of the second
            of_errors = errors(step(), problem.reference)
            found[subject] = {"peak_mib": peak_mib(step, device)} | of_errors
            steps[subject] = step
        except torch.OutOfMemoryError:
            print(f"left out: {subject} in {name} at {problem.shape}, out of memory")
        except Exception as error:  # of a peer; continue with the others
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
    """Run all subjects in one use at one shape, on the same inputs; return a line for each that works."""
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
    """Yield the lines of each use at a shape; the first shape has more uses and more subjects."""
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
    """Return one run as a table. "/ trl" and "/ matmul" are ratios of medians: below 1 is faster than they are."""
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
    """Return all shapes: the main one, then the others with its number of tokens, then other numbers of tokens."""
    grid = [
        dict(zip(GRID, (N, H, V), strict=True))
        for N in GRID["N"]
        for H, V in sorted(product(GRID["H"], GRID["V"]), key=prod)
    ]
    return [FIRST, *(shape for shape in grid if shape != FIRST)]


def measure_all(
    shapes: Iterable[Shape], heads: dict[str, Head], device: torch.device, folder: Path, budget: float
) -> None:
    """Measure the shapes that are expected to fit into the budget, in seconds, and add the lines."""
    begun = time.monotonic()
    ceilings, about = measure_ceilings(device), origin(device.type)
    print(f"{about}\n{ceilings}")
    seconds_per_work, first, skipped, path = 0.0, True, [], None
    for shape in shapes:
        # Expected from the time that the last shape took for its size
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
    parser.add_argument("--sweep", action="store_true", help="only find the fastest tile sizes of ours")
    parser.add_argument("--without", nargs="*", default=[], choices=SUBJECTS, help="subjects to leave out")
    parser.add_argument("--shape", type=int, nargs=3, metavar=tuple(FIRST), help="measure only this shape")
    parser.add_argument("--budget", type=float, default=200, help="seconds; shapes that would take more are left out")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder to write to")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here. `--device cpu` needs none.")
    if options.device == "cpu":
        # At small shapes threads mostly wait for one another on a busy machine
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
