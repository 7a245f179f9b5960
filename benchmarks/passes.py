"""Measure GRPO and DPO steps beside stock TRL's, with the passes, rows and tokens that each of them runs.

    python benchmarks/passes.py           # a small model on the CPU or on one GPU, a few minutes, no network
    python benchmarks/passes.py --smoke   # a tiny one: that it runs; its times say nothing

Completions come from a script instead of a sampler, so a step is its log-prob passes, its backward and its optimizer.
Stock and ours take turns, on the same model, data and seed; the first optimizer steps of each run are left out. Every
line it writes to benchmarks/results/passes-<date>-<device>.jsonl is one case:

- step_ms: median time of an optimizer step, of each subject; ratio: stock's over ours, more is better.
- tokens: tokens that entered the model (padding included) in those steps, by a hook on the input embedding.
- no_grad_forwards: forwards without a gradient (old policy and reference) in those steps.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl
from steps import GROUP, Shape, StepTimes, dpo, grpo, number_of, policy, quiet, write
from steps import reward as rewarded
from transformers import PrinterCallback

import trl_ext

SHAPE = Shape(hidden=256, layers=4, vocabulary=4096, prompt=64, completion=64, steps=8, rounds=3)
SMOKE = Shape(hidden=32, layers=1, vocabulary=64, prompt=4, completion=4, steps=4, rounds=1)
DPO_PAIRS = 8  # of a step


@dataclass(frozen=True)
class Case:
    """A training that TRL's users run, and what of it changes no gradient."""

    name: str
    trainer: str
    config: dict[str, Any] = field(default_factory=dict)
    dead_share: float = 0.0  # of the groups
    sampler: bool = False  # completions come with their sampler's log-probs, as from vLLM, and are corrected for


CASES = (
    Case("grpo", "grpo"),
    Case("grpo, half of the groups dead", "grpo", dead_share=0.5),
    Case("grpo, num_iterations=2", "grpo", {"num_iterations": 2}),
    Case("grpo, steps_per_generation = 2 x accumulation", "grpo", {"steps_per_generation": 2}),
    Case("grpo, sampler corrected for", "grpo", sampler=True),
    Case("grpo, sampler corrected for, half of the groups dead", "grpo", dead_share=0.5, sampler=True),
    Case("dpo, second epoch", "dpo"),
)


def trainer_of(library: Any, case: Case, shape: Shape, folder: str) -> Any:
    if case.trainer == "dpo":
        config: dict[str, Any] = {"per_device_train_batch_size": DPO_PAIRS, **case.config}
        if library is trl_ext:
            config["reference_store"] = "memory"
        return dpo(library, shape, folder, config, pairs=DPO_PAIRS * shape.steps // 2)

    def reward(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        dead = [number_of(prompt) % 100 < 100 * case.dead_share for prompt in prompts]
        lively = rewarded(prompts, completion_ids, **columns)
        return [0.5 if is_dead else x for is_dead, x in zip(dead, lively, strict=True)]

    trainer = grpo(
        library,
        shape,
        folder,
        {"per_device_train_batch_size": 4 * GROUP, **case.config},
        model=policy(shape),
        reward=reward,
        sampler_log_prob=-8.0 if case.sampler else None,
    )
    if case.sampler:  # as vLLM's trainer does it, with its weights in step
        trainer.use_vllm = True
        type(trainer)._last_loaded_step = property(lambda self: self.state.global_step, lambda self, step: None)
    return trainer


def run(library: Any, case: Case, shape: Shape) -> StepTimes:
    # DPO's first epoch fills the store of reference log-probs
    times = StepTimes(shape.steps // 2) if case.trainer == "dpo" else StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(library, case, shape, folder)
        times.watch(trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return times


def measure(case: Case, shape: Shape) -> dict[str, Any]:
    subjects = {"trl": trl, "trl_ext": trl_ext}
    runs: dict[str, list[StepTimes]] = {name: [] for name in subjects}
    for _ in range(shape.rounds):
        for name, library in subjects.items():
            runs[name].append(run(library, case, shape))
    step_ms = {name: statistics.median(t for times in runs[name] for t in times.milliseconds) for name in subjects}
    return {
        "case": case.name,
        "step_ms": {name: round(value, 2) for name, value in step_ms.items()},
        "ratio": round(step_ms["trl"] / step_ms["trl_ext"], 3),
        **{what: {name: runs[name][-1].counts[what] for name in subjects} for what in ("tokens", "no_grad_forwards")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model: that it runs")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    arguments = parser.parse_args()
    quiet()
    shape = SMOKE if arguments.smoke else SHAPE
    results = []
    print(f"{'case':<56}{'TRL ms':>9}{'ours ms':>9}{'ratio':>7}{'tokens fed, ours / TRL':>24}")
    for case in CASES:
        result = measure(case, shape)
        fed = result["tokens"]["trl_ext"] / result["tokens"]["trl"]
        ours, stock = result["step_ms"]["trl_ext"], result["step_ms"]["trl"]
        print(f"{case.name:<56}{stock:>9.1f}{ours:>9.1f}{result['ratio']:>7.2f}{fed:>24.2f}", flush=True)
        results.append(result)
    write("passes", results, arguments.results)


if __name__ == "__main__":
    main()
