"""Measure GRPO and DPO steps in which we skip passes or rows that do not change the gradient; stock TRL runs them.

    python benchmarks/passes.py           # a small model on the CPU or on one GPU, a few minutes, no network
    python benchmarks/passes.py --smoke   # a tiny model: a check that it runs; its times mean nothing

A step is its log-prob passes, backward and optimizer step; completions come from a script (steps.py). Stock and ours
take turns, on the same model, data and seed; turns.py describes the values.
"""

from functools import partial

from steps import GROUP, Case, Shape
from turns import begin, measure, take

SHAPE = Shape(hidden=256, layers=4, vocabulary=4096, prompt=64, completion=64, steps=8, rounds=3)
SMOKE = Shape(hidden=32, layers=1, vocabulary=64, prompt=4, completion=4, steps=6, rounds=1)


def cases(shape: Shape) -> list[Case]:
    rows = {"per_device_train_batch_size": 4 * GROUP}
    twice = {**rows, "num_iterations": 2}
    slices = {**rows, "steps_per_generation": 2}
    return [
        Case("passes_grpo", "grpo", shape, rows),
        Case("passes_grpo_half_dead", "grpo", shape, rows, dead_share=0.5),
        Case("passes_grpo_two_iterations", "grpo", shape, twice),
        Case("passes_grpo_two_slices_per_generation", "grpo", shape, slices),
        Case("passes_grpo_sampler_corrected", "grpo", shape, rows, sampler=True),
        Case("passes_grpo_sampler_corrected_half_dead", "grpo", shape, rows, dead_share=0.5, sampler=True),
        # The first epoch fills the store of reference log-probs
        Case("passes_dpo", "dpo", shape, {"per_device_train_batch_size": 8}, epochs=2),
    ]


def main() -> None:
    chosen = begin(__doc__, budget=240)
    take({case.benchmark: partial(measure, case) for case in cases(SMOKE if chosen.smoke else SHAPE)}, chosen)


if __name__ == "__main__":
    main()
