"""The command `plan`: the batch, checkpointing, offloading and engine that fit a device's memory, fastest first."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from ..config import with_help
from ..planning.speed import CPU, GPUS, Device, gpu_named
from . import CommandError, wrapped
from .arguments import OneLineParser, dataclasses_of
from .estimate import ENGINES, arguments_of, check_memory, readable
from .line import Line, check_folder
from .plan_search import Counted, Option, ranked, varied
from .plan_subject import Subject

_GIB = 2**30
# In tests of small models, measured peaks exceed their estimates by up to this share
MARGIN = 0.07
_PERCENT = f"{100 * (1 - MARGIN):.0f} %"
_SHOWN, _MISSES = 3, 4
_NOT_COVERED = (
    "Peaks and times are predictions, not measurements. No prediction was compared with a GPU. They leave out "
    "workspaces of operators, the device's context, fragmentation, and generation (its key-value cache, vLLM)."
)
_FSDP2 = {
    **{"use_fsdp": True, "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    **{"fsdp_reshard_after_forward": True, "fsdp_offload_params": False, "fsdp_cpu_ram_efficient_loading": False},
    **{"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_activation_checkpointing": False},
}


# What a plan chooses for `accelerate launch`
_OF_LAUNCH = {*_FSDP2, "num_processes", "mixed_precision", "multi_gpu", "use_deepspeed", "zero_stage"}


@with_help
@dataclass
class PlanArguments:
    """The arguments of `plan` alone."""

    num_devices: int = 1
    """Number of devices, with one process each."""

    device_memory: float | None = None
    """Memory of a device in GiB. `None`: that of `--gpu`, or of this machine's GPU."""

    gpu: str | None = field(default=None, metadata={"choices": [*GPUS]})
    """The GPU of the run, with the memory and the limits in its data sheet. This machine need not have it."""

    device: str | None = field(default=None, metadata={"choices": ["cuda", "cpu"]})
    """Where training will run. `None`: `"cpu"` with `use_cpu`, else `"cuda"`."""

    plan_output: str | None = None
    """The YAML file to write, for `--config`. `None`: `plan.yaml` in `output_dir`."""

    apply: bool = False
    """Train with the best option at once, as with `--config` and the file that was written."""


def run(line: Line) -> int:
    """Print what fits and what does not, write the best option's arguments, and train with `--apply`."""
    instead = "Remove it: `plan` chooses the engine for `--num_devices`"
    processes, precision = (line.in_file.get(x) for x in ("num_processes", "mixed_precision"))
    planned = processes is not None and precision in (None, False, "no")
    parsed, asked = arguments_of(line, PlanArguments, instead, _OF_LAUNCH if planned else ())
    if planned and processes != asked.num_devices:
        raise CommandError(
            f"`num_processes` is {processes}, but `--num_devices` is {asked.num_devices}: the batch of a step would "
            "change. Give both the same number."
        )
    if asked.num_devices < 1:
        raise CommandError(f"`--num_devices` must be at least 1, got {asked.num_devices}.")
    path = Path(asked.plan_output or os.path.join(parsed.training.output_dir, "plan.yaml"))
    if path.is_dir():
        raise CommandError(f"`--plan_output {path}` is a folder. Pass a file, such as `{path / 'plan.yaml'}`.")
    check_folder("plan_output", path.parent)
    kind = asked.device or ("cpu" if line.has_on("use_cpu") else "cuda")
    limits, bound, source = _limits(asked, kind)
    subject = Subject(line.method, parsed, asked.num_devices, kind, limits)
    limit = int(bound * (1 - MARGIN))
    fits, misses = subject.search(limit)
    if not fits:
        raise _nothing_fits(subject, misses, limit)
    print(_read(subject), _memory(bound, source), sep="\n", end="\n\n")
    given = _given(line)
    best = ranked(fits, subject.seconds_of, subject.space.given)
    for number, (counted, time) in enumerate(varied(best, _SHOWN), 1):
        memory = subject.memory_of(counted.option)
        host = f" and {readable(memory.offloaded + memory.hosted)} of host memory"
        host = host + " in each process" * (asked.num_devices > 1) if memory.offloaded + memory.hosted else ""
        print(wrapped(f"{number}. predicted peak {readable(counted.peak)}{host}, predicted time {time:.2f}"))
        print(_to_copy(_words(subject, counted.option, kind)))
        print(*_to_add(chosen(subject, counted.option, kind), given), sep="\n")
    print(_unfit(subject, misses, limit), end="")
    if subject.kept_because is not None:
        print(wrapped(f"The batch stays as given: {subject.kept_because}."))
    best_words = chosen(subject, best[0][0].option, kind)
    variables = (given.get("env") or {}) | best_words.get("env", {})
    _write(path, {**given, **best_words, "env": variables or None})
    print(wrapped(_NOT_COVERED), "", f"trl-ext {line.method} --config {path}", sep="\n")
    if not asked.apply:
        return 0
    # In a process of its own: this one has made an accelerator for the CPU
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "trl_ext.cli", line.method, "--config", str(path)]).returncode


def _limits(asked: PlanArguments, kind: str) -> tuple[Device, float, str]:
    """Return the limits of a device, the bytes of its memory, and where they are from."""
    if asked.gpu is not None and (asked.device_memory is not None or kind == "cpu"):
        of_cpu = "`--device cpu`" if asked.device else "`--use_cpu`"
        other = of_cpu if kind == "cpu" else f"`--device_memory {asked.device_memory}`"
        raise CommandError(f"`--gpu {asked.gpu}` and {other} contradict each other. Remove one of the two.")
    if asked.device_memory is not None:
        check_memory(asked.device_memory)
        return CPU if kind == "cpu" else GPUS["A100-80GB"], asked.device_memory * _GIB, "`--device_memory`"
    if asked.gpu is not None:
        return GPUS[asked.gpu], GPUS[asked.gpu].memory, f"{asked.gpu}, by its data sheet"
    if kind == "cuda" and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return gpu_named(found.name) or GPUS["A100-80GB"], found.total_memory, f"{found.name}, this machine's GPU"
    there = "a CPU has no memory of its own" if kind == "cpu" else "there is no GPU to read it from"
    remedy = "" if kind == "cpu" else f", or the GPU of the run with `--gpu`: {', '.join(GPUS)}"
    raise CommandError(f"`--device_memory` is not set, and {there}. Pass it in GiB{remedy}.")


def chosen_of_trainer(subject: Subject, option: Option) -> dict[str, Any]:
    """Return the arguments of an option that the trainer takes; `None` for those to leave out."""
    given, setting = subject.space.given, option.setting
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": option.batch,
        "gradient_accumulation_steps": option.accumulation,
    }
    if option.generation is not None:
        chosen |= {"steps_per_generation": option.generation, "generation_batch_size": None}
    if option.budget is not None or given.budget is not None:
        chosen["max_tokens_per_micro_batch"] = option.budget
    chosen["gradient_checkpointing"] = setting.checkpointing
    if setting.precompute:
        chosen["precompute_ref_log_probs"] = True
    if setting.offloads or given.setting.offloads:
        chosen["activation_offloading"] = setting.offloads
    if setting.hosts or given.setting.hosts:
        chosen["reference_device"] = "cpu" if setting.hosts else None
    return chosen


def chosen(subject: Subject, option: Option, kind: str) -> dict[str, Any]:
    """Return the arguments of an option, with those of its device and engine."""
    setting = option.setting
    chosen = {**chosen_of_trainer(subject, option), "use_cpu": True if kind == "cpu" else None}
    if setting.engine == "one_process":
        return chosen | {"num_processes": 1}
    launch: dict[str, Any] = {"num_processes": subject.devices, "mixed_precision": "no"}
    if stage := re.fullmatch(r"zero(\d)", setting.engine):
        launch |= {"use_deepspeed": True, "zero_stage": int(stage[1])}
    else:
        launch |= _FSDP2 if setting.engine == "fsdp2" else {"multi_gpu": True}
    return chosen | launch | ({"env": {"ACCELERATE_USE_CPU": "true"}} if kind == "cpu" else {})


def _words(subject: Subject, option: Option, kind: str) -> list[str]:
    """Return the arguments of an option as they are on a command line, each with its value."""
    words = []
    for name, value in chosen(subject, option, kind).items():
        if name in ("use_cpu", "multi_gpu", "use_fsdp", "use_deepspeed") and value:
            words.append(f"--{name}")
        elif value is not None and name != "env":
            words.append(f"--{name} {str(value).lower() if isinstance(value, bool) else value}")
    return words


def _to_add(chosen: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    """Yield what to do besides copying an option: variables to set, and given arguments that contradict it."""
    if variables := [f"`{name}={value}`" for name, value in chosen.get("env", {}).items()]:
        yield wrapped(f"Set {' and '.join(variables)} in the environment.")
    names = [f"`{name}`" for name, value in chosen.items() if value is None and given.get(name) not in (None, False)]
    if names:
        yield wrapped(f"Leave out {' and '.join(names)}, which you gave.")
    yield ""


def _to_copy(words: list[str]) -> str:
    """Return the words in lines of at most 80 columns, which a shell joins."""
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > 73:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(f"    {x}" for x in lines)


def _given(line: Line) -> dict[str, Any]:
    """Return the run's arguments in the file and on the line, without those of `plan`."""
    parser = OneLineParser((*dataclasses_of(line.method), PlanArguments), prog=line.prog)
    values = vars(argparse.ArgumentParser.parse_known_args(parser, line.words)[0])
    given = dict(line.in_file)
    for word in line.words:
        if word.startswith("--"):
            name = word.split("=", 1)[0]
            # argparse also takes the beginning of a name
            actions = parser._option_string_actions
            action = actions.get(name) or next(x for full, x in actions.items() if full.startswith(name))
            given[action.dest] = values[action.dest]
    apart = {x.name for x in fields(PlanArguments)} | _OF_LAUNCH
    return {name: value for name, value in given.items() if name not in apart}


def _write(path: Path, arguments: dict[str, Any]) -> None:
    """Write the file as a whole, or not at all."""
    text = yaml.safe_dump({name: x for name, x in arguments.items() if x is not None}, sort_keys=False)
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        said = f"`{path}` cannot be written: {error.strerror}. Pass another file with `--plan_output`."
        raise CommandError(said) from error


def _read(subject: Subject) -> str:
    lengths = subject.lengths
    whole = np.concatenate([lengths.prompts_U + x for x in lengths.completions_UC.T])
    what = "pairs" if subject.method == "dpo" else "prompts" if lengths.group > 1 else "rows"
    after = f" of `max_completion_length` {lengths.completions_UC.max():,}" if lengths.group > 1 else ""
    parts = (("prompt", lengths.prompts_U), (f"completion{after}", lengths.completions_UC.ravel()), ("whole", whole))
    lines = [f"{len(lengths.prompts_U):,} {what} read; tokens: median, 95 %, longest"]
    for name, tokens in parts:
        median, most, longest = np.percentile(tokens, (50, 95, 100)).round().astype(int)
        lines.append(f"{f'{median:,}':>10} {f'{most:,}':>8} {f'{longest:,}':>8}   {name}")
    return "\n".join(lines)


def _memory(bound: float, source: str) -> str:
    free = f"The plan leaves {100 * MARGIN:.0f} % of it free."
    return wrapped(f"{readable(int(bound))} ({source}). {free}", "memory bound  ")


def _named(subject: Subject, option: Option) -> str:
    """Return an option in few words."""
    setting = option.setting
    unit = ("pair" if subject.method == "dpo" else "row") + "s" * (option.batch > 1)
    size = f"{option.batch} {unit}" if option.budget is None else f"{option.budget:,} tokens"
    parts = [f"{size} per pass", f"{'with' if setting.checkpointing else 'without'} checkpointing"]
    parts += ["`activation_offloading`"] * setting.offloads + ["`reference_device`"] * setting.hosts
    parts += ["`precompute_ref_log_probs`"] * setting.precompute + [ENGINES[setting.engine]] * (subject.devices > 1)
    return ", ".join(parts)


def _unfit(subject: Subject, misses: list[Counted], limit: int) -> str:
    """Return the closest miss for each engine, checkpointing and reference."""
    closest: dict[tuple[Any, ...], Counted] = {}
    for miss in misses:
        kind = miss.option.setting[:3]
        closest[kind] = min(miss, closest.get(kind, miss), key=lambda x: x.peak)
    lines = [
        wrapped(f"{_named(subject, x.option)}", f"    {readable(x.peak):>10}   ")
        for x in sorted(closest.values(), key=lambda x: x.peak)[:_MISSES]
    ]
    parts = [f"Does not fit into {readable(limit)}, by its predicted peak", *lines, ""] if lines else []
    if subject.uncovered:
        options = dict.fromkeys(
            re.sub(r".* cover (.*) with `--engine .*", r"\1", x) for x in subject.uncovered.values()
        )
        engines = ", ".join(ENGINES[x] for x in subject.uncovered)
        parts += [wrapped(f"Not covered with {' and '.join(options)}: {engines}."), ""]
    return "\n".join([*parts, ""]) if parts else ""


def _nothing_fits(subject: Subject, misses: list[Counted], limit: int) -> CommandError:
    least = min(misses, key=lambda x: x.peak)
    options = ["set `--max_completion_length`" if subject.lengths.group > 1 else "set `--max_length`"]
    options[0] += " to a lower number"
    if subject.facts.trained_bytes == subject.facts.weight_bytes:
        options.insert(0, "train an adapter with `--use_peft`")
    if subject.shards_on_more:
        options.append("pass more devices with `--num_devices`")
    shown = f"the smallest predicted peak is {readable(least.peak)} ({_named(subject, least.option)})"
    remedies = ", ".join(options[:-1]) + ", or " * (len(options) > 1) + options[-1]
    remedies = remedies[0].upper() + remedies[1:]
    return CommandError(f"Nothing fits into {readable(limit)} ({_PERCENT} of the memory): {shown}. {remedies}.")
