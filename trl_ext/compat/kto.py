"""The private parts of TRL's `KTOTrainer`, as functions of a trainer."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import trl
from torch import Tensor
from torch.nn.functional import pad

from .reference import ReferenceInternals
from .replaced import names_replaced, replaced

_OF_ROWS = ("input_ids", "attention_mask", "completion_mask")
# Entries of a batch with one value per row, which are not model inputs
_COLUMNS = ("label", "ref_logps", "ref_KL_logps")
# The prefix of the entries for the KL term: each prompt with the completion of another row
_KL = "KL_"


KL_PASS = "_compute_kl_logps"


def has_kl_rows(batch: dict[str, Any]) -> bool:
    return f"{_KL}input_ids" in batch


def sequences_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the inputs of the reference's passes: both halves as one batch, so that they share prompts, if possible.

    The rows for the KL term are the second half, or the second batch if the model has inputs other than tokens.
    """
    first = {name: x for name, x in batch.items() if not name.startswith(_KL) and name not in _COLUMNS}
    of_kl = {name.removeprefix(_KL): x for name, x in batch.items() if name.startswith(_KL)}
    if not of_kl:
        return [first]
    if {*first} != {*_OF_ROWS} or {*of_kl} != {*_OF_ROWS}:
        return [first, first | of_kl]
    width = max(len(x["input_ids"][0]) for x in (first, of_kl))
    return [{name: torch.cat([_widened(x[name], width) for x in (first, of_kl)]) for name in _OF_ROWS}]


def tokens_of(batch: dict[str, Any]) -> int:
    """Return the tokens of a batch and of its rows for the KL term, padding included, as TRL processes them."""
    return sum(batch[name].numel() for name in ("input_ids", f"{_KL}input_ids") if name in batch)


def _widened(x: Tensor, width: int) -> Tensor:
    return pad(x, (0, width - x.shape[1]))


def with_reference(batch: dict[str, Any], sums: list[Tensor]) -> dict[str, Any]:
    """Return a batch with the reference's summed log-probs, `(B,)` or with those for the KL term `(2B,)`."""
    names = ("ref_logps", "ref_KL_logps")
    return {**batch, **dict(zip(names, torch.cat(sums).split(len(batch["input_ids"])), strict=False))}


def reference_in_batch(trainer: ReferenceInternals) -> AbstractContextManager[None]:
    """Make TRL's loss read the reference's log-probs from the batch in the `with` block."""
    return replaced(trainer, precompute_ref_logps=True)


def reference_run_by_trl(enter_reference: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Make TRL's loss run the policy with `enter_reference` where it would switch adapters, in the `with` block."""
    return names_replaced(trl.KTOTrainer, use_adapter=lambda *_, **__: enter_reference())
