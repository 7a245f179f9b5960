"""Measure whole training steps of GRPO and DPO with stock TRL and ours: the same script with another trainer class.

    python benchmarks/training.py           # a 0.6 B model on one GPU, 150 s; a small one on the CPU, 5 minutes
    python benchmarks/training.py --smoke   # a tiny one, seconds: a check that it runs; its times mean nothing

Generation is not measured: completions come from a script (steps.py), so a step is its log-prob passes, backward and
optimizer step, with tokenization and rewards. Model and data are random and made on the fly, without a network. Stock
and ours take turns, on the same model, data and seed; turns.py describes the values. A line's `shape` has the config
fields that differ between benchmarks. steps.py sets others, such as `gradient_checkpointing=False`. The rest have their
defaults. Benchmarks:

- `grpo_step_lora`, `grpo_step_full`: 4 groups of 8 completions, from 1/8 of the longest to the longest, in
  micro-batches of 8 rows. All rewards of one group are equal. On a GPU, frozen weights are bf16, and trained ones fp32
  under bf16 autocast.
- `grpo_step_hybrid`: the same for a Qwen3.5 whose layers are mostly recurrent, fully trained, on completions of equal
  lengths.
- `dpo_step_multimodal_epoch_1`, `dpo_step_multimodal_epoch_2`: a Qwen3-VL on text alone, with LoRA.
- `dpo_step_lora_epoch_1`, `dpo_step_lora_epoch_2`: the reference is the model without its adapter.
- `grpo_longest_lora`, `dpo_longest_lora`, only on a GPU: `longest` is the longest completion, in tokens, with which two
  steps of one micro-batch fit into memory, and `fails_at` the shortest with which they did not, found by doubling and
  bisection within limits on trials and time. `peak_mib` is that of the longest; nothing is timed.
- `grpo_loss_curve`, `dpo_loss_curve`: `loss` and `grad_norm` at each of 100 steps of a smaller model, and on our line
  the `largest_difference` from stock; nothing is timed. GRPO trains on each batch twice, because the first time its
  loss does not depend on the model.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import results
import torch
from steps import GROUP, Case, Shape
from turns import SUBJECTS, Line, Step, begin, line_of, measure, peak_of, shape_of, take, train

FOUR_GROUPS = {"per_device_train_batch_size": GROUP, "gradient_accumulation_steps": 4}
CURVES = {"logging_steps": 1, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
TRIALS = 9


class Sizes(NamedTuple):
    """The shapes for one machine."""

    grpo: Shape
    dpo: Shape
    curve: Shape


# Qwen3-0.6B
GPU_STEP = Shape(
    hidden=1024,
    layers=28,
    vocabulary=151936,
    prompt=1024,
    completion=1024,
    steps=5,
    rounds=4,
    heads=16,
    kv_heads=8,
    head_size=128,
    ragged=True,
)
CPU_STEP = Shape(hidden=128, layers=4, vocabulary=1024, prompt=256, completion=256, steps=5, rounds=3, ragged=True)
TINY = Shape(hidden=32, layers=1, vocabulary=64, prompt=8, completion=8, steps=6, rounds=1, ragged=True)

GPU = Sizes(
    GPU_STEP,
    replace(GPU_STEP, prompt=512, completion=512, steps=8),
    replace(GPU_STEP, layers=6, prompt=64, completion=64, steps=100),
)
CPU = Sizes(
    CPU_STEP,
    replace(CPU_STEP, prompt=128, completion=128, steps=8),
    replace(CPU_STEP, layers=2, prompt=16, completion=16, steps=100),
)
SMOKE = Sizes(TINY, TINY, TINY)


def longest_that_fits(fits: Callable[[int], bool], first: int, trials: int, deadline: float) -> tuple[int, int | None]:
    """Return the greatest length that fits (0 if none does), and the smallest that does not (None if all do).

    Another trial starts only if one as long as the last would end before `deadline`, a time of `time.monotonic`.
    """
    good, bad = 0, None
    for _ in range(trials):
        begun = time.monotonic()
        length = (good + bad) // 2 if bad else 2 * good or first
        if fits(length):
            good = length
        else:
            bad = length
        finished = time.monotonic()
        if (bad and bad - good <= max(1, bad // 16)) or 2 * finished - begun > deadline:
            break
    return good, bad


def longest_of(library: Any, case: Case, deadline: float) -> dict[str, float | None]:
    """Return the fields of a line about the longest completion."""
    taken: dict[int, list[Step]] = {0: [Step()]}

    def fits(length: int) -> bool:
        try:
            taken[length], _ = train(library, replace(case, shape=replace(case.shape, completion=length)))
        except torch.OutOfMemoryError:
            return False
        return True

    good, bad = longest_that_fits(fits, case.shape.completion, TRIALS, deadline)
    # Of the last step, because the first one also runs checks
    return {"longest": good, "fails_at": bad, "peak_mib": peak_of(taken[good]), "tokens": taken[good][-1].tokens}


def longest(case: Case, deadline: float) -> list[Line]:
    if not torch.cuda.is_available():
        print(f"left out: {case.benchmark}, which needs a GPU")
        return []
    run, lines = results.new_run(), []
    shape = {name: size for name, size in shape_of(case).items() if name != "completion"}
    for number, (name, library) in enumerate(SUBJECTS.items()):
        now = time.monotonic()
        found = longest_of(library, case, now + (deadline - now) / (len(SUBJECTS) - number))
        print(f"{case.benchmark}, {name}: {found['longest']} tokens fit, {found['fails_at']} do not", flush=True)
        lines.append(line_of(case.benchmark, shape, name, run, []) | found)
    return lines


def curve(case: Case, deadline: float) -> list[Line]:
    run, lines = results.new_run(), []
    for name, library in SUBJECTS.items():
        steps, log = train(library, case)
        line = line_of(case.benchmark, shape_of(case), name, run, [])
        curves = {what: [entry[what] for entry in log if what in entry] for what in ("loss", "grad_norm")}
        lines.append({**line, "tokens": statistics.fmean(step.tokens for step in steps), **curves})
    stock, ours = lines
    ours["largest_difference"] = {
        what: max(abs(a - b) for a, b in zip(stock[what], ours[what], strict=True)) for what in ("loss", "grad_norm")
    }
    for what, difference in ours["largest_difference"].items():
        values = f"stock's is {min(stock[what]):.4g} to {max(stock[what]):.4g}"
        print(f"{case.benchmark}: {what} differs by at most {difference:.1e} in {len(stock[what])} steps; {values}")
    return lines


def measurements(sizes: Sizes) -> dict[str, Callable[[float], list[Line]]]:
    """Return the measurements, the most important ones first, in case the time runs out."""
    pairs = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    grpo = Case("grpo_step_lora", "grpo", sizes.grpo, FOUR_GROUPS, lora=True, dead_share=0.25)
    dpo = Case("dpo_step_lora", "dpo", sizes.dpo, pairs, lora=True, epochs=2)
    grpo_curve = {"per_device_train_batch_size": 4 * GROUP, "num_iterations": 2, **CURVES}
    dpo_curve = {"per_device_train_batch_size": 8, **CURVES}
    two_steps = replace(sizes.grpo, completion=4 * sizes.grpo.completion, steps=2)
    hybrid = replace(sizes.grpo, family="qwen3_5", completion=sizes.grpo.prompt // 4, ragged=False)
    multimodal = replace(sizes.dpo, family="qwen3_vl")
    cases = [
        (measure, grpo),
        (measure, replace(grpo, benchmark="grpo_step_full", lora=False)),
        (measure, dpo),
        (measure, replace(grpo, benchmark="grpo_step_hybrid", shape=hybrid, lora=False, dead_share=0.0)),
        (measure, replace(dpo, benchmark="dpo_step_multimodal", shape=multimodal)),
        (curve, replace(grpo, benchmark="grpo_loss_curve", shape=sizes.curve, config=grpo_curve)),
        (curve, replace(dpo, benchmark="dpo_loss_curve", shape=sizes.curve, config=dpo_curve)),
        (longest, Case("grpo_longest_lora", "grpo", two_steps, {"per_device_train_batch_size": GROUP}, lora=True)),
        (longest, Case("dpo_longest_lora", "dpo", two_steps, {"per_device_train_batch_size": 2}, lora=True)),
    ]
    return {case.benchmark: partial(take_one, case) for take_one, case in cases}


def main() -> None:
    chosen = begin(__doc__, budget=150 if torch.cuda.is_available() else 360)
    take(measurements(SMOKE if chosen.smoke else GPU if torch.cuda.is_available() else CPU), chosen)


if __name__ == "__main__":
    main()
