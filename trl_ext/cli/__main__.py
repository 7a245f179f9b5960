"""`trl-ext`: runs one command. It exits with status 0, or with one line on stderr and status 2."""

import os
import re
import signal
import sys
import warnings

from ..checks.names import did_you_mean
from ..version import NEEDS_TRL, __version__
from . import CommandError, ReportedError, TrainingStoppedError, one_line, wrapped
from .commands import COMMANDS, HELP, Command, Process, Train
from .line import method_named

_OVERVIEW = """usage: trl-ext [--version] COMMAND [ARGUMENTS]

TRL's trainers with exact log-probs and less work.

commands:"""
# What torchrun and `accelerate launch` set. A user may set one of the variables, not both
_LAUNCHED_VARIABLES = (
    {"LOCAL_RANK", "WORLD_SIZE"},
    {"ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_MIXED_PRECISION"},
)


def main(argv: list[str] | None = None) -> int:
    """Run one command with the arguments in `argv`, by default those of the process, and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    process = Process(
        may_launch=not any(os.environ.keys() >= names for names in _LAUNCHED_VARIABLES),
        shows_traceback="--traceback" in arguments,
    )
    arguments = [argument for argument in arguments if argument != "--traceback"]
    command = COMMANDS.get(method_named(arguments[0])) if arguments else None
    prints = not isinstance(command, Train) or not {*HELP}.isdisjoint(arguments)
    if argv is None and prints and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` closes the pipe
    try:
        with warnings.catch_warnings():
            # TRL's configs call gradient checkpointing by the name that transformers 5.23 has replaced
            warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
            if command is None:
                return _without_command(arguments)
            if command.usage is not None and arguments[1:2] and arguments[1] in HELP:
                return _print_usage(command)
            return command.run(arguments[1:], process)
    except TrainingStoppedError:
        raise
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if process.shows_traceback:
            raise
        cause = error.__cause__ or error
        if isinstance(cause, ModuleNotFoundError) and cause.name == "trl":
            error = CommandError(NEEDS_TRL)
        _print_error(error, "trl-ext" if command is None else f"trl-ext {command.name}")
        return 2


def _without_command(arguments: list[str]) -> int:
    """Print the overview or the version."""
    word = arguments[0] if arguments else "--help"
    if word == "--version":
        print(__version__)
        return 0
    if word not in HELP:
        hint = did_you_mean(word, COMMANDS)
        raise CommandError(f"`{word}` is not a command.{hint} Choose from: {', '.join(COMMANDS)}.")
    print(_OVERVIEW, *(wrapped(x.help, f"    {x.name:<14}") for x in COMMANDS.values()), sep="\n")
    print("\n`trl-ext COMMAND --help` lists a command's arguments.\n`--traceback` shows where an error arose.")
    return 0


def _print_usage(command: Command) -> int:
    usage = command.usage or ""
    print(f"usage: trl-ext {command.name}{usage}\n\n{command.help[0].upper()}{command.help[1:]}.")
    if "ARGUMENTS" in usage:
        print(f"\n`trl-ext {command.name} dpo --help` lists the arguments.")
    return 0


def _print_error(error: Exception, prog: str) -> None:
    """Print an error in one line, after open progress bars."""
    message = str(error) if isinstance(error, ReportedError) else one_line(error)
    message = "".join([message, *getattr(error, "__notes__", ())])
    if unknown := re.search(r"'(\w+)'\.( Choose from: .*)", message):
        hint = did_you_mean(unknown[1], re.findall(r"'(\w+)'", unknown[2]))
        message = message.replace(unknown[2], hint + unknown[2])
    # An open progress bar has no line break
    for bar in [*getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())]:
        bar.close()
    hint = "" if isinstance(error, CommandError) else " (`--traceback` shows where)"
    print(f"{prog}: error: {message}{hint}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
