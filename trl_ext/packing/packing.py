"""Decide whether a padded batch of a model can be packed, and make its layout."""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from .attention import accept_layouts
from .first_batch import Rows, packing_differences
from .layout import Layout
from .support import longest_equal, padded_reason, rebases

logger = logging.getLogger("trl_ext")

# Inputs that may accompany ids and mask. All others have a row for each row of the batch
_NOT_BY_ROW = {"use_cache", "output_router_logits", "return_dict", "output_attentions", "output_hidden_states"}
_KNOWN_ATTENTION = ("sdpa", "eager", "flex_attention")


class Packing:
    """The packing of one model's batches.

    Attributes:
        padded_reason (`str`, *optional*): why batches stay padded; None if they are packed.
        unshared_reason (`str`, *optional*): why rows do not share leading tokens; None if they do.
        checked (`bool`): whether a first batch was compared with the padded forward.
        agreed (`bool`): whether the ranks have exchanged the results of this check.
        left_out (`int`): tokens of padded batches that packing has removed so far.
    """

    def __init__(self, model: Any, *, padding_free: bool, share_prompts: bool) -> None:
        self.padded_reason = padded_reason(model) if padding_free else "`padding_free=False`"
        self.unshared_reason = None if share_prompts else "`share_prompts=False`"
        self.checked = False
        self.agreed = False
        self.left_out = 0
        self._warned: set[str] = set()
        if self.padded_reason is None:
            self._rebase = share_prompts and rebases(model)
            self._longest = longest_equal(model)
            accept_layouts(model)

    def agree(self, padded_reasons: list[str | None], unshared_reasons: list[str | None]) -> None:
        """Adopt a reason that any rank has found, given the reasons of all ranks."""
        self.padded_reason = next((reason for reason in (self.padded_reason, *padded_reasons) if reason), None)
        self.unshared_reason = next((reason for reason in (self.unshared_reason, *unshared_reasons) if reason), None)
        self.agreed = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def layout(
        self, model: Any, positional: tuple[Any, ...], inputs: dict[str, Any], predicts_BS: Tensor, *, share: bool
    ) -> Layout | None:
        """Return the layout of the packed row for a batch; None if the batch stays padded.

        Args:
            positional (`tuple`): positional arguments of the backbone. With any, the batch stays padded.
            inputs (`dict`): keyword arguments of the backbone.
            predicts_BS (`Tensor` of shape `(B, S)`, bool): the tokens whose hidden states are needed.
            share (`bool`): whether rows may share leading tokens.
        """
        if self.padded_reason is not None:
            return None
        reason = _inputs_padded_reason(model, positional, inputs)
        if reason is not None:
            self._warn_once(f"A batch is not packed: {reason}.")
            return None
        ids_BS, mask_BS = inputs["input_ids"], inputs.get("attention_mask")
        real_BS = torch.ones_like(ids_BS, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
        first_B = real_BS.int().argmax(dim=1)
        lengths_B = _ends(real_BS) - first_B  # 0 for a row of padding
        if not self.checked:
            self.checked = True
            self._check(model, Rows(ids_BS, first_B, lengths_B))
            if self.padded_reason is not None:
                return None
        needed_BS = predicts_BS.to(real_BS.device)
        reason = _rows_padded_reason(real_BS, needed_BS, lengths_B, self._longest)
        if reason is not None:
            self._warn_once(f"A batch is not packed: {reason}.")
            return None
        if not inputs.get("output_router_logits"):  # the router loss counts every token
            lengths_B = (_ends(needed_BS) - first_B).clamp(min=0)
        layout = self._make_layout(model, ids_BS, lengths_B, first_B, share=share and self.unshared_reason is None)
        self.left_out += ids_BS.numel() - layout.tokens
        return layout

    def _make_layout(self, model: Any, ids_BS: Tensor, lengths_B: Tensor, first_B: Tensor, *, share: bool) -> Layout:
        if not lengths_B.any():
            # Other ranks wait for this pass, so it runs on one token although its result is not used
            lengths_B = torch.zeros_like(lengths_B)
            lengths_B[0] = 1
        return Layout(
            *(ids_BS, lengths_B, first_B),
            share=share,
            rebase=share and self._rebase,
            implementation=model.config.get_text_config()._attn_implementation,
        )

    def _check(self, model: Any, batch: Rows) -> None:
        """Compare a few rows of the first batch with their padded forward, and turn off what gives other results."""
        shares = (True, False) if self.unshared_reason is None else (False,)
        off = packing_differences(model, batch, functools.partial(self._make_layout, model), shares)
        if off[False] is not None:
            self.padded_reason = off[False]
            self._warn_once(f"Batches of {type(model).__name__} stay padded: {off[False]}.")
        elif off.get(True) is not None:
            self.unshared_reason = off[True]
            self._warn_once(f"Prompts of {type(model).__name__} are not shared: {off[True]}.")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def _inputs_padded_reason(model: Any, positional: tuple[Any, ...], inputs: dict[str, Any]) -> str | None:
    """Return a reason that does not depend on the rows, so that every rank finds the same one."""
    ids_BS = inputs.get("input_ids")
    if positional or ids_BS is None:
        return "its token ids are not given as `input_ids`"
    known = {"input_ids", "attention_mask", *_NOT_BY_ROW}
    others = [name for name, x in inputs.items() if x is not None and name not in known]
    others += [name for name in ("output_attentions", "output_hidden_states") if inputs.get(name)]
    if others:
        return f"it has the input `{others[0]}`"
    mask = inputs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        return "its attention mask does not have two dimensions"
    attention = model.config.get_text_config()._attn_implementation or "eager"
    if attention not in _KNOWN_ATTENTION and "flash" not in attention:
        return f"its attention `{attention}` is not part of transformers"
    return None


def _rows_padded_reason(real_BS: Tensor, needed_BS: Tensor, lengths_B: Tensor, longest: int | None) -> str | None:
    if longest is not None and real_BS.shape[1] >= longest:
        return f"the model's rotary embeddings depend on the length of a batch from {longest} tokens on"
    if (lengths_B != real_BS.sum(dim=1)).any():
        return "its attention mask has padding between tokens of a row"
    if (needed_BS & ~real_BS).any():
        return "it has labels that are predicted from padding"
    return None


def _ends(marked_BS: Tensor) -> Tensor:
    """Return `(B,)`, the column after each row's last marked token; 0 if there is none."""
    S = marked_BS.shape[1]
    return torch.where(marked_BS.any(dim=1), S - marked_BS.flip(1).int().argmax(dim=1), 0)
