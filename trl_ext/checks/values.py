"""Checks of the values of a config's fields, one by one: types, ranges, choices and dictionaries."""

import base64
import inspect
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from types import UnionType
from typing import Any, Union, get_args, get_origin

# Fields that TRL annotates as integers, but for which it also takes floats, or text
_TAKE_FLOATS = frozenset(
    {
        "dataloader_num_workers",
        "ddp_bucket_cap_mb",
        "ddp_timeout",
        "eval_accumulation_steps",
        "local_rank",
        "max_completion_length",
        "max_tool_calling_iterations",
        "num_completions_to_print",
        "num_generations_eval",
        "precompute_ref_batch_size",
        "ref_model_sync_steps",
        "save_total_limit",
        "vllm_group_port",
        "vllm_max_model_length",
        "vllm_tensor_parallel_size",
    }
)
_TAKE_TEXT = frozenset({"vllm_server_port"})


@dataclass(frozen=True)
class Rule:
    """The values that a field of a config may have. A message that names them is the same for all fields.

    Attributes:
        least, most (`float`, *optional*): the bounds of a number, themselves allowed.
        above, below (`float`, *optional*): bounds that are not allowed themselves.
        choices (`tuple[str, ...]`): the allowed texts, if it is no number.
        hint (`str`): what the error says last.
        is_optional (`bool`): whether None is allowed.
        read_by (`str`): the only part of the training that reads it; a value that no part reads is not checked.
        when (`Callable`): called with the config, whether anything reads the field.
    """

    field: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    hint: str = "Change it, or leave it at its default."
    is_optional: bool = False
    read_by: str = ""
    when: Callable[[Any], bool] = lambda config: True

    def check(self, value: Any) -> None:
        """Raise `ValueError` if `value` is not allowed."""
        if value is None and self.is_optional:
            return
        if self.choices:
            if value not in self.choices:
                raise ValueError(
                    f"Unknown `{self.field}` {value!r}. Choose from: {', '.join(map(repr, self.choices))}."
                )
        elif not hasattr(value, "__float__") or self._is_outside(value):
            raise ValueError(f"`{self.field}` must be {self._range()}, got {value!r}. {self.hint}".rstrip())

    def _is_outside(self, number: Any) -> bool:
        return bool(
            (self.least is not None and number < self.least)
            or (self.most is not None and number > self.most)
            or (self.above is not None and number <= self.above)
            or (self.below is not None and number >= self.below)
        )

    def _range(self) -> str:
        if self.above is not None:
            return f"above {self.above}"
        if self.least is None:
            return f"{self.most} or less" if self.below is None else f"below {self.below}"
        if self.most is None and self.below is None:
            return f"{self.least} or more"
        return f"in [{self.least}, {self.most}]" if self.below is None else f"in [{self.least}, {self.below})"


def check_rules(config: Any, rules: Iterable[Rule], replaced_parts: Collection[str] = ()) -> None:
    """Raise `ValueError` for the first field whose value is not allowed.

    Args:
        replaced (`Collection[str]`): the parts of the training that the user's code replaces.
    """
    for rule in rules:
        if rule.read_by not in replaced_parts and rule.when(config):
            rule.check(getattr(config, rule.field))


# Fields of TRL's configs: divisors, and what an optimizer or a loader refuses in the first step
_LEAST = {
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "num_generations": 2,
    "steps_per_generation": 1,
    "generation_batch_size": 1,
    "learning_rate": 0,
    "weight_decay": 0,
    "adam_epsilon": 0,
    "adam_beta1": 0,
    "adam_beta2": 0,
    "warmup_steps": 0,
    "seed": 0,
    "dataloader_num_workers": 0,
    "dataset_num_proc": 0,
    "precompute_ref_batch_size": 0,
}
_NUMBERS = (
    *(Rule(name, least=least, hint="") for name, least in _LEAST.items()),
    Rule("seed", most=2**32 - 1, hint=""),
    Rule("adam_beta1", below=1, hint=""),
    Rule("adam_beta2", below=1, hint=""),
)
# Where infinity makes every weight NaN. Elsewhere it may mean "no bound", such as for `max_grad_norm`
_FINITE = frozenset({"learning_rate", "weight_decay", "adam_epsilon", "beta", "temperature", "num_train_epochs"})

# Fields with a dictionary, for which transformers also takes the path of a JSON file
_DICTIONARIES_IN_FILES = frozenset({"accelerator_config", "deepspeed", "fsdp_config"})


def check_declared(config: Any, cls: Any) -> None:
    """Raise `ValueError` if a field that `cls` itself declares has a value of a wrong type or not in its choices."""
    fields_by_name = {x.name: x for x in fields(cls)}
    for name, kind in inspect.get_annotations(cls).items():
        value = getattr(config, name)
        choices = fields_by_name[name].metadata.get("choices")
        is_optional = fields_by_name[name].default is None
        none_or = "None or " if is_optional else ""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None and is_optional:
            continue
        if choices:
            is_allowed = value in choices
            requirement = f"{none_or}one of {choices}"
        elif kind in (bool, bool | None):
            is_allowed = isinstance(value, bool)
            requirement = f"{'None, ' if is_optional else ''}True or False"
        elif kind in (int, int | None):
            is_allowed = isinstance(value, int) and is_number and value >= 1
            requirement = f"{none_or}an integer of at least 1"
        elif kind is float:
            is_allowed = is_number and math.isfinite(value)
            requirement = "a finite number"
        else:
            continue
        if not is_allowed:
            raise ValueError(f"`{name}` must be {requirement}, got {value!r}.")


def check_numbers(config: Any) -> None:
    """Raise `TypeError` if a numeric field of a config, TRL's or ours, has no number; `ValueError` if it is too low.

    The types are those in the annotations. None, and fields that also take text, are left to TRL.
    """
    kinds: dict[str, Any] = {}
    for cls in reversed(type(config).__mro__):
        if cls.__module__.split(".")[0] in ("trl", "trl_ext", "transformers"):  # not fields of a user's subclass
            kinds |= inspect.get_annotations(cls)
    for x in fields(config):
        kind, value = kinds.get(x.name), getattr(config, x.name, None)
        allowed_types = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
        if value is None or str in allowed_types or x.name in _TAKE_TEXT:
            continue
        if list[float] in allowed_types:
            if isinstance(value, Real | str) or any(isinstance(one, str) for one in value):
                raise TypeError(f"`{x.name}` must be a list of numbers such as [1.0, 0.5], got {value!r}.")
            _check_each_finite(x.name, value)
        elif float in allowed_types or int in allowed_types:
            takes_floats = float in allowed_types or x.name in _TAKE_FLOATS
            # Numbers of numpy and torch have these methods too
            if not hasattr(value, "__float__" if takes_floats else "__index__"):
                kind = "a number" if takes_floats else "an integer"
                text = "the string " * isinstance(value, str)
                hint = _number_to_write(value, takes_floats) or f"Give {kind}."
                raise TypeError(f"`{x.name}` must be {kind}, got {text}{value!r}. {hint}")
            _check_range(x.name, value)
    epochs = getattr(config, "num_train_epochs", None)
    steps = getattr(config, "max_steps", None)
    # With `max_steps`, some write -1 for epochs
    if isinstance(epochs, Real) and epochs < 0 and isinstance(steps, Real) and steps <= 0:
        raise ValueError(f"`num_train_epochs` must be 0 or more, got {epochs!r}. Change it, or set `max_steps`.")


def _check_range(name: str, value: Any) -> None:
    """Raise `ValueError` if the number `value` is not in the range of the field `name`."""
    for rule in _NUMBERS:
        if rule.field == name:
            rule.check(value)
    if not isinstance(value, Real):  # a tensor, of which the host would wait for the device
        return
    if math.isnan(value) or (math.isinf(value) and name in _FINITE):
        raise ValueError(f"`{name}` must be a finite number, got {value!r}.")


def _check_each_finite(name: str, values: Iterable[Any]) -> None:
    if any(isinstance(value, Real) and not math.isfinite(value) for value in values):
        raise ValueError(f"`{name}` must be a list of finite numbers, got {values!r}.")


def check_dictionaries(config: Any) -> None:
    """Raise `ValueError` if a field of a config that takes a dictionary, perhaps as JSON or in a file, has none."""
    for name in getattr(config, "_VALID_DICT_FIELDS", ()):
        value = getattr(config, name, None)
        if value is None or isinstance(value, Mapping):
            continue
        in_file = name in _DICTIONARIES_IN_FILES
        if isinstance(value, str) and in_file and not value.lstrip().startswith("{"):
            if value and not os.path.isfile(value) and not (name == "deepspeed" and _is_base64(value)):
                raise ValueError(f"`{name}` is {value!r}, but there is no such file. Correct the path.")
        elif isinstance(value, str) and not isinstance(_json(value), dict):
            or_file = ", or the path of a JSON file" if in_file else ""
            raise ValueError(
                f"`{name}` must be a dictionary, got {value!r}. On the command line, give JSON such as "
                f"""'{{"name": "value"}}'{or_file}."""
            )
        elif not isinstance(value, str) and not in_file:
            raise ValueError(f"`{name}` must be a dictionary, got {value!r}.")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_base64(text: str) -> bool:
    """Return whether `text` is a dictionary as DeepSpeed also takes it: JSON in base 64."""
    try:
        return isinstance(_json(base64.urlsafe_b64decode(text).decode()), dict)
    except ValueError:
        return False


def _number_to_write(value: Any, takes_floats: bool) -> str | None:
    """Return the spelling of a number without quotes, or of a whole number without a decimal point; else `None`."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if not takes_floats and not number.is_integer():
        return None
    return f"Write {value if takes_floats else int(number)}{' without quotes' * isinstance(value, str)}."
