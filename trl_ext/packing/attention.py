"""The attention of a packed row: every row of the batch sees its own tokens and those it shares, and nothing else.

It is a function of transformers' attention interface, which attention modules call by the name in their config. The
name is set only while a module runs with a layout: generation and padded calls run what the user chose. Gradient
checkpointing passes the layout again when it recomputes a module.
"""

import inspect
import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from .layout import Layout

_KEYWORD = "packed_layout"
_NAME = "trl_ext_packed"
_NOT_PASSED = "its layers do not pass their keyword arguments to their attention"
# Of torch's varlen flash attention
_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8
_HALF = (torch.bfloat16, torch.float16)
# Further tensors that layers pass to their attention: sinks are honoured, and positions are already in the queries
_KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position"}
_OLDEST_GPU = (8, 0)
# torch 2.11 detects fewer heads of keys than of queries; later versions need the argument
_TAKES_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


class LayoutNotReadError(RuntimeError):
    """A layer's attention cannot follow the layout."""


class _IndexSelectFP32Grad(torch.autograd.Function):
    """torch's own backward adds half-precision copies in half precision: with 64 completions of a prompt, the sum's
    error is 8 times that of one rounding."""

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, index = inputs
        ctx.save_for_backward(index)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape, dtype=torch.float32)
        return total.index_add_(0, index, gradient.float()).to(gradient.dtype), None


def index_select_fp32_grad(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]`, whose gradient sums repeated places in fp32 at least."""
    if x.dtype not in _HALF:
        return x.index_select(0, index)
    return _IndexSelectFP32Grad.apply(x, index)  # type: ignore[no-any-return, no-untyped-call]


def accept_layouts(model: Any) -> None:
    """Make the attention modules of `model` follow the layout that they are called with, if any."""
    AttentionInterface.register(_NAME, packed_attention)
    for module in model.modules():
        # Not on the layers: some releases of transformers skip a layer's hooks when they recompute it
        if hasattr(module, "layer_idx") and hasattr(module, "config"):
            module.register_forward_pre_hook(_switch_on, with_kwargs=True)
            module.register_forward_hook(_switch_off, with_kwargs=True, always_call=True)


def run_packed(model: Any, layout: Layout, inputs: dict[str, Any]) -> Any:
    """The backbone's outputs for the packed row: hidden states of shape `(1, T, H)`, or of this rank's shard.

    Raises:
        `LayoutNotReadError`: its attention cannot follow the layout.
    """
    before = layout.reads[0]
    row = layout.input_ids, layout.position_ids
    input_ids, position_ids = row if layout.shard is None else (layout.shard.columns(x) for x in row)
    # transformers passes a mask of four dimensions on unchanged. A layer that reads it instead of the layout gets NaN,
    # which the check of the first batch notices.
    mask = torch.full((1, 1, 1, 1), torch.nan, device=layout.input_ids.device)
    packed = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": mask, _KEYWORD: layout}
    outputs = model.base_model(**{**inputs, **packed})
    if layout.reads[0] == before:
        raise LayoutNotReadError(_NOT_PASSED)
    return outputs


def _switch_on(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if _KEYWORD in kwargs:
        module.config._attn_implementation_internal = _NAME


def _switch_off(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if _KEYWORD in kwargs:
        module.config._attn_implementation_internal = kwargs[_KEYWORD].implementation


# Not compiled: every batch has other lengths, and would be compiled again
@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """A function of transformers' attention interface.

    Args:
        query, key, value (`Tensor` of shape `(1, heads, T, head_size)`): of the packed row; keys and values may have
            fewer heads.
        attention_mask (`Tensor`): only its shape is checked; the layout says which tokens see which.
        options: `softcap` and `s_aux` (sinks) are honoured.

    Raises:
        `LayoutNotReadError`: the layer's attention is not one that a layout can describe.

    Returns:
        `(1, T, heads, head_size)`, and no attention weights.
    """
    layout = packed_layout
    if layout is None:
        raise LayoutNotReadError(_NOT_PASSED)
    if attention_mask is None or attention_mask.shape != (1, 1, 1, 1):
        raise LayoutNotReadError("its layers make a mask of their own")
    for name in options.keys() - _KNOWN_TENSORS:
        if isinstance(options[name], Tensor):
            raise LayoutNotReadError(f"its attention receives `{name}`")
    if False in (options.get("is_causal"), getattr(module, "is_causal", None)):
        raise LayoutNotReadError("its attention is not causal")
    if sliding_window is None and _slides(module):
        raise LayoutNotReadError("its attention does not pass its sliding window on")
    layout.reads[0] += 1
    special = {name: options[name] for name in ("softcap", "s_aux") if options.get(name) is not None}
    options = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, **special}
    shard = layout.shard
    query_THD, key_KHD, value_KHD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if shard is not None:
        query_THD, key_KHD, value_KHD = (shard.to_heads(x) for x in (query_THD, key_KHD, value_KHD))
        if "s_aux" in options:
            options["s_aux"] = shard.heads(options["s_aux"])
    output = _attended(module, query_THD, key_KHD, value_KHD, layout, options)
    return output if shard is None else shard.to_tokens(output.squeeze(0)).unsqueeze(0), None


def _attended(
    module: nn.Module, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, layout: Layout, options: dict[str, Any]
) -> Tensor:
    """`(1, T, heads, head_size)`, by the fastest kernel that supports all of `options`."""
    key_KHD, value_KHD = (
        index_select_fp32_grad(x, layout.keys_K) if layout.shared else x for x in (key_THD, value_THD)
    )
    if "flash" in layout.implementation:
        return _flash(module, query_THD, key_KHD, value_KHD, layout, options)
    scaling, sliding_window = options["scaling"], options["sliding_window"]
    plain = options.keys() <= {"scaling", "dropout", "sliding_window"} and options["dropout"] == 0.0
    if plain and _varlen_serves(query_THD, value_KHD):
        query_THD, key_KHD, value_KHD = (x.to(_attended_in(query_THD)) for x in (query_THD, key_KHD, value_KHD))
        return _varlen(query_THD, key_KHD, value_KHD, layout, scaling, sliding_window)
    del options["sliding_window"]
    return _by_segments(module, query_THD, key_KHD, value_KHD, layout, sliding_window, options)


def _slides(module: Any) -> bool:
    """Whether the config says that this layer has a sliding window."""
    config = module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return layer_types[module.layer_idx] == "sliding_attention"  # type: ignore[no-any-return]


def _by_segments(
    module: nn.Module,
    query_THD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    layout: Layout,
    sliding_window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Each segment by transformers' own attention: sdpa, or the model's eager one where sdpa lacks an option."""
    # If the user chose sdpa, it treats options that it lacks as it does without packing
    special = not options.keys() <= {"scaling", "dropout"}
    eager = layout.implementation == "eager" or (special and layout.implementation != "sdpa")
    attend = _eager_attention(module) if eager else AttentionInterface()["sdpa"]
    segments = layout.segments
    # Split in one step: the gradient of a single slice would be as large as that of the whole
    of_queries = query_THD.split([segment.rows * segment.queries for segment in segments])
    of_keys, of_values = (x.split([segment.rows * segment.keys for segment in segments]) for x in (key_KHD, value_KHD))
    outputs = []
    for segment, *qkv in zip(segments, of_queries, of_keys, of_values, strict=True):
        rows, queries, keys = segment
        window = sliding_window if sliding_window is not None and sliding_window < keys else None
        mask: Tensor | None = None
        if eager or window is not None or queries != keys:  # else sdpa is causal by itself
            mask = _mask(layout, queries, keys, window, query_THD.device)
            if eager:
                lowest = torch.finfo(query_THD.dtype).min
                mask = torch.zeros_like(mask, dtype=query_THD.dtype).masked_fill_(~mask, lowest)
            mask = mask.expand(rows, 1, queries, keys)
        by_row = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in qkv)
        output, _ = attend(module, *by_row, mask, **options)
        outputs.append(output.flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _mask(layout: Layout, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """`(queries, keys)`, bool: which of a row's `keys` tokens each of the last `queries` sees, `window` at most."""
    name = queries, keys, window, device
    if name not in layout.masks:
        columns = torch.arange(keys, device=device)
        distance = columns[keys - queries :].unsqueeze(1) - columns
        layout.masks[name] = (distance >= 0) & (distance < (keys if window is None else window))
    return layout.masks[name]


def _eager_attention(module: nn.Module) -> Any:
    """The eager attention of the model's family, from the module of its class."""
    files = (sys.modules[base.__module__] for base in type(module).__mro__)
    found = [file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward")]
    if not found:
        raise LayoutNotReadError("its eager attention is not in the module of its class")
    return found[0]


def _varlen_serves(query_THD: Tensor, value_KHD: Tensor) -> bool:
    sizes = query_THD.shape[-1], value_KHD.shape[-1]
    return (
        query_THD.is_cuda
        and _attended_in(query_THD) in _HALF
        and max(sizes) <= _LARGEST_HEAD
        and torch.cuda.get_device_capability(query_THD.device) >= _OLDEST_GPU
    )


def _attended_in(query_THD: Tensor) -> torch.dtype:
    """The dtype that sdpa would compute in: autocast, which leaves a norm's output in fp32, casts for sdpa only."""
    device = query_THD.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query_THD.dtype


def _varlen(
    query_THD: Tensor,
    key_KHD: Tensor,
    value_KHD: Tensor,
    layout: Layout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """torch's varlen flash attention, causal, with queries and keys of a row aligned at their last token."""
    attend: Any = varlen_attn
    size = value_KHD.shape[-1]
    scaling = query_THD.shape[-1] ** -0.5 if scaling is None else scaling
    # The kernel supports one head size; MLA has two
    widest = math.ceil(max(query_THD.shape[-1], size) / _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    qkv = (query_THD, key_KHD, value_KHD)
    output: Any = attend(
        *(x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in qkv),
        layout.query_starts,
        layout.key_starts,
        layout.longest_query,
        layout.longest_key,
        scale=scaling,
        window_size=(-1, 0) if sliding_window is None else (sliding_window - 1, 0),
        **({"enable_gqa": key_KHD.shape[1] != query_THD.shape[1]} if _TAKES_ENABLE_GQA else {}),
    )
    return output[..., :size].unsqueeze(0)  # type: ignore[no-any-return]


def _flash(
    module: Any, query_THD: Tensor, key_KHD: Tensor, value_KHD: Tensor, layout: Layout, options: dict[str, Any]
) -> Tensor:
    """The flash attention that the user chose, by transformers' own function, which takes lengths of rows."""
    module.config._attn_implementation_internal = layout.implementation  # the function looks the kernel up by this name
    try:
        output, _ = AttentionInterface()[layout.implementation](
            module,
            *(x.transpose(0, 1).unsqueeze(0) for x in (query_THD, key_KHD, value_KHD)),
            None,
            cu_seq_lens_q=layout.query_starts,
            cu_seq_lens_k=layout.key_starts,
            max_length_q=layout.longest_query,
            max_length_k=layout.longest_key,
            **options,
        )
    finally:
        module.config._attn_implementation_internal = _NAME
    return output  # type: ignore[no-any-return]
