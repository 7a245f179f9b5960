"""Weights of 4 bits without data, in the layout of bitsandbytes."""

import math
from typing import Any

import torch


def packed(weight: Any) -> torch.nn.Parameter:
    """Return `weight`, a `bitsandbytes.nn.Params4bit` on the device "meta", as it is after it was quantized.

    Two values are in a byte, and each block has a scale. With `compress_statistics`, scales have 8 bits, and each of
    their blocks has a scale.
    """
    from bitsandbytes.functional import QuantState

    blocks = math.ceil(weight.numel() / weight.blocksize)
    nested: dict[str, Any] = {}
    if weight.compress_statistics:
        second = QuantState(absmax=torch.empty(math.ceil(blocks / 256)), code=torch.empty(256), blocksize=256)
        second.dtype = torch.float32
        nested = {"offset": torch.empty(()), "state2": second}
    state = QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32),
        shape=weight.shape,
        code=torch.empty(16),
        blocksize=weight.blocksize,
        quant_type=weight.quant_type,
        dtype=weight.dtype,
        **nested,
    )
    result = torch.nn.Parameter(torch.empty(math.ceil(weight.numel() / 2), 1, dtype=torch.uint8), requires_grad=False)
    result.quant_state = state  # type: ignore[attr-defined]
    return result
