"""Runs to plan and to measure: the arguments of a case, what `plan` says, and the peak of training with an option."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from allocations import peak_bytes

from launch import SMALL_BUCKET, launch
from memory_estimates import models_of, saved_model
from memory_on_gpu import peaks
from trl_ext.cli.arguments import OneLineParser, dataclasses_of, parse
from trl_ext.cli.commands import COMMANDS
from trl_ext.cli.line import Line
from trl_ext.cli.plan import MARGIN, PlanArguments
from trl_ext.cli.plan_lengths import lengths_of
from trl_ext.cli.predictions import parse_for_prediction, run_of
from trl_ext.cli.training import build
from trl_ext.fit.options import Option, Setting
from trl_ext.fit.planner import Planner
from trl_ext.fit.search import Counted, ranked
from trl_ext.fit.speed import CPU, GPUS

ROWS = 64
LONGEST, PROMPT, COMPLETION = 160, 32, 64
_LORA = ("--use_peft", "true", "--lora_target_modules", "all-linear", "--lora_dropout", "0")
_OF_METHOD = {
    "sft": ("--per_device_train_batch_size=8", f"--max_length={LONGEST}"),
    "dpo": ("--per_device_train_batch_size=8", f"--max_length={LONGEST}"),
    "kto": ("--per_device_train_batch_size=4", f"--max_length={LONGEST}"),
    "reward": ("--per_device_train_batch_size=8", f"--max_length={LONGEST}"),
    "grpo": ("--per_device_train_batch_size=8", "--num_generations=4", "--reward_funcs", "rewards.id_reward"),
    "rloo": ("--per_device_train_batch_size=8", "--num_generations=4", "--reward_funcs", "rewards.id_reward"),
    "distillation": ("--per_device_train_batch_size=8",),
}


@dataclass(frozen=True)
class Case:
    method: str
    model: str  # of `memory_estimates.py`
    bound: float  # MiB
    options: tuple[str, ...] = ()
    kind: str = "cpu"
    engine: str = "one_process"  # of `launch.py`


CASES = {
    "sft-full-wide": Case("sft", "small", 150),
    "sft-full-narrow": Case("sft", "small", 40),
    "sft-lora-tied": Case("sft", "tied", 40, _LORA),
    "dpo-lora-wide": Case("dpo", "small", 120, _LORA),
    "dpo-lora-narrow": Case("dpo", "small", 24, _LORA),
    "dpo-full-tied": Case("dpo", "tied", 70),
    "dpo-full-reference": Case("dpo", "small", 45),
    "dpo-whole-batch": Case("dpo", "small", 60, (*_LORA, "--loss_type", "aot")),
    "kto-full": Case("kto", "small", 60),
    "kto-lora-tied": Case("kto", "tied", 30, _LORA),
    "grpo-full-wide": Case("grpo", "small", 120),
    "grpo-full-narrow": Case("grpo", "tied", 45),
    "grpo-lora-reference": Case("grpo", "small", 30, (*_LORA, "--beta", "0.1")),
    "rloo-full": Case("rloo", "small", 50),
    "rloo-lora-tied": Case("rloo", "tied", 40, _LORA),
    "distillation-full": Case("distillation", "small", 60),
    "distillation-lora-tied": Case("distillation", "tied", 40, _LORA),
    "reward-full": Case("reward", "small", 60),
    "reward-lora-tied": Case("reward", "tied", 60, _LORA),
}
# On the pretended GPU, from which activations and the reference may go to the host
ON_GPU = {
    "gpu-sft-full": Case("sft", "small", 30, kind="cuda"),
    "gpu-dpo-lora": Case("dpo", "small", 20, _LORA, kind="cuda"),
    "gpu-dpo-full": Case("dpo", "small", 35, kind="cuda"),
    "gpu-kto-full": Case("kto", "small", 45, kind="cuda"),
    "gpu-grpo-lora": Case("grpo", "small", 16, _LORA, kind="cuda"),
}
# On two ranks
ON_RANKS = {
    "ddp-dpo-lora": Case("dpo", "small", 40, _LORA, engine="ddp"),
    "ddp-sft-full": Case("sft", "small", 70, engine="ddp"),
    "fsdp2-dpo-full": Case("dpo", "small", 50, engine="fsdp2"),
    "fsdp2-grpo-full": Case("grpo", "small", 50, engine="fsdp2"),
    "fsdp2-kto-lora": Case("kto", "tied", 36, _LORA, engine="fsdp2"),
    "zero1-sft-full": Case("sft", "small", 42.6, engine="small_buckets_zero1"),
    "zero1-rloo-full": Case("rloo", "small", 50, engine="small_buckets_zero1"),
    "zero2-dpo-full": Case("dpo", "small", 50, engine="small_buckets_zero2"),
}
_ALL = CASES | ON_GPU | ON_RANKS


def line_of(name: str, folder: Path, longest_only: bool = False) -> Line:
    """Return the command line of a case, as `trl-ext plan` reads it."""
    case = _ALL[name]
    words = [
        *("--model_name_or_path", saved_model(case.model, folder)),
        *("--dataset_name", _data(case.method, folder, longest_only), "--output_dir", str(folder / "out")),
        *("--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--max_steps", "2"),
        *("--learning_rate", "1e-5", "--no_dataloader_pin_memory", "--disable_tqdm", "true"),
        *("--gradient_accumulation_steps", "2", *_OF_METHOD[case.method]),
        *(["--use_cpu"] if (case.kind, case.engine) == ("cpu", "one_process") else []),
        *case.options,
    ]
    if case.method in ("dpo", "kto"):
        words += ["--reference_store", "memory"]
    if case.method == "distillation" and _LORA[0] not in case.options:
        words += ["--teacher_model_name_or_path", saved_model(case.model, folder)]
    if case.method in ("grpo", "rloo", "distillation"):
        words += [f"--max_completion_length={COMPLETION}", "--generation_kwargs", '{"suppress_tokens": [1]}']
    return COMMANDS["plan"].read([case.method, *words])


@dataclass(frozen=True)
class Planned:
    planner: Planner
    bound: int
    fits: list[Counted]
    misses: list[Counted]

    @property
    def best(self) -> Counted:
        return ranked(self.fits, self.planner.seconds_of, self.planner.space.given_option)[0].candidate

    @property
    def tempting(self) -> list[Counted]:
        """The closest miss of each ladder: less checkpointing, or a larger micro-batch."""
        closest: dict[Setting, Counted] = {}
        for miss in sorted(self.misses, key=lambda x: -x.peak):
            closest[miss.option.setting] = miss
        return [*closest.values()]


def planned(name: str, folder: Path) -> Planned:
    """Return what `plan` finds for a case."""
    line, case = line_of(name, folder), _ALL[name]
    devices = 1 if case.engine == "one_process" else 2
    line = COMMANDS["plan"].read([line.method, *line.words, "--num_devices", str(devices)])
    parsed = parse_for_prediction(line, PlanArguments, "")
    run = run_of(line.method, parsed, device=case.kind, devices=devices)
    limits = CPU if case.kind == "cpu" else GPUS["A10"]
    planner = Planner(run, limits, partial(lengths_of, line.method, parsed))
    if devices > 1:  # `plan` has other engines than DDP only for GPUs
        planner.engines = (case.engine.removeprefix("small_buckets_"),)
        step_of_setting = planner._step
        planner._step = lambda setting: replace(step_of_setting(setting), reduce_bucket_size=SMALL_BUCKET)
    bound = int(case.bound * 2**20)
    found = planner.search(int(bound * (1 - MARGIN)))
    return Planned(planner, bound, found.fits, found.misses)


def measured(name: str, folder: Path, planner: Planner, option: Option) -> int:
    """Return the peak bytes of training with an option on the longest rows alone, by the allocator's records."""
    line = line_of(name, folder, longest_only=True)
    again = COMMANDS[line.method].read(_words(line, planner, option))
    parsed = parse(OneLineParser(dataclasses_of(line.method)), again, may_launch=False)
    trainer: Any = build(line.method, parsed)
    held = sum(x.nbytes for model in models_of(trainer) for x in (*model.parameters(), *model.buffers()))
    return held + peak_bytes(trainer.train)


def measured_on_gpu(name: str, folder: Path, planner: Planner, options: list[Option]) -> list[int]:
    """Return what `measured` does for several options, on the pretended GPU."""
    line = line_of(name, folder, longest_only=True)
    runs = {str(i): (line.method, _words(line, planner, x)) for i, x in enumerate(options)}
    return [*peaks(runs, folder).values()]


def measured_on_ranks(plans: dict[str, Planned], folder: Path) -> dict[str, list[list[int]]]:
    """Return for plans under one engine, on each rank, what `measured` does for the best option and the misses."""
    for name, plan in plans.items():
        line = line_of(name, folder, longest_only=True)
        runs = [_words(line, plan.planner, x.option) for x in (plan.best, *plan.tempting)]
        (folder / f"{name}.json").write_text(json.dumps(runs))
    (engine,) = {ON_RANKS[name].engine for name in plans}
    return launch(Path(__file__).with_name("plans_on_ranks.py"), list(plans), engine, folder, timeout=900.0)


def _words(line: Line, planner: Planner, option: Option) -> list[str]:
    """Return the arguments of a run with an option."""
    words = list(line.words)
    for argument, value in planner.space.arguments_of(option).items():
        if value is not None:
            words += [f"--{argument}", str(value)]
    return words


def _data(method: str, folder: Path, longest_only: bool) -> str:
    """Write rows of an eighth of the longest length up to all of it, which half of them have."""
    path = folder / f"{method}-{'longest' if longest_only else 'ragged'}"
    if not path.exists():
        path.mkdir()
        rows = [_row(method, i, 8 if longest_only else min(8, 1 + i * 16 // ROWS)) for i in range(ROWS)]
        (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _row(method: str, i: int, eighths: int) -> dict[str, Any]:
    draws = np.random.default_rng(i)

    def words(count: int) -> str:
        return " ".join(f"w{x}" for x in draws.integers(94, size=max(1, count)))

    prompt, rest = words(PROMPT * eighths // 8), (LONGEST - PROMPT) * eighths // 8 - 1  # and the end of the text
    if method in ("grpo", "rloo", "distillation"):
        return {"prompt": prompt}
    if method in ("dpo", "reward"):
        return {"prompt": prompt, "chosen": f" {words(rest)}", "rejected": f" {words(rest)}"}
    row = {"prompt": prompt, "completion": f" {words(rest)}"}
    return row if method == "sft" else {**row, "label": bool(i % 2)}
