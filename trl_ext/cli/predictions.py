"""What `estimate` and `plan` share: arguments for a run that may be for another machine, and how sizes are written."""

import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager

from ..checks.arguments import check_arguments_of
from ..fit.run import ArgumentError, Run
from . import CommandError
from .arguments import OneLineParser, Parsed, dataclasses_of, parse
from .launch import asks_for_one_process
from .line import Line

GIB = 2**30
_MOST_MEMORY = 2**20  # of a device, in GiB


def parse_for_prediction(line: Line, command_class: type, remedy: str, ignored: Container[str] = ()) -> Parsed:
    """Return the arguments of a run, and as `command` those of the command alone.

    Arguments of the file for `accelerate launch` that are in `ignored` have no effect.

    Raises:
        `CommandError`: an argument is for `accelerate launch`; `remedy` says what to do.
    """
    script_class, config_class, model_class, mixture_class = dataclasses_of(line.method)
    # GRPO's config checks the batch of all processes
    devices = str(line.value("num_devices"))
    world_size = max(1, int(devices)) if devices.isdigit() else 1
    config_on_devices = type(config_class.__name__, (config_class,), {"world_size": world_size})
    parser = OneLineParser((script_class, config_on_devices, model_class, mixture_class, command_class), prog=line.prog)
    parser.set_defaults(use_cpu=True)  # the run may be meant for another machine
    parsed_arguments = parse(parser, line, may_launch=True, predicts=True)
    check_arguments_of(line.method, parsed_arguments.training)
    if not asks_for_one_process([*parsed_arguments.launch_of_file, *parsed_arguments.launch]):
        names = [x for x in parsed_arguments.launch_of_file if x.startswith("--")]
        of_file = [x for x in names if x.removeprefix("--") not in ignored]
        for argument in (*of_file, *parsed_arguments.launch):
            command = line.prog.split()[1]
            raise CommandError(f"`{argument}` is for `accelerate launch`, which `{command}` does not run. {remedy}.")
    return parsed_arguments


def run_of(method: str, parsed_arguments: Parsed, *, device: str, devices: int, engine: str = "one_process") -> Run:
    """Return the run whose memory is predicted."""
    return Run(
        method=method,
        training=parsed_arguments.training,
        model=parsed_arguments.model,
        device=device,
        engine=engine,
        devices=devices,
        prompt_length=getattr(parsed_arguments.command, "prompt_length", 0),
    )


@contextmanager
def as_command_errors() -> Iterator[None]:
    """Raise errors of the arguments, which `fit/` names as the command line does, as `CommandError`."""
    try:
        yield
    except ArgumentError as error:
        raise CommandError(str(error)) from error


def check_memory(device_memory: float) -> None:
    """Raise `CommandError` unless `device_memory` is a positive number of GiB, and not one of bytes."""
    if not 0 < device_memory <= _MOST_MEMORY:
        raise CommandError(
            f"`--device_memory` must be a number above 0, in GiB, and at most {_MOST_MEMORY:,}, got {device_memory}."
        )


def readable(size: int) -> str:
    """Return a number of bytes in GiB, or in MiB if it is below one."""
    return f"{size / GIB:.3f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


class CountingLine:
    """A line on stderr while memory is counted: a terminal shows how far it is, a log file gets one line."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = False

    def update(self, number: int) -> None:
        """Say that count `number` begins."""
        if self._is_terminal:
            print(f"\rCounting memory: {number}", end="", file=sys.stderr, flush=True)
        elif not self._is_shown:
            print("Counting memory ...", file=sys.stderr, flush=True)
        self._is_shown = True

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._is_terminal and self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
