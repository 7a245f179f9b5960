"""The words after a command, read and checked before torch and TRL are imported."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from . import CommandError

# The arguments that each method needs: (name, what to give, alternatives)
_MODEL = ("model_name_or_path", "a folder, or a name on the Hub", ())
_DATA = ("dataset_name", "a file, a folder, or a name on the Hub", ("datasets",))
_REWARDS = ("reward_funcs", "such as `my_rewards.py:brevity`", ("reward_model_name_or_path",))
# The types of files with data, and what `datasets` calls them
DATA_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
METHODS = {
    **dict.fromkeys(("sft", "dpo", "kto"), (_MODEL, _DATA)),
    **dict.fromkeys(("grpo", "rloo"), (_MODEL, _DATA, _REWARDS)),
}


class Line(NamedTuple):
    """The words after `dpo`, `explain dpo` and the like."""

    method: str  # a key of `METHODS`
    prog: str  # such as "trl-ext explain dpo"
    words: list[str]  # without `--config` and its file
    file: str | None  # that file
    in_file: dict[str, Any]  # what it sets

    @property
    def whole(self) -> list[str]:
        """The words, with `--config` and its file."""
        return self.words if self.file is None else ["--config", self.file, *self.words]

    def where(self, message: str) -> str:
        """Return where the arguments in an error `message` are set or looked for: the file, the folder, the adapter."""
        named = dict.fromkeys(re.findall(r"(?:`|argument )(?:--)?(\w+)", message))
        of_file = [f"`{name}`" for name in named if name in self.in_file and name not in names_in(self.words)]
        place = f" ({', '.join(of_file)} in {self.file})" if of_file and str(self.file) not in message else ""
        model, of_hub = str(self.value("model_name_or_path")), "huggingface.co" in message
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

    def value(self, name: str) -> Any:
        """Return the value given for an argument or a prefix of its name: `None` if not given, "" if without value."""
        values = [self.in_file.get(name)]
        for word, after in zip(self.words, [*self.words[1:], "--"], strict=False):
            begun, mark, value = word.partition("=")
            if len(begun) > 2 and f"--{name}".startswith(begun):
                values.append(value if mark else "" if after.startswith("--") else after)
        return values[-1]

    def typed(self) -> Iterator[tuple[str, str]]:
        """Yield each argument on the line with its value, "" if it has none."""
        for word, after in zip(self.words, [*self.words[1:], "--"], strict=False):
            if word.startswith("--"):
                name, mark, value = word[2:].partition("=")
                yield name, value if mark else "" if after.startswith("--") else after

    def has_on(self, name: str) -> bool:
        """Return whether an argument is given, and its value is not false."""
        value = self.value(name)
        return value is not None and str(value).lower() not in ("false", "f", "no", "n", "0")

    def given(self) -> list[tuple[str, str, str]]:
        """Return (name, name in errors, prefix of a name: "--" or "") for each argument on the line and in the file."""
        in_words = [(name, f"`--{name}`", "--") for name in names_in(self.words)]
        return in_words + [(name, f"`{name}` in {self.file}", "") for name in self.in_file]


def read(command: str, words: list[str]) -> Line:
    """Read the words, and raise `CommandError` for mistakes that show without the types of the arguments."""
    from ..compat.arguments import OTHER_NAMES, OTHER_NAMES_OF  # checks the version of TRL

    method, prog = command, f"trl-ext {command}"
    if command not in METHODS:
        method, *words = words or [""]
        if method not in METHODS:
            given = f"`{method}`" if method else "nothing"
            known = ", ".join(f"`{x}`" for x in METHODS)
            raise CommandError(f"`{command}` must be followed by one of {known}, got {given}.")
        prog = f"{prog} {method}"
    apart = [word.split("=", 1) if word.startswith("--config=") else [word] for word in words]
    words = [_with_underscores(part) for parts in apart for part in parts]
    file, in_file = None, {}
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
    if {"-h", "--help"}.isdisjoint(words):
        _check_names(line, OTHER_NAMES | OTHER_NAMES_OF[method])
        _check_needs(line, METHODS[method][: 1 if command == "estimate" else None])
        _check_model(line)
        _check_adapter(line)
        _check_quantization(line)
        if command != "estimate":
            _check_data(line)
        if command in METHODS:
            check_folder("output_dir", line.value("output_dir"))
            store = line.value("reference_store_dir")
            if store is not None and not os.path.isdir(store):  # one that is there may be read-only, and full
                check_folder("reference_store_dir", store)
            _check_best_model(line)
    return line


def refuse_word(word: str, line: Line) -> NoReturn:
    """Raise `CommandError` for a word that belongs to no argument."""
    before = next((x for x, y in pairwise(line.words) if y == word and x.startswith("--no_")), "")
    if before and word.lower() in ("true", "false"):
        on = f"--{before.removeprefix('--no_')} {'false' if word.lower() == 'true' else 'true'}"
        raise CommandError(f"`{before}` takes no value, got `{word}`. Write `{before}` alone, or `{on}`.")
    is_yaml = word.endswith((".yaml", ".yml")) and line.file is None
    remedy = f"Write `--config {word}` to read a YAML file" if is_yaml else "Put the name of its argument before it"
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
        given = f"`{file}`, which is not a file" if file else "nothing"
        raise CommandError(f"`--config` must be followed by a YAML file, got {given}.")
    try:
        found = _UniqueKeys(Path(file).read_text()).get_single_data()
    except _RepeatedKeyError as error:
        key, number = error.args
        raise CommandError(
            f"`{key}` is set twice in {file}, the second time in line {number}. Remove one of the two."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" Look at line {mark.line + 1}."
        raise CommandError(f"`--config {file}` is not valid YAML.{where}") from error
    if not isinstance(found, dict):
        raise CommandError(f"`--config {file}` must have lines such as `learning_rate: 1.0e-5`, got {found!r:.40}.")
    variables = found.get("env", {})
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        raise CommandError(f"`env` in {file} must have lines such as `HF_HUB_OFFLINE: 1`, got {variables!r:.40}.")
    return {str(name): value for name, value in found.items()}


def _check_names(line: Line, others: dict[str, str]) -> None:
    for name, shown, mark in line.given():
        if name in others:
            raise CommandError(f"{shown} is not an argument of `{line.prog}`. Write `{mark}{others[name]}`.")
        # Also the beginning of `label_smoothing_factor`, which only SFT reads
        if name == "label_smoothing" and line.method not in ("sft", "dpo"):
            raise CommandError(
                f"{shown} is not an argument of `{line.prog}`, whose loss has no label smoothing. Leave it out."
            )


def _check_model(line: Line) -> None:
    """Raise `CommandError` for a path without a model. A model on the Hub is checked when it is loaded."""
    name, base = str(line.value("model_name_or_path") or "None"), line.base
    is_folder = os.path.isdir(name)
    if os.path.isfile(name):
        raise CommandError(f"`--model_name_or_path` is `{name}`, which is a file. Pass the folder of a model.")
    if (_is_path(name) or is_folder) and base is None and not os.path.isfile(os.path.join(name, "config.json")):
        what = "it has no `config.json` or `adapter_config.json`" if is_folder else "there is no such folder"
        raise CommandError(f"`--model_name_or_path` is `{name}`, but {what}. Current folder: {Path.cwd()}.")
    if base is not None and _is_path(base) and not os.path.isdir(base):
        raise CommandError(
            f"`--model_name_or_path` is `{name}`, an adapter of `{base}`, a folder that does not exist. Correct "
            "`base_model_name_or_path` in its `adapter_config.json`."
        )


def _check_data(line: Line) -> None:
    """Raise `CommandError` for a file that is no data. `datasets` would look for its name on the Hub."""
    name = str(line.value("dataset_name") or "")
    kind = os.path.splitext(name)[1]
    if os.path.isfile(name) and kind not in DATA_FORMATS:
        of_kind = f"of the type `{kind}`" if kind else "without a type"
        known = ", ".join(DATA_FORMATS)
        raise CommandError(
            f"`--dataset_name` is `{name}`, a file {of_kind}. Pass a folder, or a file of one of {known}."
        )


def check_folder(argument: str, given: Any) -> None:
    """Raise `CommandError` if the folder `given` for an argument cannot be written to. It is not created."""
    if given is None:
        return
    folder = Path(str(given)).expanduser()
    there = next((x for x in (folder, *folder.parents) if x.exists()), Path("."))
    what = ""
    if str(given) == "":
        what = "is empty"
    elif not there.is_dir():
        what = f"is `{given}`, " + ("which is a file" if there == folder else f"but `{there}` is a file")
    else:
        try:
            with tempfile.TemporaryDirectory(dir=there):
                pass
        except OSError as error:
            what = f"is `{given}`, but `{there}` cannot be written to ({error.strerror})"
    if what:
        raise CommandError(f"`--{argument}` {what}. Pass a folder that you can write to.")


def _check_best_model(line: Line) -> None:
    """Raise `CommandError` if the best model is to be loaded, but nothing is evaluated: TRL would keep the last one."""
    strategy = line.value("eval_strategy")
    if line.has_on("load_best_model_at_end") and strategy in (None, False, "no"):
        raise CommandError(
            "`--load_best_model_at_end` has no effect without evaluations. Pass `--eval_strategy steps`, or leave "
            "`--load_best_model_at_end` out."
        )


def _check_quantization(line: Line) -> None:
    """Raise `CommandError` for weights of two precisions, or quantized weights without an adapter to train."""
    of_bits = [name for name in ("load_in_4bit", "load_in_8bit") if line.has_on(name)]
    if len(of_bits) > 1:
        raise CommandError("`--load_in_4bit` and `--load_in_8bit` contradict each other. Remove one of the two.")
    if of_bits and not line.has_on("use_peft") and line.base is None:
        name = of_bits[0]
        raise CommandError(f"`--{name}` trains only adapters. Pass `--use_peft`, or leave `--{name}` out.")


def _is_path(name: str) -> bool:
    """Return whether `name` is a path, because no model on the Hub can have that name."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1


def _check_adapter(line: Line) -> None:
    """Raise `CommandError` for arguments of a new adapter if none is made; TRL would ignore them."""
    new, trained = line.has_on("use_peft"), line.base is not None
    flags = ("use_rslora", "use_dora", *["use_peft"] * trained)
    for name, shown, mark in line.given():
        of_adapter = name.startswith("lora_") or (len(name) > 4 and any(flag.startswith(name) for flag in flags))
        if not of_adapter or not line.has_on(name) or (new and not trained):
            continue
        if trained:
            model = line.value("model_name_or_path")
            why = f"is for a new adapter, but `{model}` already is an adapter. To train it, leave `{mark}{name}` out"
            raise CommandError(f"{shown} {why}.")
        why = f"has no effect unless `{mark}use_peft` is true. Set it, or leave `{mark}{name}` out"
        raise CommandError(f"{shown} {why}.")


def _check_needs(line: Line, needs: tuple[tuple[str, str, tuple[str, ...]], ...]) -> None:
    def lacks(*names: str) -> bool:
        return all(line.value(name) in (None, "") for name in names)

    missing = [f"`--{name}` ({what})" for name, what, others in needs if lacks(name, *others)]
    if not missing:
        return
    stray = [x for x in line.words if x.endswith((".yaml", ".yml"))]
    if line.file is None and stray and lacks("config_file", "accelerate_config"):
        refuse_word(stray[0], line)
    *first, last = missing
    names = f"{', '.join(first)} and {last} are" if first else f"{last} is"
    raise CommandError(f"{names} not set. Set arguments on the command line, or in a YAML file with `--config FILE`.")
