"""Runs a model's backbone on a padded batch as one row, where the model can, and says where each hidden state is."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .attention import KEYWORD, LayoutNotReadError, accept_layouts
from .layout import Layout
from .support import has_experts, longest_equal, rebases, why_padded

logger = logging.getLogger("trl_ext")

# What may come beside ids and mask, where it is not None; other inputs have a row for each of the batch
_NOT_BY_ROW = {"use_cache", "output_router_logits", "return_dict", "output_attentions", "output_hidden_states"}
_ROWS_CHECKED = 3
_COLUMNS_PREPENDED = 3
# Of a hidden state's norm, and how many may be further off: a router of experts can flip on the last bit
_OFF_FULL, _OFF_HALF, _MAY_BE_OFF = 1e-3, 0.1, 0.1


class Packing:
    """Packing of one model.

    Attributes:
        why_padded (`str`, *optional*): why this model is fed the padded batch; None where it is fed one row.
        why_unshared (`str`, *optional*): why each row feeds all of its tokens; None where leading tokens that rows have
            in common are fed once.
        checked (`bool`): whether a first batch was compared with the padded forward.
        left_out (`int`): tokens of padded batches that were not fed, so far.
    """

    def __init__(self, model: Any, *, padding_free: bool, share_prompts: bool) -> None:
        self.why_padded = why_padded(model) if padding_free else "`padding_free=False`"
        self.why_unshared = None if share_prompts else "`share_prompts=False`"
        self.checked = False
        self.left_out = 0
        self._said: set[str] = set()
        if self.why_padded is None:
            self._rebase = share_prompts and rebases(model)
            self._longest = longest_equal(model)
            accept_layouts(model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def layout(
        self, model: Any, positional: tuple[Any, ...], inputs: dict[str, Any], predicts_BS: Tensor, *, share: bool
    ) -> Layout | None:
        """The row to feed for a batch; None where the padded batch is to be fed.

        Args:
            inputs (`dict`): keyword arguments of the backbone; beside them it must have no `positional` ones.
            predicts_BS (`Tensor` of shape `(B, S)`, bool): the tokens whose hidden states are needed.
            share (`bool`): whether tokens that rows have in common may be fed once.
        """
        if self.why_padded is not None:
            return None
        why = _why_inputs_are_padded(model, positional, inputs, self._longest)
        if why is None:
            ids_BS, real_BS = inputs["input_ids"], _real(inputs)
            needed_BS = predicts_BS.to(real_BS.device)
            first_B, lengths_B = _span(real_BS)
            why = _why_rows_are_padded(real_BS, needed_BS, lengths_B)
        if why is not None:
            self._say(f"A batch is fed padded: {why}.")
            return None
        if not self.checked:
            self.checked = True
            self._check(model, inputs)
            if self.why_padded is not None:
                return None
        if not inputs.get("output_router_logits"):  # the router loss counts every token
            lengths_B = _up_to_last(needed_BS, first_B)
        layout = self._laid_out(model, ids_BS, lengths_B, first_B, share=share and self.why_unshared is None)
        self.left_out += ids_BS.numel() - layout.tokens
        return layout

    def _laid_out(self, model: Any, ids_BS: Tensor, lengths_B: Tensor, first_B: Tensor, *, share: bool) -> Layout:
        if not lengths_B.any():
            # A pass that nobody reads runs all the same, for the sake of the other ranks: on one token
            lengths_B = torch.zeros_like(lengths_B)
            lengths_B[0] = 1
        return Layout(
            *(ids_BS, lengths_B, first_B),
            share=share,
            rebase=share and self._rebase,
            implementation=model.config.get_text_config()._attn_implementation,
        )

    def run(self, model: Any, layout: Layout, inputs: dict[str, Any]) -> Any:
        """The backbone's outputs for the fed row: hidden states of shape `(1, T, H)`."""
        given = {name: x for name, x in inputs.items() if name not in {"input_ids", "attention_mask"}}
        device = layout.input_ids.device
        # A mask of four dimensions is handed on as it is. A layer that reads it instead of the layout must not pass
        # for right: it finds NaN there.
        mask = torch.full((1, 1, 1, 1), torch.nan, device=device)
        before = layout.meetings
        outputs = model.base_model(
            input_ids=layout.input_ids,
            position_ids=layout.position_ids,
            attention_mask=mask,
            **given,
            **{KEYWORD: layout},
        )
        if layout.meetings == before:
            raise LayoutNotReadError("its layers do not hand their keyword arguments on to their attention")
        return outputs

    def _check(self, model: Any, inputs: dict[str, Any]) -> None:
        """Compare a few rows of the first batch with their padded forward, and stay with what agrees.

        Every rank runs the same forwards, whatever they show.
        """
        ids_BS, real_BS = inputs["input_ids"], _real(inputs)
        first_B, lengths_B = _span(real_BS)
        some = Layout(ids_BS, lengths_B, first_B, share=True, rebase=True, implementation="").order_B[-_ROWS_CHECKED:]
        ids, real = _with_a_twin(ids_BS[some], real_BS[some])
        # Prepended padding tells whether the model takes the columns as positions
        ids, real = (torch.nn.functional.pad(x, (_COLUMNS_PREPENDED, 0)) for x in (ids, real))
        first, lengths = _span(real)
        given = {name: x for name, x in inputs.items() if name in {"use_cache"}}
        off: dict[bool, str | None] = {}
        with _evaluating(model):
            padded = model.base_model(input_ids=ids, attention_mask=real.to(ids_BS.dtype), **given).last_hidden_state
            for share in (True, False) if self.why_unshared is None else (False,):
                layout = self._laid_out(model, ids, lengths, first, share=share)
                try:
                    hidden = self.run(model, layout, given).last_hidden_state[0]
                    off[share] = _why_off(model, hidden[layout.at_BS[real]], padded[real])
                except LayoutNotReadError as error:
                    off[share] = str(error)
        if off[False] is not None:
            self.why_padded = off[False]
            self._say(f"Every token of the padded batch is fed: {off[False]} ({type(model).__name__}).")
        elif off.get(True) is not None:
            self.why_unshared = off[True]
            self._say(f"Prompts are not shared: {off[True]} ({type(model).__name__}).")

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning(message)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Within, nothing of `model` is drawn at random, and no gradient is recorded."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _with_a_twin(ids_BS: Tensor, real_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, and the longest once more with another second half.

    So there is always a start to share and an end that is not shared, of an eighth of the tokens or more where there
    are at most four rows.
    """
    longest = real_BS.sum(dim=1).argmax()
    twin_S = ids_BS[longest].clone()
    columns = real_BS[longest].nonzero().squeeze(1)
    end = columns[len(columns) // 2 :]
    twin_S[end] = twin_S[columns[: len(end)]]
    return torch.cat([ids_BS, twin_S.unsqueeze(0)]), torch.cat([real_BS, real_BS[longest].unsqueeze(0)])


def _why_off(model: Any, hidden_NH: Tensor, padded_NH: Tensor) -> str | None:
    half = padded_NH.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(padded_NH.device.type)
    off_N = (hidden_NH - padded_NH).float().norm(dim=1) / padded_NH.float().norm(dim=1).clamp(min=1e-30)
    too_far = ~(off_N <= (_OFF_HALF if half else _OFF_FULL))
    may_be_off = _MAY_BE_OFF if half or has_experts(model) else 0.0
    # A model that has itself gone to NaN is not the packing's doing; and padding alone shows nothing
    if not len(off_N) or not padded_NH.isfinite().all() or too_far.float().mean() <= may_be_off:
        return None
    return f"on the first batch hidden states differ from the padded forward's by {off_N.max():.2g} of their norm"


def _why_inputs_are_padded(
    model: Any, positional: tuple[Any, ...], inputs: dict[str, Any], longest: int | None
) -> str | None:
    ids_BS = inputs.get("input_ids")
    if positional or ids_BS is None:
        return "its token ids are not given as `input_ids`"
    known = {"input_ids", "attention_mask", *_NOT_BY_ROW}
    others = [name for name, x in inputs.items() if x is not None and name not in known]
    others += [name for name in ("output_attentions", "output_hidden_states") if inputs.get(name)]
    if others:
        return f"it comes with `{others[0]}`"
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None) is not None:
        return "the noise of `neftune_noise_alpha` depends on its width"
    if longest is not None and ids_BS.shape[1] > longest:
        return f"the model's rotary embeddings depend on its length beyond {longest} tokens"
    return None


def _why_rows_are_padded(real_BS: Tensor, needed_BS: Tensor, lengths_B: Tensor) -> str | None:
    if (lengths_B != real_BS.sum(dim=1)).any():
        return "its attention mask has padding between tokens of a row"
    if (needed_BS & ~real_BS).any():
        return "a token is to be predicted from padding"
    return None


def _real(inputs: dict[str, Any]) -> Tensor:
    """`(B, S)`, bool: the tokens that are not padding."""
    mask_BS = inputs.get("attention_mask")
    return torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask_BS is None else mask_BS.bool()


def _span(real_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The column of each row's first real token, and the columns from there to its last: `(B,)` each."""
    S = real_BS.shape[1]
    first_B = real_BS.int().argmax(dim=1)
    end_B = torch.where(real_BS.any(dim=1), S - real_BS.flip(1).int().argmax(dim=1), 0)
    return first_B, end_B - first_B


def _up_to_last(needed_BS: Tensor, first_B: Tensor) -> Tensor:
    """`(B,)`: tokens from each row's first one to the last that is needed; 0 where none is."""
    S = needed_BS.shape[1]
    return torch.where(needed_BS.any(dim=1), S - needed_BS.flip(1).int().argmax(dim=1) - first_B, 0)
