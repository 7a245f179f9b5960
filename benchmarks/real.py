"""Measure training steps of a real model, SmolLM2-135M-Instruct, with stock TRL and ours in turns.

    make bench-real            # in an environment of its own, on one CPU thread
    python benchmarks/real.py --only grpo --steps 3

Each case is a run of `trl-ext compare`: the same arguments, data and seed, in processes of their own. Two cases run at
a time, each on one thread, and times are CPU seconds. `generate` samples the completions of GRPO and RLOO. On a line,
milliseconds are those of whole steps, generation included, without the first one; `generation_ms` is the median of
generation, and `equal_rewards` the mean share of groups whose rewards are equal. On our line, `differences` has the
largest relative difference of loss and metrics, and that of the weights from their change.
"""

import argparse
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_data
import results

from trl_ext.cli.compare import LIBRARIES, compare, run_alone
from trl_ext.cli.compared import WEIGHTS, Job, RunResult

_COMMON = """
    --use_cpu --gradient_checkpointing false --dataloader_pin_memory false --lr_scheduler_type constant
"""
_LORA = """
    --use_peft --lora_r 16 --lora_alpha 32 --lora_dropout 0.0 --lora_target_modules all-linear --learning_rate 1e-4
"""
_FULL = "--learning_rate 1e-5"
_FP32 = "--bf16 false --dtype float32"
_BF16 = "--bf16 false --dtype bfloat16"
_AUTOCAST = "--bf16 true --dtype float32"
_REWARDS = Path(__file__).parent / "real_rewards.py"
_REWARD = f"--reward_funcs {_REWARDS}:right_answer"


@dataclass(frozen=True)
class Case:
    """A training to measure."""

    name: str
    method: str
    data: str  # a key of `real_data.DATA`
    words: str  # the arguments of `trl-ext`


# So that two cases that run at a time fit into 24 GiB
CASES = [
    Case(
        "grpo_lora",
        "grpo",
        "questions",
        f"{_LORA} {_FP32} {_REWARD} --per_device_train_batch_size 32 --num_generations 8 --max_completion_length 8",
    ),
    Case("dpo_lora", "dpo", "answers", f"{_LORA} {_FP32} --per_device_train_batch_size 2"),
    Case(
        "dpo_lora_checkpointing",
        "dpo",
        "answers",
        f"{_LORA} {_FP32} --per_device_train_batch_size 2 --gradient_checkpointing true",
    ),
    Case("kto_lora", "kto", "labelled answers", f"{_LORA} {_FP32} --per_device_train_batch_size 4"),
    Case("sft_lora", "sft", "passages", f"{_LORA} {_FP32} --per_device_train_batch_size 2 --max_length 160"),
    Case("sft_full_bf16_short", "sft", "short passages", f"{_FULL} {_BF16} --per_device_train_batch_size 1"),
    Case(
        "rloo_lora",
        "rloo",
        "questions",
        f"{_LORA} {_FP32} {_REWARD} --per_device_train_batch_size 8 --num_generations 4 --max_completion_length 8",
    ),
    Case(
        "grpo_lora_mixed",
        "grpo",
        "last words",
        f"{_LORA} {_FP32} {_REWARD} --per_device_train_batch_size 16 --num_generations 8 --max_completion_length 8",
    ),
    Case(
        "grpo_lora_64_tokens",
        "grpo",
        "questions",
        f"{_LORA} {_FP32} {_REWARD} --per_device_train_batch_size 16 --num_generations 8 --max_completion_length 64",
    ),
    Case("dpo_lora_batch_8", "dpo", "answers", f"{_LORA} {_FP32} --per_device_train_batch_size 8"),
    Case("dpo_lora_long", "dpo", "long", f"{_LORA} {_FP32} --per_device_train_batch_size 2 --max_length 512"),
    Case("dpo_full_autocast", "dpo", "answers", f"{_FULL} {_AUTOCAST} --per_device_train_batch_size 2"),
    Case("dpo_lora_bf16_equal", "dpo", "equal", f"{_LORA} {_BF16} --per_device_train_batch_size 2 --max_length 160"),
]


def lines_of(case: Case, steps: int) -> list[dict[str, Any]]:
    """Measure a case, and return a line for TRL and one for ours."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = real_data.write("data", real_data.DATA[case.data](256), folder)
        paths = ["--model_name_or_path", str(real_data.checkpoint()), "--dataset_name", str(file)]
        words = [*_COMMON.split(), *case.words.split(), *paths]
        runs = {x: run_alone(Job(case.method, x, words, steps, 256), folder / x) for x in LIBRARIES}
        comparison = compare(*runs.values(), *(folder / x / WEIGHTS for x in LIBRARIES))
    run = results.new_run()
    shape = {
        "model": "SmolLM2-135M-Instruct",
        "method": case.method,
        "data": case.data,
        "arguments": " ".join(case.words.replace(str(_REWARDS), _REWARDS.name).split()),
    }
    lines = [_line(f"real_{case.name}", shape, x, run, runs[x]) for x in LIBRARIES]
    metrics = max(comparison.metrics.values(), default=0.0)
    lines[1]["differences"] = {"loss": comparison.loss, "metrics": metrics, "weights": comparison.weights}
    return lines


def _line(benchmark: str, shape: dict[str, Any], subject: str, run: str, result: RunResult) -> dict[str, Any]:
    later = result.steps[1:] or result.steps
    milliseconds = [1e3 * (step.seconds + step.generation_seconds) for step in later]
    equal_rewards = [entry["frac_reward_zero_std"] for entry in result.log if "frac_reward_zero_std" in entry]
    return {
        "benchmark": benchmark,
        "shape": shape,
        "subject": subject,
        "run": run,
        "median_ms": statistics.median(milliseconds),
        "min_ms": min(milliseconds),
        "max_ms": max(milliseconds),
        "generation_ms": statistics.median(1e3 * step.generation_seconds for step in later),
        "first_step_ms": 1e3 * (result.steps[0].seconds + result.steps[0].generation_seconds),
        "peak_mib": result.peak_mib,
        "max_error": None,
        "tokens": statistics.median(step.tokens for step in later),
        "equal_rewards": statistics.fmean(equal_rewards) if equal_rewards else None,
        "steps": len(later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each run")
    parser.add_argument("--at_once", type=int, default=2, help="cases that run at a time, on a core each")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder to write to")
    chosen = parser.parse_args()
    origin = results.origin("cpu")
    print(f"{'':<26}{'TRL s':>9}{'ours s':>9}{'ratio':>7}  tokens, peak MiB, differences of loss and weights")
    cases = [case for case in CASES if chosen.only in case.name]
    pool = ThreadPoolExecutor(chosen.at_once)
    runs = [pool.submit(lines_of, case, chosen.steps) for case in cases]
    for case, run in zip(cases, runs, strict=True):
        stock, ours = lines = run.result()
        results.add([line | origin for line in lines], chosen.results)
        seconds = [line["median_ms"] / 1e3 for line in lines]
        differences = ours["differences"]
        print(
            f"{case.name:<26}{seconds[0]:>9.2f}{seconds[1]:>9.2f}{seconds[0] / seconds[1]:>7.2f}  "
            f"{stock['tokens']:.0f} -> {ours['tokens']:.0f}, {stock['peak_mib']:.0f} -> {ours['peak_mib']:.0f}, "
            f"{differences['loss']:.0e}, {differences['weights']:.0e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
