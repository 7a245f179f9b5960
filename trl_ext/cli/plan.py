"""The command `plan`: the batch, checkpointing, offloading and engine that fit a device's memory, fastest first."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from ..config import with_help
from ..fit.coverage import ENGINES
from ..fit.estimate import PAIR_METHODS
from ..fit.launch import LAUNCH_ARGUMENTS, launch_arguments
from ..fit.options import Option
from ..fit.planner import Planner
from ..fit.search import Counted, Ranked, SearchResult, ranked, varied
from ..fit.speed import CPU, GPUS, Device, gpu_named
from . import CommandError, wrapped
from .arguments import OneLineParser, dataclasses_of
from .commands import Process
from .line import Line, check_folder
from .plan_lengths import lengths_of
from .predictions import GIB, CountingLine, as_command_errors, check_memory, parse_for_prediction, readable, run_of

# In tests of small models, measured peaks exceed their estimates by up to this share
MARGIN = 0.07
_PERCENT = f"{100 * (1 - MARGIN):.0f} %"
_LITTLE = 0.1  # share of the memory below which a larger batch is advised
_SHOWN = 3  # options that fit
_MISSES = 4  # options that do not
_NOT_COVERED = (
    "Peaks and times are predictions, not measurements. No prediction was compared with a GPU. The predictions leave "
    "out workspaces of operators, the device's context, fragmentation, and generation (its key-value cache, vLLM)."
)
_FLAGS = ("use_cpu", "multi_gpu", "use_fsdp", "use_deepspeed")  # arguments without a value


@with_help
@dataclass
class PlanArguments:
    """The arguments of `plan` alone."""

    num_devices: int = 1
    """Number of devices, with one process each."""

    device_memory: float | None = None
    """Memory of a device in GiB. `None`: the memory of `--gpu`, or of this machine's GPU."""

    gpu: str | None = field(default=None, metadata={"choices": [*GPUS]})
    """The GPU of the run. Its data sheet gives the memory and the speed. This machine need not have such a GPU."""

    device: str | None = field(default=None, metadata={"choices": ["cuda", "cpu"]})
    """Where training will run. `None`: `"cpu"` with `use_cpu`, else `"cuda"`."""

    plan_output: str | None = None
    """The YAML file to write, for `--config`. `None`: `plan.yaml` in `output_dir`."""

    apply: bool = False
    """Start training with the best option, as `--config` with the written file does."""


def run(line: Line, process: Process) -> int:
    """Print what fits and what does not, write the best option's arguments, and train with `--apply`."""
    remedy = "Remove it: `plan` chooses the engine for `--num_devices`"
    processes = line.in_file.get("num_processes")
    # A file that `plan` has written may be planned again
    precision = line.in_file.get("mixed_precision") or "no"
    is_planned = processes is not None and precision in ("no", "bf16", "fp16")
    parsed_arguments = parse_for_prediction(line, PlanArguments, remedy, LAUNCH_ARGUMENTS if is_planned else ())
    arguments = parsed_arguments.command
    if is_planned and processes != arguments.num_devices:
        raise CommandError(
            f"`num_processes` is {processes}, but `--num_devices` is {arguments.num_devices}: the batch of a step "
            "would change. Give both the same number."
        )
    if is_planned and precision != "no" and not getattr(parsed_arguments.training, precision):
        raise CommandError(
            f"`mixed_precision` is {precision} in the file, but `--{precision}` is false. Remove `mixed_precision`: "
            f"`plan` writes it."
        )
    if arguments.num_devices < 1:
        raise CommandError(f"`--num_devices` must be at least 1, got {arguments.num_devices}.")
    path = Path(arguments.plan_output or os.path.join(parsed_arguments.training.output_dir, "plan.yaml"))
    if path.is_dir():
        raise CommandError(f"`--plan_output {path}` is a folder. Pass a file, such as `{path / 'plan.yaml'}`.")
    check_folder("plan_output", path.parent)
    kind = arguments.device or ("cpu" if line.is_on("use_cpu") else "cuda")
    memory = _memory_of_device(arguments, kind)
    planned_run = run_of(line.method, parsed_arguments, device=kind, devices=arguments.num_devices)
    limit = int(memory.size * (1 - MARGIN))
    progress = CountingLine()
    with as_command_errors():
        read_lengths = partial(lengths_of, line.method, parsed_arguments)
        planner = Planner(planned_run, memory.device, read_lengths, progress.update)
        search_result = planner.search(limit)
    progress.clear()
    if not search_result.fits:
        raise _nothing_fits(planner, search_result.misses, limit)
    print(_lengths_table(planner), _bound_line(memory), sep="\n", end="\n\n")
    given_arguments = _given_arguments(line)
    best = ranked(search_result.fits, planner.seconds_of, planner.space.given_option)
    for number, option in enumerate(varied(best, _SHOWN), 1):
        _print_option(number, option, planner, given_arguments)
    print(_unfit(planner, search_result, limit), end="")
    print(_little_used(planner, best[0].candidate, memory), end="")
    if planner.kept_because is not None:
        print(wrapped(f"The batch stays as given: {planner.kept_because}."))
    chosen_arguments = _arguments_of(planner, best[0].candidate.option)
    variables = (given_arguments.get("env") or {}) | chosen_arguments.get("env", {})
    _write(path, {**given_arguments, **chosen_arguments, "env": variables or None})
    print(wrapped(_NOT_COVERED), "", sep="\n")
    start = "This command starts now" if arguments.apply else "Run this command as it is"
    print(wrapped(f"{start}, to train with the first option and your other arguments:"), "", sep="\n")
    print(f"trl-ext {line.method} --config {path}")
    if not arguments.apply:
        return 0
    # In a process of its own: this one has made an accelerator for the CPU
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "trl_ext.cli", line.method, "--config", str(path)]).returncode


@dataclass(frozen=True)
class _DeviceMemory:
    """The memory that a plan may use, and the limits from which it predicts times."""

    device: Device
    size: float  # bytes
    source: str  # where the size is from, for the user


def _memory_of_device(arguments: PlanArguments, kind: str) -> _DeviceMemory:
    if arguments.gpu is not None and (arguments.device_memory is not None or kind == "cpu"):
        other_argument = f"`--device_memory {arguments.device_memory}`"
        if kind == "cpu":
            other_argument = "`--device cpu`" if arguments.device else "`--use_cpu`"
        raise CommandError(
            f"`--gpu {arguments.gpu}` and {other_argument} contradict each other. Remove one of the two."
        )
    if arguments.device_memory is not None:
        check_memory(arguments.device_memory)
        device = CPU if kind == "cpu" else GPUS["A100-80GB"]
        return _DeviceMemory(device, arguments.device_memory * GIB, "`--device_memory`")
    if arguments.gpu is not None:
        gpu = GPUS[arguments.gpu]
        return _DeviceMemory(gpu, gpu.memory, f"{arguments.gpu}, by its data sheet")
    if kind == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = gpu_named(properties.name) or GPUS["A100-80GB"]
        return _DeviceMemory(gpu, properties.total_memory, f"{properties.name}, this machine's GPU")
    reason = "a CPU has no memory of its own" if kind == "cpu" else "there is no GPU to read it from"
    remedy = "" if kind == "cpu" else f", or name the GPU of the run with `--gpu`: {', '.join(GPUS)}"
    raise CommandError(f"`--device_memory` is not set, and {reason}. Pass it in GiB{remedy}.")


def _arguments_of(planner: Planner, option: Option) -> dict[str, Any]:
    """Return the arguments of an option, with those of its device and engine; `None` for those to leave out."""
    return {
        **planner.space.arguments_of(option),
        **launch_arguments(option.setting.engine, planner.run.devices, planner.run.device, planner.run.mixed_precision),
    }


def _print_option(number: int, option: Ranked, planner: Planner, given_arguments: dict[str, Any]) -> None:
    """Print what an option needs, its arguments to copy, and what else to do."""
    memory = planner.memory_of(option.candidate.option)
    on_host = memory.offloaded + memory.hosted
    host = ""
    if on_host:
        host = f" and {readable(on_host)} of host memory" + " in each process" * (planner.run.devices > 1)
    peak = readable(option.candidate.peak)
    arguments = _arguments_of(planner, option.candidate.option)
    fastest = " (fastest)" * (number == 1)
    print(wrapped(f"{number}. predicted peak {peak}{host}, relative time {option.time:.2f}{fastest}"))
    if planner.run.devices > 1:
        print(wrapped(f"{ENGINES[option.candidate.option.setting.engine]} on {planner.run.devices} devices", "    "))
    print(_to_copy(_words(arguments)))
    print(*_to_add(arguments, given_arguments), sep="\n")


def _words(arguments: dict[str, Any]) -> list[str]:
    """Return arguments as they are on a command line, each with its value."""
    words = []
    for name, value in arguments.items():
        if name in _FLAGS and value:
            words.append(f"--{name}")
        elif value is not None and name != "env":
            words.append(f"--{name} {str(value).lower() if isinstance(value, bool) else value}")
    return words


def _to_add(option_arguments: dict[str, Any], given_arguments: dict[str, Any]) -> Iterator[str]:
    """Yield what to do besides copying an option: variables to set, and given arguments that contradict it."""
    if variables := [f"`{name}={value}`" for name, value in option_arguments.get("env", {}).items()]:
        yield wrapped(f"Set {' and '.join(variables)} in the environment.")
    names = [
        f"`{name}`"
        for name, value in option_arguments.items()
        if value is None and given_arguments.get(name) not in (None, False)
    ]
    if names:
        yield wrapped(f"Leave out {' and '.join(names)}, which you passed.")
    yield ""


def _to_copy(words: list[str]) -> str:
    """Return the words in lines of at most 80 columns, which a shell joins."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > 73:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(f"    {x}" for x in lines)


def _given_arguments(line: Line) -> dict[str, Any]:
    """Return the run's arguments in the file and on the line, without those of `plan`."""
    parser = OneLineParser((*dataclasses_of(line.method), PlanArguments), prog=line.prog)
    values = vars(argparse.ArgumentParser.parse_known_args(parser, line.words)[0])
    arguments = dict(line.in_file)
    for word in line.words:
        if word.startswith("--"):
            name = word.split("=", 1)[0]
            # argparse also takes the beginning of a name
            actions = parser._option_string_actions
            action = actions.get(name) or next(x for full, x in actions.items() if full.startswith(name))
            arguments[action.dest] = values[action.dest]
    chosen_by_plan = {x.name for x in fields(PlanArguments)} | LAUNCH_ARGUMENTS
    return {name: value for name, value in arguments.items() if name not in chosen_by_plan}


def _write(path: Path, arguments: dict[str, Any]) -> None:
    """Write the file as a whole, or not at all."""
    text = yaml.safe_dump({name: x for name, x in arguments.items() if x is not None}, sort_keys=False)
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        message = f"`{path}` cannot be written: {error.strerror}. Pass another file with `--plan_output`."
        raise CommandError(message) from error


def _lengths_table(planner: Planner) -> str:
    """Return how many rows were read, and the median, 95th percentile and maximum of their tokens."""
    lengths = planner.lengths
    prompts_U, completions_UC = lengths.prompts_U, lengths.completions_UC
    unit = "rows"
    completion = "completion"
    if planner.run.method in PAIR_METHODS:
        unit = "pairs"
    if planner.run.samples:
        unit = "prompts"
        completion = f"completion of `max_completion_length` {completions_UC.max():,}"
    rows = np.concatenate([prompts_U + completions_U for completions_U in completions_UC.T])
    lines = [f"{len(prompts_U):,} {unit} read; tokens: median, 95 %, longest"]
    for name, tokens in (("prompt", prompts_U), (completion, completions_UC.ravel()), ("whole", rows)):
        median, most, longest = np.percentile(tokens, (50, 95, 100)).round().astype(int)
        lines.append(f"{f'{median:,}':>10} {f'{most:,}':>8} {f'{longest:,}':>8}   {name}")
    return "\n".join(lines)


def _bound_line(memory: _DeviceMemory) -> str:
    free = f"The plan leaves {100 * MARGIN:.0f} % of it free."
    return wrapped(f"{readable(int(memory.size))} ({memory.source}). {free}", "memory bound  ")


def _named(planner: Planner, option: Option) -> str:
    """Return an option in few words."""
    setting = option.setting
    unit = "pair" if planner.run.method in PAIR_METHODS else "row"
    if option.batch > 1:
        unit += "s"
    size = f"{option.batch} {unit}" if option.budget is None else f"{option.budget:,} tokens"
    parts = [f"{size} per pass", f"{'with' if setting.checkpointing else 'without'} checkpointing"]
    if setting.offloads:
        parts.append("`activation_offloading`")
    if setting.hosts:
        parts.append("`reference_device`")
    if setting.precompute:
        parts.append("`precompute_ref_log_probs`")
    if planner.run.devices > 1:
        parts.append(ENGINES[setting.engine])
    return ", ".join(parts)


def _unfit(planner: Planner, search_result: SearchResult, limit: int) -> str:
    """Return the closest miss for each engine, checkpointing and reference, and the engines that are not covered."""
    closest: dict[tuple[str, bool, bool], Counted] = {}
    for miss in search_result.misses:
        kind = miss.option.setting.on_device
        closest[kind] = min(miss, closest.get(kind, miss), key=lambda x: x.peak)
    lines = [
        wrapped(_named(planner, miss.option), f"    {'over ' * miss.is_least + readable(miss.peak):>15}   ")
        for miss in sorted(closest.values(), key=lambda x: x.peak)[:_MISSES]
    ]
    parts = []
    if lines:
        parts += [f"Options that do not fit into {readable(limit)}, by their predicted peaks", *lines, ""]
    if planner.uncovered:
        options = dict.fromkeys(
            re.sub(r".* cover (.*) with `--engine .*", r"\1", reason) for reason in planner.uncovered.values()
        )
        engines = ", ".join(ENGINES[engine] for engine in planner.uncovered)
        parts += [wrapped(f"`plan` does not cover these engines with {' and '.join(options)}: {engines}."), ""]
    return "\n".join([*parts, ""]) if parts else ""


def _little_used(planner: Planner, best: Counted, memory: _DeviceMemory) -> str:
    """Return what to do with the memory if the best option uses less than a tenth of it."""
    share = best.peak / memory.size
    if share >= _LITTLE:
        return ""
    shown = f"{100 * share:.0f} %" if share >= 0.01 else "less than 1 %"
    remedy = "raise `--per_device_train_batch_size`, or use a smaller device"
    return wrapped(f"The first option uses {shown} of the memory: {remedy}.") + "\n\n"


def _nothing_fits(planner: Planner, misses: list[Counted], limit: int) -> CommandError:
    least = min(misses, key=lambda x: (x.is_least, x.peak))
    length = "max_completion_length" if planner.run.samples else "max_length"
    # Shorter rows save activations, not weights
    remedies = ["use a smaller model" if least.is_least else f"set `--{length}` to a lower number"]
    if planner.facts.trained_bytes == planner.facts.weight_bytes:
        remedies.insert(0, "train an adapter with `--use_peft`")
    if planner.shards_on_more:
        remedies.append("pass more devices with `--num_devices`")
    smallest_peak = f"the smallest predicted peak is {readable(least.peak)} ({_named(planner, least.option)})"
    if least.is_least:
        smallest_peak = f"weights, gradients and optimizer states alone need {readable(least.peak)}"
    advice = ", ".join(remedies[:-1]) + ", or " * (len(remedies) > 1) + remedies[-1]
    advice = advice[0].upper() + advice[1:]
    return CommandError(f"Nothing fits into {readable(limit)} ({_PERCENT} of the memory): {smallest_peak}. {advice}.")
