"""The words after a command, read and checked before torch and TRL are imported."""

import re
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from . import CommandError

# What other libraries and users call an argument; `compat/arguments.py` has the names in older versions of TRL
OTHER_NAMES = {
    **dict.fromkeys(("model", "model_id", "model_path", "base_model"), "model_name_or_path"),
    **dict.fromkeys(("data", "dataset", "dataset_path"), "dataset_name"),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "micro_batch_size", "per_device_batch_size"),
        "per_device_train_batch_size",
    ),
    **dict.fromkeys(("accumulation_steps", "grad_accum", "grad_accumulation_steps"), "gradient_accumulation_steps"),
    **dict.fromkeys(("epochs", "num_epochs"), "num_train_epochs"),
    **dict.fromkeys(("lora", "use_lora"), "use_peft"),
    **dict.fromkeys(("target_modules", "lora_targets"), "lora_target_modules"),
    **{"eval_batch_size": "per_device_eval_batch_size", "kl_coef": "beta", "lora_rank": "lora_r"},
    **{"lr": "learning_rate", "lr_scheduler": "lr_scheduler_type", "torch_dtype": "dtype"},
}
OTHER_NAMES_OF = {
    "dpo": {**dict.fromkeys(("max_seq_length", "max_seq_len"), "max_length"), "num_proc": "dataset_num_proc"},
    "grpo": {"group_size": "num_generations"},
}

# What each method needs, what to give, and what may be given in its place
_MODEL = ("model_name_or_path", "a folder, or a name on the Hub", ())
_DATA = ("dataset_name", "a file, a folder, or a name on the Hub", ("datasets",))
_REWARDS = ("reward_funcs", "such as `my_rewards.py:brevity`", ("reward_model_name_or_path",))
METHODS = {"dpo": (_MODEL, _DATA), "grpo": (_MODEL, _DATA, _REWARDS)}


class Line(NamedTuple):
    """The words after `dpo`, `explain dpo` and the like."""

    method: str  # "dpo" or "grpo"
    prog: str  # such as "trl-ext explain dpo"
    words: list[str]  # without `--config` and its file
    file: str | None  # that file
    in_file: dict[str, Any]  # what it sets

    @property
    def whole(self) -> list[str]:
        """The words, with `--config` and its file."""
        return self.words if self.file is None else ["--config", self.file, *self.words]

    def where(self, message: str) -> str:
        """Which of the arguments that `message` names the file sets."""
        named = dict.fromkeys(re.findall(r"(?:`|argument )(?:--)?(\w+)", message))
        of_file = [f"`{name}`" for name in named if name in self.in_file and name not in names_in(self.words)]
        place = f" ({', '.join(of_file)} in {self.file})" if of_file and str(self.file) not in message else ""
        model = str(self.value("model_name_or_path"))
        of_hub = "huggingface.co" in message and model in message and "Current folder" not in message
        if not Path(model).exists() and (f"={model!r}" in message or of_hub):
            place += f" (`--model_name_or_path`; current folder: {Path.cwd()})"
        return place

    def value(self, name: str) -> Any:
        """What is given for an argument; `None` if nothing is, or in part of its name."""
        values = [self.in_file.get(name)]
        for word, after in zip(self.words, [*self.words[1:], ""], strict=False):
            if word.split("=")[0] == f"--{name}":
                values.append(word.partition("=")[2] or ("" if after.startswith("--") else after))
        return values[-1]

    def given(self) -> list[tuple[str, str, str]]:
        """Each argument, as an error shows it, and what is before a name where it is given."""
        in_words = [(name, f"`--{name}`", "--") for name in names_in(self.words)]
        return in_words + [(name, f"`{name}` in {self.file}", "") for name in self.in_file]


def read(command: str, words: list[str]) -> Line:
    """Read the words, and raise `CommandError` for mistakes that show without the types of the arguments."""
    method, prog = command, f"trl-ext {command}"
    if command not in METHODS:
        method, *words = words or [""]
        if method not in METHODS:
            given = f"`{method}`" if method else "nothing"
            raise CommandError(f"`{command}` must be followed by `dpo` or `grpo`, got {given}.")
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
            raise CommandError("`--config` is given twice. Give one file.")
    line = Line(method, prog, words, file, in_file)
    if words and not words[0].startswith("-"):
        refuse_word(words[0], line)
    if {"-h", "--help"}.isdisjoint(words):
        _check_names(line, OTHER_NAMES | OTHER_NAMES_OF[method])
        _check_needs(line, METHODS[method][: 1 if command == "estimate" else None])
        _check_model(line)
        _check_adapter(line)
    return line


def refuse_word(word: str, line: Line) -> NoReturn:
    """Raise `CommandError` for a word that belongs to no argument."""
    is_yaml = word.endswith((".yaml", ".yml")) and line.file is None
    remedy = f"Write `--config {word}` to read a YAML file" if is_yaml else "Write the name of its argument before it"
    raise CommandError(f"`{word}` is not an argument of `{line.prog}`. {remedy}.")


def _with_underscores(word: str) -> str:
    """An argument in its one spelling; TRL's parser takes two."""
    name, *value = word.split("=", 1)
    return "=".join([f"--{name[2:].replace('-', '_')}", *value]) if word.startswith("--") else word


def names_in(words: list[str]) -> list[str]:
    """The arguments among the words."""
    return [word[2:].split("=", 1)[0] for word in words if word.startswith("--")]


def _set_in(file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        given = f"`{file}`, which is not a file" if file else "nothing"
        raise CommandError(f"`--config` must be followed by a YAML file, got {given}.")
    try:
        found = yaml.safe_load(Path(file).read_text())
    except (yaml.MarkedYAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" Look at line {mark.line + 1}."
        raise CommandError(f"`--config {file}` is not valid YAML.{where}") from error
    if not isinstance(found, dict):
        raise CommandError(f"`--config {file}` must have lines such as `learning_rate: 1.0e-5`, got {found!r:.40}.")
    env = found.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(name, str) for name in env):
        raise CommandError(
            f"`env` in {file} must name variables, such as `env: {{NCCL_DEBUG: INFO}}`, got {env!r:.40}."
        )
    return {str(name): value for name, value in found.items()}


def _check_names(line: Line, others: dict[str, str]) -> None:
    for name, shown, mark in line.given():
        if name in others:
            raise CommandError(f"{shown} is not an argument of `{line.prog}`. Write `{mark}{others[name]}`.")


def _check_model(line: Line) -> None:
    """Refuse a path without a model. Whether the Hub has a model shows when it is loaded."""
    name, full = str(line.value("model_name_or_path") or "None"), "model_name_or_path"
    if any(full.startswith(given) and given != full for given in names_in(line.words)):
        return  # a part of the argument's name, which the parser takes
    is_path = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    try:
        is_folder = Path(name).is_dir()
    except OSError as error:  # too long
        short = f"`{name[:40]}...`, {len(name)} characters"
        raise CommandError(f"`--model_name_or_path` is {short}: neither a folder nor a name on the Hub.") from error
    if (is_path or is_folder) and not any(Path(name, f"{x}config.json").is_file() for x in ("", "adapter_")):
        what = "it has no `config.json` or `adapter_config.json`" if is_folder else "there is no such folder"
        raise CommandError(f"`--model_name_or_path` is `{name}`, but {what}. Current folder: {Path.cwd()}.")


def _check_adapter(line: Line) -> None:
    """Refuse arguments of an adapter which TRL ignores, so that it trains all weights."""
    begun = tuple(name for name, _, _ in line.given() if name and name != "use_peft")
    off = None, False, "false", "False"
    if "use_peft".startswith(begun) or line.value("use_peft") not in off:
        return
    for name, shown, mark in line.given():
        switches = (x for x in ("use_dora", "use_rslora") if len(name) > len("use_") and x.startswith(name))
        if (name.startswith("lora_") or any(switches)) and line.value(name) not in off:
            peft = f"`{mark}use_peft{'' if mark else ': true'}`"
            raise CommandError(f"{shown} has no effect without {peft}. Add it, or leave `{mark}{name}` out.")


def _check_needs(line: Line, needs: tuple[tuple[str, str, tuple[str, ...]], ...]) -> None:
    given = {name for name, value in line.in_file.items() if value is not None}
    # As TRL's parser does, take the beginning of a name for the name
    begun = tuple(name for name in names_in(line.words) if name)
    missing = [
        f"`--{name}` ({what})"
        for name, what, others in needs
        if given.isdisjoint((name, *others)) and not any(x.startswith(begun) for x in (name, *others))
    ]
    if not missing:
        return
    stray = next((x for x in line.words if x.endswith((".yaml", ".yml"))), None)
    if line.file is None and stray is not None and {"config_file", "accelerate_config"}.isdisjoint(begun):
        refuse_word(stray, line)
    *first, last = missing
    names = f"{', '.join(first)} and {last} are" if first else f"{last} is"
    raise CommandError(f"{names} not set. Set arguments on the command line, or in a YAML file with `--config FILE`.")
