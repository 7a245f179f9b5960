"""`trl-ext`: runs one command, which ends with status 0, or with one line on stderr and status 2.

Each command imports torch and TRL when it needs them: after `--version`, `--help` and the checks of `line.py`.
"""

import argparse
import sys
import warnings

from ..version import __version__
from . import CommandError, TrainingStoppedError, did_you_mean, one_line
from .line import Line, read

COMMANDS = {
    "dpo": "train with DPO",
    "grpo": "train with GRPO",
    "explain": "show what a run computes, reuses and skips, and why",
    "estimate": "estimate the memory of a training step, and the longest sequence that fits",
    "doctor": "check versions, devices and the engine, and test the LM head on each device",
    "completion": "print a script with which a shell completes commands and arguments",
}
# What follows a command that is not a method
_FOLLOWED_BY = {
    "explain": " {dpo,grpo} [ARGUMENTS]",
    "estimate": " {dpo,grpo} [ARGUMENTS]",
    "doctor": "",
    "completion": " {bash,zsh,tcsh}",
}
_HELP = ("-h", "--help")
_SHELLS = ("bash", "zsh", "tcsh")


def main(argv: list[str] | None = None, *, may_launch: bool = True) -> int:
    """Run one command, and return the exit status.

    Args:
        argv (`list[str]`, *optional*): the arguments; `None`: those of the process.
        may_launch (`bool`): whether `accelerate launch` may start processes, which may not start others.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    shows_traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    try:
        with warnings.catch_warnings():
            # TRL's configs call gradient checkpointing by the name that transformers 5.23 has replaced
            warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
            return _run(arguments, may_launch, shows_traceback)
    except TrainingStoppedError:
        raise
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if shows_traceback:
            raise
        said = "".join([one_line(error), *getattr(error, "__notes__", ())])
        hint = "" if isinstance(error, CommandError) else " (`--traceback` shows where)"
        print(f"{' '.join(filter(None, ['trl-ext', name]))}: error: {said}{hint}", file=sys.stderr)
        return 2


def _run(arguments: list[str], may_launch: bool, shows_traceback: bool) -> int:
    command, *rest = arguments or ["--help"]
    if command in _HELP:
        overview().print_help()
    elif command == "--version":
        print(__version__)
    elif command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        raise CommandError(f"`{command}` is not a command. Choose from: {', '.join(COMMANDS)}.{hint}")
    elif command in _FOLLOWED_BY and rest and rest[0] in _HELP:
        print(f"usage: trl-ext {command}{_FOLLOWED_BY[command]}\n\n{COMMANDS[command].capitalize()}.")
        if "ARGUMENTS" in _FOLLOWED_BY[command]:
            print(f"\n`trl-ext {command} dpo --help` lists the arguments.")
    elif command == "doctor":
        if rest:
            raise CommandError(f"`doctor` takes no arguments, got `{rest[0]}`.")
        from . import doctor

        return doctor.run()
    elif command == "completion":
        if len(rest) != 1 or rest[0] not in _SHELLS:
            given = " ".join(rest) or "nothing"
            raise CommandError(f"`completion` must be followed by one of {', '.join(_SHELLS)}, got {given}.")
        from . import completion

        completion.run(rest[0], COMMANDS)
    else:
        return _run_method(command, read(command, rest), may_launch, shows_traceback)
    return 0


def _run_method(command: str, line: Line, may_launch: bool, shows_traceback: bool) -> int:
    try:
        if command == "estimate":
            from . import estimate

            return estimate.run(line)
        from . import training

        return training.run(command, line, may_launch=may_launch, shows_traceback=shows_traceback)
    except Exception as error:
        error.add_note(line.where(str(error)))
        raise


def overview() -> argparse.ArgumentParser:
    """The parser of `trl-ext --help`: the commands, without their arguments."""
    parser = argparse.ArgumentParser(
        prog="trl-ext",
        description="TRL's DPO and GRPO trainers with exact log-probs, less work and the same training.",
        epilog="`trl-ext COMMAND --help` lists the arguments of a command. `--traceback` anywhere on the command line "
        "shows the traceback of an error.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


if __name__ == "__main__":  # as `accelerate launch -m trl_ext.cli` starts it
    raise SystemExit(main(may_launch=False))
