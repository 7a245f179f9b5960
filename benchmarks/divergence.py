"""Measure the divergence of two LM heads beside TRL's: time, peak memory and error against float64, on the CPU.

    python benchmarks/divergence.py          # 512 tokens and the shape of a small model, some minutes
    python benchmarks/divergence.py --smoke  # small shapes, some seconds

Each line that it adds to benchmarks/results/<date>-<device>.jsonl is one subject with one `beta`, frozen or trained
student head, and either two heads or one head for both models with nearly equal hidden states. Hidden states and
weights are bf16. In one run both subjects get the same inputs and take turns on one thread.

- median_ms, min_ms, max_ms: process time of forward and backward.
- peak_mib: peak memory of forward and backward above what was allocated before, gradients included.
- value_error: the largest |divergence - float64| over tokens, over the mean divergence.
- gradient_error: ||gradient - float64|| / ||float64|| for the hidden states; bf16 results alone are off by 1.7e-3.

Errors are those of the first tokens only. Dimensions: N tokens, H hidden size, V vocabulary.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from results import FOLDER, add, new_run, origin
from timing import in_turns, peak_mib
from torch import Tensor
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from trl_ext.heads.divergence import DivergenceHead, linear_divergence

SHAPE = {"N": 512, "H": 576, "V": 49152}
SMALL = {"N": 64, "H": 64, "V": 4099}
BETAS = (0.0, 0.5, 1.0)
# Standard deviation of the logits, and how far the models' logits are apart with one head
SPREAD = 4.0
APART = 0.1
ROUNDS = 5
ERROR_TOKENS = 32

CPU = torch.device("cpu")


class Inputs(NamedTuple):
    student_hidden: Tensor
    student_weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor


Subject = Callable[[Inputs, float], Tensor]


def ours(x: Inputs, beta: float) -> Tensor:
    teacher = DivergenceHead(x.teacher_weight)
    return linear_divergence(x.student_hidden, DivergenceHead(x.student_weight), x.teacher_hidden, teacher, beta)[0]


def trl(x: Inputs, beta: float) -> Tensor:
    student = (x.student_hidden, x.student_weight, None)
    teacher = (x.teacher_hidden, x.teacher_weight, None)
    return ChunkedDivergenceFunction.apply(*student, *teacher, beta)[0]


SUBJECTS: dict[str, Subject] = {"trl_ext": ours, "trl": trl}


def inputs_of(shape: dict[str, int], *, one_head: bool, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    N, H, V = shape.values()
    hidden_s, hidden_t = (torch.randn(N, H, generator=generator) for _ in range(2))
    weights = [(torch.randn(V, H, generator=generator) * (SPREAD / math.sqrt(H))).bfloat16() for _ in range(2)]
    if one_head:
        hidden_t = hidden_s + hidden_t * (APART / SPREAD)
        weights[1] = weights[0]
    return Inputs(hidden_s.bfloat16(), weights[0], hidden_t.bfloat16(), weights[1])


def exact(x: Inputs, beta: float) -> Tensor:
    """Return the divergence by its definition."""
    log_s = (x.student_hidden @ x.student_weight.t()).log_softmax(-1)
    log_t = (x.teacher_hidden @ x.teacher_weight.t()).log_softmax(-1)
    if beta == 0:
        return (log_t.exp() * (log_t - log_s)).sum(-1)
    if beta == 1:
        return (log_s.exp() * (log_s - log_t)).sum(-1)
    log_m = torch.logaddexp(log_s + math.log(1 - beta), log_t + math.log(beta))
    return (beta * log_t.exp() * (log_t - log_m) + (1 - beta) * log_s.exp() * (log_s - log_m)).sum(-1)


def step_of(subject: Subject, x: Inputs, beta: float, *, trained: bool) -> Callable[[], tuple[Tensor, ...]]:
    """Return the call to measure: results, and gradients of hidden states and of a trained weight."""
    hidden = x.student_hidden.detach().requires_grad_()
    weight = x.student_weight.detach().requires_grad_(trained)
    given = x._replace(student_hidden=hidden, student_weight=weight)

    def step() -> tuple[Tensor, ...]:
        divergence = subject(given, beta)
        gradients = torch.autograd.grad(divergence.sum(), (hidden, weight) if trained else (hidden,))
        return divergence.detach(), *gradients

    return step


def errors(subject: Subject, x: Inputs, beta: float) -> dict[str, float]:
    few = x._replace(student_hidden=x.student_hidden[:ERROR_TOKENS], teacher_hidden=x.teacher_hidden[:ERROR_TOKENS])
    value, gradient = step_of(subject, few, beta, trained=False)()
    wide = Inputs(*(tensor.double() for tensor in few))
    true_value, true_gradient = step_of(exact, wide, beta, trained=False)()
    return {
        "value_error": float((value - true_value).abs().max() / true_value.mean()),
        "gradient_error": float((gradient - true_gradient).norm() / true_gradient.norm()),
    }


def measure(shape: dict[str, int], beta: float, *, one_head: bool, trained: bool, rounds: int) -> list[dict[str, Any]]:
    """Return a line for each subject, on the same inputs."""
    run = new_run()
    heads = "one" if one_head else "two"
    student_head = "trained" if trained else "frozen"
    x = inputs_of(shape, one_head=one_head, seed=int(run, 16))
    steps = {name: step_of(subject, x, beta, trained=trained) for name, subject in SUBJECTS.items()}
    times = in_turns(steps, rounds, CPU)
    return [
        {
            "benchmark": "divergence",
            "shape": {**shape, "beta": beta, "heads": heads, "student_head": student_head},
            "subject": name,
            "run": run,
            "median_ms": statistics.median(times[name]),
            "min_ms": min(times[name]),
            "max_ms": max(times[name]),
            "peak_mib": peak_mib(steps[name], CPU),
            **errors(subject, x, beta),
            "dtype": "bfloat16",
        }
        for name, subject in SUBJECTS.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small shapes, two rounds")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder to write to")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    about = origin("cpu")
    shape, rounds = (SMALL, 2) if options.smoke else (SHAPE, ROUNDS)
    row = "{:>5} {:>6} {:>8} {:>9} {:>10} {:>10} {:>12} {:>14}".format
    print(row("beta", "heads", "head", "subject", "median ms", "peak MiB", "value error", "gradient error"))
    for one_head, trained, beta in product((False, True), (False, True), BETAS):
        lines = measure(shape, beta, one_head=one_head, trained=trained, rounds=rounds)
        for line in lines:
            cells = (beta, line["shape"]["heads"], line["shape"]["student_head"], line["subject"])
            numbers = (f"{line['median_ms']:.1f}", f"{line['peak_mib']:.1f}")
            print(row(*cells, *numbers, f"{line['value_error']:.1e}", f"{line['gradient_error']:.2e}"), flush=True)
        path = add([line | about for line in lines], options.results)
    print(f"added to {path}")


if __name__ == "__main__":
    main()
