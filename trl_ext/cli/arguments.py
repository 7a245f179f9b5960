"""The command line's arguments, parsed and checked."""

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from accelerate.commands.launch import launch_command_parser
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ..config import AddedDPOFields, AddedGRPOFields, DPOConfig, GRPOConfig, with_help
from . import CommandError, did_you_mean

METHODS = ("dpo", "grpo")


@with_help
@dataclass
class GRPOScriptArguments(ScriptArguments):
    """TRL's arguments about data sets, and the rewards."""

    reward_funcs: list[str] = field(default_factory=list)
    """Reward functions: names in `trl.rewards`, such as `accuracy_reward`, or dotted paths, such as
    `my_rewards.brevity`, which may be in the current folder."""

    reward_model_name_or_path: str | None = None
    """Reward model: a name on the Hub or a folder."""


class Parsed(NamedTuple):
    """Four dataclasses, and the arguments for `accelerate launch` of the file and of the command line."""

    script: Any
    training: Any
    model: Any
    mixture: Any
    launch_of_file: list[str]
    launch: list[str]


class OneLineParser(TrlParser):
    """TRL's parser with errors of one line, and a group in `--help` for the fields that trl_ext adds to a config."""

    set_environment = False  # whether `env` in the file of `--config` has changed the environment

    def __init__(self, dataclass_types: Any = None, **keywords: Any) -> None:
        added = [x for x in (AddedDPOFields, AddedGRPOFields) for of in dataclass_types or () if issubclass(of, x)]
        self._added = {x.name for fields_of in added for x in fields(fields_of)}
        self._group: Any = None
        super().__init__(dataclass_types, **keywords)

    def add_argument(self, *flags: Any, **keywords: Any) -> Any:
        """Add it to the group, if it is one of the added fields."""
        if keywords.get("dest", flags[0].lstrip("-")) not in self._added:
            return super().add_argument(*flags, **keywords)
        if self._group is None:
            self._group = self.add_argument_group("trl_ext options")
        return self._group.add_argument(*flags, **keywords)

    def parse_args_and_config(self, *positional: Any, **keywords: Any) -> Any:
        """TRL's."""
        self._environment = dict(os.environ)
        return super().parse_args_and_config(*positional, **keywords)

    def set_defaults_with_config(self, **config: Any) -> Any:
        """TRL's, called after it has set the variables."""
        self.set_environment = dict(os.environ) != self._environment
        return super().set_defaults_with_config(**config)

    def error(self, message: str) -> NoReturn:
        """Raise `CommandError` with argparse's message, in place of pages of usage."""
        raise CommandError(f"{message}. `{self.prog} --help` lists what it takes.")


def dataclasses_of(method: str) -> tuple[type, ...]:
    """The four dataclasses of a method, in the order of `Parsed`."""
    script, training = (ScriptArguments, DPOConfig) if method == "dpo" else (GRPOScriptArguments, GRPOConfig)
    return script, training, ModelConfig, DatasetMixtureConfig


def method_of(arguments: list[str], command: str) -> tuple[str, list[str]]:
    """The method that follows `explain` or `estimate`, and the other arguments."""
    method, *rest = arguments or [""]
    if method not in METHODS:
        given = f"got `{method}`" if method else "got nothing"
        raise CommandError(f"`{command}` is followed by `dpo` or `grpo`, {given}: `trl-ext {command} dpo ...`.")
    return method, rest


def parse(parser: Any, arguments: list[str], *, may_launch: bool) -> tuple[Any, ...]:
    """The parser's dataclasses, then `accelerate launch`'s arguments in the file of `--config` and on the line."""
    arguments = [part for x in arguments for part in (x.split("=", 1) if x.startswith("--config=") else [x])]
    without_config = arguments
    if "--config" in arguments:
        at = arguments.index("--config") + 1
        if at == len(arguments) or not Path(arguments[at]).is_file():
            given = "nothing" if at == len(arguments) else f"`{arguments[at]}`, which is not a file"
            raise CommandError(f"`--config` must be followed by a YAML file, got {given}.")
        without_config = arguments[: at - 1] + arguments[at + 1 :]
    known = {*launch_command_parser()._option_string_actions, "--accelerate_config"}
    # Before the dataclasses are made, which complain about the machine
    unknown = [x for x in parser.parse_known_args(without_config)[1] if x.startswith("-")]
    _refuse_unknown(unknown, known if may_launch else set(), parser)
    try:
        *parsed, from_file, left = parser.parse_args_and_config(
            arguments, return_remaining_strings=True, separate_remaining_strings=True
        )
    except ValueError as error:
        if "use_cpu" not in str(error):
            raise
        raise CommandError(
            "`--bf16` is true, as it is by default in TRL, and there is no GPU. Give `--use_cpu` to train in bf16 on "
            "the CPU, or `--bf16 false`."
        ) from error
    _refuse_unknown(from_file[::2], known, parser)
    return *parsed, from_file, left


def _refuse_unknown(given: list[str], known: set[str], parser: Any) -> None:
    for argument in given:
        name = argument.split("=", 1)[0]
        if name not in known:
            close = did_you_mean(name, [*parser._option_string_actions, *known])
            raise CommandError(f"`{name}` is not an argument of `{parser.prog}`.{close or ' Leave it out.'}")
