"""What both trainers check of their arguments."""

from dataclasses import fields
from typing import Any

from transformers import PreTrainedTokenizerBase

from .checked_arguments import check_model_name
from .checked_data import check_rows, check_type


def check_given(name: str, given: dict[str, Any], config: Any, wanted: type) -> None:
    """Check the arguments of a trainer called `name`, whose config is a `wanted`."""
    if given["model"] is None:
        raise ValueError(f"`model` of `{name}` is None. Pass a model, or the name or folder of one.")
    check_model_name(given["model"])
    if config is not None and not all(hasattr(config, field.name) for field in fields(wanted)):
        raise TypeError(
            f"`args` of `{name}` is a `{type(config).__name__}`. Pass a `{wanted.__name__}` with these values."
        )
    tokenizer: Any = getattr(given.get("processing_class"), "tokenizer", given.get("processing_class"))
    padded_elsewhere = getattr(config, "pad_token", None) is not None or given.get("data_collator") is not None
    is_tokenizer: bool = isinstance(tokenizer, PreTrainedTokenizerBase)
    if is_tokenizer and tokenizer.pad_token is None and tokenizer.eos_token is None and not padded_elsewhere:
        raise ValueError(
            "`processing_class` has neither a `pad_token` nor an `eos_token`. Set one: "
            '`processing_class.pad_token = "..."`.'
        )
    if given.get("train_dataset") is not None:
        check_type(given["train_dataset"], "train_dataset")
        check_rows(given["train_dataset"], "train_dataset")
