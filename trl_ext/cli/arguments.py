"""The command line's arguments: parsed and checked."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from accelerate.commands.launch import launch_command_parser
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ..config import DPOConfig, GRPOConfig
from . import CommandError, did_you_mean

METHODS = ("dpo", "grpo")


@dataclass
class GRPOScriptArguments(ScriptArguments):
    """TRL's data set arguments, and the rewards.

    Args:
        reward_funcs (`list[str]`, *optional*, defaults to `[]`):
            Reward functions: names in `trl.rewards`, such as `accuracy_reward`, or dotted paths, such as
            `my_rewards.brevity`, looked for in the current folder too.
        reward_model_name_or_path (`str`, *optional*):
            Reward model: a name on the Hub or a folder.
    """

    reward_funcs: list[str] = field(
        default_factory=list,
        metadata={"help": "Reward functions: names in `trl.rewards`, or dotted paths such as `my_rewards.brevity`."},
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Reward model: a name on the Hub or a folder."}
    )


class Parsed(NamedTuple):
    """What one command line says: four dataclasses, and what is left for `accelerate launch`, from file and line."""

    script: Any
    training: Any
    model: Any
    mixture: Any
    launch_of_file: list[str]
    launch: list[str]


class OneLineParser(TrlParser):
    """TRL's parser, whose errors are one line.

    Attributes:
        set_environment (`bool`): `env` in the file of `--config` has changed the environment.
    """

    set_environment = False

    def parse_args_and_config(self, *positional: Any, **keywords: Any) -> Any:
        """TRL's own."""
        self._environment = dict(os.environ)
        return super().parse_args_and_config(*positional, **keywords)

    def set_defaults_with_config(self, **config: Any) -> Any:
        """TRL's own, which it calls once it has set the variables."""
        self.set_environment = dict(os.environ) != self._environment
        return super().set_defaults_with_config(**config)

    def error(self, message: str) -> NoReturn:
        """Raise `CommandError` with argparse's message, in place of pages of usage."""
        raise CommandError(f"{message}. `{self.prog} --help` lists what it takes.")


def dataclasses_of(method: str) -> tuple[type, ...]:
    """The four dataclasses of `method`, one of `METHODS`, in the order of `Parsed`."""
    script, training = (ScriptArguments, DPOConfig) if method == "dpo" else (GRPOScriptArguments, GRPOConfig)
    return script, training, ModelConfig, DatasetMixtureConfig


def method_of(arguments: list[str], command: str) -> tuple[str, list[str]]:
    """The method that `explain` and `estimate` are asked about, and the other arguments."""
    method, *rest = arguments or [""]
    if method not in METHODS:
        given = f"got `{method}`" if method else "got nothing"
        raise CommandError(f"`{command}` is followed by `dpo` or `grpo`, {given}: `trl-ext {command} dpo ...`.")
    return method, rest


def parse(parser: Any, arguments: list[str], *, may_launch: bool) -> tuple[Any, ...]:
    """The parser's dataclasses, from the command line and `--config`; then what is left for `accelerate launch`.

    What is left of the file comes first, then that of the command line.

    Raises:
        `CommandError`: an argument that neither knows, or a file that cannot be read.
    """
    arguments = [part for argument in arguments for part in _config_in_two(argument)]
    if "--config" in arguments:
        at = arguments.index("--config") + 1
        if at == len(arguments) or not Path(arguments[at]).is_file():
            given = "nothing" if at == len(arguments) else f"`{arguments[at]}`, which is not a file"
            raise CommandError(f"`--config` must be followed by a YAML file, got {given}.")
    options = launch_command_parser()._option_string_actions
    known = {*options, "--accelerate_config"}
    # Before the dataclasses are made, which complain of the machine
    unknown = [x for x in _unknown(parser, arguments) if x.startswith("-")]
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


def _unknown(parser: Any, arguments: list[str]) -> list[str]:
    at = arguments.index("--config") if "--config" in arguments else len(arguments)
    left: list[str] = parser.parse_known_args([*arguments[:at], *arguments[at + 2 :]])[1]
    return left


def _config_in_two(argument: str) -> list[str]:
    return argument.split("=", 1) if argument.startswith("--config=") else [argument]


def _refuse_unknown(given: list[str], known: set[str], parser: Any) -> None:
    for argument in given:
        name = argument.split("=", 1)[0]
        if name not in known:
            close = did_you_mean(name, [*parser._option_string_actions, *known])
            raise CommandError(f"`{name}` is not an argument of `{parser.prog}`.{close or ' Leave it out.'}")
