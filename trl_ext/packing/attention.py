"""The attention of a packed row. Each row of the batch sees only its own tokens and those that it shares.

It is a function of transformers' attention interface, which attention modules call by the name in their config. The
name is set only while a module runs with a layout, so generation and padded calls run the attention that the user
chose. Gradient checkpointing passes the layout again when it recomputes a module.
"""

import inspect
import logging
import math
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from .layout import Layout, Segment
from .support import backbone_of

logger = logging.getLogger("trl_ext")

# The keyword argument of a forward that has the layout
LAYOUT_ARGUMENT = "packed_layout"
# Inputs of multimodal models that say what each token is: 0 for text
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
_NAME = "trl_ext_packed"
_NOT_PASSED = "the model's layers do not pass their keyword arguments to their attention"
# Limits of torch's varlen flash attention
_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8
_HALF = (torch.bfloat16, torch.float16)
# Other tensors that layers may pass to their attention: sinks are applied, and queries already include the positions
_KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position"}
_OLDEST_GPU = (8, 0)
# torch 2.11 detects grouped-query attention; later versions need the argument
_TAKES_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
# What one more attention call costs on a GPU, in pairs of a query and a key of one head. Eager attention of Gemma 2 and
# GPT-OSS launches 33 kernels, forward and backward, and moves 130 bytes a pair (counted). At 5 us a launch and an
# H100's 3.35 TB/s, a call is 4 million pairs: an estimate. sdpa has about half of each. On a CPU a call costs little.
# There only equal lengths share one, so a row has the same bits in each batch: DPO's store scores it in another one.
_PAIRS_OF_A_CALL: dict[str, float | None] = {"cuda": 33 * 5e-6 / (130 / 3.35e12), "cpu": None}


class LayoutNotReadError(RuntimeError):
    """A layer's attention does not use the layout."""


class _IndexSelectFP32Grad(torch.autograd.Function):
    """`index_select` whose backward sums in fp32. torch sums in half precision: with 64 completions of a prompt, the
    error is 8 times that of one rounding."""

    @staticmethod
    def forward(index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.index_select(0, index) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.rows = len(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors

        def sum_repeated(*gradients: Tensor) -> tuple[Tensor, ...]:
            first = gradients[0]
            stacked = first.new_empty(len(gradients), *first.shape, dtype=torch.float32)
            total = stacked.new_zeros(len(gradients), ctx.rows, *first.shape[1:])
            return total.index_add_(1, index, torch.stack(gradients, out=stacked)).to(first.dtype).unbind()

        # In one sum, except those of keys and values with different head sizes
        if len({x.shape for x in gradients}) == 1:
            return None, *sum_repeated(*gradients)
        return None, *(sum_repeated(x)[0] for x in gradients)


def index_select_fp32_grad(x: Tensor, index: Tensor) -> Tensor:
    """Return `x[index]`, whose gradient sums repeated indices in fp32 or float64."""
    return select_fp32_grad(index, x)[0]


def select_fp32_grad(index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`index_select_fp32_grad` of several tensors of the same length, dtype and device."""
    if tensors[0].dtype not in _HALF:
        return tuple(x.index_select(0, index) for x in tensors)
    return _IndexSelectFP32Grad.apply(index, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def accept_layouts(model: Any) -> None:
    """Make the attention modules of `model` use the layout in their arguments, if there is one."""
    AttentionInterface.register(_NAME, packed_attention)
    for module in model.modules():
        # Not on the layers, because some releases of transformers skip a layer's hooks when they recompute it
        if hasattr(module, "layer_idx") and hasattr(module, "config"):
            module.register_forward_pre_hook(_switch_on, with_kwargs=True)
            module.register_forward_hook(_switch_off, with_kwargs=True, always_call=True)


def run_packed(model: Any, layout: Layout, inputs: dict[str, Any]) -> Any:
    """Run the backbone on the packed row. The hidden states have shape `(1, T, H)`, or are those of this rank's shard.

    Raises:
        `LayoutNotReadError`: the model's attention does not use the layout.
    """
    reads_before = layout.reads[0]
    input_ids = layout.input_ids
    position_ids = layout.position_ids
    if layout.shard is not None:
        input_ids = layout.shard.columns(input_ids)
        position_ids = layout.shard.columns(position_ids)
    # transformers does not change a mask of four dimensions. A layer that reads it instead of the layout gets NaN, and
    # the check of the first batch detects that.
    packed = {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "attention_mask": layout.no_mask,
        LAYOUT_ARGUMENT: layout,
    }
    packed |= {name: torch.zeros_like(input_ids) for name in TOKEN_TYPES if inputs.get(name) is not None}
    with_images: AbstractContextManager[None] = nullcontext()
    if layout.images is not None:
        packed |= layout.images.inputs(inputs)
        with_images = layout.images.repeated(model)
    model_inputs = inputs | packed
    with with_images:
        outputs = backbone_of(model)(**model_inputs)
    if layout.reads[0] == reads_before:
        raise LayoutNotReadError(_NOT_PASSED)
    return outputs


def _switch_on(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if LAYOUT_ARGUMENT in kwargs:
        module.config._attn_implementation_internal = _NAME


def _switch_off(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if LAYOUT_ARGUMENT in kwargs:
        module.config._attn_implementation_internal = kwargs[LAYOUT_ARGUMENT].implementation


# Not compiled: lengths differ in every batch, so every batch would be compiled again
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
    """Compute the attention of a packed row, as a function of transformers' attention interface.

    Args:
        query, key, value (`Tensor` of shape `(1, heads, T, head_size)`): of the packed row. Keys and values may have
            fewer heads.
        attention_mask (`Tensor`): only its shape is checked. The layout says which tokens see which.
        options: `softcap` and `s_aux` (sinks) are applied.

    Raises:
        `LayoutNotReadError`: a layout cannot describe the layer's attention.

    Returns:
        `tuple[Tensor, None]`: the output `(1, T, heads, head_size)`, and no attention weights.
    """
    layout = packed_layout
    if layout is None:
        raise LayoutNotReadError(_NOT_PASSED)
    if attention_mask is None or attention_mask.shape != (1, 1, 1, 1):
        raise LayoutNotReadError("the model's layers make their own attention mask")
    for name in sorted(options.keys() - _KNOWN_TENSORS):
        if isinstance(options[name], Tensor):
            raise LayoutNotReadError(f"the model's attention receives `{name}`")
    if False in (options.get("is_causal"), getattr(module, "is_causal", None)):
        raise LayoutNotReadError("the model's attention is not causal")
    if sliding_window is None and _has_sliding_window(module):
        raise LayoutNotReadError("the model's attention does not forward `sliding_window`")
    layout.reads[0] += 1
    special = {name: options[name] for name in ("softcap", "s_aux") if options.get(name) is not None}
    options = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, **special}
    shard = layout.shard
    query_THD, key_KHD, value_KHD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if shard is not None:
        query_THD, key_KHD, value_KHD = (shard.to_heads(x) for x in (query_THD, key_KHD, value_KHD))
        if "s_aux" in options:
            options["s_aux"] = shard.heads(options["s_aux"])
    output = _attend(module, query_THD, key_KHD, value_KHD, layout, options)
    if shard is not None:
        output = shard.to_tokens(output.squeeze(0)).unsqueeze(0)
    return output, None


def _attend(
    module: nn.Module, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, layout: Layout, options: dict[str, Any]
) -> Tensor:
    """Return `(1, T, heads, head_size)`, computed by the fastest kernel that supports all `options`."""
    flash = "flash" in layout.implementation
    if not flash and not _varlen_supports(query_THD, value_THD, options):
        return _by_batches(module, query_THD, key_THD, value_THD, layout, options)
    key_KHD, value_KHD = key_THD, value_THD
    if layout.shares_tokens:
        key_KHD, value_KHD = select_fp32_grad(layout.keys_K, key_THD, value_THD)
    if flash:
        return _flash(module, query_THD, key_KHD, value_KHD, layout, options)
    query_THD, key_KHD, value_KHD = (x.to(_attention_dtype(query_THD)) for x in (query_THD, key_KHD, value_KHD))
    return _varlen(query_THD, key_KHD, value_KHD, layout, options["scaling"], options["sliding_window"])


def _has_sliding_window(module: Any) -> bool:
    """Whether the config says that this layer has a sliding window."""
    config = module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if module.layer_idx is None:  # as in Zamba, where several layers share one attention
        return "sliding_attention" in layer_types
    return layer_types[module.layer_idx] == "sliding_attention"  # type: ignore[no-any-return]


def _by_batches(
    module: nn.Module, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, layout: Layout, options: dict[str, Any]
) -> Tensor:
    """Compute batches of rows by transformers' sdpa attention, or by the model's eager one if sdpa lacks an option."""
    window = min(options.pop("sliding_window") or layout.longest_key, layout.longest_key)
    # If the user chose sdpa, it ignores or refuses options that it lacks, as it does without packing
    special = not options.keys() <= {"scaling", "dropout"}
    eager = layout.implementation == "eager" or (special and layout.implementation != "sdpa")
    attend = _eager_attention(module) if eager else AttentionInterface()["sdpa"]
    dtype = query_THD.dtype if eager else _attention_dtype(query_THD)
    settings = (query_THD.shape[1], window, dtype, eager, query_THD.device)
    if settings not in layout.calls:
        layout.calls[settings] = _plan_calls(layout, *settings)
    calls: _Calls = layout.calls[settings]
    query_THD = query_THD if calls.queries is None else query_THD.index_select(0, calls.queries)
    key_KHD, value_KHD = key_THD, value_THD
    if calls.keys is not None:
        key_KHD, value_KHD = select_fp32_grad(calls.keys, key_THD, value_THD)
    call_queries = _split(query_THD, calls.shapes, 1)
    call_keys = _split(key_KHD, calls.shapes, 2)
    call_values = _split(value_KHD, calls.shapes, 2)
    outputs = []
    for mask, *qkv in zip(calls.masks, call_queries, call_keys, call_values, strict=True):
        output, _ = attend(module, *(x.transpose(1, 2) for x in qkv), mask, **options)
        outputs.append(output.flatten(0, 1))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (output if calls.place_T is None else output.index_select(0, calls.place_T)).unsqueeze(0)


class _Calls(NamedTuple):
    """The attention of a packed row in several calls. Indices are those of `Layout.in_batches`, or None: in order."""

    shapes: list[Segment]
    masks: list[Tensor | None]
    queries: Tensor | None
    keys: Tensor | None
    place_T: Tensor | None


def _plan_calls(
    layout: Layout, heads: int, window: int, dtype: torch.dtype, eager: bool, device: torch.device
) -> _Calls:
    """Return shapes, masks and indices of the calls.

    A mask is added to the scores, so that each query sees the keys of its row, at most `window`. All layers share it:
    sdpa would convert a bool mask in each layer, and keep the copy for the backward.
    """
    groups = _groups(layout.segments, heads, window, eager, device)
    calls = [_shape(layout.segments, group, window) for group in groups]
    shapes = [shape for shape, _, _ in calls]
    queries: Tensor | None = None
    keys: Tensor | None = layout.keys_K if layout.shares_tokens else None
    place_T: Tensor | None = None
    call_indices: list[Any] = groups  # of queries and keys; read only where rows of different lengths share a call
    if len(groups) < len(layout.segments):
        queries, keys, place_T = layout.in_batches(groups)
        call_indices = list(zip(_split(queries, shapes, 1), _split(keys, shapes, 2), strict=True))
    masks: list[Tensor | None] = []
    for (shape, padded, causal), indices in zip(calls, call_indices, strict=True):
        if not eager and causal:
            masks.append(None)
            continue
        columns = torch.arange(shape.keys, device=device)
        distance = columns[shape.keys - shape.queries :].unsqueeze(1) - columns
        mask = ((distance >= 0) & (distance < window)).view(1, 1, shape.queries, shape.keys)
        if padded:
            # An index before an equal one is padding. Padded queries see it, because a softmax needs a key
            query_RQ, key_RK = (F.pad(x[:, 1:] == x[:, :-1], (0, 1)) for x in indices)
            mask = mask & (query_RQ[:, None, :, None] | ~key_RK[:, None, None])
        unseen = torch.finfo(dtype).min if eager else -torch.inf
        additive_mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, unseen)
        masks.append(additive_mask.expand(shape.rows, 1, -1, -1))
    return _Calls(shapes, masks, queries, keys, place_T)


def _groups(segments: list[Segment], heads: int, window: int, eager: bool, device: torch.device) -> list[list[int]]:
    """Return numbers of segments for each call. The longest first, each joins a call or begins one, as costs less."""
    pairs_of_call = _PAIRS_OF_A_CALL.get(device.type)
    if pairs_of_call is None:
        return [[number] for number in range(len(segments))]

    def cost(call: list[int]) -> float:
        """Return the cost of a call in pairs of a query and a key of one head."""
        shape, _, causal = _shape(segments, call, window)
        pairs = math.prod(shape) / (2 if causal and not eager else 1)
        return heads * pairs + pairs_of_call

    calls: list[list[int]] = []
    for number in sorted(range(len(segments)), key=lambda i: segments[i][:0:-1], reverse=True):
        best = min([*calls, []], key=lambda call: cost([*call, number]) - (cost(call) if call else 0))
        calls += [] if best else [best]
        best.append(number)
    return sorted(sorted(call) for call in calls)


def _shape(segments: list[Segment], call: list[int], window: int) -> tuple[Segment, bool, bool]:
    """Return the shape of a call, whether rows are padded, and whether sdpa needs no mask and skips half of it."""
    rows, queries, keys = zip(*(segments[i] for i in call), strict=True)
    padded = len({*zip(queries, keys, strict=True)}) > 1
    return Segment(sum(rows), max(queries), max(keys)), padded, not padded and queries[0] == keys[0] <= window


def _split(x: Tensor, shapes: list[Segment], axis: int) -> list[Tensor]:
    """Return `(rows, tokens, ...)` of each call."""
    # In one call: the gradient of each single slice would be as large as the whole
    parts = x.split([shape.rows * shape[axis] for shape in shapes])
    return [part.unflatten(0, (shape.rows, -1)) for part, shape in zip(parts, shapes, strict=True)]


def _eager_attention(module: nn.Module) -> Any:
    """Return the eager attention of the model's family, from the Python module of its class."""
    files = (sys.modules[base.__module__] for base in type(module).__mro__)
    forwards = [file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward")]
    if not forwards:
        raise LayoutNotReadError("the model's eager attention is not in the Python module of its attention class")
    return forwards[0]


def _varlen_supports(query_THD: Tensor, value_THD: Tensor, options: dict[str, Any]) -> bool:
    """Whether torch's varlen attention can run. On a GPU, a warning says why not."""
    if not query_THD.is_cuda:
        return False
    dtype = _attention_dtype(query_THD)
    size = max(query_THD.shape[-1], value_THD.shape[-1])
    reasons = {
        "has a softcap": "softcap" in options,
        "has sinks": "s_aux" in options,
        "has dropout": options["dropout"] != 0.0,
        f"runs in {dtype}": dtype not in _HALF,
        f"has heads of more than {_LARGEST_HEAD}": size > _LARGEST_HEAD,
        "runs on a GPU older than Ampere": torch.cuda.get_device_capability(query_THD.device) < _OLDEST_GPU,
    }
    for reason in [reason for reason, applies in reasons.items() if applies]:
        _warn_of_batches(reason)
    return not any(reasons.values())


@cache
def _warn_of_batches(reason: str) -> None:
    logger.warning(
        f"Attention {reason}, which torch's varlen kernel does not support. Packed rows run in padded batches instead. "
        "This takes several calls in each layer and, in eager attention, memory for all pairs of a query and a key. If "
        "FlashAttention supports such attention, set `attn_implementation`."
    )


def _attention_dtype(query_THD: Tensor) -> torch.dtype:
    """Return the dtype of sdpa: autocast casts the queries, which a norm may leave in fp32, only inside sdpa."""
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
    """Run torch's varlen flash attention, causal, with the queries and keys of a row aligned at their last token."""
    attend: Any = varlen_attn
    size = value_KHD.shape[-1]
    scaling = query_THD.shape[-1] ** -0.5 if scaling is None else scaling
    # The kernel needs equal head sizes, but MLA has two
    widest = math.ceil(max(query_THD.shape[-1], size) / _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    qkv = (query_THD, key_KHD, value_KHD)
    grouped_queries = {"enable_gqa": key_KHD.shape[1] != query_THD.shape[1]} if _TAKES_ENABLE_GQA else {}
    output: Any = attend(
        *(x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in qkv),
        layout.query_starts,
        layout.key_starts,
        layout.longest_query,
        layout.longest_key,
        scale=scaling,
        window_size=(-1, 0) if sliding_window is None else (sliding_window - 1, 0),
        **grouped_queries,
    )
    return output[..., :size].unsqueeze(0)  # type: ignore[no-any-return]


def _flash(
    module: Any, query_THD: Tensor, key_KHD: Tensor, value_KHD: Tensor, layout: Layout, options: dict[str, Any]
) -> Tensor:
    """Run the flash attention that the user chose, by transformers' function, which supports rows of any length."""
    module.config._attn_implementation_internal = layout.implementation  # the function finds its kernel by this name
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
