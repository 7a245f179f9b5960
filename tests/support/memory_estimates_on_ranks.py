"""Measures the memory of training steps on two ranks, on each by its own allocator; see `memory_estimates.py`."""

import os
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from allocations import peak_bytes
from torch.profiler import record_function
from transformers import TrainerCallback

from launch import LaunchedRank
from memory_estimates import CASES as ALL
from memory_estimates import words
from trl_ext.cli.arguments import OneLineParser, dataclasses_of, parse
from trl_ext.cli.commands import COMMANDS
from trl_ext.cli.training import build


class _Steady(TrainerCallback):
    """Marks the last step: those before it have made the optimizer's states and the engine's buffers."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps - 1:
            with record_function("steady"):
                pass


def measured(case: str, rank: LaunchedRank) -> int:
    """Return the bytes that this rank holds at the peak of a step of a case."""
    further: tuple[str, ...] = ()
    if "bf16" in case and not rank.is_zero:
        # The argument wants a GPU or `--use_cpu`, which the launch of an engine for GPUs has not
        further = ("--bf16", "false")
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    return peak_of(ALL[case][0], [*words(case, rank.folder), *further], rank)


def peak_of(method: str, arguments: list[str], rank: LaunchedRank) -> int:
    """Return the bytes that this rank holds at the peak of a step with these arguments.

    Counting begins before the models are loaded, because each engine copies what it keeps of them into its own memory,
    and frees the files that they were read from.
    """
    trainers: list[Any] = []

    def run() -> None:
        line = COMMANDS[method].read([*arguments, "--max_steps", "3", *of_rank])
        trainers.append(build(method, parse(OneLineParser(dataclasses_of(method)), line, may_launch=False)))
        trainers[0].add_callback(_Steady())
        trainers[0].train()

    of_rank = [x for name, value in rank.training_arguments().items() for x in (f"--{name}", value)]
    of_rank += ["--use_cpu"] * rank.is_zero
    _free_on_this_thread()
    peak = peak_bytes(run, since="steady")
    rank.check(trainers[0])
    return peak


def _free_on_this_thread() -> None:
    """Have gloo's threads let go of what they sent before this one does: the profiler sees what this one frees."""
    wait = dist.Work.wait

    def waited(work: dist.Work, *args: Any) -> Any:
        result = wait(work, *args)
        time.sleep(0.001)
        return result

    dist.Work.wait = waited
    # DDP sends all weights once, and waits for that in C++. Both ranks have read the same file
    torch.nn.parallel.distributed._sync_module_states = lambda *args, **kwargs: None


_ALWAYS = ("dpo-lora", "dpo-full-accumulation", "dpo-lora-bf16", "kto-full-checkpointing", "rloo-lora-reference")
_ON_SHARDS = (
    *_ALWAYS,
    "dpo-full",
    "sft-adamw_torch",
    "kto-full-reference-accumulation",
    "grpo-full-reference",
    "rloo-full-reference-checkpointing",
)
ON_RANKS = {
    "ddp": (
        *_ALWAYS,
        "dpo-full",
        "dpo-lora-checkpointing",
        "grpo-full",
        "sft-full",
        "sft-adamw_8bit",
        "sft-4bit",
        "distillation-full",
        "distillation-lora",
    ),
    "fsdp2": (*_ON_SHARDS, "sft-lora", "sft-sgd", "grpo-full", "kto-lora"),
    "small_buckets_zero1": (*_ON_SHARDS, "sft-short-full", "sft-sgd"),
    "small_buckets_zero2": (*_ON_SHARDS, "sft-short-full", "sft-short-momentum"),
    "zero1": ("dpo-full",),
    "zero2": ("dpo-full",),
}
CASES = {name: partial(measured, name) for name in ALL}
