"""Checks of data sets and reward functions: a mistake is one error before training."""

import inspect
import logging
import math
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from datasets import Dataset, IterableDataset
from torch import nn
from trl import is_conversational

from ..compat.choices import REWARD_COLUMNS_LEFT_OUT, REWARD_KEYWORDS
from .messages import check_messages, check_options, check_template, sharegpt_hint
from .prompts import PROMPT_NAMES, check_missing_prompts, check_repeated_prompts, is_messages, mixed_hint
from .sampled_rows import as_python, columns_of, first_empty, first_none, sampled_rows
from .tokens import check_special_tokens

logger = logging.getLogger("trl_ext")

_PAIR = ("prompt", "chosen", "rejected")
_ROWS_COMPARED = 8  # the first rows of a data set, to find out if chosen equals rejected

# Keyword arguments of reward functions: a column with one of these names would collide
_RESERVED = ("prompts", "completions")

# The rewards of `trl.rewards` that read `completion[0]["content"]`, so that text is an error in the first step
_READ_MESSAGES = frozenset({"accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"})

# Columns -> the methods that read such rows, the most columns first
_METHODS_OF_COLUMNS = {
    ("prompt", "completion", "label"): "KTO (`KTOTrainer`, `trl-ext kto`)",
    ("chosen", "rejected"): "DPO (`DPOTrainer`, `trl-ext dpo`)",
    ("prompt", "completion"): "SFT (`SFTTrainer`, `trl-ext sft`)",
    ("messages",): "SFT (`SFTTrainer`, `trl-ext sft`)",
    ("text",): "SFT (`SFTTrainer`, `trl-ext sft`)",
    ("prompt",): "GRPO (`GRPOTrainer`, `trl-ext grpo`) or RLOO",
}

# Other names that data sets give to columns
_OTHER_NAMES = {
    "prompt": PROMPT_NAMES,
    "completion": ("completions", "response", "output", "answer", "chosen"),
    "label": ("labels", "score", "rating"),
}


def named_datasets(train_dataset: Any, eval_dataset: Any) -> Iterable[tuple[str, Any]]:
    """Yield (name in messages, data set)."""
    if train_dataset is not None:
        yield "train_dataset", train_dataset
    if isinstance(eval_dataset, dict):
        yield from ((f"eval_dataset[{name!r}]", dataset) for name, dataset in eval_dataset.items())
    elif eval_dataset is not None:
        yield "eval_dataset", eval_dataset


def check_dataset(dataset: Any, name: str) -> None:
    """Raise `TypeError` unless TRL can read the data set, and `ValueError` if it has no row."""
    if not isinstance(dataset, Dataset | IterableDataset):
        hint = "Pass `datasets.Dataset.from_list(rows)`, or one split that `datasets.load_dataset` returns."
        if isinstance(dataset, dict) and dataset:
            hint = f"Pass one of its splits, such as `dataset[{next(iter(dataset))!r}]`."
        raise TypeError(f"`{name}` must be a `Dataset` or an `IterableDataset`, got `{type(dataset).__name__}`. {hint}")
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"`{name}` has no rows. Look at the filter or the split that made it.")


def check_rows_are_left(dataset: Any, config: Any) -> None:
    """Raise `ValueError` if TRL has dropped every row of the training data, because all prompts are too long."""
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        has_mode = hasattr(config, "truncation_mode")
        remedy = ", shorten the prompts, or set `truncation_mode='keep_end'`" if has_mode else " or shorten the prompts"
        raise ValueError(
            f"`max_length={config.max_length}` leaves no row of `train_dataset`: every prompt alone reaches that "
            f"length. Raise `max_length`{remedy}."
        )


def check_pairs_are_left(dataset: Any, config: Any) -> None:
    """Raise `ValueError` if TRL has dropped every pair of the training data, because a row of each is too long."""
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(
            f"`max_length={config.max_length}` leaves no pair of `train_dataset`: TRL drops a pair with a row that is "
            "longer. Raise `max_length` or shorten the rows."
        )


def check_margins(dataset: Any, name: str) -> None:
    """Raise `ValueError` if a pair has a margin that is no finite number. Streams are not read."""
    if not isinstance(dataset, Dataset) or "margin" not in (columns_of(dataset) or ()):
        return
    for place, margin in enumerate(dataset.with_format(None).select_columns("margin")["margin"]):
        if margin is None:
            _refuse_none("margin", place, name)
        if not isinstance(margin, int | float) or not math.isfinite(margin):
            raise ValueError(
                f"`margin` of `{name}` must be a number, got {margin!r} in row {place}. It is how much higher the "
                "chosen row is to score. Correct it, or remove the column."
            )


def checked_rows(
    dataset: Any,
    dataset_name: str,
    processing_class: Any,
    read_columns: Callable[[dict[str, Any], str], tuple[str, ...]],
    *,
    has_end: bool,
) -> Any:
    """Return the data set with rows of Python objects; raise `ValueError` if TRL cannot read it or would misread it.

    Streams are checked when TRL reads them, and only their first row.

    Args:
        dataset_name (`str`): TRL's: "train", "eval", or a key of `eval_dataset`.
        read_columns (`Callable`): takes a row and the name of its data set, and returns the columns with text or
            messages that TRL reads. Raises `ValueError` if one is missing.
    """
    name = named(dataset_name)
    checks = _RowChecks(name, processing_class, read_columns, has_end)
    if not isinstance(dataset, Dataset):
        return as_python(dataset).map(_StreamedRows(checks), with_indices=True)
    check_dataset(dataset, name)
    dataset = as_python(dataset)
    row = dataset[0]
    columns = read_columns(row, name)
    for column in columns:
        _check_filled(dataset, column, name)
    for column in columns:
        _check_messages_exist(dataset, column, name, has_prompt="prompt" in row)
    if columns or "input_ids" not in row:  # TRL does not render rows that have token ids
        _check_options(dataset, name)
    prompts = [x for x in row if x.lower() in PROMPT_NAMES]
    sampled_columns = (*columns, *prompts, "tools", "chat_template_kwargs")
    checks.check({**sampled_rows(dataset, sampled_columns), 0: row})
    if "rejected" in columns:
        _warn_of_equal_pairs(dataset, name)
    elif "label" in row and "completion" in columns and dataset.format["type"] != "custom":
        for place, label in enumerate(dataset.select_columns("label")["label"]):
            _check_label(label, place, name)
    return dataset


def named(dataset_name: str) -> str:
    """Return the argument that is TRL's `dataset_name`: "train", "eval", or a key of `eval_dataset`."""
    return f"{dataset_name}_dataset" if dataset_name in ("train", "eval") else f"eval_dataset[{dataset_name!r}]"


@dataclass
class _RowChecks:
    """The checks of rows, all of the data set `name`. `read_columns` and `has_end` as for `checked_rows`."""

    name: str
    processing_class: Any
    read_columns: Callable[[dict[str, Any], str], tuple[str, ...]]
    has_end: bool

    def check(self, rows: dict[int, dict[str, Any]]) -> None:
        """Check row number -> row. Row 0 is among them."""
        columns = self.read_columns(rows[0], self.name)
        if not columns and "input_ids" in rows[0]:
            return
        for place, row in rows.items():
            self._check_row(row, place, columns)
        check_messages(rows, columns, self.name, self.processing_class)
        if "prompt" in columns:
            check_repeated_prompts(rows, columns, self.name)
        elif "chosen" in columns:
            check_missing_prompts(rows, self.name)
        check_special_tokens(rows, columns, self.name, self.processing_class)

    def check_values(self, row: dict[str, Any], place: int, columns: tuple[str, ...]) -> dict[str, str]:
        """Check the values of a row that TRL fails on. Returns column -> "text" or "messages"."""
        check_options(row, place, self.name)
        if columns == ("conversations",):  # TRL converts them
            return {}
        return {x: _kind(row.get(x), x, place, self.name) for x in columns}

    def _check_row(self, row: dict[str, Any], place: int, columns: tuple[str, ...]) -> None:
        name = self.name
        kinds = self.check_values(row, place, columns)
        if len(set(kinds.values())) > 1:
            raise ValueError(
                f"`{name}` mixes text and messages in {_row(place)}: "
                f"{', '.join(f'`{x}` is {kind}' for x, kind in kinds.items())}. {mixed_hint(row, kinds)}"
            )
        # TRL's `is_conversational` reads the first message of any column
        read_values = {x: row[x] for x in (*kinds, "chat_template_kwargs") if row.get(x)}
        check_template(read_values, name, self.processing_class)
        if kinds and not self.has_end and not is_conversational(read_values):
            raise ValueError(
                "`processing_class` has no `eos_token`, which ends each completion. Set it: "
                '`processing_class.eos_token = "..."`.'
            )


def _warn_of_equal_pairs(dataset: Dataset, name: str) -> None:
    if {"chosen", "rejected"} <= set(columns_of(dataset) or ()):
        first = dataset.with_format(None).select_columns(["chosen", "rejected"])[:_ROWS_COMPARED]
        if first["chosen"] == first["rejected"]:
            logger.warning(
                f"`chosen` and `rejected` are equal in the first {len(first['chosen'])} rows of `{name}`. Equal pairs "
                "have no preference to learn."
            )


def pair_columns(row: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the columns that DPO reads. As for the other methods, `row` is the first of the data set `name`."""
    if missing_columns := [column for column in ("chosen", "rejected") if column not in row]:
        raise _missing(row, name, "DPO reads `prompt`, `chosen` and `rejected`", dict.fromkeys(missing_columns, ()))
    return tuple(x for x in _PAIR if x in row)


def reward_columns(row: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the columns that reward modeling reads; none of rows that have token ids."""
    for chosen, rejected in (("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids")):
        if chosen in row and rejected in row:
            return ()
    if missing_columns := [column for column in ("chosen", "rejected") if column not in row]:
        reads = "`RewardTrainer` reads `chosen` and `rejected`, and a `prompt` if there is one"
        raise _missing(row, name, reads, dict.fromkeys(missing_columns, ()))
    return tuple(x for x in _PAIR if x in row)


def kto_columns(row: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the columns that KTO reads: those of a pair, or of a completion."""
    if {"chosen", "rejected"} <= set(row):
        return pair_columns(row, name)
    if missing_columns := [column for column in ("prompt", "completion", "label") if column not in row]:
        reads = "KTO reads `prompt`, `completion` and `label`, or pairs with `prompt`, `chosen` and `rejected`"
        raise _missing(row, name, reads, {column: _OTHER_NAMES[column] for column in missing_columns})
    _check_label(row["label"], 0, name)
    return "prompt", "completion"


def sft_columns(row: dict[str, Any], name: str, *, text_field: str | None) -> tuple[str, ...]:
    """Return the columns that SFT reads; none of rows that have token ids, or whose text a `formatting_func` makes.

    There is no `text_field` then.
    """
    chat = [x for x in ("messages", "conversations", text_field) if is_messages(row.get(x or ""))]
    if text_field is None or "input_ids" in row:
        return ()
    if is_messages(row.get("conversations"), role="from"):
        return ("conversations",)
    if "prompt" not in row:
        if "messages" in row and ("messages" in chat or text_field not in row):
            return ("messages",)
        if text_field in row and text_field not in chat:
            return (text_field,)
    elif "completion" in row:
        return "prompt", "completion"
    reads = (
        "SFT reads `text` (or the column that `dataset_text_field` names), `messages`, or both `prompt` and "
        "`completion`"
    )
    missing_columns = [column for column in ("prompt", "completion") if column not in row]
    has_prompt = "prompt" in row or any(x in row for x in _OTHER_NAMES["prompt"])
    likely = {x: _OTHER_NAMES[x] for x in missing_columns if has_prompt}
    hint = "Rename your columns."
    if "prompt" in row and (chat or text_field in row):
        hint = f'To train on `{[*chat, text_field][0]}`, remove the prompt: `dataset.remove_columns("prompt")`.'
    elif chat:
        hint = f'Rename the column: `dataset.rename_column("{chat[0]}", "messages")`.'
    elif likely:
        hint = _joined_prompt(row, likely)
    elif len(row) == 1:
        hint = f"Set `dataset_text_field={next(iter(row))!r}`."
    raise _missing(row, name, reads, likely, hint)


def _joined_prompt(row: dict[str, Any], other_names: dict[str, tuple[str, ...]]) -> str:
    """Return how to make a prompt of an instruction and its input, such as Alpaca's; empty if there is only one."""
    input_column = next((x for x in ("input", "context") if "instruction" in row and x in row), None)
    completion = next((x for x in other_names.get("completion", ()) if x in row), None)
    if input_column is None or completion is None:
        return ""
    return (
        'Build them from your columns: `dataset.map(lambda row: {"prompt": row["instruction"] + "\\n\\n" + '
        f'row["{input_column}"], "completion": row["{completion}"]}})`.'
    )


def formatted(formatting_func: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> Any:
    """Return the text of a row; raise `ValueError` if `formatting_func` does not return text, and TRL reads it."""
    text = formatting_func(row)
    if isinstance(text, str) or is_conversational(row):
        return text
    raise ValueError(
        f"`formatting_func` must return text, got {reprlib.repr(text)}. TRL calls it for each row: return one text."
    )


def _missing(
    row: dict[str, Any], name: str, reads: str, other_names: dict[str, tuple[str, ...]], hint: str = ""
) -> ValueError:
    """Return an error about columns that a row lacks: the keys of `others`, each with other names for it."""
    present_names = {column: next((x for x in names if x in row), None) for column, names in other_names.items()}
    # With two further columns, these may be ours by other names
    fitting_methods = (
        x for columns, x in _METHODS_OF_COLUMNS.items() if row.keys() >= set(columns) and len(row) < len(columns) + 2
    )
    method = next(fitting_methods, None)
    read_columns = {*re.findall(r"`(\w+)`", reads)} - {"prompt"}
    if method is not None and None in present_names.values() and read_columns.isdisjoint(row):
        # All that another method reads, and nothing that only this one does: no column to rename
        hint = f"These are columns for {method}. Train with it, or pass other data."
    renaming = ", ".join(f'"{x or f"old_{column}"}": "{column}"' for column, x in present_names.items())
    hint = hint or f"Rename what you have: `dataset.rename_columns({{{renaming}}})`."
    return ValueError(f"`{name}` has the columns {sorted(row)}, but {reads}. {hint}")


def _check_label(label: Any, row: int, name: str) -> None:
    if label is None:
        _refuse_none("label", row, name)
    if isinstance(label, list | str) or label not in (0, 1):
        test = "== '...'" if isinstance(label, str) else "> ..."
        if isinstance(label, int | float) and label < 0:
            test = "> 0"
        hint = f'Convert it: `dataset.map(lambda row: {{"label": row["label"] {test}}})`.'
        hint = "Give one value for each row." if isinstance(label, list) else hint
        raise ValueError(f"`label` of `{name}` must be True or False, got {label!r} in row {row}. {hint}")


class _StreamedRows:
    """Checks the first row of a stream once, while TRL prepares it, and in each row the values that TRL fails on."""

    def __init__(self, checks: _RowChecks) -> None:
        self._checks = checks
        self._columns: tuple[str, ...] | None = None

    def __call__(self, row: dict[str, Any], place: int) -> dict[str, Any]:
        if self._columns is None:
            self._checks.check({0: row})
            self._columns = self._checks.read_columns(row, self._checks.name)
        elif self._columns:
            self._checks.check_values(row, place, self._columns)
            if "label" in row and "completion" in self._columns:
                _check_label(row["label"], place, self._checks.name)
        return row


def check_prompts(trainer: Any, processing_class: Any) -> None:
    """Check the prompts of a trainer's data sets, and warn if one for evaluation has none."""
    evaluated = None if trainer.args.eval_strategy == "no" else trainer.eval_dataset
    method = trainer._config_class.__name__.removesuffix("Config")
    for name, dataset in named_datasets(trainer.train_dataset, evaluated):
        _check_prompts(dataset, name, processing_class, method)
        _warn_of_unread_options(dataset, name, trainer.args, method)
        if isinstance(dataset, Dataset) and len(dataset) == 0:
            logger.warning("`%s` has no rows, so evaluations on it have no result.", name)


def _check_prompts(dataset: Any, name: str, processing_class: Any, method: str) -> None:
    """Raise `ValueError` unless a data set has prompts that `processing_class` can render. Streams are not read.

    Without a `processing_class`, something else renders the prompts, so their content is not checked.
    """
    columns = columns_of(dataset)
    if columns is not None and "prompt" not in columns:
        likely = next((x for x in _OTHER_NAMES["prompt"] if x in columns), None)
        hint = f'Rename the column of prompts: `dataset.rename_column("{likely}", "prompt")`.' if likely else ""
        other_names: dict[str, tuple[str, ...]] = {} if hint else {"prompt": ()}
        raise _missing(dict.fromkeys(columns), name, f"{method} reads `prompt`", other_names, hint)
    if columns is None or not isinstance(dataset, Dataset) or not len(dataset):  # None with a transform
        return
    _check_filled(dataset, "prompt", name)
    if processing_class is None:
        return
    rows = sampled_rows(dataset, ["prompt"])
    if dataset.format["type"] not in (None, "torch", "custom") and isinstance(rows[0]["prompt"], list):
        raise ValueError(
            f"`{name}` has the format {dataset.format['type']!r}, which turns messages into arrays. Remove it: "
            "`dataset.with_format(None)`."
        )
    _check_messages_exist(dataset, "prompt", name, has_prompt=True)
    for place, row in rows.items():
        _kind(row["prompt"], "prompt", place, name)
        check_template(row, name, processing_class)
    check_messages(rows, ("prompt",), name, processing_class)
    check_special_tokens(rows, ("prompt",), name, processing_class)


def _warn_of_unread_options(dataset: Any, name: str, config: Any, method: str) -> None:
    """Warn of template options in a column, which other trainers read."""
    if "chat_template_kwargs" in (columns_of(dataset) or ()) and not config.chat_template_kwargs:
        logger.warning(
            f"{method} does not read the column `chat_template_kwargs` of `{name}`. Set `chat_template_kwargs` in "
            f"`{method}Config`, or remove the column."
        )


def check_column(train_dataset: Any, eval_dataset: Any, column: str) -> None:
    """Raise `ValueError` if a data set lacks the column of completions, or if one is empty or repeats its prompt."""
    for name, dataset in named_datasets(train_dataset, eval_dataset):
        columns = columns_of(dataset)
        if columns is not None and column not in columns:
            raise ValueError(
                f"`completion_column` is {column!r}, but `{name}` has no such column. Choose from: "
                f"{', '.join(map(repr, columns))}."
            )
        if isinstance(dataset, Dataset) and columns is not None:
            _check_filled(dataset, column, name)
            row = first_empty(dataset, column)
            if row is not None:
                raise ValueError(f"`{column}` is empty in row {row} of `{name}`. Fill it, or remove the row.")
            if len(dataset) and isinstance(dataset[0][column], str) != isinstance(dataset[0]["prompt"], str):
                raise ValueError(
                    f"`{name}` has text in one of the columns `prompt` and `{column}` (`completion_column`), and "
                    "messages in the other. Use the same in both."
                )
            rows = sampled_rows(dataset, ("prompt", column))
            # Text may begin with its prompt. A user's message would be an error only in the first step
            chats = {place: row for place, row in rows.items() if is_messages(row["prompt"])}
            check_repeated_prompts(chats, ("prompt", column), name)


def check_enough_prompts(dataset: Any, generation_batch_size: int, num_generations: int) -> None:
    """Raise `ValueError` if the prompts do not fill a generation batch, so that TRL's sampler drops them all."""
    prompts_of_batch = generation_batch_size // num_generations
    if isinstance(dataset, Dataset) and len(dataset) < prompts_of_batch:
        raise ValueError(
            f"`train_dataset` has {len(dataset)} prompts, but each generation batch takes {prompts_of_batch} "
            f"(`generation_batch_size={generation_batch_size}` / `num_generations={num_generations}`): no step would "
            "run. Add prompts, or lower `per_device_train_batch_size`, `gradient_accumulation_steps` or "
            "`steps_per_generation`."
        )


def check_rewards(arguments: dict[str, Any], config: Any, *, has_environments: bool, columns_are_added: bool) -> None:
    """Raise `TypeError` unless each reward function takes the keyword arguments that TRL passes, columns included.

    With `columns_are_added`, a rollout function adds columns that are not known here.
    """
    if arguments.get("reward_funcs") == [] and not has_environments:
        raise ValueError("`reward_funcs` is empty. Pass a function, a model or the name of a model.")
    reward_funcs = arguments.get("reward_funcs")
    drops = getattr(config, "remove_unused_columns", False)
    if not has_environments:  # one may add its own reward
        _check_weights(reward_funcs, getattr(config, "reward_weights", None))
    columns = columns_of(None if drops else arguments.get("train_dataset"))
    reserved = next((x for x in _RESERVED if x in (columns or ())), None)
    for reward in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if reward is None or isinstance(reward, str | nn.Module):
            continue
        _check_reads_messages(reward, arguments)
        if not callable(reward):
            raise TypeError(f"`reward_funcs` contains {reward!r}. Pass a function, a model or the name of a model.")
        if reserved is not None:
            raise ValueError(
                f"`train_dataset` has the column `{reserved}`, but TRL passes its own `{reserved}` to reward "
                f'functions. Rename the column: `dataset.rename_column("{reserved}", "...")`.'
            )
        if columns is not None:
            passed_keywords = [*REWARD_KEYWORDS, *(x for x in columns if x not in REWARD_COLUMNS_LEFT_OUT)]
            passed_keywords += ["environments"] if has_environments else []
            _check_keywords(reward, passed_keywords, are_all=not columns_are_added)


def _check_weights(reward_funcs: Any, weights: Any) -> None:
    """Raise `ValueError` unless there are as many weights as rewards."""
    count = len(reward_funcs) if isinstance(reward_funcs, list) else 1
    if weights is not None and reward_funcs is not None and len(weights) != count:
        raise ValueError(
            f"`reward_weights` must have a number for each of the {count} `reward_funcs`, got {list(weights)!r}."
        )


def _check_reads_messages(reward: Any, arguments: dict[str, Any]) -> None:
    """Raise `ValueError` if a reward of TRL reads messages, but the prompts are text, and with them the completions."""
    name = getattr(reward, "__name__", "")
    if name not in _READ_MESSAGES or not str(getattr(reward, "__module__", "")).startswith("trl.rewards"):
        return
    for dataset_name, dataset in named_datasets(arguments.get("train_dataset"), arguments.get("eval_dataset")):
        # A transform may make messages of text
        plain = not isinstance(dataset, Dataset) or dataset.format["type"] != "custom"
        features = (plain and getattr(dataset, "features", None)) or {}
        if getattr(features.get("prompt"), "dtype", None) in ("string", "large_string"):
            raise ValueError(
                f"`reward_funcs`: `{name}` reads messages, but `prompt` of `{dataset_name}` is text. Give each prompt "
                "as a list of messages, such as [{'role': 'user', 'content': '...'}], or use a function that reads "
                "text."
            )


def _check_keywords(reward: Callable[..., Any], passed_keywords: list[str], *, are_all: bool) -> None:
    try:
        parameters = inspect.signature(reward, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # builtins may have no signature
        return
    name = getattr(reward, "__name__", type(reward).__name__)
    parameter_names = [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    required_keywords = [x.name for x in parameters if x.name in parameter_names and x.default is x.empty]
    missing_keywords = [x for x in required_keywords if x not in passed_keywords]
    if missing_keywords and are_all:
        raise TypeError(
            f"`reward_funcs`: `{name}` requires `{missing_keywords[0]}`, which TRL does not pass. TRL passes the "
            f"columns of `train_dataset` and others: {passed_keywords}. Add or rename the column, or give the "
            "parameter a default."
        )
    unnamed = [x for x in passed_keywords if x not in parameter_names]
    if unnamed and not any(x.kind is x.VAR_KEYWORD for x in parameters):
        raise TypeError(
            f"`reward_funcs`: `{name}` does not take `{unnamed[0]}`, one of the keywords that TRL passes to every "
            "reward function. Add `**kwargs` to its parameters."
        )


def _check_filled(dataset: Dataset, column: str, name: str) -> None:
    """Raise `ValueError` if the column is None in a row."""
    if (row := first_none(dataset, column)) is not None:
        _refuse_none(column, row, name)


def _check_messages_exist(dataset: Dataset, column: str, name: str, *, has_prompt: bool) -> None:
    """Raise `ValueError` if a row has no message to render. TRL trains on an empty completion after a prompt."""
    if column in ("chosen", "rejected", "completion") and has_prompt:
        return
    row = first_empty(dataset, column)
    if row is not None and (not has_prompt and column in ("chosen", "rejected")):
        raise ValueError(
            f"`{column}` is empty in row {row} of `{name}`, so the row has no prompt: there is no column `prompt`. "
            "Remove the row, or add the column."
        )
    if row is not None and not isinstance(dataset[row][column], str):
        _kind([], column, row, name)


def _check_options(dataset: Dataset, name: str) -> None:
    """Raise `ValueError` if template options are None in a row, or tools an empty text."""
    if (row := first_none(dataset, "chat_template_kwargs")) is not None:
        check_options({"chat_template_kwargs": None}, row, name)
    if (row := first_empty(dataset, "tools")) is not None and isinstance(dataset[row]["tools"], str):
        check_options({"tools": ""}, row, name)


def _row(place: int) -> str:
    return f"row {place}" if place else "its first row"


def _refuse_none(column: str, row: int, name: str) -> NoReturn:
    raise ValueError(f"`{column}` is None in row {row} of `{name}`. Fill it in, or remove the row.")


def _kind(value: Any, column: str, place: int, name: str) -> str:
    """Return `"text"` or `"messages"`; raise `ValueError` for other values, which TRL cannot render."""
    if value is None:
        _refuse_none(column, place, name)
    if isinstance(value, str) and column != "messages":
        return "text"
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, dict) and "role" in first:
        return "messages"
    hint = "Give text, or messages such as [{'role': 'user', 'content': '...'}]."
    if isinstance(value, str):
        hint = f'Rename the column: `dataset.rename_column("{column}", "text")`.'
    if isinstance(value, list) and not value:
        if column not in ("prompt", "messages"):  # TRL trains on an empty completion
            return "messages"
        hint = "Give at least one message, or remove the row."
    elif isinstance(value, dict):
        hint = "Put the message into a list."
    elif isinstance(first, dict) and "from" in first:
        hint = sharegpt_hint(value, column)
    raise ValueError(
        f"`{column}` of `{name}` must be {'text or ' * (column != 'messages')}a list of messages, got "
        f"{reprlib.repr(value)} in {_row(place)}. {hint}"
    )
