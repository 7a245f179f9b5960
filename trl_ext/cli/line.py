"""The words after a command, read and checked before torch and TRL are imported."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml

from . import CommandError


@dataclass(frozen=True)
class Need:
    """An argument without which a method does not run."""

    name: str
    hint: str  # what to give
    alternatives: tuple[str, ...] = ()  # arguments that take its place


_MODEL = Need("model_name_or_path", "a folder, or a name on the Hub")
_DATA = Need("dataset_name", "a file, a folder, or a name on the Hub", ("datasets",))
_REWARDS = Need("reward_funcs", "such as `my_rewards.py:brevity`", ("reward_model_name_or_path",))
_TEACHER = Need("teacher_model_name_or_path", "a folder, or a name on the Hub; not needed with `--use_peft`")
# The types of files with data, and what `datasets` calls them
DATA_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
METHODS = {
    "sft": (_MODEL, _DATA),
    "dpo": (_MODEL, _DATA),
    "kto": (_MODEL, _DATA),
    "grpo": (_MODEL, _DATA, _REWARDS),
    "rloo": (_MODEL, _DATA, _REWARDS),
    "reward": (_MODEL, _DATA),
    "distillation": (_MODEL, _DATA, _TEACHER),
}
_SHORT_NAMES = {"distill": "distillation"}


def class_name(method: str, kind: str) -> str:
    """Return the name of a method's class, such as "DPOTrainer" or "RewardConfig". `kind`: "Trainer" or "Config"."""
    return f"{method.capitalize() if method in ('reward', 'distillation') else method.upper()}{kind}"


def method_named(word: str) -> str:
    """Return the method that a command line names."""
    return _SHORT_NAMES.get(word, word)


@dataclass(frozen=True)
class Argument:
    """An argument that is given."""

    name: str
    shown_name: str  # its name in errors
    prefix: str  # of its name: "--" on the line, "" in a file


@dataclass(frozen=True)
class Line:
    """The words after `dpo`, `explain dpo` and the like."""

    method: str  # a key of `METHODS`
    prog: str  # such as "trl-ext explain dpo"
    words: list[str]  # without `--config` and its file
    file: str | None  # that file
    in_file: dict[str, Any]  # what it sets

    @property
    def all_words(self) -> list[str]:
        """The words, with `--config` and its file."""
        return self.words if self.file is None else ["--config", self.file, *self.words]

    @property
    def asks_for_help(self) -> bool:
        return not {"-h", "--help"}.isdisjoint(self.words)

    def where(self, message: str) -> str:
        """Return where the arguments in an error `message` are set or looked for: the file, the folder, the adapter."""
        names = dict.fromkeys(re.findall(r"(?:`|argument )(?:--)?(\w+)", message))
        of_file = [f"`{name}`" for name in names if name in self.in_file and name not in names_in(self.words)]
        place = f" ({', '.join(of_file)} in {self.file})" if of_file and str(self.file) not in message else ""
        model = str(self.value("model_name_or_path"))
        of_hub = "huggingface.co" in message
        of_model = f"={model!r}" in message or (of_hub and model in message and "Current folder" not in message)
        # Transformers does not say what it could not load
        of_model = of_model or ("couldn't connect" in message and self.base is None)
        if of_model and not os.path.exists(model):
            place += f" (`--model_name_or_path {model}`; current folder: {Path.cwd()})"
        if of_hub and self.base is not None and not os.path.exists(self.base):
            place += f" (`{model}` is an adapter of `{self.base}`)"
        return place

    @property
    def base(self) -> str | None:
        """The base model, if the model is the folder of an adapter."""
        try:
            text = Path(str(self.value("model_name_or_path")), "adapter_config.json").read_text()
            return str(json.loads(text).get("base_model_name_or_path"))
        except (OSError, ValueError):
            return None

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield each argument in the words with its value, "" if it has none."""
        for word, next_word in zip(self.words, [*self.words[1:], "--"], strict=False):
            if word.startswith("--"):
                name, mark, value = word[2:].partition("=")
                yield name, value if mark else "" if next_word.startswith("--") else next_word

    def value(self, name: str) -> Any:
        """Return the value given for an argument or a prefix of its name: `None` if not given, "" if without value."""
        values = [self.in_file.get(name)]
        values += [value for beginning, value in self.pairs() if beginning and name.startswith(beginning)]
        return values[-1]

    def is_on(self, name: str) -> bool:
        """Return whether an argument is given, and its value is not false."""
        value = self.value(name)
        return value is not None and str(value).lower() not in ("false", "f", "no", "n", "0")

    def arguments(self) -> list[Argument]:
        """Return each argument in the words and in the file."""
        in_words = [Argument(name, f"`--{name}`", "--") for name in names_in(self.words)]
        return in_words + [Argument(name, f"`{name}` in {self.file}", "") for name in self.in_file]


def read_method(command: str, words: list[str]) -> Line:
    """Read the words after a command that a method follows.

    Raises:
        `CommandError`: none does, or a word is wrong.
    """
    method, *other_words = words or [""]
    method = method_named(method)
    if method not in METHODS:
        got = f"`{method}`" if method else "nothing"
        methods = ", ".join(f"`{x}`" for x in METHODS)
        raise CommandError(f"`{command}` must be followed by one of {methods}, got {got}.")
    return read(method, f"trl-ext {command} {method}", other_words)


def read(method: str, prog: str, words: list[str]) -> Line:
    """Read the words after a method, and the file that `--config` names."""
    word_parts = [word.split("=", 1) if word.startswith("--config=") else [word] for word in words]
    words = [_with_underscores(part) for parts in word_parts for part in parts]
    file = None
    in_file = {}
    if "--config" in words:
        at = words.index("--config")
        file = words[at + 1] if at + 1 < len(words) else ""
        in_file = _set_in(file)
        words = words[:at] + words[at + 2 :]
    if "--config" in words:
        raise CommandError("`--config` is given more than once. Put all arguments into one file.")
    line = Line(method, prog, words, file, in_file)
    if words and not words[0].startswith("-"):
        refuse_word(words[0], line)
    return line


def check(line: Line, *, reads_data: bool) -> None:
    """Raise `CommandError` for mistakes that show without the types of the arguments."""
    from ..checks.names import OTHER_NAMES, OTHER_NAMES_OF
    from ..compat.features import check_command_line  # here, because `--version` must work with any version

    check_command_line()
    if line.asks_for_help:
        return
    _check_names(line, OTHER_NAMES | OTHER_NAMES_OF[line.method])
    needs = METHODS[line.method]
    _check_needs(line, needs if reads_data else (_MODEL,))
    _check_model(line)
    _check_adapter(line)
    _check_quantization(line)
    if reads_data:
        _check_data(line)


def check_output(line: Line) -> None:
    """Raise `CommandError` if a training could not write its results, or would not load the best of them."""
    if line.asks_for_help:
        return
    check_folder("output_dir", line.value("output_dir"))
    store = line.value("reference_store_dir")
    if store is not None and not os.path.isdir(store):  # one that is there may be read-only, and full
        check_folder("reference_store_dir", store)
    _check_best_model(line)


def refuse_word(word: str, line: Line) -> NoReturn:
    """Raise `CommandError` for a word that belongs to no argument."""
    before = next((x for x, y in pairwise(line.words) if y == word and x.startswith("--no_")), "")
    if before and word.lower() in ("true", "false"):
        on = f"--{before.removeprefix('--no_')} {'false' if word.lower() == 'true' else 'true'}"
        raise CommandError(f"`{before}` takes no value, got `{word}`. Write `{before}` alone, or `{on}`.")
    is_yaml = word.endswith((".yaml", ".yml")) and line.file is None
    remedy = (
        f"Write `--config {word}` to read a YAML file" if is_yaml else "Put the name of an argument before this value"
    )
    raise CommandError(f"`{word}` is not an argument of `{line.prog}`. {remedy}.")


def _with_underscores(word: str) -> str:
    """Return an argument spelled with underscores; TRL's parser also takes hyphens."""
    name, *value = word.split("=", 1)
    return "=".join([f"--{name[2:].replace('-', '_')}", *value]) if word.startswith("--") else word


def names_in(words: list[str]) -> list[str]:
    """Return the names of the arguments among the words."""
    return [word[2:].split("=", 1)[0] for word in words if word.startswith("--")]


class _RepeatedKeyError(Exception):
    """A key, and the line of its repetition."""


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML's safe loader, which would take the last of several values of a key."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        values = [key.value for key in keys]
        for i, key in enumerate(keys):
            if isinstance(key, yaml.ScalarNode) and key.value in values[:i]:
                raise _RepeatedKeyError(key.value, key.start_mark.line + 1)
        return super().construct_mapping(node, deep)


def _set_in(file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        given_file = f"`{file}`, which is not a file" if file else "nothing"
        raise CommandError(f"`--config` must be followed by a YAML file, got {given_file}.")
    try:
        content = _UniqueKeys(Path(file).read_text()).get_single_data()
    except _RepeatedKeyError as error:
        key, number = error.args
        raise CommandError(
            f"`{key}` is set twice in {file}, the second time on line {number}. Remove one of the two."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" Look at line {mark.line + 1}."
        raise CommandError(f"`--config {file}` is not valid YAML.{where}") from error
    if not isinstance(content, dict):
        raise CommandError(f"`--config {file}` must have lines such as `learning_rate: 1.0e-5`, got {content!r:.40}.")
    variables = content.get("env", {})
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        raise CommandError(f"`env` in {file} must have lines such as `HF_HUB_OFFLINE: 1`, got {variables!r:.40}.")
    return {str(name): value for name, value in content.items()}


def _check_names(line: Line, other_names: dict[str, str]) -> None:
    for argument in line.arguments():
        name = argument.name
        if name in other_names:
            remedy = f"Write `{argument.prefix}{other_names[name]}`."
            raise CommandError(f"{argument.shown_name} is not an argument of `{line.prog}`. {remedy}")
        # Also the beginning of `label_smoothing_factor`, which only SFT reads
        if name == "label_smoothing" and line.method not in ("sft", "dpo"):
            raise CommandError(
                f"{argument.shown_name} is not an argument of `{line.prog}`, whose loss has no label smoothing. Leave "
                "it out."
            )


def _check_model(line: Line) -> None:
    """Raise `CommandError` for a path without a model. A model on the Hub is checked when it is loaded."""
    name = str(line.value("model_name_or_path") or "None")
    base = line.base
    is_folder = os.path.isdir(name)
    if os.path.isfile(name):
        raise CommandError(f"`--model_name_or_path` is `{name}`, which is a file. Pass the folder of a model.")
    if (_is_path(name) or is_folder) and base is None and not os.path.isfile(os.path.join(name, "config.json")):
        problem = "it has no `config.json` or `adapter_config.json`" if is_folder else "there is no such folder"
        raise CommandError(f"`--model_name_or_path` is `{name}`, but {problem}. Current folder: {Path.cwd()}.")
    if base is not None and _is_path(base) and not os.path.isdir(base):
        raise CommandError(
            f"`--model_name_or_path` is `{name}`, an adapter of `{base}`, but there is no folder `{base}`. Correct "
            "`base_model_name_or_path` in the adapter's `adapter_config.json`."
        )


def _check_data(line: Line) -> None:
    """Raise `CommandError` for a file that is no data. `datasets` would look for its name on the Hub."""
    name = str(line.value("dataset_name") or "")
    kind = os.path.splitext(name)[1]
    if os.path.isfile(name) and kind not in DATA_FORMATS:
        of_kind = f"of the type `{kind}`" if kind else "without a type"
        file_types = ", ".join(DATA_FORMATS)
        raise CommandError(
            f"`--dataset_name` is `{name}`, a file {of_kind}. Pass a folder, or a file ending in one of {file_types}."
        )


def check_folder(argument: str, folder_name: Any) -> None:
    """Raise `CommandError` if the folder for an argument cannot be written to. It is not created."""
    if folder_name is None:
        return
    folder = Path(str(folder_name)).expanduser()
    existing = next((x for x in (folder, *folder.parents) if x.exists()), Path("."))
    if str(folder_name) == "":
        problem = "is empty"
    elif existing.is_dir():
        try:
            with tempfile.TemporaryDirectory(dir=existing):
                return
        except OSError as error:
            problem = f"is `{folder_name}`, but `{existing}` cannot be written to ({error.strerror})"
    elif existing == folder:
        problem = f"is `{folder_name}`, which is a file"
    else:
        problem = f"is `{folder_name}`, but `{existing}` is a file"
    raise CommandError(f"`--{argument}` {problem}. Pass a folder that you can write to.")


def _check_best_model(line: Line) -> None:
    """Raise `CommandError` if the best model is to be loaded, but nothing is evaluated: TRL would keep the last one."""
    strategy = line.value("eval_strategy")
    if line.is_on("load_best_model_at_end") and strategy in (None, False, "no"):
        raise CommandError(
            "`--load_best_model_at_end` has no effect without evaluations. Pass `--eval_strategy steps`, or leave "
            "`--load_best_model_at_end` out."
        )


def _check_quantization(line: Line) -> None:
    """Raise `CommandError` for weights of two precisions, or quantized weights without an adapter to train."""
    of_bits = [name for name in ("load_in_4bit", "load_in_8bit") if line.is_on(name)]
    if len(of_bits) > 1:
        raise CommandError("`--load_in_4bit` and `--load_in_8bit` contradict each other. Remove one of the two.")
    if of_bits and not line.is_on("use_peft") and line.base is None:
        name = of_bits[0]
        raise CommandError(f"`--{name}` trains only adapters. Pass `--use_peft`, or leave `--{name}` out.")


def _is_path(name: str) -> bool:
    """Return whether `name` is a path, because no model on the Hub can have that name."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def _check_adapter(line: Line) -> None:
    """Raise `CommandError` for arguments of a new adapter if none is made; TRL would ignore them."""
    is_adapter = line.base is not None
    if line.is_on("use_peft") and not is_adapter:
        return
    flags = ["use_rslora", "use_dora"]
    if is_adapter:
        flags.append("use_peft")
    for argument in line.arguments():
        name = argument.name
        typed_name = f"`{argument.prefix}{argument.name}`"
        is_flag = len(name) > 4 and any(flag.startswith(name) for flag in flags)
        if not (name.startswith("lora_") or is_flag) or not line.is_on(name):
            continue
        if is_adapter:
            raise CommandError(
                f"{argument.shown_name} is for a new adapter, but `{line.value('model_name_or_path')}` already is an "
                f"adapter. To train it, leave {typed_name} out."
            )
        raise CommandError(
            f"{argument.shown_name} has no effect without `{argument.prefix}use_peft`. Set "
            f"`{argument.prefix}use_peft`, or leave {typed_name} out."
        )


def _check_needs(line: Line, needs: tuple[Need, ...]) -> None:
    def lacks(*names: str) -> bool:
        return all(line.value(name) in (None, "") for name in names)

    if line.is_on("use_peft") or line.base is not None:  # the base model of the student's adapter is the teacher
        needs = tuple(need for need in needs if need != _TEACHER)
    missing_arguments = [f"`--{need.name}` ({need.hint})" for need in needs if lacks(need.name, *need.alternatives)]
    if not missing_arguments:
        return
    stray = [x for x in line.words if x.endswith((".yaml", ".yml"))]
    if line.file is None and stray and lacks("config_file", "accelerate_config"):
        refuse_word(stray[0], line)
    *first, last = missing_arguments
    names = f"{', '.join(first)} and {last} are" if first else f"{last} is"
    raise CommandError(f"{names} not set. Set arguments on the command line, or in a YAML file with `--config FILE`.")
