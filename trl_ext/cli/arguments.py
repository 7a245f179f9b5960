"""The arguments of a method: their dataclasses, and the parser."""

import argparse
import re
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from accelerate.commands.launch import launch_command_parser
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ..checks.names import did_you_mean, former_name
from ..config import (
    ADDED_FIELDS,
    AddedCommonFields,
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    with_help,
)
from . import CommandError
from .launch import check_launch, launch_words, needs_launch
from .line import Argument, Line

CONFIGS = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
    "grpo": GRPOConfig,
    "rloo": RLOOConfig,
    "reward": RewardConfig,
    "distillation": DistillationConfig,
}
# The functions of `trl.rewards` that `--reward_funcs` takes, as TRL's command does
REWARDS = ("accuracy_reward", "get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward")


@with_help
@dataclass
class RewardScriptArguments(ScriptArguments):
    """TRL's arguments about data sets, and the rewards."""

    reward_funcs: list[str] = field(default_factory=list)
    """Reward functions. `my_rewards.py:brevity` names the function `brevity` in that file. `my_rewards.brevity` names
    it in a module on Python's path or in the current folder. `accuracy_reward` names a function of `trl.rewards`."""

    reward_model_name_or_path: str | None = None
    """Reward model: a name on the Hub or a folder."""


@dataclass
class ClassifierConfig(ModelConfig):
    """TRL's arguments about the model, for one with a score head."""

    lora_task_type: str = field(default="SEQ_CLS", metadata={"help": "The task type of PEFT. A reward model has one."})


# Messages of argparse and of TRL's parser, and ours
_SAID = {
    r"argument (--\w+)\S*: invalid int value: (.*)": r"`\1` must be an integer, got \2",
    r"argument (--\w+)\S*: invalid float value: (.*)": r"`\1` must be a number, got \2",
    r"argument (--\w+)\S*: Truthy value expected: got (.*) but .*": r"`\1` must be true or false, got '\2'",
    r"argument (--\w+)\S*: invalid choice: (.*) \(choose from (.*)\)": r"Unknown `\1` \2. Choose from: \3",
    r"argument (--\w+)\S*: expected 2 arguments": r"`\1` must be two numbers, such as `\1 -1 1`",
    r"argument (--\w+)\S*: expected .*": r"`\1` has no value",
    r"argument (--\w+)\S*: invalid \w+ value: (.*)": r"`\1` cannot be \2",
    r"argument (--\w+)\S*: ignored explicit argument (.*)": r"`\1` takes no value, got \2. Write `\1` alone",
    r"ambiguous option: (\S+) could match (.*)": r"`\1` can mean \2. Write the full name",
    r"unrecognized arguments: (\S+).*": r"`\1` is not an argument: names begin with `--`",
}
# argparse's own pattern has no exponent, so that `-1e-5` would be an argument
_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|-(inf|nan)$", re.IGNORECASE)


@dataclass(frozen=True)
class Parsed:
    """All arguments of a run. A run that starts processes, which parse them again, may lack the dataclasses."""

    script: Any  # TRL's arguments about data sets, and the rewards
    training: Any  # the trainer's config
    model: Any  # TRL's `ModelConfig`
    mixture: Any  # TRL's `DatasetMixtureConfig`
    command: Any  # the dataclass of `estimate` or `plan`; `None` for other commands
    launch_of_file: list[str]  # arguments for `accelerate launch` in the file
    launch: list[str]  # those on the command line


class OneLineParser(TrlParser):
    """TRL's parser with one-line errors, and a group in `--help` for the arguments that trl_ext adds."""

    def __init__(self, dataclass_types: Any = None, **keywords: Any) -> None:
        configs = [x for x in dataclass_types or () if issubclass(x, AddedCommonFields)]
        self._added_names = {x.name for config in configs for cls in _added_by(config) for x in fields(cls)}
        self._group: Any = None
        usage = "%(prog)s [--config FILE.yaml] [--traceback] [ARGUMENTS]"
        launch = "Arguments of `accelerate launch`, such as `--num_processes 4`, start several processes."
        super().__init__(dataclass_types, usage=usage, description=launch, **keywords)
        self._negative_number_matcher = _NEGATIVE_NUMBER

    def add_argument(self, *flags: Any, **keywords: Any) -> Any:
        """Add an argument without its hyphenated spelling, and to the group if it is one of trl_ext's."""
        once = [flag for flag in flags if "-" not in flag[2:]]
        of_bool = getattr(keywords.get("type"), "__name__", "") == "string_to_bool"
        is_optional = keywords.get("default") is None and "action" not in keywords
        if keywords.get("action") == "store_false":
            # TRL's help is that of the argument which this one turns off. The default is that one's, too
            keywords |= {"help": f"The same as `--{keywords['dest']} false`.", "default": argparse.SUPPRESS}
        elif of_bool and is_optional:
            keywords |= {"nargs": "?", "const": True, "type": _or_none(keywords["type"])}
        elif keywords.get("choices") and is_optional and keywords.get("type") is str:
            keywords |= {"choices": _ChoicesOrNone(keywords["choices"]), "type": _or_none(str)}
        elif flags[0] == "--reward_clip_range":  # TRL's parser would split the text into letters
            keywords |= {"nargs": 2, "type": _or_none(float)}
        choices = ", ".join(map(str, keywords.get("choices") or ()))
        # `--help` fits 80 columns
        if len(choices) > 60:
            keywords |= {"metavar": "CHOICE", "help": f"{keywords.get('help', '')} Choose from: {choices}."}
        elif len(flags[0]) > 35 and "action" not in keywords:
            keywords["metavar"] = "VALUE"
        if keywords.get("dest", flags[0].lstrip("-")) not in self._added_names:
            return super().add_argument(*once, **keywords)
        if self._group is None:
            self._group = self.add_argument_group("trl_ext options")
            self._action_groups.insert(0, self._action_groups.pop())  # before TRL's hundreds
        return self._group.add_argument(*once, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise `CommandError` with argparse's message in one line, in place of pages of usage."""
        for pattern, wording in _SAID.items():
            message = re.sub(pattern, wording, message)
        raise CommandError(f"{message.rstrip('.')}. `{self.prog} --help` lists the arguments.")


class _ChoicesOrNone(list[Any]):
    """Choices for an argument that may also be None, which help and errors do not list."""

    def __contains__(self, value: object) -> bool:
        return value is None or super().__contains__(value)


def _or_none(parse: Any) -> Any:
    """Return `parse` that also takes `None`, as TRL's parser does for numbers."""

    def parsed(text: str) -> Any:
        return None if text.lower() in ("none", "null") else parse(text)

    parsed.__name__ = parse.__name__  # for argparse's message
    return parsed


def _added_by(config: type) -> list[type[AddedCommonFields]]:
    return [added_fields for cls, added_fields in ADDED_FIELDS.items() if issubclass(config, cls)]


def dataclasses_of(method: str) -> tuple[type, ...]:
    """Return the four dataclasses of a method, in the order of `Parsed`."""
    script = RewardScriptArguments if method in ("grpo", "rloo") else ScriptArguments
    model = ClassifierConfig if method == "reward" else ModelConfig
    return script, CONFIGS[method], model, DatasetMixtureConfig


def parse(parser: Any, line: Line, *, may_launch: bool, predicts: bool = False) -> Parsed:
    """Return the arguments on the line and in its file. The parser has the dataclasses of `dataclasses_of` first.

    With `may_launch`, arguments for `accelerate launch` are known. With `predicts`, no process is launched even so.
    """
    launcher = launch_command_parser()
    launcher.error = parser.error
    launcher._negative_number_matcher = _NEGATIVE_NUMBER
    launch_names = {x.lstrip("-") for x in (*launcher._option_string_actions, "--accelerate_config")}
    names_on_line = {x.lstrip("-") for x in parser._option_string_actions}
    if may_launch:
        names_on_line |= launch_names
    names_of_parser = {action.dest for action in parser._actions}
    # First, because making the dataclasses may raise errors about the machine
    _refuse_short(line, launcher._option_string_actions)
    launch_on_line = parser.parse_known_args(line.words)[1]
    for argument in replace(line, words=launch_on_line).arguments():
        names = names_on_line if argument.prefix else names_of_parser | launch_names
        if argument.name not in names:
            remedy = _instead(argument, line, names) or f" `{line.prog} --help` lists the arguments."
            raise CommandError(f"{argument.shown_name} is not an argument of `{line.prog}`.{remedy}")
    # `env` of a file is TRL's
    in_file = {x: line.in_file[x] for x in line.in_file if x in launch_names - names_of_parser - {"env"}}
    launch_of_file = launch_words(in_file, launcher)
    check_launch(launcher, [*launch_of_file, *launch_on_line], line)
    try:
        *parsed_dataclasses, _ = parser.parse_args_and_config(line.all_words, return_remaining_strings=True)
    except ValueError as error:
        if "divisible" in str(error):
            # The processes that this one launches check the batch of all processes
            if may_launch and not predicts and needs_launch([*launch_of_file, *launch_on_line]):
                return Parsed(None, None, None, None, None, launch_of_file, launch_on_line)
            remedy = "Change `--num_generations_eval` or `--per_device_eval_batch_size`."
            if "num_generations" in str(error):
                remedy = "Change `--num_generations` or `--per_device_train_batch_size`."
            raise CommandError(f"{error} {remedy}") from error
        if "use_cpu" not in str(error):
            raise
        raise CommandError(
            "`--bf16` is true, TRL's default, but there is no GPU. Pass `--use_cpu` to train in bf16 on the CPU, or "
            "`--bf16 false`."
        ) from error
    script, training, model, mixture, *of_command = parsed_dataclasses
    command = of_command[0] if of_command else None
    return Parsed(script, training, model, mixture, command, launch_of_file, launch_on_line)


def _refuse_short(line: Line, of_launch: Collection[str]) -> None:
    """Raise `CommandError` for a word with one hyphen that is no number and no argument of `accelerate launch`."""
    for word in line.words:
        if word.partition("=")[0] == "--":
            raise CommandError(f"`{word}` is not an argument of `{line.prog}`. Write a name after `--`.")
        if re.match("-[^-]", word) and not _NEGATIVE_NUMBER.match(word) and word not in ("-h", *of_launch):
            raise CommandError(f"`{word}` is not an argument of `{line.prog}`: names begin with `--`.")


def _instead(argument: Argument, line: Line, known_names: set[str]) -> str:
    """Return what replaces an argument of an older TRL, or the name that a typo was meant to be."""
    name = argument.name
    mark = argument.prefix
    value = line.value(name)
    former = former_name(name, known_names, "VALUE" if value in (None, "") else str(value))
    if former is None and name.removeprefix("no_") in known_names and name.startswith("no_"):
        on = name.removeprefix("no_")
        return f" Write `{mark}{on}{' ' if mark else ': '}false`."
    if former is None:
        return did_you_mean(name, known_names, mark)

    def as_given(code: re.Match[str]) -> str:
        new_name, value = code.groups()
        if new_name not in known_names:
            return code[0]
        # From Python's `a=["b", 1.0]` to `--a b 1.0` or `a: [b, 1.0]`
        value = re.sub(r'[]["=,]' if mark else '["=]', "", value or "")
        return f"`{mark}{new_name}{' ' if mark and value else ': ' if value else ''}{value}`"

    return f" {re.sub('`(.+?)(=.+?)?`', as_given, former)}"
