"""Checks of data sets and reward functions: a mistake is one error before training."""

import inspect
import logging
import re
import reprlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn

from datasets import Dataset, IterableDataset
from torch import nn
from trl import is_conversational

from ..compat.choices import REWARD_COLUMNS_LEFT_OUT, REWARD_KEYWORDS

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
    "prompt": ("prompts", "question", "query", "instruction", "input", "problem", "context"),
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
            f"`max_length={config.max_length}` leaves no row of `train_dataset`: every prompt alone reaches it. Raise "
            f"it{remedy}."
        )


def checked_rows(
    dataset: Any,
    dataset_name: str,
    processing_class: Any,
    columns_of: Callable[[dict[str, Any], str], tuple[str, ...]],
    *,
    has_end: bool,
) -> Any:
    """Return the data set; raise `ValueError` if it lacks what TRL reads. Streams are checked when TRL reads them.

    Args:
        dataset_name (`str`): TRL's: "train", "eval", or a key of `eval_dataset`.
        columns_of (`Callable`): takes a row and the name of its data set, and returns the columns with text or messages
            that TRL reads. Raises `ValueError` if one is missing.
    """
    name = f"{dataset_name}_dataset" if dataset_name in ("train", "eval") else f"eval_dataset[{dataset_name!r}]"
    check_row = partial(
        _check_row, columns_of=columns_of, name=name, processing_class=processing_class, has_end=has_end
    )
    if not isinstance(dataset, Dataset):
        return dataset.map(_FirstRow(check_row))
    check_dataset(dataset, name)
    row = dataset[0]
    columns = columns_of(row, name)
    for column in columns:
        _check_filled(dataset, column, name)
    check_row(row)
    if "rejected" in columns:
        _warn_of_equal_pairs(dataset, name)
    elif "label" in row and "completion" in columns and dataset.format["type"] != "custom":
        for place, label in enumerate(dataset.with_format(None).select_columns("label")["label"]):
            _check_label(label, place, name)
    return dataset


def _warn_of_equal_pairs(dataset: Dataset, name: str) -> None:
    if {"chosen", "rejected"} <= set(_columns(dataset) or ()):
        first = dataset.with_format(None).select_columns(["chosen", "rejected"])[:_ROWS_COMPARED]
        if first["chosen"] == first["rejected"]:
            logger.warning(
                f"`chosen` and `rejected` are equal in the first {len(first['chosen'])} rows of `{name}`. Equal pairs "
                "have no preference to learn."
            )


def pair_columns(row: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the columns that DPO reads. As for the other methods, `row` is the first of the data set `name`."""
    if missing := [column for column in ("chosen", "rejected") if column not in row]:
        raise _missing(row, name, "DPO reads `prompt`, `chosen` and `rejected`", dict.fromkeys(missing, ()))
    return tuple(x for x in _PAIR if x in row)


def kto_columns(row: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return the columns that KTO reads: those of a pair, or of a completion."""
    if {"chosen", "rejected"} <= set(row):
        return pair_columns(row, name)
    if missing := [column for column in ("prompt", "completion", "label") if column not in row]:
        reads = "KTO reads `prompt`, `completion` and `label`, or pairs with `prompt`, `chosen` and `rejected`"
        raise _missing(row, name, reads, {column: _OTHER_NAMES[column] for column in missing})
    _check_label(row["label"], 0, name)
    return "prompt", "completion"


def sft_columns(row: dict[str, Any], name: str, *, text_field: str | None) -> tuple[str, ...]:
    """Return the columns that SFT reads; none of rows that have token ids, or that TRL converts to messages or text.

    Without a `text_field`, a `formatting_func` makes the text.
    """
    chat = [x for x in ("messages", "conversations", text_field) if _is_chat(row.get(x or ""))]
    if text_field is None or "input_ids" in row or _is_chat(row.get("conversations"), role="from"):
        return ()
    if "prompt" not in row:
        if "messages" in row and ("messages" in chat or text_field not in row):
            return ("messages",)
        if text_field in row and text_field not in chat:
            return (text_field,)
    elif "completion" in row:
        return "prompt", "completion"
    reads = "SFT reads `text` (or the column in `dataset_text_field`), or `messages`, or both `prompt` and `completion`"
    missing = [column for column in ("prompt", "completion") if column not in row]
    likely = {x: _OTHER_NAMES[x] for x in missing if "prompt" in row or any(y in row for y in _OTHER_NAMES["prompt"])}
    hint = "Rename yours."
    if "prompt" in row and (chat or text_field in row):
        hint = f'To train on `{[*chat, text_field][0]}`, remove the prompt: `dataset.remove_columns("prompt")`.'
    elif chat:
        hint = f'Rename the column: `dataset.rename_column("{chat[0]}", "messages")`.'
    elif likely:
        hint = ""
    elif len(row) == 1:
        hint = f"Set `dataset_text_field={next(iter(row))!r}`."
    raise _missing(row, name, reads, likely, hint)


def formatted(formatting_func: Callable[[dict[str, Any]], Any], row: dict[str, Any]) -> Any:
    """Return the text of a row; raise `ValueError` if `formatting_func` does not return text, and TRL reads it."""
    text = formatting_func(row)
    if isinstance(text, str) or is_conversational(row):
        return text
    raise ValueError(
        f"`formatting_func` must return text, got {reprlib.repr(text)}. TRL calls it for each row: return one text."
    )


def _is_chat(value: Any, role: str = "role") -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and role in value[0]


def _missing(
    row: dict[str, Any], name: str, reads: str, others: dict[str, tuple[str, ...]], hint: str = ""
) -> ValueError:
    """Return an error about columns that a row lacks: the keys of `others`, each with other names for it."""
    old = {column: next((x for x in names if x in row), None) for column, names in others.items()}
    # With two further columns, these may be ours by other names
    fitting = (
        x for columns, x in _METHODS_OF_COLUMNS.items() if row.keys() >= set(columns) and len(row) < len(columns) + 2
    )
    method = next(fitting, None)
    own = {*re.findall(r"`(\w+)`", reads)} - {"prompt"}
    if method is not None and None in old.values() and own.isdisjoint(row):
        # All that another method reads, and nothing that only this one does: no column to rename
        hint = f"These are columns for {method}. Train with it, or pass other data."
    renaming = ", ".join(f'"{x or f"old_{column}"}": "{column}"' for column, x in old.items())
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


class _FirstRow:
    """Checks the first row of a stream once, while TRL prepares it, and not again in each worker or epoch."""

    def __init__(self, check_row: Callable[[dict[str, Any]], None]) -> None:
        self._checks = [check_row]

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        while self._checks:
            self._checks.pop()(row)
        return row


def _check_row(
    row: dict[str, Any],
    *,
    columns_of: Callable[[dict[str, Any], str], tuple[str, ...]],
    name: str,
    processing_class: Any,
    has_end: bool,
) -> None:
    columns = columns_of(row, name)
    kinds = {x: _kind(row[x], x, name) for x in columns}
    if "chosen" in kinds and "prompt" not in row:
        _check_shared_prompt(row, name)
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"`{name}` mixes text and messages: {', '.join(f'`{x}` is {kind}' for x, kind in kinds.items())} in its "
            "first row. Give all columns as text, or all as lists of messages."
        )
    # TRL's `is_conversational` reads the first message of any column
    read = {x: row[x] for x in (*columns, "chat_template_kwargs") if row.get(x)}
    _check_template(read, name, processing_class)
    if columns and not has_end and not is_conversational(read):
        raise ValueError(
            "`processing_class` has no `eos_token`, which ends each completion. Set it: "
            '`processing_class.eos_token = "..."`.'
        )


def _check_shared_prompt(row: dict[str, Any], name: str) -> None:
    """Check the prefix that chosen and rejected share: TRL makes it the prompt, even if empty or cut within a word."""
    chosen, rejected = row["chosen"], row["rejected"]
    is_text = isinstance(chosen, str) and isinstance(rejected, str)
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
    likely = next((x for x in _OTHER_NAMES["prompt"] if row.get(x) is not None), None)
    has_none = not shared or (is_text and not any(map(str.isspace, shared)))
    if likely is not None and has_none and not (is_text and str(row[likely]) in "".join(shared)):
        raise ValueError(
            f"`{name}` has the columns {sorted(row)} but no `prompt`, and `chosen` and `rejected` of its first row do "
            f'not start with the same prompt. Rename the column: `dataset.rename_column("{likely}", "prompt")`.'
        )
    if not shared:
        logger.warning(
            f"`{name}` has no `prompt`, and `chosen` and `rejected` of its first row do not start with the same text: "
            "such rows have an empty prompt in training."
        )


def check_prompts(trainer: Any, processing_class: Any) -> None:
    """Check the prompts of a trainer's data sets, and warn if one for evaluation has none."""
    evaluated = None if trainer.args.eval_strategy == "no" else trainer.eval_dataset
    method = trainer._config_class.__name__.removesuffix("Config")
    for name, dataset in named_datasets(trainer.train_dataset, evaluated):
        _check_prompts(dataset, name, processing_class, method)
        if isinstance(dataset, Dataset) and len(dataset) == 0:
            logger.warning("`%s` has no rows, so evaluations on it have no result.", name)


def _check_prompts(dataset: Any, name: str, processing_class: Any, method: str) -> None:
    """Raise `ValueError` unless a data set has prompts that `processing_class` can render. Streams are not read.

    Without a `processing_class`, something else renders the prompts, so their content is not checked.
    """
    columns = _columns(dataset)
    if columns is not None and "prompt" not in columns:
        likely = next((x for x in _OTHER_NAMES["prompt"] if x in columns), "...")
        hint = f'Rename the column of prompts: `dataset.rename_column("{likely}", "prompt")`.'
        raise _missing(dict.fromkeys(columns), name, f"{method} reads `prompt`", {}, hint)
    if columns is not None and isinstance(dataset, Dataset) and len(dataset):  # `_columns` is None with a transform
        _check_filled(dataset, "prompt", name)
        if processing_class is not None:
            plain = dataset if dataset.format["type"] == "custom" else dataset.with_format(None)
            row = {"prompt": plain[0]["prompt"]}
            _kind(row["prompt"], "prompt", name)
            _check_template(row, name, processing_class)


def check_enough_prompts(dataset: Any, generation_batch_size: int, num_generations: int) -> None:
    """Raise `ValueError` if the prompts do not fill a generation batch, so that TRL's sampler drops them all."""
    needed = generation_batch_size // num_generations
    if isinstance(dataset, Dataset) and len(dataset) < needed:
        raise ValueError(
            f"`train_dataset` has {len(dataset)} prompts, but each generation batch takes {needed} "
            f"(`generation_batch_size={generation_batch_size}` / `num_generations={num_generations}`): no step would "
            "run. Add prompts, or lower `per_device_train_batch_size`, `gradient_accumulation_steps` or "
            "`steps_per_generation`."
        )


def check_rewards(given: dict[str, Any], config: Any, *, has_environments: bool, columns_are_added: bool) -> None:
    """Raise `TypeError` unless each reward function takes the keyword arguments that TRL passes, columns included.

    With `columns_are_added`, a rollout function adds columns that are not known here.
    """
    if given.get("reward_funcs") == [] and not has_environments:
        raise ValueError("`reward_funcs` is empty. Pass a function, a model or the name of a model.")
    reward_funcs, drops = given.get("reward_funcs"), getattr(config, "remove_unused_columns", False)
    if not has_environments:  # one may add its own reward
        _check_weights(reward_funcs, getattr(config, "reward_weights", None))
    columns = _columns(None if drops else given.get("train_dataset"))
    reserved = next((x for x in _RESERVED if x in (columns or ())), None)
    for reward in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        if reward is None or isinstance(reward, str | nn.Module):
            continue
        _check_reads_messages(reward, given)
        if not callable(reward):
            raise TypeError(f"`reward_funcs` contains {reward!r}. Pass a function, a model or the name of a model.")
        if reserved is not None:
            raise ValueError(
                f"`train_dataset` has the column `{reserved}`, but TRL passes its own `{reserved}` to rewards. "
                f'Rename it: `dataset.rename_column("{reserved}", "...")`.'
            )
        if columns is not None:
            passed = [*REWARD_KEYWORDS, *(x for x in columns if x not in REWARD_COLUMNS_LEFT_OUT)]
            passed += ["environments"] if has_environments else []
            _check_keywords(reward, passed, are_all=not columns_are_added)


def _check_weights(reward_funcs: Any, weights: Any) -> None:
    """Raise `ValueError` unless there are as many weights as rewards."""
    count = len(reward_funcs) if isinstance(reward_funcs, list) else 1
    if weights is not None and reward_funcs is not None and len(weights) != count:
        raise ValueError(
            f"`reward_weights` must have a number for each of the {count} `reward_funcs`, got {list(weights)!r}."
        )


def _check_reads_messages(reward: Any, given: dict[str, Any]) -> None:
    """Raise `ValueError` if a reward of TRL reads messages, but the prompts are text, and with them the completions."""
    name = getattr(reward, "__name__", "")
    if name not in _READ_MESSAGES or not str(getattr(reward, "__module__", "")).startswith("trl.rewards"):
        return
    for dataset_name, dataset in named_datasets(given.get("train_dataset"), given.get("eval_dataset")):
        # A transform may make messages of text
        plain = not isinstance(dataset, Dataset) or dataset.format["type"] != "custom"
        features = (plain and getattr(dataset, "features", None)) or {}
        if getattr(features.get("prompt"), "dtype", None) in ("string", "large_string"):
            raise ValueError(
                f"`reward_funcs`: `{name}` reads messages, but `prompt` of `{dataset_name}` is text. Give each prompt "
                "as a list of messages, such as [{'role': 'user', 'content': '...'}], or use a function that reads "
                "text."
            )


def _check_keywords(reward: Callable[..., Any], given: list[str], *, are_all: bool) -> None:
    try:
        parameters = inspect.signature(reward, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # builtins may have no signature
        return
    name = getattr(reward, "__name__", type(reward).__name__)
    named = [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    missing = [x.name for x in parameters if x.name in named and x.default is x.empty and x.name not in given]
    if missing and are_all:
        raise TypeError(
            f"`reward_funcs`: `{name}` requires `{missing[0]}`, which TRL does not pass. TRL passes the columns of "
            f"`train_dataset` and others: {given}. Add or rename the column, or give the parameter a default."
        )
    unnamed = [x for x in given if x not in named]
    if unnamed and not any(x.kind is x.VAR_KEYWORD for x in parameters):
        raise TypeError(
            f"`reward_funcs`: `{name}` does not take `{unnamed[0]}`, one of the keywords that TRL passes to every "
            "reward function. Add `**kwargs` to its parameters."
        )


def _columns(dataset: Any) -> list[str] | None:
    """Return the names of the columns; `None` if they are not known without reading a row."""
    if isinstance(dataset, Dataset):
        if dataset.format["type"] == "custom":  # a transform may make other columns, or draw random numbers
            return None
        if not dataset.format["output_all_columns"]:
            return list(dataset.format["columns"])
    return getattr(dataset, "column_names", None)


def _check_filled(dataset: Dataset, column: str, name: str) -> None:
    """Raise `ValueError` if the column is None in a row. Reads Arrow's null counts, not the values."""
    if column not in (_columns(dataset) or ()) or not dataset.data.column(column).null_count:
        return
    is_none = dataset.data.column(column).is_null().to_numpy()
    if dataset._indices is not None:  # rows were selected
        is_none = is_none[dataset._indices.column(0).to_numpy()]
    if is_none.any():
        _refuse_none(column, int(is_none.argmax()), name)


def _refuse_none(column: str, row: int, name: str) -> NoReturn:
    raise ValueError(f"`{column}` is None in row {row} of `{name}`. Fill it in, or remove the row.")


def _kind(value: Any, column: str, name: str) -> str:
    """Return `"text"` or `"messages"`; raise `ValueError` for other values, which TRL cannot render."""
    if value is None:
        _refuse_none(column, 0, name)
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
        hint = f"Convert messages with `from` and `value`: `{name}.map(trl.maybe_convert_to_chatml)`."
    raise ValueError(
        f"`{column}` of `{name}` must be {'text or ' * (column != 'messages')}a list of messages, got "
        f"{reprlib.repr(value)} in its first row. {hint}"
    )


def _check_template(row: dict[str, Any], name: str, processing_class: Any) -> None:
    if not is_conversational(row):
        return
    options = row.get("chat_template_kwargs") or {}
    if processing_class.chat_template is None and "chat_template" not in options:
        raise ValueError(
            f"`{name}` holds messages, but `processing_class` has no chat template to render them. Use an "
            "instruct model's tokenizer, set `processing_class.chat_template`, or give the rows as text."
        )
    messages = [one for column, value in row.items() if column != "chat_template_kwargs" for one in value]
    has_parts = any(isinstance(one, dict) and isinstance(one.get("content"), list) for one in messages)
    if has_parts and not _renders_parts(partial(processing_class.apply_chat_template, tokenize=False, **options)):
        raise ValueError(
            f"`{name}` has messages whose `content` is a list of parts, but the chat template of `processing_class` "
            "renders only text. Give the text as `content`, or use a template that renders parts."
        )


def _renders_parts(render: Callable[..., str]) -> bool:
    """Return whether a chat template renders the parts of a list as text, and does not print the list."""

    def rendered(content: Any) -> str:
        try:
            return render([{"role": "user", "content": content}])
        except Exception:  # a template may raise any error
            return ""

    as_parts = rendered([{"type": "text", "text": "some-text"}])
    return not rendered("some-text") or ("some-text" in as_parts and "'text'" not in as_parts)
