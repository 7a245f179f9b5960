"""What a model's tables have no row for: tokens of a tokenizer that has more of them, and positions."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def missing_rows(model: Any, tokens: int) -> int | None:
    """How many tokens a model's embedding has, where a tokenizer has more; else `None`, and no id has to be looked at.

    Args:
        tokens (`int`): of the tokenizer.
    """
    rows: int | None = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return rows if rows is not None and rows < tokens else None


def check_token_ids(largest: Iterable[int | None], rows: int, tokens: int) -> None:
    """Raise `ValueError` if one of the ids is that of a token that the model has not.

    Args:
        rows (`int`): how many tokens the model has.
        tokens (`int`): how many the tokenizer has.
    """
    for token in largest:
        if token is not None and token >= rows:
            raise ValueError(
                f"`processing_class` has {tokens} tokens and `model` has {rows}: the data have the token id {token}. "
                "Pass the model's own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))` before."
            )


def watch_token_ids(model: Any, tokens: int) -> None:
    """Let a model, whose tokenizer has more tokens than it has, look at each batch before its embedding fails at it.

    On a GPU that failure is an assertion of the device, after which nothing runs. Tokens that no text has, such as one
    for padding that is never fed, do no harm.
    """
    rows = missing_rows(model, tokens)
    if rows is None:
        return

    def look(module: Any, inputs: tuple[Tensor, ...]) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].numel():
            check_token_ids([int(inputs[0].max())], rows, tokens)

    model.get_input_embeddings().register_forward_pre_hook(look)


def has_position_table(model: Any, positions: int) -> bool:
    """Whether a model looks its positions up in a table of so many rows, as GPT-2 does, and has none for others."""
    tokens = model.get_input_embeddings()
    return any(
        isinstance(module, nn.Embedding) and module is not tokens and 0 <= module.num_embeddings - positions <= 2
        for module in model.modules()  # OPT's table has two rows more
    )
