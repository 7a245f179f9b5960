"""The check of the first batch: a few of its rows must have the same hidden states padded and packed.

It finds what the static rule cannot know of a model. Every rank runs the same forwards, whatever its batch and their
results: a sharded model needs all ranks in each of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import LayoutNotReadError, run_packed
from .layout import Layout
from .support import has_experts, longest_equal

_ROWS, _COLUMNS = 3, 1024
_PREPENDED = 3
# Allowed differences, relative to a hidden state's norm, in fp32 and in less; and the share of tokens that may exceed
# them, as a router of experts can flip on the last bit
_OFF, _OFF_COARSE, _MAY_BE_OFF = 1e-3, 0.2, 0.1


class Rows(NamedTuple):
    """Rows without gaps: `ids_BS` `(B, S)`, the column of each row's first token and its length, `(B,)`."""

    ids_BS: Tensor
    first_B: Tensor
    lengths_B: Tensor


def why_off(
    model: Any, batch: Rows, laid_out: Callable[..., Layout], shares: tuple[bool, ...]
) -> dict[bool, str | None]:
    """For each of `shares` (sharing leading tokens or not), why packed and padded results differ; None if they agree.

    `laid_out` makes a layout of ids, lengths, first columns and `share`.
    """
    rows = _rows_to_check(model, batch)
    # Only the padded batch has a row's last token, as in training: nothing before it may see it
    lengths_B = (rows.lengths_B - 1).clamp(min=1)
    found: dict[bool, str | None] = {}
    with _evaluating(model):
        places_BS = torch.arange(rows.ids_BS.shape[1], device=rows.ids_BS.device) - rows.first_B.unsqueeze(1)
        real_BS = (places_BS >= 0) & (places_BS < rows.lengths_B.unsqueeze(1))
        padded = model.base_model(input_ids=rows.ids_BS, attention_mask=real_BS.to(rows.ids_BS.dtype), use_cache=False)
        padded_BSH = padded.last_hidden_state
        for share in shares:
            layout = laid_out(rows.ids_BS, lengths_B, rows.first_B, share=share)
            try:
                hidden_TH = run_packed(model, layout, {"use_cache": False}).last_hidden_state[0]
            except LayoutNotReadError as error:
                found[share] = str(error)
                continue
            packed_BS = layout.at_BS >= 0
            # A model split over devices can end on another device than it begins on
            at_N, packed_BS = layout.at_BS[packed_BS].to(hidden_TH.device), packed_BS.to(padded_BSH.device)
            found[share] = _why_far(model, hidden_TH[at_N], padded_BSH[packed_BS])
    return found


def _rows_to_check(model: Any, batch: Rows) -> Rows:
    """The first rows of the batch, and the longest of them once more with another second half, all after padding.

    So there is always a start to share, and an end not to share, of more than a tenth of the tokens. Padding reveals a
    model that takes columns as positions.
    """
    limits = (longest_equal(model), getattr(model.config.get_text_config(), "max_position_embeddings", None))
    most = min([_COLUMNS, *(limit - _PREPENDED for limit in limits if limit is not None and limit > 0)])
    first_B, lengths_B = batch.first_B[:_ROWS], batch.lengths_B[:_ROWS].clamp(min=1, max=max(most, 1))
    width = int(lengths_B.max())
    columns_S = torch.arange(width, device=first_B.device)
    source_BS = (first_B.unsqueeze(1) + columns_S).clamp(max=batch.ids_BS.shape[1] - 1)
    ids_BS = batch.ids_BS[:_ROWS].gather(1, source_BS)
    longest = lengths_B.argmax()
    half = width - width // 2
    twin_S = torch.cat([ids_BS[longest, :half], ids_BS[longest, : width // 2]])
    ids_BS = F.pad(torch.cat([ids_BS, twin_S.unsqueeze(0)]), (_PREPENDED, 0))
    lengths_B = torch.cat([lengths_B, lengths_B[longest].unsqueeze(0)])
    return Rows(ids_BS, torch.full_like(lengths_B, _PREPENDED), lengths_B)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Run `model` without randomness and without recording gradients."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _why_far(model: Any, hidden_NH: Tensor, padded_NH: Tensor) -> str | None:
    off_N = (hidden_NH - padded_NH).float().norm(dim=1) / padded_NH.float().norm(dim=1).clamp(min=1e-30)
    coarse = _is_coarse(model, padded_NH)
    too_far = ~(off_N <= (_OFF_COARSE if coarse else _OFF))
    may_be_off = _MAY_BE_OFF if coarse or has_experts(model) else 0.0
    # A model whose own results are NaN is not the packing's fault
    if not padded_NH.isfinite().all() or too_far.float().mean() <= may_be_off:
        return None
    return f"on the first batch hidden states differ from the padded forward's by {off_N.max():.2g} of their norm"


def _is_coarse(model: Any, hidden_NH: Tensor) -> bool:
    """Whether products have fewer digits than fp32, so that the shape of a batch changes hidden states visibly."""
    return (
        hidden_NH.dtype in (torch.bfloat16, torch.float16)
        or torch.is_autocast_enabled(hidden_NH.device.type)
        or not multiplies_fp32(hidden_NH.device)
        or getattr(model, "is_quantized", False)
    )


def multiplies_fp32(device: torch.device) -> bool:
    """Whether matrix products of fp32 tensors keep fp32 precision on `device`, by any of torch's switches."""
    # `torch.get_float32_matmul_precision` raises once the newer switches are set, as by transformers for `tf32=True`
    backends: Any = torch.backends
    matmul = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    return matmul.fp32_precision in ("none", "ieee")
