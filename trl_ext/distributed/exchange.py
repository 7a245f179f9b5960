"""Rows of a batch move between ranks: one exchange of their values, without padding."""

import math
import zlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from .ranks import Ranks


@dataclass(frozen=True)
class Column:
    """How an entry of a batch with values for each token, `(B, W, ...)`, is padded."""

    fill: float = 0
    pads_left: bool = False  # on which side the padding is
    width: str = ""  # entries with the same `width` stay equally wide; "": this one alone
    multiple: int = 1  # of which the width is a multiple
    # Entries that are as wide, the longest of which gives the length of a row; (): this one, without its last `fill`.
    # Ids end before a last token that equals the padding, and a mask may be 0 for a whole row: name both
    like: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows:
    """The entries of a batch with one item for each of its B rows: `(B,)`, or `(B, W, ...)` with padding."""

    entries: dict[str, Tensor]
    columns: dict[str, Column]  # for those of shape (B, W, ...)

    @cached_property
    def device(self) -> torch.device:
        """The device of all entries; the host, if they lie on several: those on the host are by far the largest."""
        devices = {x.device for x in self.entries.values()}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    @cached_property
    def lengths_BE(self) -> Tensor:
        """The number of tokens of each row and entry, without padding; int64 on `device`."""
        return torch.stack([self._lengths(name) for name in self.entries], dim=1)

    def _lengths(self, name: str) -> Tensor:
        """Return the number of tokens of each row of an entry: `(B,)`, on `device`."""
        x = self.entries[name]
        if x.ndim == 1:
            return torch.ones_like(x, dtype=torch.int64, device=self.device)
        column = self.columns[name]
        if column.like:
            return torch.stack([self._lengths(other) for other in column.like]).amax(dim=0)
        real_BW = x.flip(1) != column.fill if column.pads_left else x != column.fill
        places = torch.arange(x.size(1) + 1, device=x.device)
        return (pad(real_BW, (1, 0)) * places).amax(dim=1).to(self.device)

    @property
    def signature(self) -> int:
        """A number that is equal on two ranks if their batches have the same entries."""
        kinds = [f"{name} {x.dtype} {x.ndim} {[*x.shape[2:]]}" for name, x in self.entries.items()]
        return zlib.crc32("\n".join(kinds).encode())

    def exchanged(self, order_N: Tensor, lengths_NE: Tensor, ranks: Ranks) -> dict[str, Tensor]:
        """Return this rank's B rows of a new order.

        Args:
            order_N (`Tensor`): the rows of all ranks, numbered one rank after another, in their new order: `(N,)`,
                int64, on the CPU.
            lengths_NE (`Tensor`): `lengths_BE` of all ranks, on the CPU.
            ranks (`Ranks`): which exchange, in one collective.
        """
        count = ranks.accelerator.num_processes
        rank = ranks.accelerator.process_index
        rows = len(order_N) // count
        to_N = torch.arange(len(order_N)) // rows
        from_N = order_N // rows
        sent_S = (from_N == rank).nonzero().squeeze(1)  # places, by receiver
        by_sender_B = torch.argsort(from_N[to_N == rank], stable=True)
        received_B = order_N[to_N == rank][by_sender_B]
        values = self._without_padding(order_N[sent_S] - rank * rows)
        sent_parts = _cut(values, self._bytes(lengths_NE[order_N[sent_S]], to_N[sent_S], count))
        sizes = self._bytes(lengths_NE[received_B], received_B // rows, count)
        received_bytes = ranks.exchange([torch.cat(parts) for parts in sent_parts], sizes.sum(dim=1).tolist())
        pieces = [x.split(entry_bytes) for x, entry_bytes in zip(received_bytes, sizes.tolist(), strict=True)]
        values = [torch.cat(entry_pieces) for entry_pieces in zip(*pieces, strict=True)]
        return self._padded(values, lengths_NE[received_B], by_sender_B.argsort())

    def _bytes(self, lengths_SE: Tensor, rank_S: Tensor, count: int) -> Tensor:
        """Return the bytes of S rows that belong to each of `count` ranks: `(count, E)`."""
        token_bytes_E = torch.tensor(
            [_dtype_sent(name, x.dtype).itemsize * math.prod(x.shape[2:]) for name, x in self.entries.items()]
        )
        bytes_SE = lengths_SE * token_bytes_E
        return torch.zeros(count, bytes_SE.size(1), dtype=torch.int64).index_add(0, rank_S, bytes_SE)

    def _without_padding(self, rows_S: Tensor) -> list[Tensor]:
        """Return each entry's values of rows, one row after another, as bytes on `device`."""
        values = []
        for (name, x), lengths_B in zip(self.entries.items(), self.lengths_BE.unbind(1), strict=True):
            rows = rows_S.to(x.device)
            values_S = x[rows]
            if x.ndim > 1:
                values_S = values_S[_is_real(lengths_B.to(x.device)[rows], x.size(1), self.columns[name].pads_left)]
            values_S = values_S.to(_dtype_sent(name, x.dtype)).contiguous().flatten()
            values.append(values_S.view(torch.uint8).to(self.device))
        return values

    def _padded(self, values: list[Tensor], lengths_BE: Tensor, order_B: Tensor) -> dict[str, Tensor]:
        widths: dict[str, int] = {}
        for name, lengths_B in zip(self.entries, lengths_BE.unbind(1), strict=True):
            column = self.columns.get(name)
            if column is not None:
                width = -(-max(1, int(lengths_B.max())) // column.multiple) * column.multiple
                widths[column.width or name] = max(width, widths.get(column.width or name, 0))
        padded = {}
        for (name, x), flat, lengths_B in zip(self.entries.items(), values, lengths_BE.unbind(1), strict=True):
            flat = flat.to(x.device).view(_dtype_sent(name, x.dtype)).to(x.dtype)
            order = order_B.to(x.device)
            column = self.columns.get(name)
            if column is None:
                padded[name] = flat[order]
                continue
            width = widths[column.width or name]
            rows = x.new_full((len(order), width, *x.shape[2:]), column.fill)
            rows[_is_real(lengths_B.to(x.device), width, column.pads_left)] = flat.view(-1, *x.shape[2:])
            padded[name] = rows[order]
        return padded


def _is_real(lengths_B: Tensor, width: int, pads_left: bool) -> Tensor:
    places_W = torch.arange(width, device=lengths_B.device)
    return (places_W.flip(0) if pads_left else places_W) < lengths_B.unsqueeze(1)


def _dtype_sent(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return how values are sent: 4 bytes for a token id, 1 for an element of a mask."""
    if dtype.is_floating_point:
        return dtype
    if dtype == torch.bool or name.endswith("_mask"):
        return torch.uint8
    return dtype if dtype.itemsize < 4 else torch.int32


def _cut(values: list[Tensor], bytes_RE: Tensor) -> list[tuple[Tensor, ...]]:
    """Return each rank's part of each entry's values."""
    return list(
        zip(*(x.split(rank_bytes.tolist()) for x, rank_bytes in zip(values, bytes_RE.T, strict=True)), strict=True)
    )


def equally_wide(tensors: list[Tensor], column: Column) -> list[Tensor]:
    """Return `tensors` `(B, W)`, padded to the largest width."""
    width = max(x.size(1) for x in tensors)
    padding = [width - x.size(1) for x in tensors]
    return [
        pad(x, (more, 0) if column.pads_left else (0, more), value=column.fill)
        for x, more in zip(tensors, padding, strict=True)
    ]
