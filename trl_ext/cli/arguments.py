"""The arguments of a method: their dataclasses, and the parser."""

import os
import re
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, NoReturn

from accelerate.commands.launch import launch_command_parser
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ..compat.arguments import former_name
from ..compat.choices import resolve_accelerate_config_argument
from ..config import AddedDPOFields, AddedGRPOFields, DPOConfig, GRPOConfig, with_help
from . import CommandError, did_you_mean
from .line import Line, names_in, refuse_word

# The functions of `trl.rewards` that `--reward_funcs` takes, as TRL's command does
REWARDS = ("accuracy_reward", "get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward")


@with_help
@dataclass
class GRPOScriptArguments(ScriptArguments):
    """TRL's arguments about data sets, and the rewards."""

    reward_funcs: list[str] = field(default_factory=list)
    """Reward functions: `my_rewards.py:brevity` is the function `brevity` in that file, `my_rewards.brevity` in a
    module on Python's path or in the current folder, and `accuracy_reward` the one in `trl.rewards`."""

    reward_model_name_or_path: str | None = None
    """Reward model: a name on the Hub or a folder."""


# Messages of argparse and of TRL's parser, and ours
_SAID = {
    r"argument (--\w+)\S*: invalid int value: (.*)": r"`\1` must be an integer, got \2",
    r"argument (--\w+)\S*: invalid float value: (.*)": r"`\1` must be a number, got \2",
    r"argument (--\w+)\S*: Truthy value expected: got (.*) but .*": r"`\1` must be true or false, got '\2'",
    r"argument (--\w+)\S*: invalid choice: (.*) \(choose from (.*)\)": r"`\1` is \2. Choose from: \3",
    r"argument (--\w+)\S*: expected .*": r"`\1` has no value",
    r"ambiguous option: (\S+) could match (.*)": r"`\1` may be \2. Write one of them in full",
}


class Parsed(NamedTuple):
    """Four dataclasses, and the arguments for `accelerate launch` of the file and of the command line."""

    script: Any
    training: Any
    model: Any
    mixture: Any
    launch_of_file: list[str]
    launch: list[str]


class OneLineParser(TrlParser):
    """TRL's parser with errors of one line, and a group in `--help` for the arguments that trl_ext adds."""

    set_environment = False  # whether `env` in the file of `--config` has changed the environment

    def __init__(self, dataclass_types: Any = None, **keywords: Any) -> None:
        added = [x for x in (AddedDPOFields, AddedGRPOFields) for of in dataclass_types or () if issubclass(of, x)]
        self._added = {x.name for fields_of in added for x in fields(fields_of)}
        self._group: Any = None
        super().__init__(dataclass_types, usage="%(prog)s [--config FILE.yaml] [ARGUMENTS]", **keywords)

    def add_argument(self, *flags: Any, **keywords: Any) -> Any:
        """Add it in its one spelling, and to the group if trl_ext adds it."""
        once = [flag for flag in flags if "-" not in flag[2:]]
        choices = ", ".join(map(str, keywords.get("choices") or ()))
        # `--help` fits 80 columns
        if len(choices) > 60:
            keywords |= {"metavar": "CHOICE", "help": f"{keywords.get('help', '')} Choose from: {choices}."}
        elif len(flags[0]) > 35 and "action" not in keywords:
            keywords["metavar"] = "VALUE"
        if keywords.get("dest", flags[0].lstrip("-")) not in self._added:
            return super().add_argument(*once, **keywords)
        if self._group is None:
            self._group = self.add_argument_group("trl_ext options")
        return self._group.add_argument(*once, **keywords)

    def parse_args_and_config(self, *positional: Any, **keywords: Any) -> Any:
        """TRL's."""
        self._environment = dict(os.environ)
        return super().parse_args_and_config(*positional, **keywords)

    def set_defaults_with_config(self, **config: Any) -> Any:
        """TRL's, called after it has set the variables."""
        self.set_environment = dict(os.environ) != self._environment
        return super().set_defaults_with_config(**config)

    def error(self, message: str) -> NoReturn:
        """Raise `CommandError` with argparse's message in one line, in place of pages of usage."""
        for theirs, ours in _SAID.items():
            message = re.sub(theirs, ours, message)
        raise CommandError(f"{message.rstrip('.')}. `{self.prog} --help` lists the arguments.")


def dataclasses_of(method: str) -> tuple[type, ...]:
    """The four dataclasses of a method, in the order of `Parsed`."""
    script, training = (ScriptArguments, DPOConfig) if method == "dpo" else (GRPOScriptArguments, GRPOConfig)
    return script, training, ModelConfig, DatasetMixtureConfig


def parse(parser: Any, line: Line, *, may_launch: bool) -> tuple[Any, ...]:
    """The parser's dataclasses, then `accelerate launch`'s arguments in the file of `--config` and on the line."""
    launcher = launch_command_parser()
    launcher.error = parser.error
    of_launch = {x.lstrip("-") for x in (*launcher._option_string_actions, "--accelerate_config")}
    known = {x.lstrip("-") for x in parser._option_string_actions} | (of_launch if may_launch else set())
    # Before the dataclasses are made, which complain about the machine
    left = parser.parse_known_args(line.words)[1]
    for name in names_in(left):
        if name not in known:
            remedy = _instead(name, known, "--") or f" `{line.prog} --help` lists the arguments."
            raise CommandError(f"`--{name}` is not an argument of `{line.prog}`.{remedy}")
    settable = {action.dest for action in parser._actions} | of_launch | {"env"}
    for name in line.in_file:
        if name not in settable:
            remedy = _instead(name, settable) or f" `{line.prog} --help` lists the arguments."
            raise CommandError(f"`{name}` in {line.file} is not an argument of `{line.prog}`.{remedy}")
    # The first word that is no value of an argument is what `accelerate launch` would run
    stray = launcher.parse_args([*resolve_accelerate_config_argument(left), "-m", line.prog]).training_script
    if stray != line.prog:
        refuse_word(stray, line)
    try:
        return parser.parse_args_and_config(line.whole, return_remaining_strings=True, separate_remaining_strings=True)
    except ValueError as error:
        if "use_cpu" not in str(error):
            raise
        raise CommandError(
            "`--bf16` is true, TRL's default, but there is no GPU. Give `--use_cpu` to train in bf16 on the CPU, or "
            "`--bf16 false`."
        ) from error


def _instead(name: str, known: set[str], mark: str = "") -> str:
    """What replaces an argument of an older TRL, or the name that a slip was meant to be."""
    former = former_name(name, known)
    return did_you_mean(name, known, mark) if former is None else f" {former}"
