"""The command `completion`: a script for the shell, written once, so that completing starts no Python."""

import argparse
from typing import Any

import shtab

from . import CommandError
from .__main__ import COMMANDS
from .arguments import METHODS, OneLineParser, dataclasses_of
from .estimate import EstimateArguments

_FILES_AND_FOLDERS = {
    *("accelerate_config", "config", "dataset_name", "model_name_or_path", "output_dir", "reward_model_name_or_path"),
}


def run(arguments: list[str]) -> int:
    """Print the script for the shell that is named.

    Raises:
        `CommandError`: another shell.
    """
    shells = list(shtab.SUPPORTED_SHELLS)
    if len(arguments) != 1 or arguments[0] not in shells:
        given = " ".join(arguments) or "nothing"
        raise CommandError(f"`completion` is followed by one of {', '.join(shells)}, got {given}.")
    print(shtab.complete(_whole_parser(), arguments[0]))
    return 0


def _whole_parser() -> Any:
    """The commands with all their arguments."""
    parser = argparse.ArgumentParser(prog="trl-ext")
    commands = parser.add_subparsers(parser_class=OneLineParser)
    for name, text in COMMANDS.items():
        if name in METHODS:
            _add(commands, name, text, dataclasses_of(name))
            continue
        command = commands.add_parser(name, help=text)
        if name in ("explain", "estimate"):
            methods = command.add_subparsers(parser_class=OneLineParser)
            further = (EstimateArguments,) if name == "estimate" else ()
            for method in METHODS:
                _add(methods, method, COMMANDS[method], (*dataclasses_of(method), *further))
        elif name == "completion":
            command.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return parser


def _add(subparsers: Any, name: str, text: str, dataclasses: tuple[type, ...]) -> None:
    parser = subparsers.add_parser(name, help=text, dataclass_types=dataclasses)
    for argument in ("--config", "--accelerate_config"):
        parser.add_argument(argument, help="a YAML file")
    for action in parser._actions:
        if action.dest in _FILES_AND_FOLDERS:
            action.complete = shtab.FILE
