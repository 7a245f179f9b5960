"""Rows of a batch move between ranks: one exchange of their values, without padding."""

import zlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from .ranks import Ranks


@dataclass(frozen=True)
class Column:
    """How an entry of a batch with a value per token, `(B, W)`, is padded."""

    fill: float = 0
    pads_left: bool = False  # on which side the padding is
    width: str = ""  # entries with the same `width` stay equally wide; "": this one alone
    multiple: int = 1  # of which the width is a multiple


@dataclass(frozen=True)
class Rows:
    """The entries of a batch with one item for each of its B rows: `(B,)`, or `(B, W)` with padding."""

    entries: dict[str, Tensor]
    columns: dict[str, Column]  # for those of shape (B, W)

    @cached_property
    def lengths_BE(self) -> Tensor:
        """The number of values of each row and entry, without padding; int64 on the device of the entries."""
        lengths = []
        for name, x in self.entries.items():
            if x.ndim == 1:
                lengths.append(torch.ones_like(x, dtype=torch.int64))
                continue
            column = self.columns[name]
            real_BW = x.flip(1) != column.fill if column.pads_left else x != column.fill
            places = torch.arange(x.size(1) + 1, device=x.device)
            lengths.append((pad(real_BW, (1, 0)) * places).amax(dim=1))
        return torch.stack(lengths, dim=1)

    @property
    def signature(self) -> int:
        """A number that is equal on two ranks if their batches have the same entries."""
        kinds = [f"{name} {x.dtype} {x.ndim}" for name, x in self.entries.items()]
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
        widths = torch.tensor([_dtype_sent(name, x.dtype).itemsize for name, x in self.entries.items()])
        return torch.zeros(count, len(widths), dtype=torch.int64).index_add(0, rank_S, lengths_SE * widths)

    def _without_padding(self, rows_S: Tensor) -> list[Tensor]:
        """Return each entry's values of rows, one row after another, as bytes."""
        values = []
        for (name, x), lengths_B in zip(self.entries.items(), self.lengths_BE.unbind(1), strict=True):
            rows = rows_S.to(x.device)
            values_S = x[rows]
            if x.ndim > 1:
                values_S = values_S[_is_real(lengths_B[rows], x.size(1), self.columns[name].pads_left)]
            values.append(values_S.to(_dtype_sent(name, x.dtype)).contiguous().view(torch.uint8))
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
            flat = flat.view(_dtype_sent(name, x.dtype)).to(x.dtype)
            order = order_B.to(x.device)
            column = self.columns.get(name)
            if column is None:
                padded[name] = flat[order]
                continue
            width = widths[column.width or name]
            rows = x.new_full((len(order), width), column.fill)
            rows[_is_real(lengths_B.to(x.device), width, column.pads_left)] = flat
            padded[name] = rows[order]
        return padded


def _is_real(lengths_B: Tensor, width: int, pads_left: bool) -> Tensor:
    places_W = torch.arange(width, device=lengths_B.device)
    return (places_W.flip(0) if pads_left else places_W) < lengths_B.unsqueeze(1)


def _dtype_sent(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return how values are sent: 4 bytes for a token id, 1 for an element of a mask."""
    if dtype.is_floating_point:
        return dtype
    return torch.uint8 if dtype == torch.bool or name.endswith("_mask") else torch.int32


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
