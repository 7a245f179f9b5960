"""`trl-ext`: runs one command, which ends with status 0, or with one line on stderr and status 2.

`--version` and `--help` import neither torch nor TRL: each command imports what it needs when it runs.
"""

import argparse
import sys
import warnings
from typing import Any

from ..version import __version__
from . import CommandError, TrainingStoppedError, did_you_mean, one_line

COMMANDS = {
    "dpo": "train with DPO; TRL's arguments and ours",
    "grpo": "train with GRPO; TRL's arguments and ours",
    "explain": "`explain dpo|grpo ...`: what training with these arguments would run, and why",
    "estimate": "`estimate dpo|grpo ...`: memory of a training step, part by part, and the longest sequence that fits",
    "doctor": "versions, devices, the engine, and a self-test of the head on each device",
    "completion": "`completion bash|zsh|tcsh`: a script that completes commands and arguments",
}

_FILES_AND_FOLDERS = (
    *("accelerate_config", "config", "dataset_name", "model_name_or_path", "output_dir", "reward_model_name_or_path"),
)


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
        hint = "" if isinstance(error, CommandError) else " (`--traceback` shows where)"
        print(f"{' '.join(filter(None, ['trl-ext', name]))}: error: {one_line(error)}{hint}", file=sys.stderr)
        return 2


def _run(arguments: list[str], may_launch: bool, shows_traceback: bool) -> int:
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help"):
        overview().print_help()
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command in ("dpo", "grpo", "explain"):
        from . import training

        return training.run(command, rest, may_launch=may_launch, shows_traceback=shows_traceback)
    if command == "estimate":
        from . import estimate

        return estimate.run(rest)
    if command == "doctor":
        from . import doctor

        return doctor.run(rest)
    if command == "completion":
        return _complete(rest)
    raise CommandError(
        f"`{command}` is not a command. Give one of {', '.join(COMMANDS)}.{did_you_mean(command, COMMANDS)}"
    )


def overview() -> argparse.ArgumentParser:
    """The parser of `trl-ext --help`: the commands, without their arguments."""
    parser = argparse.ArgumentParser(
        prog="trl-ext",
        description="TRL's DPO and GRPO with exact log-probs, and without the passes, rows and tokens that change "
        "nothing.",
        epilog="`trl-ext COMMAND --help` lists a command's arguments. `--traceback`, anywhere, shows the traceback of "
        "an error instead of one line.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _complete(arguments: list[str]) -> int:
    """Print a script for the shell that holds all arguments, so that completing starts no Python."""
    import shtab

    from .arguments import METHODS, OneLineParser, dataclasses_of
    from .estimate import EstimateArguments

    shells = list(shtab.SUPPORTED_SHELLS)
    if len(arguments) != 1 or arguments[0] not in shells:
        given = " ".join(arguments) or "nothing"
        raise CommandError(f"`completion` is followed by one of {', '.join(shells)}, got {given}.")

    def add_method(subparsers: Any, method: str, *further: type) -> None:
        types = (*dataclasses_of(method), *further)
        added = subparsers.add_parser(method, help=COMMANDS[method], dataclass_types=types)
        for argument in ("--config", "--accelerate_config"):
            added.add_argument(argument, help="a YAML file")
        for action in added._actions:
            if action.dest in _FILES_AND_FOLDERS:
                action.complete = shtab.FILE

    parser = argparse.ArgumentParser(prog="trl-ext")
    commands: Any = parser.add_subparsers(parser_class=OneLineParser)
    for name, text in COMMANDS.items():
        if name in METHODS:
            add_method(commands, name)
            continue
        command = commands.add_parser(name, help=text)
        if name in ("explain", "estimate"):
            methods = command.add_subparsers(parser_class=OneLineParser)
            for method in METHODS:
                add_method(methods, method, *([EstimateArguments] if name == "estimate" else []))
        elif name == "completion":
            command.add_argument("shell", choices=shells)
    print(shtab.complete(parser, arguments[0]))
    return 0


if __name__ == "__main__":  # as `accelerate launch -m trl_ext.cli` starts it
    raise SystemExit(main(may_launch=False))
