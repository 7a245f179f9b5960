"""The command `estimate`: the memory of a training step with these arguments, and the longest sequence that fits."""

from dataclasses import dataclass, field
from typing import Any

import torch

from ..checks.arguments import check_offloading_device
from ..config import with_help
from ..fit.coverage import ENGINES
from ..fit.estimate import PAIR_METHODS, longest_rows, step_of
from ..fit.policy import Policy, policy_of
from ..fit.run import Run
from ..fit.step import DIVERGENCE_HEAD, SCORE_HEAD, Step, StepMemory, memory_of_step
from ..trainers.reference_weights import check_hosted_arguments
from . import CommandError, wrapped
from .commands import Process
from .line import Line
from .predictions import GIB, CountingLine, as_command_errors, check_memory, parse_for_prediction, readable, run_of

_NOT_COVERED = (
    "The estimate is for the longest rows without shared prompts, so no batch takes more. It leaves out workspaces of "
    "operators, the device's context, fragmentation, evaluation, and generation (its key-value cache, vLLM)."
)


@with_help
@dataclass
class EstimateArguments:
    """The arguments of `estimate` alone."""

    device_memory: float | None = None
    """Memory of a device in GiB, to find the longest sequence that fits. `None`: the memory of this machine's
    GPU, if any."""

    device: str = field(default="cuda", metadata={"choices": ["cuda", "cpu"]})
    """Where training will run, `"cuda"` or `"cpu"`. This machine need not have the device."""

    prompt_length: int = 0
    """Tokens of a prompt. `max_length` includes them; `max_completion_length` does not."""

    engine: str = field(default="one_process", metadata={"choices": [*ENGINES, "zero3"]})
    """The engine of the run, as the files in `examples/accelerate_configs` set it: `"one_process"`, `"ddp"`, `"fsdp2"`,
    `"zero1"` or `"zero2"`. `"zero3"` is not covered."""

    num_devices: int = 1
    """Number of devices, with one process each. The estimate is for one of them."""


def run(line: Line, process: Process) -> int:
    """Print the parts of the memory, the peak and the longest sequence that fits."""
    remedy = "Remove it, and pass `--engine` and `--num_devices` instead"
    parsed_arguments = parse_for_prediction(line, EstimateArguments, remedy)
    arguments = parsed_arguments.command
    if arguments.device_memory is not None:
        check_memory(arguments.device_memory)
    estimated_run = run_of(
        line.method, parsed_arguments, device=arguments.device, devices=arguments.num_devices, engine=arguments.engine
    )
    with as_command_errors():
        step = step_of(estimated_run)
        policy = policy_of(estimated_run)
    _check_host_memory(estimated_run.training, step.device, has_adapter=policy.has_adapter)
    progress = CountingLine()
    progress.update(1)
    memory = memory_of_step(step)
    progress.clear()
    print(_table(line.method, step, policy, memory))
    limit = None if arguments.device_memory is None else int(arguments.device_memory * GIB)
    if limit is None and arguments.device == "cuda" and torch.cuda.is_available():
        limit = torch.cuda.get_device_properties(0).total_memory
    unknown = "unknown. Pass `--device_memory` in GiB, because there is no GPU to read it from."
    longest = unknown if limit is None else _longest(step, policy, limit, progress)
    progress.clear()
    print(wrapped(longest, f"{'longest':<13}"))
    print("", *map(wrapped, _notes(estimated_run, policy)), sep="\n")
    return 0


def _check_host_memory(training: Any, device: torch.device, *, has_adapter: bool) -> None:
    """Raise `ValueError` for options of host memory that the trainer refuses, or that save nothing."""
    if getattr(training, "activation_offloading", False):
        check_offloading_device(device)
    if getattr(training, "reference_device", None) is None:
        return
    # The trainer has no such check, because it would train all the same
    if device.type == "cpu":
        raise CommandError("`--reference_device` saves nothing on a CPU, whose memory is host memory. Leave it out.")
    check_hosted_arguments(training, has_model=not has_adapter)


def _notes(estimated: Run, policy: Policy) -> list[str]:
    """Return what the estimate does not cover, and where it is for other rows than those of the arguments."""
    notes = [_NOT_COVERED]
    if estimated.samples and not estimated.prompt_length:
        notes.insert(0, "Prompts count as 0 tokens: set `--prompt_length` to the length of the longest prompt.")
    if estimated.longest_row > policy.longest_row:
        notes.insert(
            0,
            f"The arguments allow rows of {estimated.longest_row:,} tokens, but {_models(policy)} has "
            f"{policy.longest_row:,} positions, so the estimate is for rows of {policy.longest_row:,} tokens.",
        )
    return notes


def _models(policy: Policy) -> str:
    return "the model or its teacher" if policy.has_teacher else "the model"


def _longest(step: Step, policy: Policy, limit: int, progress: CountingLine) -> str:
    """Return which rows fit into `limit` bytes, as text."""
    longest, most = longest_rows(step, policy.longest_row, limit, progress.update)
    why_no_longer = ""
    if longest + 64 > policy.longest_row:
        why_no_longer = f" ({_models(policy)} takes no longer rows)"
    elif longest + 64 > most:
        why_no_longer = " (`estimate` counts no longer rows)"
    rows = f"rows of {longest:,} tokens fit" if longest else "no row of 64 tokens fits"
    return f"{rows} into {limit / GIB:.4g} GiB{why_no_longer}"


def _table(method: str, step: Step, policy: Policy, memory: StepMemory) -> str:
    """Return the parts of the memory, one a line, under a title with the batch."""
    rows = f"{step.rows} rows" + f" ({step.rows // 2} pairs)" * (method in PAIR_METHODS)
    on_host = f", without {readable(memory.offloaded)} in host memory" if step.offloads else ""
    reference = "a separate model" if step.reference else "no separate model"
    is_distilled = step.head == DIVERGENCE_HEAD
    if memory.hosted:
        reference += f", with {readable(memory.hosted)} in host memory"
    gathered = ", and gathered weights" if step.engine == "fsdp2" else ""
    copies = ", and fp32 copies of trained parameters" if step.engine.startswith("zero") else ""
    where = "one process" if step.devices == 1 else f"one of {step.devices} devices under {ENGINES[step.engine]}"
    autocast = "" if step.autocast is None else f" with {_name(step.autocast)} autocast"
    heads = {SCORE_HEAD: "the score head's", DIVERGENCE_HEAD: "the divergence's"}
    head = heads.get(step.head, "the LM head's")
    lines = [
        ("weights", memory.weights, "of the policy, with its adapters if any"),
        ("teacher" if is_distilled else "reference", memory.reference, reference),
        ("optimizer", memory.optimizer, "its states" + copies if memory.optimizer else "no states"),
        ("gradients", memory.gradients, "after the backward pass"),
    ]
    if memory.buckets > 0:
        lines.append(("buckets", memory.buckets, "in which the engine averages gradients"))
    lines += [
        ("activations", memory.activations, "after the forward pass of the backbone" + gathered + on_host),
        ("head", memory.head, f"added by {head} forward pass"),
        ("peak", memory.peak, "the most at one time, in a forward, backward or optimizer step"),
    ]
    tokens = step.tokens + (step.head != SCORE_HEAD)  # an LM predicts nothing from a row's last token
    title = wrapped(
        f"{rows} of {tokens:,} tokens per micro-batch, {_name(policy.dtype)} weights{autocast}, "
        f"{where} on {step.device.type}"
    )
    return "\n".join([title, "", *(wrapped(text, f"{name:<13}{readable(size):>12}   ") for name, size, text in lines)])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
