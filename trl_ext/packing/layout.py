"""The packed row: the real tokens of a padded batch in one row, and for each token of the batch its index in this row.

The packed tokens are the nodes of a trie over the rows: a prefix that several rows share is stored once.
In sorted order, a row shares its longest common prefix with the previous row, so comparing neighbours finds the trie.

Dimensions: B rows, S columns, T packed tokens, K keys (of each row that adds tokens, all tokens that it sees).
"""

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Segment(NamedTuple):
    """Successive rows, each of which sees `keys` tokens. Only the last `queries` of these are packed for this row."""

    rows: int
    queries: int
    keys: int


class Shard(Protocol):
    """This rank's share of a row split over n ranks: c of T tokens, and in attention all tokens of A / n heads."""

    def columns(self, row_1T: Tensor) -> Tensor: ...  # this rank's columns: `(1, c)`
    def to_heads(self, x_cAD: Tensor) -> Tensor: ...  # all tokens of this rank's heads: `(T, A / n, D)`
    def to_tokens(self, x_TAD: Tensor) -> Tensor: ...  # this rank's tokens, all heads: `(c, A, D)`
    def heads(self, x_A: Tensor) -> Tensor: ...  # this rank's slice of a per-head vector: `(A / n,)`


class Images(Protocol):
    """The images of a packed row."""

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]: ...  # in place of those of the batch
    def repeated(self, model: Any) -> AbstractContextManager[None]: ...  # for a forward on the packed row


class Layout:
    """The packed row of a padded batch. It is not a dataclass, because FSDP copies dataclasses in a model's arguments.

    Attributes:
        input_ids (`Tensor` of shape `(1, T)`): the packed tokens.
        position_ids (`Tensor` of shape `(1, T)`): their positions.
        keys_K (`Tensor` of shape `(K,)`): the index in the packed row of each key.
        query_starts, key_starts (`Tensor`, int32): where queries and keys of each row with queries begin, and the end.
        row_N, column_N, at_N (`Tensor`): row, column and packed index of each token whose next token is predicted.
        same_N (`Tensor`): for each of these N, the index of the one that stands for all with the same packed index.
        no_mask (`Tensor` of shape `(1, 1, 1, 1)`): NaN, fp32; an attention mask that attention must not read.
        segments (`list[Segment]`): the parts of the packed row; each is a batch without padding.
        shared (`bool`): whether rows share a token. If not, the keys are the packed tokens in order.
        longest_query, longest_key (`int`): the most queries and keys of a row.
        implementation (`str`): the name of the attention that the user chose.
        shard (`Shard`, *optional*): this rank's share, if the tokens are split over ranks.
        reads (`list[int]`): how often modules have read this layout or its copies on other devices.
        calls (`dict`): how attention modules and mixers compute the rows in several calls.
        images (`Images`, *optional*): the images of the packed row. If there are any, positions may have axes:
            `(A, 1, T)`.
    """

    shard: Shard | None = None
    images: Images | None = None

    def __init__(
        self,
        ids_BS: NDArray[Any],
        lengths_B: NDArray[Any],
        first_B: NDArray[Any],
        *,
        scored_BS: NDArray[np.bool_] | None = None,
        share: bool,
        rebase: bool,
        implementation: str = "sdpa",
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            ids_BS (`ndarray` of shape `(B, S)`): the batch, in host memory.
            lengths_B, first_B (`ndarray`): how many tokens each row needs, and the column of the first.
            scored_BS (`ndarray` of shape `(B, S)`, bool, *optional*): the tokens whose next token is predicted.
            share (`bool`): whether equal leading tokens of rows are packed once.
            rebase (`bool`): whether positions begin at 0 in each row. If so, rows share every equal prefix, otherwise
                only one that begins in the same column.
            device: where the model's inputs lie.
        """
        rows = [ids[first : first + n] for ids, first, n in zip(ids_BS, first_B, lengths_B, strict=True)]
        order = _sorted(rows, None if rebase else first_B) if share else range(len(rows))
        start_B = np.zeros_like(first_B) if rebase else first_B
        common_B = np.zeros_like(lengths_B)
        for before, i in itertools.pairwise(order):
            if share and start_B[before] == start_B[i]:
                common_B[i] = _common(rows[before], rows[i])
        self._rows = [(i, int(first_B[i]), int(common_B[i]), len(rows[i])) for i in order]
        self._shape = ids_BS.shape
        lengths = [(keys - common, keys) for _, _, common, keys in self._rows if keys > common]
        self.segments = [
            Segment(len(list(equal_rows)), queries, keys) for (queries, keys), equal_rows in itertools.groupby(lengths)
        ]
        self.shares_tokens = any(queries != keys for queries, keys in lengths)
        self.longest_query, self.longest_key = (max(x) for x in zip(*lengths, strict=True))
        self.tokens, keys = (sum(x) for x in zip(*lengths, strict=True))
        scored_BS = np.zeros(ids_BS.shape, bool) if scored_BS is None else scored_BS
        ends_B = np.count_nonzero(scored_BS, axis=1).cumsum()
        N = ends_B[-1]
        # All arrays are slices of one, which is copied to the device at once
        sizes = [self.tokens, self.tokens, keys, N, N, N, N, len(lengths) + 1, 1]
        staging = _staging(sum(sizes), torch.device(device))
        arrays = np.split(staging.numpy(), np.cumsum(sizes)[:-1])
        ids_T, position_T, keys_K, row_N, column_N, at_N, same_N, starts, nan = arrays
        nan.view(np.float32)[:] = np.nan
        t = 0
        k = 0
        for (i, first, common, length), path in zip(self._rows, self.paths(), strict=True):
            new_tokens = slice(t, t + length - common)  # the row's tokens that it does not share with the previous row
            ids_T[new_tokens] = rows[i][common:]
            position_T[new_tokens] = np.arange(start_B[i] + common, start_B[i] + length)
            if length > common:
                keys_K[k : k + length] = path
                k += length
            columns = np.flatnonzero(scored_BS[i])
            places = slice(ends_B[i] - len(columns), ends_B[i])
            row_N[places] = i
            column_N[places] = columns
            at_N[places] = path[columns - first]
            t = new_tokens.stop
        same_T = np.empty(self.tokens, np.int64)
        same_T[at_N] = np.arange(len(at_N))
        same_N[:] = same_T[at_N]
        starts = starts.view(np.int32).reshape(2, -1)
        starts[:, 0] = 0
        starts[:, 1:] = np.cumsum(lengths, axis=0).T
        self._device = torch.device(device)
        parts = staging.to(device, non_blocking=True).split([int(size) for size in sizes])
        self.input_ids, self.position_ids = (x.unsqueeze(0) for x in parts[:2])
        self.keys_K, self.row_N, self.column_N, self.at_N, self.same_N = parts[2:7]
        self.query_starts, self.key_starts = parts[7].view(torch.int32).view(2, -1)
        self.no_mask = parts[8].view(torch.float32)[:1].view(1, 1, 1, 1)
        self.implementation = implementation
        self.reads = [0]
        self.calls: dict[Any, Any] = {}
        self._copies: dict[torch.device, Layout] = {}

    def for_pass(self, implementation: str) -> "Layout":
        """Return the layout for another pass over the same batch, with the attention `implementation`."""
        layout = copy.copy(self)
        layout.implementation = implementation
        layout.reads = [0]
        layout.calls = {}
        layout._copies = {}
        return layout

    def in_batches(self, groups: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices that put each of `groups` (numbers of segments) in a batch, aligned at the rows' last tokens.

        They are those of queries and keys in the packed row, and of the packed tokens among the queries. A shorter row
        begins with copies of its first token.
        """
        number_R = np.repeat(np.arange(len(self.segments)), [segment.rows for segment in self.segments])
        sizes_R2 = np.array([segment[1:] for segment in self.segments])[number_R]
        ends_R2 = sizes_R2.cumsum(axis=0)
        parts: tuple[list[NDArray[Any]], ...] = [], []
        for group in groups:
            rows = np.isin(number_R, group)
            for part, size, end in zip(parts, sizes_R2[rows].T, ends_R2[rows].T, strict=True):
                part.append((end[:, None] - np.arange(size.max(), 0, -1).clip(max=size[:, None])).ravel())
        queries, keys = (np.concatenate(part) for part in parts)
        place_T = np.empty(self.tokens, np.int64)
        place_T[queries] = np.arange(len(queries))  # the last of equal indices: a token is after its copies
        sizes = [len(queries), len(keys), self.tokens]
        staging = _staging(sum(sizes), self._device)
        np.concatenate([queries, keys, place_T], out=staging.numpy())
        queries, keys, places = staging.to(self._device, non_blocking=True).split(sizes)
        return queries, self.keys_K.index_select(0, keys), places

    def paths(self) -> Iterator[NDArray[np.int64]]:
        """Yield the index in the packed row of each token of each row, in the order of the packed row.

        Each array is overwritten by the next.
        """
        path_S = np.empty(self._shape[1], np.int64)
        tokens = 0
        for _, _, common, length in self._rows:
            path_S[common:length] = np.arange(tokens, tokens + length - common)
            tokens += length - common
            yield path_S[:length]

    @property
    def shared_lengths(self) -> list[int]:
        """How many leading tokens each row shares with the one before, in the order of the packed row."""
        return [common for _, _, common, _ in self._rows]

    @property
    def sources_T(self) -> NDArray[np.int64]:
        """The place in the batch, flattened, of each packed token; of a shared one, in the first row that has it."""
        width = self._shape[1]
        rows = [row * width + first + np.arange(common, length) for row, first, common, length in self._rows]
        return np.concatenate(rows)

    @property
    def at_BS(self) -> Tensor:
        """The index in the packed row of each token of the batch, -1 if it is not packed: `(B, S)`, on the CPU."""
        at_BS = torch.full(self._shape, -1)
        for (i, first, _, length), path in zip(self._rows, self.paths(), strict=True):
            at_BS[i, first : first + length] = torch.from_numpy(path)
        return at_BS

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def real_places(self) -> Tensor:
        """Return the index in the packed row of each token of the batch that is packed: `(N,)`, on the CPU."""
        at_BS = self.at_BS
        return at_BS[at_BS >= 0]

    def to(self, device: Any, **_: Any) -> "Layout":
        """Return the layout for a layer on another device. With a `device_map`, accelerate calls this method."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device == self._device:
            return self
        if device not in self._copies:
            layout = copy.copy(self)
            layout._device = device
            layout._copies = {}
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    setattr(layout, name, value.to(device))
            self._copies[device] = layout
        return self._copies[device]


def _sorted(rows: list[NDArray[Any]], start_B: NDArray[Any] | None) -> list[int]:
    """Return the indices of `rows`, sorted by start, if given, and content. Token ids must not be negative."""
    # Big-endian bytes sort like the numbers
    content = [row.astype(">i4").tobytes() for row in rows]
    starts = np.zeros(len(rows)) if start_B is None else start_B
    return sorted(range(len(rows)), key=lambda i: (starts[i], content[i]))


def _common(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Return how many leading tokens of two rows are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def _staging(size: int, device: torch.device) -> Tensor:
    """Return an int64 tensor in host memory, from which a GPU can copy while the host goes on."""
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.long, pin_memory=True)
    return torch.from_numpy(np.empty(size, np.int64))  # numpy asks for huge pages
