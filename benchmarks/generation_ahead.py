"""Measure whole GRPO steps whose sampler or reward waits for another machine, in turn and one batch ahead.

    python benchmarks/generation_ahead.py           # a small model on the CPU, about 6 minutes
    python benchmarks/generation_ahead.py --smoke   # short waits: a check that it runs; its times mean nothing

The sampler is a `rollout_func` that waits, as for a server, and returns fixed completions. Training waits as long. In
the last case, reward and training compute in Python instead: "ahead" in a thread, "pool" in another process.
Milliseconds are wall-clock medians of whole optimizer steps after the first. Subjects take turns.
"""

import itertools
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import results
import torch
from datasets import Dataset
from steps import Shape, policy, text, tokenizer, words
from transformers import PrinterCallback, TrainerCallback
from turns import Line, begin, line_of, sizes_of, take

import trl_ext

SHAPE = Shape(hidden=64, layers=2, vocabulary=256, prompt=16, completion=8, steps=7, rounds=2)
LENGTH = 8
POOL = ProcessPoolExecutor(1, get_context("spawn"))  # its process starts at the first call


@dataclass(frozen=True)
class Case:
    """The waits of an optimizer step, in seconds.

    Args:
        lag (`int`): `generation_lag`.
        batches (`int`): generation batches of a step.
        ahead (`bool`): whether trl_ext may send weights, and so sample ahead.
        works (`bool`): whether reward and training compute, instead of waiting.
        pool (`ProcessPoolExecutor`, *optional*): where the reward computes.
    """

    sampler: float = 0.0
    reward: float = 0.0
    training: float = 0.0
    lag: int = 0
    batches: int = 1
    ahead: bool = True
    works: bool = False
    pool: ProcessPoolExecutor | None = None


def small_operations(count: int) -> None:
    """Compute as training does that waits for Python, not for the device."""
    x = torch.ones(64)
    for _ in range(count):
        x = x + 1.0


def additions(count: int) -> None:
    """Compute as a reward function does that is written in Python."""
    total = 0
    for i in range(count):
        total += i * i % 7


@cache
def per_second(work: Callable[[int], None]) -> int:
    """Return how many rounds of `work` take a second alone."""
    counts = []
    for _ in range(5):
        began = time.perf_counter()
        work(100_000)
        counts.append(int(100_000 / (time.perf_counter() - began)))
    return sorted(counts)[2]


def measured(seconds: float) -> dict[str, dict[str, Case]]:
    sampled = Case(sampler=seconds, training=seconds)
    rewarded = Case(reward=seconds, training=seconds)
    cases: dict[str, dict[str, Case]] = {}
    for name, case in (("sampler", sampled), ("reward", rewarded)):
        cases[f"{name}_lag"] = {"in turn": replace(case, ahead=False), "ahead": replace(case, lag=1)}
        for batches in (2, 4):
            several = replace(case, batches=batches)
            cases[f"{name}_within_{batches}"] = {"in turn": replace(several, ahead=False), "ahead": several}
    computed = replace(rewarded, works=True)
    cases["python_reward_lag"] = {
        "in turn": replace(computed, ahead=False),
        "ahead": replace(computed, lag=1),
        "pool": replace(computed, lag=1, pool=POOL),
    }
    return cases


class Sampler:
    """Returns fixed completions after a while. Its weights are elsewhere."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        time.sleep(self.seconds)
        prompt_ids = [trainer.processing_class(x)["input_ids"] for x in prompts]
        completion_ids = [[2 + (7 * row + place) % 200 for place in range(LENGTH)] for row in range(len(prompts))]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": [[-5.0] * LENGTH for _ in prompts],
        }


class SamplerWithWeights(Sampler):
    def sync_weights(self, trainer: Any) -> None:
        pass


class Training(TrainerCallback):
    """Makes training take a while, and notes the ends of optimizer steps.

    Args:
        run (`Callable`): called in each micro-batch.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.ends: list[float] = []

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.run()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.run()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter())


def seconds_of_steps(case: Case, shape: Shape) -> list[float]:
    spend: Callable[[], None] = partial(time.sleep, case.reward / case.batches)
    train: Callable[[], None] = partial(time.sleep, case.training / 4)
    if case.works:
        spend = partial(additions, int(case.reward * per_second(additions)))
        train = partial(small_operations, int(case.training * per_second(small_operations) / 4))

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if case.pool is None:
            spend()
        else:
            case.pool.submit(spend).result()
        return [float(ids[0] % 5) for ids in completion_ids]

    training = Training(train)
    kind = SamplerWithWeights if case.ahead else Sampler
    rows = [{"prompt": text(words(row, shape.prompt, shape.vocabulary))} for row in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_ext.GRPOTrainer(
            policy(shape),
            reward_funcs=reward,
            rollout_func=kind(case.sampler / case.batches),
            args=trl_ext.GRPOConfig(
                folder,
                per_device_train_batch_size=4,
                num_generations=4,
                gradient_accumulation_steps=4,
                steps_per_generation=4 // case.batches,
                generation_lag=case.lag,
                sample_ahead=case.ahead or None,
                max_completion_length=LENGTH,
                max_steps=shape.steps,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                show_plan=False,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(shape.vocabulary),
            callbacks=[training],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [end - begin for begin, end in itertools.pairwise(training.ends)]


def compared(name: str, cases: dict[str, Case], shape: Shape, _: float) -> list[Line]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(shape.rounds):
        for subject, case in cases.items():
            seconds[subject] += seconds_of_steps(case, shape)
    run_name = results.new_run()
    return [
        line_of(f"grpo_ahead_{name}", sizes_of(shape), subject, run_name, [1e3 * x for x in values]) | {"tokens": 0.0}
        for subject, values in seconds.items()
    ]


def main() -> None:
    chosen = begin(__doc__, budget=900)
    logging.disable(logging.WARNING)
    shape = replace(SHAPE, steps=3, rounds=1) if chosen.smoke else SHAPE
    pairs = measured(0.05 if chosen.smoke else 1.0)
    take({name: partial(compared, name, cases, shape) for name, cases in pairs.items()}, chosen)
    POOL.shutdown()


if __name__ == "__main__":
    main()
