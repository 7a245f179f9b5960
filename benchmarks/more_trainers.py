"""Measure whole steps of distillation and of reward models with stock TRL and ours: the same script, another class.

    python benchmarks/more_trainers.py           # on the CPU, about 3 minutes
    python benchmarks/more_trainers.py --smoke   # few tokens: a check that it runs; its figures mean nothing

Completions of distillation come from a script. Prompts and completions have many lengths. turns.py describes a line's
values. Benchmarks:

- `distillation_step`: student and teacher of the same size, the student fully trained.
- `distillation_step_lora`: a LoRA student and a copy of its base model as the teacher.
- `distillation_step_forward_kl`: the same, with the forward KL, `beta=0`; the others have `beta=0.5`.
- `reward_step`, `reward_step_lora`: 8 pairs, with prompts of up to 512 tokens and completions of up to 64.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from steps import Case, Shape
from turns import begin, measure, take

SHAPE = Shape(
    hidden=128, layers=4, vocabulary=8192, prompt=64, completion=64, steps=6, rounds=4, heads=4, kv_heads=2, ragged=True
)
REWARD = replace(SHAPE, vocabulary=1024, prompt=512)
BATCH = {"per_device_train_batch_size": 8}


def cases(shape: Shape, of_reward: Shape) -> list[Case]:
    return [
        Case("distillation_step", "distillation", shape, {**BATCH, "beta": 0.5}),
        Case("distillation_step_lora", "distillation", shape, {**BATCH, "beta": 0.5}, lora=True),
        Case("distillation_step_forward_kl", "distillation", shape, {**BATCH, "beta": 0.0}, lora=True),
        Case("reward_step", "reward", of_reward, BATCH),
        Case("reward_step_lora", "reward", of_reward, BATCH, lora=True),
    ]


def main() -> None:
    chosen = begin(__doc__, budget=900)
    logging.disable(logging.WARNING)
    sizes = SHAPE, REWARD
    if chosen.smoke:
        sizes = tuple(replace(x, layers=1, hidden=32, vocabulary=64, prompt=8, completion=8, rounds=1) for x in sizes)
    measurements: dict[str, Any] = {case.benchmark: partial(measure, case) for case in cases(*sizes)}
    take(measurements, chosen)


if __name__ == "__main__":
    main()
