"""Runs a model's backbone on a padded batch as one packed row where possible, and says where each hidden state is."""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from .attention import accept_layouts
from .first_batch import Rows, why_off
from .layout import Layout
from .support import longest_equal, rebases, why_padded

logger = logging.getLogger("trl_ext")

# Inputs that may come beside ids and mask; all others have a row for each row of the batch
_NOT_BY_ROW = {"use_cache", "output_router_logits", "return_dict", "output_attentions", "output_hidden_states"}
_KNOWN_ATTENTION = ("sdpa", "eager", "flex_attention")


class Packing:
    """Packing of one model.

    Attributes:
        why_padded (`str`, *optional*): why this model's batches stay padded; None if they are packed.
        why_unshared (`str`, *optional*): why rows do not share leading tokens; None if they do.
        checked (`bool`): whether a first batch was compared with the padded forward.
        agreed (`bool`): whether the ranks have exchanged what their first batches showed.
        left_out (`int`): tokens of padded batches that packing has saved so far.
    """

    def __init__(self, model: Any, *, padding_free: bool, share_prompts: bool) -> None:
        self.why_padded = why_padded(model) if padding_free else "`padding_free=False`"
        self.why_unshared = None if share_prompts else "`share_prompts=False`"
        self.checked = False
        self.agreed = False
        self.left_out = 0
        self._said: set[str] = set()
        if self.why_padded is None:
            self._rebase = share_prompts and rebases(model)
            self._longest = longest_equal(model)
            accept_layouts(model)

    def agree(self, why_padded: list[str | None], why_unshared: list[str | None]) -> None:
        """Adopt what any rank has found: `why_padded` and `why_unshared` of each."""
        self.why_padded = next((why for why in (self.why_padded, *why_padded) if why), None)
        self.why_unshared = next((why for why in (self.why_unshared, *why_unshared) if why), None)
        self.agreed = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def layout(
        self, model: Any, positional: tuple[Any, ...], inputs: dict[str, Any], predicts_BS: Tensor, *, share: bool
    ) -> Layout | None:
        """The layout of the packed row for a batch; None if the batch stays padded.

        Args:
            positional (`tuple`): positional arguments of the backbone; a batch with any stays padded.
            inputs (`dict`): its keyword arguments.
            predicts_BS (`Tensor` of shape `(B, S)`, bool): the tokens whose hidden states are needed.
            share (`bool`): whether rows may share leading tokens.
        """
        if self.why_padded is not None:
            return None
        why = _why_inputs_are_padded(model, positional, inputs)
        if why is not None:
            self._say(f"A batch is not packed: {why}.")
            return None
        ids_BS, mask_BS = inputs["input_ids"], inputs.get("attention_mask")
        real_BS = torch.ones_like(ids_BS, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
        first_B = real_BS.int().argmax(dim=1)
        lengths_B = _ends(real_BS) - first_B  # 0 for a row of padding
        if not self.checked:
            self.checked = True
            self._check(model, Rows(ids_BS, first_B, lengths_B))
            if self.why_padded is not None:
                return None
        needed_BS = predicts_BS.to(real_BS.device)
        why = _why_rows_are_padded(real_BS, needed_BS, lengths_B, self._longest)
        if why is not None:
            self._say(f"A batch is not packed: {why}.")
            return None
        if not inputs.get("output_router_logits"):  # the router loss counts every token
            lengths_B = (_ends(needed_BS) - first_B).clamp(min=0)
        layout = self._laid_out(model, ids_BS, lengths_B, first_B, share=share and self.why_unshared is None)
        self.left_out += ids_BS.numel() - layout.tokens
        return layout

    def _laid_out(self, model: Any, ids_BS: Tensor, lengths_B: Tensor, first_B: Tensor, *, share: bool) -> Layout:
        if not lengths_B.any():
            # Other ranks wait for this pass, so it runs although nobody reads it: on one token
            lengths_B = torch.zeros_like(lengths_B)
            lengths_B[0] = 1
        return Layout(
            *(ids_BS, lengths_B, first_B),
            share=share,
            rebase=share and self._rebase,
            implementation=model.config.get_text_config()._attn_implementation,
        )

    def _check(self, model: Any, batch: Rows) -> None:
        """Compare a few rows of the first batch with their padded forward, and turn off what disagrees."""
        shares = (True, False) if self.why_unshared is None else (False,)
        off = why_off(model, batch, functools.partial(self._laid_out, model), shares)
        if off[False] is not None:
            self.why_padded = off[False]
            self._say(f"Packing is off: {off[False]} ({type(model).__name__}).")
        elif off.get(True) is not None:
            self.why_unshared = off[True]
            self._say(f"Prompts are not shared: {off[True]} ({type(model).__name__}).")

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning(message)


def _why_inputs_are_padded(model: Any, positional: tuple[Any, ...], inputs: dict[str, Any]) -> str | None:
    """A reason that does not depend on the rows, so that every rank finds the same."""
    ids_BS = inputs.get("input_ids")
    if positional or ids_BS is None:
        return "its token ids are not given as `input_ids`"
    known = {"input_ids", "attention_mask", *_NOT_BY_ROW}
    others = [name for name, x in inputs.items() if x is not None and name not in known]
    others += [name for name in ("output_attentions", "output_hidden_states") if inputs.get(name)]
    if others:
        return f"it comes with `{others[0]}`"
    mask = inputs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        return "its attention mask is not one of rows and columns"
    attention = model.config.get_text_config()._attn_implementation or "eager"
    if attention not in _KNOWN_ATTENTION and "flash" not in attention:
        return f"its attention, `{attention}`, is not one of transformers"
    return None


def _why_rows_are_padded(real_BS: Tensor, needed_BS: Tensor, lengths_B: Tensor, longest: int | None) -> str | None:
    if longest is not None and real_BS.shape[1] >= longest:
        return f"the model's rotary embeddings depend on its length from {longest} tokens on"
    if (lengths_B != real_BS.sum(dim=1)).any():
        return "its attention mask has padding between tokens of a row"
    if (needed_BS & ~real_BS).any():
        return "a token is to be predicted from padding"
    return None


def _ends(marked_BS: Tensor) -> Tensor:
    """`(B,)`: the column after each row's last marked token; 0 where none is."""
    S = marked_BS.shape[1]
    return torch.where(marked_BS.any(dim=1), S - marked_BS.flip(1).int().argmax(dim=1), 0)
