"""How large a tile of logits is: so many tokens by so many columns of the vocabulary."""

import torch

# Elements of one fp32 tile. Two such buffers live at a time (three with a softcap), beside half a tile for bf16
# probabilities on CUDA: 160 MiB there, below the 256 MiB of TRL 1.16's one bf16 tile; on CPU 4 MiB each.
_ELEMENTS = {"cuda": 2**24, "cpu": 2**20}
_TOKENS = {"cuda": 4096, "cpu": 1024}
_FEWEST_COLUMNS = 256
# Few tokens do not make a tile wide: its slice of the weight may have to be cast, and that copy has as many rows
_MOST_COLUMNS = 8192


def rows_per_tile(tokens: int, device: torch.device, chunk_size: int | None) -> int:
    """Tokens of a tile; `chunk_size` is the user's number, None chooses it."""
    return max(1, min(tokens, chunk_size or _TOKENS[_kind(device)]))


def columns_per_tile(rows: int, vocabulary: int, device: torch.device, columns: int | None = None) -> int:
    """Columns of a tile of so many tokens; `columns` settles it."""
    fitting = min(_MOST_COLUMNS, max(_FEWEST_COLUMNS, _ELEMENTS[_kind(device)] // rows))
    return min(vocabulary, columns or fitting)


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "cuda"
