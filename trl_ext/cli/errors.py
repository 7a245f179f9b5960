"""What a user of the command line reads for an error that was raised for Python: arguments and values as typed.

It imports nothing heavy: the error may be that torch or TRL is missing.
"""

import os
import re
import sys
from dataclasses import fields
from typing import Any

from .line import Line

_OF_RANKS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
# Values of many variables, which messages name for other reasons
_COMMON_VALUES = ("true", "false", "yes", "no", "none", "on", "off")
# What Python calls an argument of the command line
_OF_PYTHON = {"target_modules": "lora_target_modules"}


def as_typed(message: str, line: Line) -> str:
    """Return `message` with the names of arguments as they were typed, and with their values where it lacks both."""
    known_names = _names(line.method)
    typed_values = dict(line.pairs())

    def flagged(name: str) -> str | None:
        name = name if name in known_names else _OF_PYTHON.get(name, name)
        in_file = name in line.in_file and name not in typed_values
        return f"--{name}" if name in known_names and not in_file else None

    def as_argument(code: re.Match[str]) -> str:
        flag = flagged(code[1])
        return code[0] if flag is None else f"`{flag}{_value(code[2])}`"

    message = _for_files(message)
    if (
        typed_values.get("reward_model_name_or_path") or message + "."
    ) in message:  # TRL's trainer takes both as `reward_funcs`
        message = message.replace("`reward_funcs", "`reward_model_name_or_path")
    message = re.sub(r"`(\w+)(=[^`]*)?`", as_argument, message)
    # Such as "Got warmup_steps = -1"; a name that is also an English word needs the backticks
    for name in typed_values:
        if "_" in name or re.search(r"\d", name):
            message = re.sub(rf"(?<![\w`\"'./=-]){name}(?![\w`\"'./(=-])", f"`--{name}`", message)
    if "dataset_name" in typed_values:
        message = message.replace("`train_dataset`", f"`--dataset_name {typed_values['dataset_name']}`")
    if line.is_on("push_to_hub") and re.search("connect|401|Unauthorized|token", message, re.IGNORECASE):
        message += " (`--push_to_hub` needs the Hub, and a token that may write there)"
    if not any(f"--{name}" in message or f"`{name}" in message for name in {*typed_values, *line.in_file}):
        typed_values.pop("model_name_or_path", None)  # `where` says more
        notes = [f" (`--{name} {value}`)" for name, value in _whose_value_is_in(message, typed_values)[:2]]
        message += of_environment(message) or "".join(notes)
    return message + line.where(message)


def of_environment(message: str) -> str:
    """Return the environment variable, set for this run or before, whose value an error `message` quotes; else ""."""
    for name, value in os.environ.items():
        if re.match("(ACCELERATE|FSDP|HF|TRANSFORMERS|TRL)_", name) or name in _OF_RANKS:
            whole = rf"(?<![\w/.-]){re.escape(value)}(?![\w/-])"
            says_something = len(value) > 1 and not _is_number(value) and value.lower() not in _COMMON_VALUES
            if says_something and re.search(whole, message, re.IGNORECASE):
                return f" (environment: `{name}={value}`)"
    return ""


def _names(method: str) -> set[str]:
    """Return the names of all arguments, if the error came after they were made."""
    arguments: Any = sys.modules.get("trl_ext.cli.arguments")
    if not hasattr(arguments, "dataclasses_of"):
        return set()
    return {x.name for cls in arguments.dataclasses_of(method) for x in fields(cls)}


def _value(assignment: str | None) -> str:
    """Return Python's `=["a", 1.0]` as ` a 1.0`, and `=True` as ` true`."""
    if assignment is None:
        return ""
    words = assignment[1:]
    if words in ("True", "False"):
        words = words.lower()
    elif not words.startswith("{"):
        words = re.sub(r"""[][()"',]""", "", words)
    return f" {words}"


def _for_files(message: str) -> str:
    """Return advice to rename columns in Python as what to rename in the file or on the Hub."""

    def renamed(code: re.Match[str]) -> str:
        names = re.findall(r'"(\w+|\.\.\.)"', code[1])
        pairs = [f"`{old}` to `{new}`" for old, new in zip(names[::2], names[1::2], strict=False)]
        return f"in the data, {' and '.join(pairs)}"

    return re.sub(r"`dataset\.rename_columns?\((.*?)\)`", renamed, message)


def _whose_value_is_in(message: str, typed_values: dict[str, str]) -> list[tuple[str, str]]:
    """Return (name, value) of the arguments whose value, or else whose name, stands in `message`."""
    number = r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)(?![\w.]*\w)"
    words = [
        (name, value) for name, value in typed_values.items() if not _is_number(value) and _has_word(message, value)
    ]
    # The number after such words is the one that was given
    for before in (r"(?:got|is|was|passed|[=:])\s+", r"(?<![\w.])"):
        given_numbers = [float(x) for x in re.findall(before + number, message)]
        if before.startswith("(?<"):  # such as "in [0, 1]" and "line 1"
            given_numbers = [x for x in given_numbers if x < 0 or x > 9 or not x.is_integer()]
        numbers = [
            (name, value) for name, value in typed_values.items() if _is_number(value) and float(value) in given_numbers
        ]
        if len(numbers) == 1:  # a number of several arguments says nothing
            return words + numbers
    names = [(x, y) for x, y in typed_values.items() if len(x) > 3 and re.search(rf"\b{x}\b", message, re.IGNORECASE)]
    return words or names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _has_word(message: str, value: str) -> bool:
    """Return whether a message contains a value: quoted, if it may be in the message by chance."""
    if len(value) < 3:
        return False
    quoted_value = rf"['\"`=]{re.escape(value)}(?:['\"`,. ]|$)"
    whole = rf"(?<![\w-]){re.escape(value)}(?![\w-])"
    if re.search(quoted_value if value.isalpha() else whole, message):
        return True
    # Such as "FlashAttention2" for `flash_attention_2`
    plain, spelled = (re.sub("[^a-z0-9]", "", x.lower()) for x in (message, value))
    return "_" in value and len(spelled) > 7 and spelled in plain
