"""A tile of the head's product, and its size: how many tokens by how many columns of the vocabulary."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """The product x = h W^T of some tokens and consecutive classes, and its operands.

    The next tile overwrites `product` (n, v). It includes the low-rank term of `down` (n, R) and `up` (v, R), but not
    yet `bias` (v,), of any dtype.
    """

    tokens: slice
    classes: slice
    product: Tensor
    bias: Tensor | None
    hidden: Tensor
    weight: Tensor
    down: Tensor | None
    up: Tensor | None


# Elements of one fp32 tile; on the CPU there are two such buffers at a time (three with a softcap), 4 MiB each
_ELEMENTS = {"cpu": 2**20}
_TOKENS = {"cpu": 1024, "accelerator": 4096}
# A library's matrix product gives each multiprocessor blocks of this size; a few of them keep it busy to the end
_BLOCK = 128 * 256
_BLOCKS_EACH = 4
_FEWEST_COLUMNS = 256
# A limit also for few tokens: the tile's slice of the weight may have to be cast, and that copy has as many rows
MOST_COLUMNS = 8192


def rows_per_tile(tokens: int, device: torch.device, chunk_size: int | None) -> int:
    """Tokens of a tile: the user's `chunk_size`, or an even share of all tokens."""
    if chunk_size is not None:
        return max(1, min(tokens, chunk_size))
    most = _TOKENS["cpu" if device.type == "cpu" else "accelerator"]
    if tokens <= most:
        return max(1, tokens)
    even = -(-tokens // -(-tokens // most))
    return -(-even // 128) * 128


def columns_per_tile(rows: int, vocabulary: int, device: torch.device, columns: int | None = None) -> int:
    """Columns of a tile of `rows` tokens: the user's `columns` or as many as fit, at most `MOST_COLUMNS`."""
    elements = _ELEMENTS.get(device.type) or _elements_of(device)
    return min(vocabulary, MOST_COLUMNS, columns or max(_FEWEST_COLUMNS, elements // rows))


@cache
def _elements_of(device: torch.device) -> int:
    """Elements that keep an accelerator busy: 2^24 on an H200, a buffer of 64 MiB beside 32 MiB of bf16 coefficients.

    That is below the 256 MiB of TRL 1.16's one bf16 tile. Reasoned, not measured: `benchmarks/head.py --sweep` does.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 2**24
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return 2 ** min(25, max(21, round(math.log2(_BLOCKS_EACH * multiprocessors * _BLOCK))))
