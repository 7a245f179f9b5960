"""Which models and token ids the trainers accept: decoders, and ids and positions that the model has embeddings for."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def check_decoder(model: Any, argument: str) -> None:
    """Raise `ValueError` if `model`, the trainer's `argument`, is no decoder-only language model."""
    # TRL crashes in the first step, or trains: then the encoder of BART sees the tokens that the decoder predicts
    if model.config.is_encoder_decoder:
        lacks = "has an encoder"
    elif model.get_output_embeddings() is None:
        lacks = "has no output embedding"
    elif model.base_model is model and not hasattr(model, "model"):  # as Llama 4 with images, on which TRL crashes
        lacks = "has no backbone"
    else:
        return
    raise ValueError(
        f"`{argument}` is a {type(model).__name__}, which {lacks}. Pass a decoder-only language model, which "
        "`AutoModelForCausalLM` or `AutoModelForImageTextToText` loads."
    )


def missing_rows(model: Any, tokens: int) -> int | None:
    """Return the number of rows of the token embedding if the tokenizer has more `tokens`, else None: all are valid."""
    rows: int | None = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return rows if rows is not None and rows < tokens else None


def check_token_ids(largest: Iterable[int | None], rows: int, tokens: int, name: str = "model") -> None:
    """Raise `ValueError` if an id is not below `rows`, the number of the model's tokens; the tokenizer has `tokens`."""
    for token in largest:
        if token is not None and token >= rows:
            hint = "Pass a reference with the policy's vocabulary, or leave `ref_model` out."
            if name == "model":
                hint = "Pass the model's own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))` first."
            raise ValueError(
                f"`processing_class` has {tokens} tokens, but `{name}` has only {rows}, and the data contain the token "
                f"id {token}. {hint}"
            )


def watch_token_ids(model: Any, tokens: int, name: str = "model") -> None:
    """Check the token ids of each batch, if the tokenizer has more tokens than the model.

    On a GPU, an invalid id triggers a device-side assertion, after which nothing runs. Only ids that occur in a batch
    are an error: a tokenizer may have other invalid ones, such as a padding token that no forward reads.
    """
    rows = missing_rows(model, tokens)
    if rows is None:
        return

    def check(module: Any, inputs: tuple[Tensor, ...]) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].numel():
            check_token_ids([int(inputs[0].max())], rows, tokens, name)

    model.get_input_embeddings().register_forward_pre_hook(check)


def has_position_table(model: Any, positions: int) -> bool:
    """Whether the model looks up positions in a table of `positions` rows, like GPT-2, and supports no more."""
    tokens = model.get_input_embeddings()
    return any(
        isinstance(module, nn.Embedding) and module is not tokens and 0 <= module.num_embeddings - positions <= 2
        for module in model.modules()  # OPT's table has two extra rows
    )
