"""The public function `linear_log_probs`, and the call of the tiled or dense head."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .adapters import LowRank, Operands, ReplacedRows
from .dense import dense_logits, log_probs_of, masked_logits
from .kernels.work import check_kernels
from .logits import OUTPUTS, LinearLogProbs, LogitTransform
from .parallel import VocabularyShard, check_range, range_of, shard_of_group
from .products import statistics_dtype
from .sampling_mask import SamplingMask
from .tiled import Head, tiled_log_probs

HEADS = ("tiled", "dense")


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    outputs: tuple[str, ...] = ("log_probs",),
    entropy_requires_grad: bool = False,
    chunk_size: int | None = None,
    tile_columns: int | None = None,
    kernels: str | None = None,
    group: dist.ProcessGroup | None = None,
    first_class: int = 0,
    vocab_size: int | None = None,
    own_tokens: bool = False,
) -> LinearLogProbs:
    """Return per-token log-probs of `targets` from hidden states, without storing all logits.

    The log-probs are `log_softmax(z)` at the targets, with the logits
    `z = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature`. The logits are computed tile
    by tile, accumulated in fp32 and never rounded to half precision. Besides inputs, outputs and gradients, the forward
    and the backward need the memory of one tile.

    Args:
        hidden (`torch.Tensor` of shape `(..., H)`):
            Hidden states, bf16, fp16, fp32 or float64.
        weight (`torch.Tensor` of shape `(V, H)`):
            Weight of the LM head, V at least 2. With `group`: this rank's rows, possibly none. Both operands are cast
            to the wider dtype of `hidden` and `weight`, or to autocast's dtype under autocast (except float64). The
            head computes with autocast and TF32 off.
        targets (`torch.Tensor` of shape `(...)`):
            Integer class ids in `[0, V)`. An id out of range raises an error on the CPU and gives NaN on other devices.
        bias (`torch.Tensor` of shape `(V,)`, *optional*):
            Bias of the head, one number per row of `weight`. It is added in fp32 (float64 for float64 operands).
        temperature (`float`, *optional*, defaults to `1.0`):
            Divides the logits, after the softcap.
        logit_scale (`float`, *optional*, defaults to `1.0`):
            Multiplies the product, before the softcap.
        softcap (`float`, *optional*):
            Bounds the logits before the temperature divides them (Gemma 2, arXiv 2408.00118).
        outputs (`tuple[str, ...]`, *optional*, defaults to `("log_probs",)`):
            Fields of [`LinearLogProbs`] to compute: `"log_probs"`, `"entropy"`, `"log_sum_sq_probs"`, `"mean_logits"`,
            `"is_top1"` or `"mean_log_probs"`. The gradient of `"mean_log_probs"` costs as much as the entropy's.
        entropy_requires_grad (`bool`, *optional*, defaults to `False`):
            Whether the entropy has a gradient. Without it and with a frozen weight, the forward already computes the
            gradient of the hidden states (two matrix products in total). Otherwise the backward recomputes the tiles.
        chunk_size (`int`, *optional*):
            Tokens in a tile. `None` chooses from the number of tokens and the device.
        tile_columns (`int`, *optional*):
            Columns of the vocabulary in a tile, at most 8192. `None` chooses from the tokens in a tile and the device.
        kernels (`str`, *optional*):
            What runs between the matrix products of a tile: `"triton"` (not for float64 operands) or `"torch"`. Their
            results differ by fp32 rounding. `None` uses Triton where it compiles for the device and its kernels
            reproduce torch's results there, and torch elsewhere.
        group (`torch.distributed.ProcessGroup`, *optional*):
            Ranks that each hold consecutive rows of the weight. All ranks call this function together, with the same
            options. They exchange a few fp32 numbers per token, never logits or rows of the weight.
        first_class (`int`, *optional*, defaults to `0`):
            With `group`, the class id of this rank's first row.
        vocab_size (`int`, *optional*):
            With `group`, the expected V, which is checked. `None` adds up the ranks' rows.
        own_tokens (`bool`, *optional*, defaults to `False`):
            With `group`, whether each rank has its own tokens, in any number (as under FSDP2). They are then gathered.
            `False`: all ranks have the same tokens (as under tensor parallelism).

    Returns:
        [`LinearLogProbs`]: tensors of shape `(...)`, fp32 (float64 for float64 operands; `is_top1` bool). Outputs that
        were not requested are None. Gradients flow through `log_probs` and `mean_log_probs`, and through `entropy` with
        `entropy_requires_grad`, to `hidden`, `weight` and `bias`. With `group`, they are the gradients of the sum of
        the ranks' losses, in which each token counts once, whether one rank has it (`own_tokens`) or all.

    Raises:
        `TypeError`: a tensor argument is not a tensor, `hidden`, `weight` or `bias` is not floating point, `targets`
            are not integers, or `temperature`, `logit_scale` or `softcap` is not a number.
        `ValueError`: shapes or devices do not match, a target on the CPU or an option is out of range, an output is
            unknown, the ranks' rows do not cover the vocabulary once, or `kernels="triton"` does not run here.
        `RuntimeError`: the backward runs under `create_graph=True`; there is no second derivative.

    Example:

    ```python
    >>> import torch
    >>> from trl_ext import linear_log_probs
    >>> hidden, weight = torch.randn(2, 5, 16), torch.randn(100, 16)
    >>> linear_log_probs(hidden, weight, torch.randint(100, (2, 5))).log_probs.shape
    torch.Size([2, 5])
    ```
    """
    _check_options(temperature, logit_scale, softcap, outputs, chunk_size=chunk_size, tile_columns=tile_columns)
    _check_tensors(hidden, weight, targets, bias)
    check_kernels(kernels, hidden.device)
    shard = None
    if group is not None:
        shard = shard_of_group(group, weight.shape[0], first_class, vocab_size, targets, own_tokens)
    elif first_class or own_tokens or vocab_size not in (None, weight.shape[0]):
        raise ValueError(
            "`first_class`, `vocab_size` and `own_tokens` are for a weight that is split over ranks. Pass `group` too."
        )
    elif weight.shape[0] < 2:
        raise ValueError(f"`weight` must have shape (V, H) with V at least 2, got {tuple(weight.shape)}.")
    else:
        check_range(*range_of(targets), weight.shape[0])
    return run_head(
        "tiled",
        hidden,
        weight,
        targets,
        bias=bias,
        transform=LogitTransform(float(temperature), float(logit_scale), softcap),
        outputs=outputs,
        entropy_requires_grad=entropy_requires_grad,
        chunk_size=chunk_size,
        tile_columns=tile_columns,
        kernels=kernels,
        shard=shard,
    )


# Not compiled: torch.compile may change rounding and the order of sums, and has dropped the cast to autocast's dtype
@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_head(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    entropy_requires_grad: bool = False,
    chunk_size: int | None = None,
    tile_columns: int | None = None,
    kernels: str | None = None,
    readable: Callable[[], AbstractContextManager[Any]] = nullcontext,
    shard: VocabularyShard | None = None,
    low_rank: LowRank | None = None,
    replaced: ReplacedRows | None = None,
    rows: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
) -> LinearLogProbs:
    """Call the head `name` of `HEADS` on checked input. Shapes, dtypes and results are those of [`linear_log_probs`].

    Args:
        readable (`Callable`, *optional*):
            Returns a context in which weight and bias can be read, for engines that shard parameters. The forward
            enters it, and so does a backward that reads the weight.
        shard (`VocabularyShard`, *optional*):
            For the tiled head: which rows of the weight this rank has. `weight` holds these rows; if the shard has
            `rows_for`, only the dtype of `weight` is read.
        low_rank (`LowRank`, *optional*):
            The term that an adapter adds to the product. Not with `shard`.
        replaced (`ReplacedRows`, *optional*), rows (`torch.Tensor` of shape `(K, H)`, *optional*):
            The classes whose rows of the weight are replaced by `rows`. Not with `shard`.
        sampling_mask (`SamplingMask`, *optional*):
            The classes over which each token's probabilities are normalised; its target is always one. Results are
            those of a vocabulary without the other classes, which get no gradient. Not with means over the vocabulary,
            and not with a `shard` whose ranks have their own tokens.
    """
    dtype = operand_dtype(hidden, weight)
    up_dtype = dtype if low_rank is None else low_rank.dtype
    x = Operands.of(hidden.reshape(-1, hidden.shape[-1]), weight, bias, low_rank, rows)
    targets_N = targets.reshape(-1).long()
    if sampling_mask is not None:
        assert {"mean_logits", "mean_log_probs"}.isdisjoint(outputs), outputs
        assert shard is None or shard.exchange.counts is None, shard
        sampling_mask = sampling_mask.with_targets(targets_N)
    if name == "dense":
        accumulate = statistics_dtype(dtype)
        logits_NV = dense_logits(x, transform, dtype, accumulate, readable, up_dtype=up_dtype, replaced=replaced)
        logits_NV = masked_logits(logits_NV, sampling_mask)
        results = log_probs_of(logits_NV, targets_N, outputs, entropy_requires_grad=entropy_requires_grad)
    else:
        head = Head(
            dtype,
            transform,
            outputs,
            shard or VocabularyShard(),
            chunk_size=chunk_size,
            columns=tile_columns,
            kernels=kernels,
            up_dtype=up_dtype,
            replaced=replaced,
            sampling_mask=sampling_mask,
            readable=readable,
        )
        results = tiled_log_probs(head, x, targets_N, entropy_requires_grad=entropy_requires_grad)
    return LinearLogProbs(*(None if x is None else x.view(targets.shape) for x in results))


def operand_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which hidden states and weight are multiplied."""
    wider = torch.promote_types(hidden.dtype, weight.dtype)
    device_type = hidden.device.type
    # Autocast leaves float64 alone
    if wider != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return wider


def _check_tensors(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    floating = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    tensors = floating | {"targets": targets}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}.")
    for name, tensor in floating.items():
        if not tensor.is_floating_point():
            raise TypeError(f"`{name}` must be floating point (bf16, fp16, fp32 or float64), got {tensor.dtype}.")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"`targets` must hold integer class ids, got {targets.dtype}.")
    if weight.ndim != 2:
        raise ValueError(f"`weight` must have shape (V, H), got {tuple(weight.shape)}.")
    vocabulary, width = weight.shape
    if hidden.ndim < 1 or hidden.shape[-1] != width:
        raise ValueError(
            f"`hidden` must have shape (..., {width}) to match `weight` of shape {tuple(weight.shape)}, got "
            f"{tuple(hidden.shape)}."
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`targets` must have the shape of `hidden` without the last dimension, {tuple(hidden.shape[:-1])}, got "
            f"{tuple(targets.shape)}."
        )
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"`bias` must have shape ({vocabulary},), got {tuple(bias.shape)}.")
    for name, tensor in tensors.items():
        if tensor.device != hidden.device:
            raise ValueError(f"`{name}` must be on the same device as `hidden`, {hidden.device}, got {tensor.device}.")


def _check_options(
    temperature: float, logit_scale: float, softcap: float | None, outputs: tuple[str, ...], **sizes: int | None
) -> None:
    for name, number in {"temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}.items():
        optional = name == "softcap" and number is None
        if not optional and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise TypeError(f"`{name}` must be a number, got {number!r}.")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"`temperature` must be a finite number above 0, got {temperature}.")
    if not math.isfinite(logit_scale):
        raise ValueError(f"`logit_scale` must be a finite number, got {logit_scale}.")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"`softcap` must be None or a finite number above 0, got {softcap}.")
    if isinstance(outputs, str) or not outputs or not all(name in OUTPUTS for name in outputs):
        raise ValueError(f"`outputs` must be a non-empty tuple of names from {list(OUTPUTS)}, got {outputs!r}.")
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"`{name}` must be None or an integer of at least 1, got {size!r}.")
