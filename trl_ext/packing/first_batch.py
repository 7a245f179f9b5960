"""The check of the first batch: a few of its rows must have the same hidden states padded and packed.

Modules that mix tokens are also run with other hidden states in one row, which must not change their outputs for the
others. This shows what hidden states may hide, for example a state that a convolution carries from row to row.

The check detects what the rules of `support.py` cannot see. Every rank runs the same forwards, whatever its batch and
the results, because each forward of a sharded model needs all ranks.

What it detects, and what each needs:

- attention, or another layer, that reads other rows, or one row's state in the next: two rows;
- positions counted from the column or from the mask: padding before rows, and rows of different lengths;
- prompts that rows cannot share: two rows that begin with the same tokens;
- a mixer that reads padding: padding;
- a window or a chunk that the packed row ignores: rows that are longer than it.

The end of each row shows all but the last, in 64 tokens. So longer rows run only for a model whose config has a window
or a chunk that more tokens show, and for code of users, whose reach is not known.
"""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .attention import LayoutNotReadError, run_packed
from .hooks import functions_of_users, is_known, is_replaced_in_libraries, without_hooks_of_users
from .layout import Layout
from .mixer_states import output_of
from .support import (
    backbone_of,
    has_experts,
    longest_equal,
    longest_in_one_chunk,
    mixers_of,
    own_class_of,
    placeholder_ids,
    takes_text_only,
    text_backbone_of,
    text_id,
)

ROWS = 3  # of the batch, to which one is added
# Tokens of each row: for layers of libraries, and for those that only a longer row shows to be wrong
_COLUMNS = 64
_MOST_COLUMNS = 1024
_PREPENDED = 3
# Names of config fields that say how many tokens a layer sees, or processes together
_REACH = re.compile("^(?!.*(layers|experts|pattern)).*(window|chunk|block|local|kernel|distance|topk)")
_OF_PYTHON = ("abc", "typing")
# Tolerances relative to a hidden state's norm, in fp32 and in lower precision
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 0.2
# The share of tokens that may exceed them in lower precision, or if rounding can change a router's choice of experts
_OUTLIERS = 0.1
# Part of an output's norm by which it may change with another row. Rounding changes less, tokens of that row far more
_LEAK = 1e-2


@dataclass(frozen=True)
class PackingCheck:
    """What the check found, and what it took."""

    differences: dict[bool, str | None]  # how packing changes the results, by whether rows share leading tokens
    tokens: int  # that the backbone processed
    is_complete: bool  # whether the batch had rows as long as the check runs, of different lengths


def check_packing(
    model: Any,
    rows: tuple[NDArray[Any], NDArray[Any], NDArray[Any]],
    device: torch.device,
    shares: tuple[bool, ...],
    *,
    rebase: bool,
) -> PackingCheck:
    """Compare the results of packed rows with those of padded ones, for each of `shares`.

    Args:
        rows: token ids `(B, S)`, and the first column and the length of each row, `(B,)`.
        device: where the model's inputs lie.
        shares (`tuple[bool, ...]`): whether rows share leading tokens.
        rebase (`bool`): whether positions of rows that share tokens begin at 0.
    """
    ids_BS, lengths_B = _rows_to_check(model, *rows)
    first_B = np.full_like(lengths_B, _PREPENDED)
    attention = model.config.get_text_config()._attn_implementation
    differences: dict[bool, str | None] = {}
    tokens = ids_BS.size
    with undisturbed(model, device):
        places_BS = np.arange(ids_BS.shape[1]) - first_B[:, None]
        real_BS = (places_BS >= 0) & (places_BS < lengths_B[:, None])
        ids, mask = (torch.from_numpy(x).to(device) for x in (ids_BS, real_BS.astype(ids_BS.dtype)))
        with _leaks(mixers_of(model), mask == 0) as leaks_of_padding:
            padded_BSH = backbone_of(model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        # As in training, only the padded batch has a row's last token, which no earlier token may see
        packed_lengths_B = (lengths_B - 1).clip(min=1)
        for share in shares:
            layout = Layout(
                ids_BS,
                packed_lengths_B,
                first_B,
                share=share,
                rebase=share and rebase,
                implementation=attention,
                device=device,
            )
            tokens += layout.tokens
            in_first_row_1T = torch.arange(layout.tokens, device=device)[None] < int(packed_lengths_B[0])
            try:
                with _leaks([] if share else _token_mixers(model), in_first_row_1T) as leaks:
                    hidden_TH = run_packed(model, layout, {"use_cache": False}).last_hidden_state[0]
            except LayoutNotReadError as error:
                differences[share] = str(error)
                continue
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of a mixer's code, which may need what only whole rows have
                if not mixers_of(model):
                    raise
                differences[share] = f"on the first batch, packing fails: {error}"
                continue
            if leaks_of_padding or leaks:
                source = "padding" if leaks_of_padding else "another row"
                leak, *_ = leaks_of_padding or leaks
                differences[share] = f"on the first batch, outputs of the model's {leak} depend on {source}"
                continue
            # A model that is split over devices may begin and end on different devices
            packed_BS = (layout.at_BS >= 0).to(padded_BSH.device)
            hidden_NH = hidden_TH[layout.real_places().to(hidden_TH.device)]
            differences[share] = _difference_reason(model, hidden_NH, padded_BSH[packed_BS])
    has_longest = int(lengths_B.max()) == columns_to_check(model)
    return PackingCheck(differences, tokens, is_complete=has_longest and len(set(lengths_B.tolist())) > 1)


def image_difference(model: Any, inputs: dict[str, Any], layout: Layout | str) -> str | None:
    """Return how packing changes the hidden states of a batch with images, or None.

    Args:
        inputs: of the backbone.
        layout: of the batch, or why it has none.
    """
    with undisturbed(model, inputs["input_ids"].device):
        padded_BSH = backbone_of(model)(**inputs).last_hidden_state
        try:
            if isinstance(layout, str):
                backbone_of(model)(**inputs)  # other ranks run two forwards
                return layout
            hidden_TH = run_packed(model, layout, inputs).last_hidden_state[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the model's code, which may read its images in another way
            return f"on the first batch with images, packing fails: {error}"
        packed_BS = (layout.at_BS >= 0).to(padded_BSH.device)
        hidden_NH = hidden_TH[layout.real_places().to(hidden_TH.device)]
        return _difference_reason(model, hidden_NH, padded_BSH[packed_BS], batch="the first batch with images")


@contextmanager
def _leaks(modules: list[nn.Module], changed_BS: Tensor) -> Iterator[list[str]]:
    """Collect the classes of `modules` in which some tokens change the outputs for other tokens, of other rows.

    In the `with` block, each module first runs with other hidden states for the tokens in `changed_BS`, bool `(B, S)`.
    """
    leaks: list[str] = []
    other_outputs: dict[nn.Module, Tensor] = {}
    running_again: list[nn.Module] = []

    def run_changed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if running_again:
            return
        arguments: dict[Any, Any] = dict(enumerate(args)) | kwargs
        tensors = [name for name, x in arguments.items() if isinstance(x, Tensor)]
        name = "hidden_states" if "hidden_states" in tensors else tensors[0]
        hidden = arguments[name]  # of shape `(B, S, H)`, or `(B * S, H)`
        if hidden.shape[:-1].numel() != changed_BS.numel():
            return
        changed = changed_BS.to(hidden.device).view(*hidden.shape[:-1], 1)
        arguments[name] = torch.where(changed, hidden.flip(-1) + 1, hidden)
        running_again.append(module)
        positional = [arguments.pop(number) for number in range(len(args))]
        try:
            other_outputs[module] = output_of(module(*positional, **arguments))
        finally:
            running_again.clear()

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if running_again or module not in other_outputs:
            return
        output, other = output_of(output), other_outputs.pop(module)
        if output.shape[:-1].numel() != changed_BS.numel():
            return
        is_kept_N = ~changed_BS.flatten().to(output.device)
        output_NH, other_NH = (x.flatten(0, -2)[is_kept_N].float() for x in (output, other))
        difference_N = (output_NH - other_NH).norm(dim=-1) / output_NH.norm(dim=-1).clamp(min=1e-30)
        if (difference_N > _LEAK).any():  # NaN is seen in the hidden states
            leaks.append(type(module).__name__)

    handles = []
    for module in modules:
        # Before the hooks that switch to packed attention, which the second call would switch off
        handles.append(module.register_forward_pre_hook(run_changed, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(compare, with_kwargs=True))
    try:
        yield leaks
    finally:
        for handle in handles:
            handle.remove()


def _token_mixers(model: Any) -> list[nn.Module]:
    """Return attention modules, mixers and others with a place in a cache, without the layers that hold them."""
    placed = [x for x in text_backbone_of(model).modules() if hasattr(x, "layer_idx")]
    token_mixers = dict.fromkeys([*mixers_of(model), *placed])
    return [x for x in token_mixers if not any(y is not x and y in token_mixers for y in x.modules())]


def columns_to_check(model: Any) -> int:
    """Return how many tokens of each row are checked."""
    config = model.config.get_text_config()
    columns = _MOST_COLUMNS
    if is_of_libraries(text_backbone_of(model)):
        # Half of a row is beyond each reach. The longest check does not show a longer one
        reaches = [x for name, x in vars(config).items() if isinstance(x, int) and _REACH.search(name)]
        columns = min(_MOST_COLUMNS, max([_COLUMNS, *(2 * reach for reach in reaches if reach < _MOST_COLUMNS)]))
    limits = (longest_equal(model), longest_in_one_chunk(model), getattr(config, "max_position_embeddings", None))
    return max(1, min([columns, *(limit - _PREPENDED for limit in limits if limit is not None and limit > 0)]))


def is_of_libraries(model: nn.Module) -> bool:
    """Whether only code of known packages runs in a forward of `model`, apart from hooks."""
    if is_replaced_in_libraries():
        return False
    for module in model.modules():
        if module._compiled_call_impl is not None:  # the backend of `compile` may be the user's
            return False
        part = own_class_of(module)
        if not all(is_known(x.__module__) or x.__module__ in _OF_PYTHON for x in part.__mro__):
            return False
        if any(True for x in (part.forward, vars(module).get("forward")) for _ in functions_of_users(x)):
            return False
    return True


def _rows_to_check(
    model: Any, ids_BS: NDArray[Any], first_B: NDArray[Any], lengths_B: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the ends of the first rows, plus a copy of the longest with a different second half, all left-padded.

    So two rows start with the same tokens and end with different ones, each half more than a tenth of all tokens. The
    padding exposes models that use the column index as the position. The beginnings of rows would not do, because the
    first rows of GRPO are completions of one prompt.
    """
    columns = columns_to_check(model)
    all_lengths_B = lengths_B[:ROWS]
    # Cut to different lengths, as in a batch
    most_B = columns - columns // 8 * np.arange(len(all_lengths_B))
    lengths_B = np.minimum(all_lengths_B, most_B).clip(1)
    width = lengths_B.max()
    first_B = first_B[:ROWS] + (all_lengths_B - lengths_B).clip(0)
    source_BS = (first_B[:, None] + np.arange(width)).clip(max=ids_BS.shape[1] - 1)
    ids_BS = np.take_along_axis(ids_BS[:ROWS], source_BS, axis=1)
    if not takes_text_only(model):
        # Without their images, placeholders would not be what the model expects
        placeholders = sorted(placeholder_ids(model.config))
        ids_BS = np.where(np.isin(ids_BS, placeholders), text_id(model.config), ids_BS)
    longest = lengths_B.argmax()
    twin_S = np.concatenate([ids_BS[longest, : width - width // 2], ids_BS[longest, : width // 2]])
    return np.pad(np.vstack([ids_BS, twin_S]), ((0, 0), (_PREPENDED, 0))), np.append(lengths_B, lengths_B[longest])


@contextmanager
def undisturbed(model: Any, device: torch.device) -> Iterator[None]:
    """Run `model` for a check in the `with` block: users' hooks do not notice it, and random states stay as they were.

    Each block gets equal random numbers.
    """
    devices = [] if device.type == "cpu" else [device]
    states = random.getstate(), np.random.get_state()
    fork = torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type)
    try:
        with evaluating(model), without_hooks_of_users(model), fork:
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Run `model` in evaluation mode and without gradients in the `with` block."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _difference_reason(model: Any, hidden_NH: Tensor, padded_NH: Tensor, batch: str = "the first batch") -> str | None:
    difference_N = (hidden_NH - padded_NH).float().norm(dim=1) / padded_NH.float().norm(dim=1).clamp(min=1e-30)
    coarse = is_coarse(model, padded_NH)
    is_outlier_N = ~(difference_N <= (_COARSE_TOLERANCE if coarse else _TOLERANCE))
    allowed_share = _OUTLIERS if coarse or has_experts(model) else 0.0
    # If the padded results are NaN too, packing is not the cause
    if not padded_NH.isfinite().all() or is_outlier_N.float().mean() <= allowed_share:
        return None
    return f"on {batch}, packed hidden states differ from padded ones by {difference_N.max():.2g} of their norm"


def is_coarse(model: Any, hidden_NH: Tensor) -> bool:
    """Whether matrix products are less precise than fp32, so hidden states change visibly with a batch's shape."""
    return (
        hidden_NH.dtype in (torch.bfloat16, torch.float16)
        or torch.is_autocast_enabled(hidden_NH.device.type)
        or not multiplies_fp32(hidden_NH.device)
        or getattr(model, "is_quantized", False)
    )


def multiplies_fp32(device: torch.device) -> bool:
    """Whether matrix products of fp32 tensors have fp32 precision on `device`, by any of torch's switches."""
    # `torch.get_float32_matmul_precision` fails after a newer switch is set, as transformers does for `tf32=True`
    backends: Any = torch.backends
    matmul = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    return matmul.fp32_precision in ("none", "ieee")
