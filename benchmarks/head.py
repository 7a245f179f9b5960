"""Measure the head (hidden states to log-probs) beside its peers: time, peak memory and error against float64.

    python benchmarks/head.py --device cuda         # the whole grid on one GPU, under 5 minutes, no network
    python benchmarks/head.py --device cpu --smoke  # tiny shapes: that it runs, and the errors; its times say nothing

Every line it writes to benchmarks/results/<date>-<device>.jsonl is one subject at one shape in one of three uses:
`head_nograd` (a forward), `head_frozen_fwd_bwd` (forward and backward to the hidden states, as with LoRA) and
`head_trained_fwd_bwd` (to the weight too). Within one run all subjects get the same fresh inputs and take turns, so
that a slow spell of the machine hits all of them: compare subjects of one run only. A new peer is a function that
imports it, in `SUBJECTS`.

- median_ms, min_ms, max_ms: of `ROUNDS` calls, each begun on an idle device, by CUDA events (on the CPU by the clock).
- peak_mib: the most memory allocated above what was before the call, results included; null on the CPU.
- max_error: the largest |log p - float64| over some of the tokens, with the same bf16 inputs.
- gradient_error: ||gradient - float64|| / ||float64|| of the hidden states of these tokens. The result is bf16, so that
  even an exact head is off by 1.7e-3.
- The subject `matmul` is the bare matrix products that the use needs (1, 2, 4), each as one call that leaves fp32 where
  the device can: the limit of a head that makes its products with the library. (A fused kernel never writes the logits
  and may go below; on the CPU torch rounds these products to bf16, which is another amount of work.)

Dimensions: N tokens, H hidden size, V vocabulary, n the tokens that are checked.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, product
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

GRID = {"N": (2048, 8192), "H": (2048, 4096), "V": (32000, 131072, 151936)}
SMOKE_GRID = {"N": (96,), "H": (64,), "V": (1000, 4099)}
DTYPE = torch.bfloat16
ROUNDS = 20
CHECKED_TOKENS = 512

# (hidden, weight, targets, outputs) -> log_probs, of shapes (N, H), (V, H), (N,) and (N,)
Head = Callable[[Tensor, Tensor, Tensor, tuple[str, ...]], Tensor]
# log_probs, and the gradient of the hidden states where there is one
Results = tuple[Tensor, Tensor | None]


def trl_ext() -> Head:
    from trl_ext import linear_log_probs

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, outputs: tuple[str, ...]) -> Tensor:
        log_probs = linear_log_probs(hidden, weight, targets, outputs=outputs).log_probs
        assert log_probs is not None
        return log_probs

    return head


def trl() -> Head:
    # Its backward imports this: a machine that lacks a part of it should say so now, and not in a measurement
    import trl.trainer.utils  # noqa: F401
    from trl.kernels import ChunkedLogProbFunction

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, outputs: tuple[str, ...]) -> Tensor:
        # Temperature 1, TRL's own chunk size, no softcap, no scale
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32768, None, 1.0, outputs)[0]

    return head


SUBJECTS: dict[str, Callable[[], Head]] = {"trl_ext": trl_ext, "trl": trl}


@dataclass(frozen=True)
class Use:
    """What gets a gradient, and the matrix products that this takes at least."""

    grad_hidden: bool
    grad_weight: bool
    products: tuple[str, ...]


USES = {
    "head_nograd": Use(False, False, ("logits",)),
    "head_frozen_fwd_bwd": Use(True, False, ("logits", "grad_hidden")),
    # The logits of every tile once for the normalizer and once more for the gradient
    "head_trained_fwd_bwd": Use(True, True, ("logits", "logits", "grad_hidden", "grad_weight")),
}


class Inputs(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (N,)
    upstream: Tensor  # (N,), fp32: the gradient that comes in, another one for every token


def fresh_inputs(N: int, H: int, V: int, device: torch.device, seed: int) -> Inputs:
    """Logits of standard deviation 4, with targets from very unlikely to nearly certain, as a trained model has."""
    generator = torch.Generator(device).manual_seed(seed)
    on_device: dict[str, Any] = {"device": device, "generator": generator}
    hidden = torch.randn(N, H, dtype=DTYPE, **on_device)
    weight = torch.randn(V, H, dtype=DTYPE, **on_device).mul_(4 / H**0.5)
    targets = torch.randint(V, (N,), **on_device)
    # Along its row of the weight a hidden state moves its target's logit, and hardly any other
    row_NH = weight[targets].float()
    raised_by = 24 * torch.rand(N, 1, **on_device)
    hidden = (hidden + raised_by * row_NH / row_NH.square().sum(-1, keepdim=True)).to(DTYPE)
    return Inputs(hidden, weight, targets, torch.randn(N, **on_device))


def float64_reference(inputs: Inputs, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """log_probs (n,) and the gradient of the hidden states (n, H) of these tokens in float64.

    A token's results depend on no other token, so that some of them can be checked alone. The weight is cast in slices.
    """
    hidden, targets = inputs.hidden[tokens].double(), inputs.targets[tokens, None]
    slices = inputs.weight.split(8192)
    log_p_nV = torch.cat([hidden @ weight.double().t() for weight in slices], dim=1).log_softmax(-1)
    log_probs = log_p_nV.gather(1, targets)[:, 0]
    # d log p_t / dz_v = [v = t] - p_v
    coefficients = log_p_nV.exp_().neg_()
    coefficients.scatter_add_(1, targets, torch.ones_like(targets, dtype=torch.float64))
    gradient = torch.zeros_like(hidden)
    for part, weight in zip(coefficients.split(8192, dim=1), slices, strict=True):
        gradient += part @ weight.double()
    return log_probs, gradient * inputs.upstream[tokens, None].double()


def step_of(head: Head, use: Use, inputs: Inputs, outputs: tuple[str, ...]) -> Callable[[], Results]:
    """One call as it is measured: `head`, and the gradients that `use` asks for."""
    hidden = inputs.hidden.detach().requires_grad_(use.grad_hidden)
    weight = inputs.weight.detach().requires_grad_(use.grad_weight)
    wanted = [tensor for tensor in (hidden, weight) if tensor.requires_grad]

    def step() -> Results:
        with torch.set_grad_enabled(bool(wanted)):
            log_probs = head(hidden, weight, inputs.targets, outputs)
        if not wanted:
            return log_probs, None
        return log_probs.detach(), torch.autograd.grad(log_probs, wanted, inputs.upstream)[0]

    return step


def matmul_step(use: Use, inputs: Inputs) -> Callable[[], None]:
    """The bare products of `use`, whose results are dropped."""
    hidden, weight = inputs.hidden, inputs.weight
    # Random as all other operands are: on zeros a GPU multiplies faster
    coefficients_NV = torch.randn(len(hidden), len(weight), dtype=DTYPE, device=hidden.device)
    operands = {
        "logits": (hidden, weight.t()),
        "grad_hidden": (coefficients_NV, weight),
        "grad_weight": (coefficients_NV.t(), hidden),
    }
    # Elsewhere torch has no product of bf16 that leaves fp32
    options: dict[str, Any] = {"out_dtype": torch.float32} if hidden.device.type == "cuda" else {}

    def step() -> None:
        for name in use.products:
            torch.mm(*operands[name], **options)

    return step


def milliseconds(step: Callable[[], Any], device: torch.device) -> float:
    """Time of one call that begins on an idle device."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begun = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - begun)


def peak_mib(step: Callable[[], Any], device: torch.device) -> float | None:
    """Most memory allocated during one call, above what was allocated before; None where torch does not count it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def errors(results: Results, reference: tuple[Tensor, Tensor], tokens: Tensor) -> dict[str, float | None]:
    (log_probs, gradient), (log_probs64, gradient64) = results, reference
    max_error, gradient_error = (log_probs[tokens] - log_probs64).abs().max().item(), None
    if gradient is not None:
        gradient_error = ((gradient[tokens] - gradient64).norm() / gradient64.norm()).item()
    return {"max_error": max_error, "gradient_error": gradient_error}


def measure(
    name: str, shape: dict[str, int], heads: dict[str, Head], device: torch.device, outputs: tuple[str, ...]
) -> list[dict[str, Any]]:
    """One run: all subjects in the use `name` at one shape, on the same inputs; a line for each that had the memory."""
    run, use = uuid.uuid4().hex[:12], USES[name]
    inputs = fresh_inputs(**shape, device=device, seed=int(run, 16))
    tokens = torch.randperm(shape["N"], device=device)[:CHECKED_TOKENS]
    reference = float64_reference(inputs, tokens)

    steps: dict[str, Callable[[], Any]] = {}
    found: dict[str, dict[str, float | None]] = {}
    for subject in (*heads, "matmul"):
        try:
            if subject == "matmul":
                step: Callable[[], Any] = matmul_step(use, inputs)
                step()
                found[subject] = dict.fromkeys(("peak_mib", "max_error", "gradient_error"))
            else:
                step = step_of(heads[subject], use, inputs, outputs)
                # This first call compiles, and takes the libraries' workspaces: the peak is that of the second
                found_errors = errors(step(), reference, tokens)
                found[subject] = {"peak_mib": peak_mib(step, device)} | found_errors
            steps[subject] = step
        except torch.OutOfMemoryError:
            print(f"left out: {subject} in {name} at {shape}, out of memory")

    times: dict[str, list[float]] = {subject: [] for subject in steps}
    order = list(steps)
    for _ in range(1 + ROUNDS):
        for subject in order:
            times[subject].append(milliseconds(steps[subject], device))
        # What one leaves behind, such as heat, falls on each of the others in turn
        order = order[1:] + order[:1]
    # The first round is warm-up
    times = {subject: spent[1:] for subject, spent in times.items()}

    benchmark = name + "".join(f"_{output}" for output in outputs[1:])
    about = {"benchmark": benchmark, "shape": shape, "dtype": str(DTYPE).removeprefix("torch.")}
    return [
        {
            **about,
            "subject": subject,
            "run": run,
            "median_ms": statistics.median(times[subject]),
            "min_ms": min(times[subject]),
            "max_ms": max(times[subject]),
            **found[subject],
        }
        for subject in steps
    ]


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in ("torch", "triton", "transformers", "trl", "trl_ext"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found["commit"] = None
    return found


def write(path: Path, text: str) -> None:
    """All or nothing: a reader, or a stop half-way, never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def table(lines: list[dict[str, Any]]) -> str:
    """The lines for a reader. "/ trl" and "/ matmul" are the median over theirs in the same run: below 1 is faster."""
    row = "{:<10}{:>10}{:>20}{:>7}{:>9}{:>10}{:>10}{:>11}".format
    text = [row("", "median ms", "min - max", "/ trl", "/ matmul", "peak MiB", "max error", "grad error")]
    for _, run in groupby(lines, key=itemgetter("run")):
        measured = {line["subject"]: line for line in run}
        first = next(iter(measured.values()))
        text.append(" ".join([first["benchmark"], *(f"{name}={size}" for name, size in first["shape"].items())]))
        for subject, line in measured.items():
            median, spread = f"{line['median_ms']:.3f}", f"{line['min_ms']:.3f} - {line['max_ms']:.3f}"
            over = [line["median_ms"] / measured[x]["median_ms"] if x in measured else None for x in ("trl", "matmul")]
            values = [*over, line["peak_mib"], line["max_error"], line["gradient_error"]]
            forms = (".2f", ".2f", ".1f", ".1e", ".1e")
            cells = ["-" if x is None else format(x, form) for x, form in zip(values, forms, strict=True)]
            text.append(row(f" {subject}", median, spread, *cells))
    return "\n".join(text)


def main() -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--entropy", action="store_true", help="ask every head for the entropy too, as GRPO does")
    parser.add_argument("--budget", type=float, default=240, help="seconds; leaves out larger shapes that take more")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here. `--device cpu --smoke` needs none.")
    if arguments.device == "cpu" and not arguments.smoke:
        parser.error("--device cpu: the whole grid takes hours on a CPU. Add --smoke for tiny shapes.")

    heads: dict[str, Head] = {}
    for subject, load in SUBJECTS.items():
        try:
            heads[subject] = load()
        except ImportError as error:
            print(f"left out: {subject} cannot be imported ({error})")
    if not heads:
        parser.error("none of the subjects can be imported.")

    device = torch.device(arguments.device)
    if arguments.device == "cpu":
        # At tiny shapes threads wait for one another, on a busy machine for most of the time
        torch.set_num_threads(1)
        name = f"CPU {platform.machine()}, 1 thread"
    else:
        name = torch.cuda.get_device_name(device)
    outputs = ("log_probs", "entropy") if arguments.entropy else ("log_probs",)
    now = datetime.now(UTC)
    origin = {"device": name, "versions": versions(), "date": now.isoformat(timespec="seconds")}
    print(origin)
    # A second call on one day adds to the file of the first
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())
    path = arguments.results / f"{now:%Y-%m-%d}-{slug}.jsonl"
    earlier = path.read_text() if path.exists() else ""

    grid = SMOKE_GRID if arguments.smoke else GRID
    shapes = [dict(zip(grid, sizes, strict=True)) for sizes in product(*grid.values())]
    shapes.sort(key=lambda shape: prod(shape.values()))
    lines: list[dict[str, Any]] = []
    seconds_per_work = 0.0
    for index, shape in enumerate(shapes):
        # As long as the last shape took for its size: they come in order of size, so that this one errs little
        started, work = time.monotonic(), prod(shape.values())
        if started - begun + seconds_per_work * work > arguments.budget:
            print(f"left out: {shapes[index:]}, past the budget of {arguments.budget:g} s")
            break
        for use in USES:
            torch.cuda.empty_cache()
            lines += [line | origin for line in measure(use, shape, heads, device, outputs)]
        write(path, earlier + "".join(json.dumps(line) + "\n" for line in lines))
        seconds_per_work = (time.monotonic() - started) / work
    print(f"\n{table(lines)}\n\n{len(lines)} lines in {path}, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
