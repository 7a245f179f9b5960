"""Checks of what is trained on: tokens without a label, and special tokens that would be there twice."""

import logging
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from datasets import Dataset, IterableDataset
from trl import is_conversational

from .sampled_rows import columns_of, sampled_rows

logger = logging.getLogger("trl_ext")

_REMOVE_START = "Remove it from the text, or give messages in place of text that a chat template made."
_REMOVE_END = (
    "Remove it and what follows it from the text. If the tokenizer adds it, set `processing_class.add_eos_token=False`."
)
_FEW = 0.1  # of the rows that are read: fewer texts may hold a special token for another reason
_END = 80  # characters at either end of a text that are tokenized


def check_special_tokens(
    rows: Mapping[int, dict[str, Any]], columns: tuple[str, ...], name: str, processing_class: Any
) -> None:
    """Warn if text begins or ends with a special token that is added to it again, as to text from a chat template.

    `columns` are those with text or messages that the trainer reads.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    begun: dict[int, str] = {}  # row -> the column whose text begins with BOS
    within: dict[int, str] = {}
    ended: dict[int, str] = {}
    completions = [x for x in columns if x != "prompt"]
    for place, row in rows.items():
        first = "prompt" if "prompt" in columns else next(iter(columns), "")
        if isinstance(row.get(first), str) and _begins_twice(row[first], tokenizer):
            begun.setdefault(place, first)
        for column in completions:
            if _ends_twice(row.get(column), tokenizer):
                ended.setdefault(place, column)
            if first == "prompt" and _begins_with_bos(row.get(column), tokenizer):
                within.setdefault(place, column)
    cause = "TRL or the tokenizer adds it to text that already has it."
    for places, words, hint in (
        (begun, f"would have {tokenizer.bos_token!r} twice at its start", f"{cause} {_REMOVE_START}"),
        (within, f"has {tokenizer.bos_token!r} at its start, which would follow the prompt", _REMOVE_START),
        (ended, f"would have {tokenizer.eos_token!r} twice at its end", f"{cause} {_REMOVE_END}"),
    ):
        if len(places) > _FEW * len(rows):
            place, column = next(iter(places.items()))
            logger.warning(
                f"`{column}` of `{name}` {words}, in {len(places)} of the {len(rows)} rows that were read, such as row "
                f"{place}. {hint}"
            )


def _begins_with_bos(text: Any, tokenizer: Any) -> bool:
    bos = tokenizer.bos_token
    if not isinstance(text, str) or not bos or bos == tokenizer.eos_token or not text.startswith(bos):
        return False
    # A tokenizer that does not add BOS may have it at the start of each message, as SmolLM2's "<|im_start|>"
    return _begins_twice(text, tokenizer)


def _begins_twice(text: str, tokenizer: Any) -> bool:
    if not tokenizer.bos_token or not text.startswith(tokenizer.bos_token):
        return False
    ids = tokenizer(text=text[:_END])["input_ids"]
    return list(ids[:2]) == [tokenizer.bos_token_id] * 2


def _ends_twice(value: Any, tokenizer: Any) -> bool:
    """Return whether a text has a second EOS, after TRL has added one to a text that does not end with it.

    Of messages, whether the last one ends with it: the chat template adds it.
    """
    eos = tokenizer.eos_token
    if not eos:
        return False
    if isinstance(value, list):
        last = value[-1] if value else None
        content = last.get("content") if isinstance(last, dict) and last.get("role") == "assistant" else None
        return isinstance(content, str) and content.rstrip().endswith(eos)
    if not isinstance(value, str):
        return False
    ended = value if value.endswith(eos) else value + eos
    if value.rstrip().endswith(eos) and ended != value:
        return True
    ids = tokenizer(text=ended[-_END:])["input_ids"]
    return list(ids[-2:]) == [tokenizer.eos_token_id] * 2


def check_token_ends(dataset: Any, name: str, tokenizer: Any) -> None:
    """Warn if rows of token ids from a `formatting_func` begin with two BOS, or end with a second EOS."""
    if not isinstance(dataset, Dataset) or not len(dataset):
        return
    rows = [row["input_ids"] for row in sampled_rows(dataset, ["input_ids"]).values()]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begun = sum(bos is not None and ids[:2] == [bos, bos] for ids in rows)
    # The text of a chat template may go on after EOS, with the end of a line
    ended = sum(len(ids) > 3 and ids[-1] == eos and eos in ids[-3:-1] for ids in rows)
    for count, token, end in ((begun, tokenizer.bos_token, "start"), (ended, tokenizer.eos_token, "end")):
        if count > _FEW * len(rows):
            logger.warning(
                f"`formatting_func` returns text for `{name}` that already has the {token!r} at its {end} that TRL or "
                f"the tokenizer adds: {count} of the {len(rows)} rows that were read have it twice. "
                f"{_REMOVE_START if end == 'start' else _REMOVE_END}"
            )


def check_completion_only(
    columns: set[str], name: str, completion_only: bool | None, *, assistant_only: bool, evaluates: bool
) -> None:
    """Raise `ValueError` if `completion_only_loss=True` has no effect, because TRL knows no completion in the columns.

    Prepared rows have token ids, and a mask or labels. For evaluation, only warn. With `assistant_only`, or masks of
    the assistant's tokens, the loss is of these alone.
    """
    is_prepared = "input_ids" in columns
    has_completion = assistant_only or columns >= {"prompt", "completion"}
    if is_prepared:
        has_completion = bool(columns & {"labels", "completion_mask", "assistant_masks"})
    if completion_only and not has_completion:
        hint = "Give `prompt` and `completion`, or leave `completion_only_loss` out."
        if columns & {"messages", "conversations"}:
            hint = "Set `assistant_only_loss=True`, which scores only the assistant's messages."
        if is_prepared:
            hint = "Add `completion_mask` or `labels`, or leave `completion_only_loss` out."
        message = (
            f"`completion_only_loss=True` has no effect on `{name}`, which has the columns {sorted(columns)}: the "
            f"loss would count every token. {hint}"
        )
        if not evaluates:
            raise ValueError(message)
        logger.warning(message)
    if completion_only is None and "completion_mask" in columns and "labels" not in columns and is_prepared:
        logger.warning(
            f"`completion_mask` of `{name}` is not read, so the loss also counts prompts. Set "
            "`completion_only_loss=True`, or remove the column."
        )


def check_label_column(columns: set[str], name: str) -> None:
    """Raise `ValueError` if rows that are not prepared have a column `labels`, such as that of a classifier."""
    if "labels" in columns and "input_ids" not in columns:
        raise ValueError(
            f"`labels` of `{name}` would become the labels of the tokens that TRL makes from the text or messages. "
            'Remove the column: `dataset.remove_columns("labels")`.'
        )


def check_completion_ends(dataset: Any, name: str, text_field: str, eos: str | None) -> None:
    """Warn if TRL ends the text of rows with EOS, and not the completion that it trains on."""
    if (
        not isinstance(dataset, Dataset)
        or not eos
        or not {"prompt", "completion", text_field} <= set(columns_of(dataset) or ())
    ):
        return
    rows = sampled_rows(dataset, ["completion", text_field]).values()
    pairs = [(row["completion"], row[text_field]) for row in rows]
    if any(isinstance(x, str) and isinstance(y, str) and not x.endswith(eos) and not y.endswith(eos) for x, y in pairs):
        logger.warning(
            f"`{name}` has the column `{text_field}` beside `prompt` and `completion`. TRL trains on `prompt` and "
            f"`completion`, but adds {eos!r} only to `{text_field}`, so completions have no end. Remove that column: "
            f'`dataset.remove_columns("{text_field}")`.'
        )


def check_formatting(dataset: Any, name: str, text_field: str) -> None:
    """Check the columns beside the text of a `formatting_func`: TRL may read these. It warns of prepared rows itself.

    Raises:
        `ValueError`: there is a `prompt` without a `completion`, which TRL would look for.
    """
    if not isinstance(dataset, Dataset) or "input_ids" in (columns := columns_of(dataset) or ()):
        return
    if "prompt" in columns:
        if "completion" not in columns:
            raise ValueError(
                f"`{name}` has the column `prompt`, so TRL reads `prompt` and `completion`, not the text that "
                "`formatting_func` returns. Rename the column, also in `formatting_func`."
            )
        read_columns = ["prompt", "completion"]
    elif is_conversational(dataset[0]):
        read_columns = ["messages"]
    elif text_field != "text" and text_field in columns:
        read_columns = [text_field]
    else:
        return
    column_names = " and ".join(f"`{column}`" for column in read_columns)
    logger.warning(
        f"`formatting_func` has no effect on `{name}`: TRL trains on {column_names}. Leave it out, or "
        f"rename {'these columns' if len(read_columns) > 1 else 'this column'}."
    )


def check_labels(dataset: Any, name: str, *, evaluates: bool) -> None:
    """Raise `ValueError` if no token of prepared rows has a label, or a row has more or fewer labels than tokens.

    For evaluation, warn of each row without a label.
    """
    if isinstance(dataset, IterableDataset) or "labels" not in (columns_of(dataset) or ()) or not len(dataset):
        return
    rows = sampled_rows(dataset, ["input_ids", "labels"])
    for row in rows.values():
        labels, ids = row["labels"], row.get("input_ids", row["labels"])
        # TRL pads the two separately, so a label would be that of another token
        if not isinstance(labels, list) or len(labels) != len(ids):
            raise ValueError(
                f"`labels` of `{name}` must be a list with a label for each token of `input_ids`, got "
                f"{reprlib.repr(labels)} for {reprlib.repr(ids)}. Use -100 for tokens without a label, and give "
                "each mask one value per token."
            )
    unlabeled = [place for place, row in rows.items() if not has_label(row["labels"])]
    if not unlabeled:
        return
    if not any(has_label(row["labels"]) for row in _rows_of(dataset)):
        refuse_unlabeled(name)
    if evaluates:
        logger.warning(
            f"`{name}` has rows in which every label is -100, such as row {unlabeled[0]}. A batch of such rows counts "
            "as a loss of 0 in the mean. Remove these rows: `dataset.filter(lambda row: max(row['labels']) >= 0)`."
        )


def refuse_unlabeled(name: str) -> NoReturn:
    raise ValueError(
        f"`{name}` has no token to train on: every label is -100 in all of its rows. If you made `labels` or masks, "
        "look at them. Otherwise the completions are empty, or the chat template leaves them out."
    )


def has_label(labels: Any) -> bool:
    return any(label != -100 for label in labels)


def _rows_of(dataset: Dataset) -> Iterator[dict[str, Any]]:
    yield from dataset.with_format(None, columns=["labels"])
