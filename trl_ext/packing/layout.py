"""The packed row: the tokens of a padded batch in order, and for each token of the batch its index in the row.

The packed tokens are the nodes of a trie over the rows: a prefix that several rows share is stored once.
In sorted order, a row shares its longest common prefix with the previous row, so comparing neighbours finds the trie.

Dimensions: B rows, S columns, T packed tokens, K keys (all tokens seen by rows that have tokens of their own).
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Segment(NamedTuple):
    """Successive rows, each with `queries` own tokens, which are the last of the `keys` tokens that it sees."""

    rows: int
    queries: int
    keys: int


class Scored(NamedTuple):
    """The tokens of a batch whose next token is predicted: row, column, and index in the packed row, each `(N,)`."""

    row_N: Tensor
    column_N: Tensor
    at_N: Tensor


class Shard(Protocol):
    """This rank's share of a row that n ranks split: c of T tokens. In attention: all tokens of some of the A heads."""

    def columns(self, row_1T: Tensor) -> Tensor: ...  # this rank's columns: `(1, c)`
    def to_heads(self, x_cAD: Tensor) -> Tensor: ...  # all tokens of this rank's heads: `(T, A / n, D)`
    def to_tokens(self, x_TAD: Tensor) -> Tensor: ...  # this rank's tokens, all heads: `(c, A, D)`
    def heads(self, x_A: Tensor) -> Tensor: ...  # this rank's slice of a per-head vector: `(A / n,)`


class Layout:
    """One packed row for a padded batch. It is not a dataclass, because FSDP copies dataclasses in a model's arguments.

    Attributes:
        input_ids (`Tensor` of shape `(1, T)`): the packed tokens.
        position_ids (`Tensor` of shape `(1, T)`): their positions.
        at_BS (`Tensor` of shape `(B, S)`, on the CPU): the index in the packed row of each token of the batch, or -1.
        keys_K (`Tensor` of shape `(K,)`): the index in the packed row of each key.
        query_starts, key_starts (`Tensor`, int32): where each row with its own tokens begins, and the end.
        scored (`Scored`): the tokens whose next token is predicted.
        segments (`list[Segment]`): the parts of the packed row; each is a batch without padding.
        shared (`bool`): whether rows share a token. If not, the keys are the packed tokens in order.
        longest_query, longest_key (`int`): the most queries and keys of a row.
        implementation (`str`): the name of the attention that the user chose.
        shard (`Shard`, *optional*): this rank's share, if the tokens are split over ranks.
        reads (`list[int]`): how many times attention modules have read this layout; copies on other devices share it.
        masks (`dict`): the attention masks made so far.
    """

    shard: Shard | None = None

    def __init__(
        self,
        ids_BS: NDArray[Any],
        lengths_B: NDArray[Any],
        first_B: NDArray[Any],
        *,
        scored_BS: NDArray[np.bool_] | None = None,
        share: bool,
        rebase: bool,
        implementation: str,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            ids_BS (`ndarray` of shape `(B, S)`): the batch, in host memory.
            lengths_B, first_B (`ndarray`): how many tokens each row needs, and the column of the first.
            scored_BS (`ndarray` of shape `(B, S)`, bool, *optional*): the tokens whose next token is predicted.
            share (`bool`): whether equal leading tokens of rows are packed once.
            rebase (`bool`): whether positions begin at 0 in each row. If so, rows share any equal start, otherwise only
                one in the same columns.
            device: where the model's inputs lie.
        """
        rows = [ids[first : first + n] for ids, first, n in zip(ids_BS, first_B, lengths_B, strict=True)]
        order = _sorted(rows, None if rebase else first_B) if share else range(len(rows))
        at_BS = np.full(ids_BS.shape, -1)
        path_S = np.empty(ids_BS.shape[1], np.int64)  # the index of each token of the current row
        before: tuple[int, NDArray[Any]] = (0, path_S[:0])  # of the previous row
        of_queries: list[tuple[NDArray[Any], NDArray[Any]]] = []  # token ids and positions
        of_keys: list[NDArray[Any]] = []
        lengths: list[tuple[int, int]] = []
        tokens = 0
        for i in order:
            row, start, first = rows[i], 0 if rebase else int(first_B[i]), int(first_B[i])
            common = _common(row, before[1]) if share and start == before[0] else 0
            queries, before = len(row) - common, (start, row)
            path_S[common : len(row)] = np.arange(tokens, tokens + queries)
            at_BS[i, first : first + len(row)] = path_S[: len(row)]
            if queries:
                of_queries.append((row[common:], np.arange(start + common, start + len(row))))
                of_keys.append(path_S[: len(row)].copy())
                lengths.append((queries, len(row)))
            tokens += queries
        self.tokens = tokens
        self.segments = [Segment(len(list(same)), *of_row) for of_row, same in itertools.groupby(lengths)]
        self.shared = any(queries != keys for queries, keys in lengths)
        self.longest_query, self.longest_key = (max(x) for x in zip(*lengths, strict=True))
        self.at_BS = torch.from_numpy(at_BS)
        scored_N = np.nonzero(np.zeros_like(ids_BS) if scored_BS is None else scored_BS)
        starts = np.zeros((2, len(lengths) + 1), np.int32)
        starts[:, 1:] = np.cumsum(lengths, axis=0).T
        ids_T, position_T = (np.concatenate(x) for x in zip(*of_queries, strict=True))
        self._device = torch.device(device)
        parts = (ids_T, position_T, np.concatenate(of_keys), *scored_N, at_BS[scored_N], starts.ravel().view(np.int64))
        ids_T, position_T, self.keys_K, *scored, starts = _copied(parts, self._device)
        self.input_ids, self.position_ids, self.scored = ids_T.unsqueeze(0), position_T.unsqueeze(0), Scored(*scored)
        self.query_starts, self.key_starts = starts.view(torch.int32).view(2, -1)
        self.implementation = implementation
        self.reads = [0]
        self.masks: dict[tuple[int, int, int | None, torch.device], Tensor] = {}
        self._copies: dict[torch.device, Layout] = {}

    def to(self, device: Any, **_: Any) -> "Layout":
        """Return the layout for a layer on another device. With a `device_map`, accelerate calls this method."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device == self._device:
            return self
        if device not in self._copies:
            copy = object.__new__(Layout)
            copy.__dict__.update(self.__dict__, _device=device, _copies={})
            for name, value in vars(self).items():
                if isinstance(value, Tensor) and name != "at_BS":
                    setattr(copy, name, value.to(device))
            self._copies[device] = copy
        return self._copies[device]


def _sorted(rows: list[NDArray[Any]], start_B: NDArray[Any] | None) -> list[int]:
    """Return the order of `rows` by first column, if they have one, and content. Token ids are not negative."""
    # The order of big-endian bytes is that of the numbers
    content = [row.astype(">i8").tobytes() for row in rows]
    starts = np.zeros(len(rows)) if start_B is None else start_B
    return sorted(range(len(rows)), key=lambda i: (starts[i], content[i]))


def _common(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Return how many leading tokens are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def _copied(parts: Sequence[NDArray[Any]], device: torch.device) -> tuple[Tensor, ...]:
    """Return int64 `parts` on `device`, by one copy for which the host does not wait."""
    if device.type == "cpu":
        return tuple(map(torch.from_numpy, parts))
    sizes = [len(x) for x in parts]
    whole = torch.empty(sum(sizes), dtype=torch.long, pin_memory=device.type == "cuda")
    np.concatenate(parts, out=whole.numpy())
    return whole.to(device, non_blocking=True).split(sizes)
