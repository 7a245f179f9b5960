"""Data sets whose columns or first rows cannot be trained on: each is one error before TRL reads them."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from trl import is_conversational

from ..compat import REWARD_COLUMNS_LEFT_OUT, REWARD_KEYWORDS


def named_datasets(train_dataset: Any, eval_dataset: Any) -> Iterable[tuple[str, Any]]:
    """Each data set that was given, and what it is called in messages."""
    yield "train_dataset", train_dataset
    if isinstance(eval_dataset, dict) and not isinstance(eval_dataset, Dataset):
        yield from ((f"eval_dataset[{name!r}]", dataset) for name, dataset in eval_dataset.items())
    else:
        yield "eval_dataset", eval_dataset


def check_type(dataset: Any, name: str) -> None:
    """Raise `TypeError` unless it is one that TRL reads."""
    if isinstance(dataset, Dataset | IterableDataset):
        return
    hint = "Pass `datasets.Dataset.from_list(rows)`, or what `datasets.load_dataset` gives for one split."
    if isinstance(dataset, dict) and dataset:
        hint = f"Pass one of its splits, such as `dataset[{next(iter(dataset))!r}]`."
    raise TypeError(f"`{name}` must be a `Dataset` or an `IterableDataset`, got `{type(dataset).__name__}`. {hint}")


def check_rows(dataset: Any, name: str) -> None:
    """Raise `ValueError` if a data set has no row."""
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"`{name}` has no rows. Look at the filter or the split that made it.")


def check_rows_are_left(dataset: Dataset, max_length: int | None) -> None:
    """Raise `ValueError` if TRL has dropped every row of DPO's training data, the prompts being too long."""
    if len(dataset) == 0:
        raise ValueError(
            f"`max_length={max_length}` leaves no row of `train_dataset`: every prompt alone fills it. Raise it, "
            "shorten the prompts, or set `truncation_mode='keep_end'`."
        )


def check_pairs(dataset: Any, name: str, *, has_template: bool, has_end: bool) -> None:
    """Raise `ValueError` unless a data set has what DPO reads: a prompt, a chosen and a rejected completion.

    Args:
        has_template (`bool`): whether the tokenizer can render messages.
        has_end (`bool`): whether it has a token that ends a text.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError(f"`{name}` has no rows. Look at the filter or the split that made it.")
    for column in ("chosen", "rejected"):
        if column not in first:
            raise ValueError(
                f"`{name}` has the columns {sorted(first)}, and DPO reads `prompt`, `chosen` and `rejected`: "
                f'`{column}` is missing. Rename the one that holds it: `dataset.rename_column("...", "{column}")`.'
            )
    for column in ("prompt", "chosen", "rejected"):
        if column in first:
            _check_filled(dataset, column, name)
    if "prompt" not in first and first["chosen"][:1] != first["rejected"][:1]:
        raise ValueError(
            f"`{name}` has the columns {sorted(first)} and no `prompt`, and `chosen` and `rejected` of its first row "
            'do not begin alike with one. Rename the column that holds it: `dataset.rename_column("...", "prompt")`.'
        )
    kinds = {column: type(first[column]).__name__ for column in ("prompt", "chosen", "rejected") if column in first}
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"`{name}` mixes text and messages: {', '.join(f'`{x}` is `{kind}`' for x, kind in kinds.items())} in its "
            "first row. Give all of them as text, or all as lists of messages."
        )
    _check_template(first, name, has_template)
    if not has_end and not is_conversational(first):
        raise ValueError(
            "`processing_class` has no `eos_token`, which ends each completion. Set it: "
            '`processing_class.eos_token = "..."`.'
        )


def check_prompts(dataset: Any, name: str, *, has_template: bool) -> None:
    """Raise `ValueError` unless a data set of known columns has what GRPO reads: prompts.

    Args:
        has_template (`bool`): whether the tokenizer can render messages.
    """
    if not isinstance(dataset, Dataset):  # a stream may give each row only once
        return
    if "prompt" not in dataset.column_names:
        raise ValueError(
            f"`{name}` has the columns {sorted(dataset.column_names)}, and GRPO reads `prompt`. Rename the one that "
            'holds it: `dataset.rename_column("...", "prompt")`.'
        )
    check_rows(dataset, name)
    _check_filled(dataset, "prompt", name)
    _check_template({"prompt": dataset[0]["prompt"]}, name, has_template)


def check_enough_prompts(dataset: Any, generation_batch_size: int, num_generations: int) -> None:
    """Raise `ValueError` if TRL's sampler, which leaves out what does not fill a generation batch, would give none."""
    needed = generation_batch_size // num_generations
    if isinstance(dataset, Dataset) and len(dataset) < needed:
        raise ValueError(
            f"`train_dataset` has {len(dataset)} prompts, and each generation batch takes {needed} "
            f"(`generation_batch_size={generation_batch_size}` / `num_generations={num_generations}`): no step would "
            "run. Add prompts, or lower `per_device_train_batch_size`, `gradient_accumulation_steps` or "
            "`steps_per_generation`."
        )


def check_rewards(reward_funcs: Any, dataset: Any, *, has_environments: bool) -> None:
    """Raise `TypeError` unless each reward can be called as TRL calls it: with keywords, of which some are columns."""
    rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    for reward in rewards:
        if reward is None or isinstance(reward, str | nn.Module):
            continue
        if not callable(reward):
            raise TypeError(
                f"`reward_funcs` has {reward!r}, which is no reward. Give a function, a model, or the name of one."
            )
        if isinstance(dataset, Dataset):
            given = [*REWARD_KEYWORDS, *(x for x in dataset.column_names if x not in REWARD_COLUMNS_LEFT_OUT)]
            _check_keywords(reward, [*given, "environments"] if has_environments else given)


def _check_keywords(reward: Callable[..., Any], given: list[str]) -> None:
    try:
        parameters = inspect.signature(reward, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # a builtin may have none
        return
    name = getattr(reward, "__name__", type(reward).__name__)
    named = [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    missing = [x.name for x in parameters if x.name in named and x.default is x.empty and x.name not in given]
    if missing:
        raise TypeError(
            f"`reward_funcs`: `{name}` reads `{missing[0]}`, which no reward function is given; columns of "
            f"`train_dataset` and others are: {given}. Add or rename the column, or give the parameter a default."
        )
    if not any(x.kind is x.VAR_KEYWORD for x in parameters) and set(given) - set(named):
        raise TypeError(
            f"`reward_funcs`: `{name}` does not take `{next(x for x in given if x not in named)}`, one of the keywords "
            "that every reward function is given. Add `**kwargs` to its parameters."
        )


def _check_filled(dataset: Any, column: str, name: str) -> None:
    if not isinstance(dataset, Dataset) or not dataset.data.column(column).null_count:
        return
    for row, value in enumerate(dataset[column]):
        if value is None:
            raise ValueError(f"`{column}` is None in row {row} of `{name}`. Fill it in, or remove the row.")


def _check_template(row: dict[str, Any], name: str, has_template: bool) -> None:
    if is_conversational(row) and not has_template:
        raise ValueError(
            f"`{name}` holds messages, and `processing_class` has no chat template to render them with. Use an "
            "instruct model's tokenizer, set `processing_class.chat_template`, or give the rows as text."
        )
