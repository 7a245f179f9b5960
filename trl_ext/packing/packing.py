"""Decide whether a padded batch of a model can be packed, and make its layout."""

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .attention import TOKEN_TYPES, accept_layouts
from .first_batch import check_packing, image_difference
from .images import IMAGE_INPUTS, BatchImages, has_images, has_own_positions, unpacked_images_reason
from .layout import Layout
from .mixers import accept_layouts_in_mixers
from .support import (
    can_rebase,
    longest_equal,
    longest_in_one_chunk,
    longest_unscaled_row,
    mixers_of,
    padded_reason,
    takes_text_only,
    text_id,
)

logger = logging.getLogger("trl_ext")

Mask = NDArray[np.bool_]

# Inputs, besides ids and mask, that do not have an entry for each row of the batch
_NOT_BY_ROW = {"use_cache", "output_router_logits", "return_dict", "output_attentions", "output_hidden_states"}
_KNOWN_ATTENTION = ("sdpa", "eager", "flex_attention")


def has_other_ranks() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


class Packing:
    """The packing of one model's batches.

    Attributes:
        padded_reason (`str`, *optional*): why batches stay padded; None if they are packed.
        takes_text_only (`bool`): whether no batch has images or sound.
        has_mixers (`bool`): whether recurrent or convolutional mixers process rows, not the packed row.
        unshared_reason (`str`, *optional*): why rows do not share leading tokens; None if they do.
        images_reason (`str`, *optional*): why batches with images stay padded; None if they are packed.
        checked (`bool`): whether a first batch was compared with the padded forward.
        checked_completely (`bool`): whether that batch had rows as long as the check runs.
        images_checked (`bool`): whether a first batch with images was compared.
        agreed (`bool`): whether the ranks have exchanged the results of this check.
        skipped_tokens (`int`): tokens of padded batches that packing has removed so far.
        checked_tokens (`int`): tokens that the checks have processed so far.
    """

    def __init__(self, model: Any, *, padding_free: bool, share_prompts: bool) -> None:
        self.padded_reason = padded_reason(model) if padding_free else "`padding_free=False`"
        self.unshared_reason = None if share_prompts else "`share_prompts=False`"
        self.takes_text_only = takes_text_only(model)
        self.has_mixers = bool(mixers_of(model))
        self.images_reason: str | None = None
        self.checked = False
        self.checked_completely = False
        self.images_checked = False
        self.agreed = False
        self.skipped_tokens = 0
        self.checked_tokens = 0
        self._warned: set[str] = set()
        if self.padded_reason is None:
            self._rebases = share_prompts and can_rebase(model)
            self._longest = longest_equal(model)
            self._chunk = longest_in_one_chunk(model)
            self._unscaled_row = longest_unscaled_row(model)
            accept_layouts(model)
            accept_layouts_in_mixers(model)

    @property
    def reasons(self) -> tuple[str | None, str | None]:
        return self.padded_reason, self.unshared_reason

    def agree(self, padded_reasons: list[str | None], unshared_reasons: list[str | None]) -> None:
        """Adopt a reason that any rank has found, given the reasons of all ranks."""
        self.padded_reason = next((reason for reason in (self.padded_reason, *padded_reasons) if reason), None)
        self.unshared_reason = next((reason for reason in (self.unshared_reason, *unshared_reasons) if reason), None)
        self.agreed = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def layout(
        self,
        model: Any,
        positional: tuple[Any, ...],
        inputs: dict[str, Any],
        labels_BS: Tensor,
        *,
        share: bool,
        pack: bool = True,
    ) -> Layout | None:
        """Return the layout of the packed row for a batch; None if the batch stays padded.

        Args:
            positional (`tuple`): positional arguments of the backbone. If there are any, the batch stays padded.
            inputs (`dict`): keyword arguments of the backbone.
            labels_BS (`Tensor` of shape `(B, S)`): not shifted yet; -100 where nothing is predicted. With one column
                more, the last token has a label too.
            share (`bool`): whether rows may share leading tokens.
            pack (`bool`): whether the batch may be packed. If not, the first one is checked nevertheless.
        """
        if self.padded_reason is not None:
            return None
        ids_BS: Any = inputs.get("input_ids")
        mask_BS = inputs.get("attention_mask")
        with_images = has_images(inputs)
        reason = _inputs_padded_reason(model, positional, inputs)
        # Every rank runs the check, and another rank may have a batch without images
        is_checked_on_text = ids_BS is not None and not positional and not self.takes_text_only
        if reason is not None and not is_checked_on_text:
            self._warn_once(f"A batch is not packed: {reason}.")
            return None
        if not self.checked:
            self.checked = True
            self._check(model, HostBatch.of(ids_BS, mask_BS, labels_BS), ids_BS.device)
        # Whatever the first check found, because it may find something else on another rank
        if with_images and reason is None and not self.images_checked:
            self.images_checked = True
            self._check_images(model, inputs, HostBatch.of(ids_BS, mask_BS, labels_BS))
        if self.padded_reason is not None:
            return None
        # After the checks, which every rank runs, whatever its hooks and the length of its batch
        reason = reason or (self.images_reason if with_images else None)
        if reason is not None:
            self._warn_once(f"A batch is not packed: {reason}.")
            return None
        if not pack:
            return None
        if self._longest is not None and ids_BS.shape[1] >= self._longest:
            by_length = "the model's rotary embeddings depend on the length of the batch"
            self._warn_once(f"A batch is not packed: from {self._longest} tokens on, {by_length}.")
            return None
        if self._chunk is not None and ids_BS.shape[1] > self._chunk:
            self._warn_once(f"A batch is not packed: it is longer than an attention chunk of {self._chunk} tokens.")
            return None
        shares = share and self.unshared_reason is None
        rebases = shares and self._rebases
        drops_ends = not inputs.get("output_router_logits")  # the router loss reads also tokens that predict no label

        def make_layout() -> Layout | str:
            batch = HostBatch.of(ids_BS, mask_BS, labels_BS)
            if batch.padded_reason or not with_images:
                lengths_B = batch.scored_lengths_B if drops_ends else batch.lengths_B
                return batch.padded_reason or _layout(batch, lengths_B, shares, rebases, ids_BS.device)
            return _layout_with_images(model, inputs, batch, shares, rebases)

        # DPO's reference and policy get the same tensors, so they share the result
        options = (shares, rebases, drops_ends, type(model) if with_images else None)
        image_tensors = [inputs.get(name) for name in (*IMAGE_INPUTS, *TOKEN_TYPES)] if with_images else []
        layout = _LAST_RESULTS[options].of(ids_BS, mask_BS, labels_BS, *image_tensors, make=make_layout)
        if isinstance(layout, str):
            self._warn_once(f"A batch is not packed: {layout}.")
            return None
        if self._unscaled_row is not None and max(layout.tokens, ids_BS.shape[1]) > self._unscaled_row:
            self._warn_once(
                f"A batch is not packed: beyond {self._unscaled_row} tokens, the model scales queries by their column."
            )
            return None
        self.skipped_tokens += ids_BS.numel() - layout.tokens
        return layout.for_pass(model.config.get_text_config()._attn_implementation)

    def _check(self, model: Any, batch: "HostBatch", device: torch.device) -> None:
        """Run a few rows of the first batch packed and padded, and turn off what changes their hidden states."""
        shares = (True, False) if self.unshared_reason is None else (False,)
        rows = (batch.ids_BS, batch.first_B, batch.lengths_B)
        check = check_packing(model, rows, device, shares, rebase=self._rebases)
        self.checked_tokens += check.tokens
        self.checked_completely = check.is_complete
        differences = check.differences
        if differences[False] is not None:
            self.padded_reason = differences[False]
            self._warn_once(f"Batches of {type(model).__name__} stay padded: {self.padded_reason}.")
        elif differences.get(True) is not None:
            self.unshared_reason = differences[True]
            self._warn_once(f"Prompts of {type(model).__name__} are not shared: {self.unshared_reason}.")

    def _check_images(self, model: Any, inputs: dict[str, Any], batch: "HostBatch") -> None:
        """Run the first batch whose images can be packed both ways, and turn off packing with images if they differ.

        Ranks do not exchange the result, because which batches are packed is decided for each batch of each rank.
        """
        shares = self.unshared_reason is None
        images = BatchImages.of(model, inputs, batch.ids_BS, batch.real_BS, share=shares)
        layout: Layout | str
        if isinstance(images, str) or batch.padded_reason is not None:
            layout = batch.padded_reason or str(images)
            # A reason of this batch, which says nothing of the model. Ranks must run equally many forwards, so with
            # others it stands for all batches
            if not has_other_ranks():
                self.images_checked = False
                return
        else:
            inputs = images.with_twin(inputs, batch.real_BS, text_id(model.config))
            unscored_BS = torch.full_like(inputs["input_ids"], -100)
            batch = HostBatch.of(inputs["input_ids"], inputs.get("attention_mask"), unscored_BS)
            try:
                layout = _layout_with_images(model, inputs, batch, shares, shares and self._rebases)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of the model's code that computes positions
                layout = f"on the first batch with images, packing fails: {error}"
        self.checked_tokens += inputs["input_ids"].numel()
        self.checked_tokens += inputs["input_ids"].numel() if isinstance(layout, str) else layout.tokens
        self.images_reason = image_difference(model, inputs, layout)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def _inputs_padded_reason(model: Any, positional: tuple[Any, ...], inputs: dict[str, Any]) -> str | None:
    """Return why a batch stays padded. All ranks find the same, unless some have images, as no reason reads tokens."""
    ids_BS = inputs.get("input_ids")
    if positional or ids_BS is None:
        return "its token ids are not given as `input_ids`"
    with_images = has_images(inputs)
    supported_inputs = {"input_ids", "attention_mask", *TOKEN_TYPES, *_NOT_BY_ROW}
    if with_images:
        supported_inputs |= set(IMAGE_INPUTS)
    additional = [name for name, x in inputs.items() if x is not None and name not in supported_inputs]
    if not with_images:
        additional += [name for name in TOKEN_TYPES if inputs.get(name) is not None and inputs[name].any()]
    additional += [name for name in ("output_attentions", "output_hidden_states") if inputs.get(name)]
    if additional:
        return f"it has the additional input `{additional[0]}`"
    mask = inputs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        return "its attention mask does not have two dimensions"
    attention = model.config.get_text_config()._attn_implementation or "eager"
    if attention not in _KNOWN_ATTENTION and "flash" not in attention:
        return f"the model's attention `{attention}` is not part of transformers"
    return unpacked_images_reason(model, inputs) if with_images else None


@dataclass(frozen=True)
class HostBatch:
    """A padded batch in host memory: token ids, which of them are real, and which predict a label, `(B, S)`."""

    ids_BS: NDArray[Any]
    real_BS: Mask
    scored_BS: Mask

    @classmethod
    def of(cls, ids_BS: Tensor, mask_BS: Tensor | None, labels_BS: Tensor) -> "HostBatch":
        """Copy a batch to the host, which waits for the device once."""
        S = ids_BS.shape[1]
        shifted_labels_BS = torch.nn.functional.pad(
            labels_BS[:, 1:].to(ids_BS.device), (0, S + 1 - labels_BS.shape[1]), value=-100
        )
        tensors = [x for x in (ids_BS, mask_BS, shifted_labels_BS) if x is not None]
        if ids_BS.device.type != "cpu":
            tensors = list(torch.stack([x.to(ids_BS.dtype) for x in tensors]).cpu())
        ids, *masks, labels = (x.numpy() for x in tensors)
        scored_BS = labels != -100
        return cls(ids, masks[0] != 0 if masks else np.ones(ids.shape, bool), scored_BS)

    @cached_property
    def first_B(self) -> NDArray[Any]:
        return self.real_BS.argmax(axis=1)

    @cached_property
    def lengths_B(self) -> NDArray[Any]:
        """Tokens from the first to the last real one; 0 for a row of padding."""
        return _ends(self.real_BS) - self.first_B

    @property
    def scored_lengths_B(self) -> NDArray[Any]:
        """Tokens from the first to the last that predicts a label."""
        return (_ends(self.scored_BS) - self.first_B).clip(min=0)

    @property
    def padded_reason(self) -> str | None:
        if (self.lengths_B != np.count_nonzero(self.real_BS, axis=1)).any():
            return "its attention mask has padding between tokens of a row"
        if (self.scored_BS & ~self.real_BS).any():
            return "it has labels that are predicted from padding"
        return None


def _layout(batch: HostBatch, lengths_B: NDArray[Any], share: bool, rebase: bool, device: torch.device) -> Layout:
    if not lengths_B.any():
        # Other ranks wait for this rank's forward, so it runs on one token, although nothing uses the result
        lengths_B = lengths_B.copy()
        lengths_B[0] = 1
    return Layout(
        batch.ids_BS,
        lengths_B,
        batch.first_B,
        scored_BS=batch.scored_BS,
        share=share,
        rebase=rebase,
        device=device,
    )


def _layout_with_images(
    model: Any, inputs: dict[str, Any], batch: HostBatch, share: bool, rebase: bool
) -> Layout | str:
    """Return the layout of a batch with images, or why it has none."""
    images = BatchImages.of(model, inputs, batch.ids_BS, batch.real_BS, share=share)
    if isinstance(images, str):
        return images
    marked = replace(batch, ids_BS=images.mark(batch.ids_BS))
    rebase = rebase or (share and has_own_positions(inputs))
    # All tokens, so that no image is cut, and the tower runs wherever it runs in TRL
    layout = _layout(marked, batch.lengths_B, share, rebase, inputs["input_ids"].device)
    images.pack(model, layout, inputs)
    return layout


class LastResult:
    """Keeps the last result of a function of tensors, and returns it again for the same tensors if unchanged."""

    def __init__(self) -> None:
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []
        self._inference_mode = False  # autograd cannot use a result of inference mode
        self._result: Any = None

    def of(self, *arguments: Tensor | None, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which reads these tensors."""
        tensors = [x for x in arguments if x is not None]
        if any(x.is_inference() for x in tensors):  # torch does not count writes to them
            return make()
        inference_mode = torch.is_inference_mode_enabled()
        if inference_mode != self._inference_mode or not self._are_unchanged(tensors):
            self._inference_mode = inference_mode
            self._result = make()
            self._tensors = [(weakref.ref(x), x._version) for x in tensors]
        return self._result

    def _are_unchanged(self, tensors: list[Tensor]) -> bool:
        """Whether these are the tensors of the last result, and nothing wrote to them since."""
        return len(tensors) == len(self._tensors) and all(
            reference() is x and version == x._version
            for x, (reference, version) in zip(tensors, self._tensors, strict=True)
        )


@contextmanager
def padded_in(packings: Iterable[Packing]) -> Iterator[None]:
    """Keep batches padded in the `with` block. None of them counts as the first batch, which packing checks."""
    reasons = [(packing, packing.padded_reason) for packing in packings]
    for packing, _ in reasons:
        packing.padded_reason = "this pass needs padded batches"
    try:
        yield
    finally:
        for packing, reason in reasons:
            packing.padded_reason = reason


# Keyed by the options of a layout
_LAST_RESULTS: defaultdict[tuple[Any, ...], LastResult] = defaultdict(LastResult)


def _ends(marked_BS: Mask) -> NDArray[Any]:
    """Return `(B,)`, the column after each row's last marked token; 0 if there is none."""
    ends_B: NDArray[Any] = marked_BS.shape[1] - marked_BS[:, ::-1].argmax(axis=1)
    return np.where(marked_BS.any(axis=1), ends_B, 0)
