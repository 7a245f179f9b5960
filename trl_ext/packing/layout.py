"""The packed row: the tokens of a padded batch in order, and for each token of the batch its index in the row.

The packed tokens are the nodes of a trie over the rows: a prefix that several rows share is stored once.
In sorted order, a row shares its longest common prefix with the previous row, so comparing neighbours finds the trie.

Dimensions: B rows, S columns, T packed tokens, K keys (all tokens seen by rows that have tokens of their own).
"""

import itertools
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Segment(NamedTuple):
    """Successive rows, each with `queries` own tokens, which are the last of the `keys` tokens that it sees."""

    rows: int
    queries: int
    keys: int


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
        at_BS (`Tensor` of shape `(B, S)`): the index in the packed row of each token of the batch, or -1.
        keys_K (`Tensor` of shape `(K,)`): the index in the packed row of each key.
        query_starts, key_starts (`Tensor`, int32): where each row with its own tokens begins, and the end.
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
        self, input_ids: Tensor, lengths_B: Tensor, first_B: Tensor, *, share: bool, rebase: bool, implementation: str
    ) -> None:
        """
        Args:
            input_ids (`Tensor` of shape `(B, S)`): the batch.
            lengths_B, first_B (`Tensor`): how many tokens each row needs, and the column of the first.
            share (`bool`): whether equal leading tokens of rows are packed once.
            rebase (`bool`): whether positions begin at 0 in each row. If so, rows share any equal start, otherwise only
                one in the same columns.
        """
        B, S = input_ids.shape
        device = input_ids.device
        columns_S = torch.arange(S, device=device)
        needed_BS = columns_S < lengths_B.unsqueeze(1)
        source_BS = (first_B.unsqueeze(1) + columns_S).clamp(max=S - 1)  # rows aligned at their first token
        ids_BS = input_ids.gather(1, source_BS).masked_fill(~needed_BS, -1)
        order_B, equal_BS = torch.arange(B, device=device), torch.zeros_like(needed_BS)
        if share and B > 1:
            order_B, equal_BS = _neighbours(ids_BS, torch.zeros_like(first_B) if rebase else first_B)
        needed_BS, first_B = needed_BS[order_B], first_B[order_B]
        own_BS = needed_BS & ~equal_BS
        own_T = own_BS.flatten().nonzero().squeeze(1)
        number_BS = own_BS.flatten().cumsum(0).view(B, S) - 1
        # A shared token belongs to the last earlier row, in sorted order, that has its own token in this column
        owner_BS = torch.where(own_BS, torch.arange(B, device=device).unsqueeze(1), 0).cummax(dim=0).values
        at_BS = number_BS.gather(0, owner_BS)
        self._device = device
        self.input_ids = ids_BS[order_B].flatten()[own_T].unsqueeze(0)
        position_BS = columns_S if rebase else first_B.unsqueeze(1) + columns_S
        self.tokens = self.input_ids.numel()
        self.position_ids = position_BS.expand(B, S).flatten()[own_T].unsqueeze(0)
        self.at_BS = torch.full_like(input_ids, -1, dtype=torch.long)
        rows, columns = needed_BS.nonzero(as_tuple=True)
        places = at_BS[rows, columns]
        self.at_BS[order_B[rows], first_B[rows] + columns] = places
        queries_B, keys_B = own_BS.sum(dim=1), needed_BS.sum(dim=1)
        has_own_B = queries_B > 0
        self.keys_K = places[has_own_B[rows]]
        lengths = torch.stack([queries_B[has_own_B], keys_B[has_own_B]])
        starts = F.pad(lengths.cumsum(dim=1), (1, 0)).int()
        self.query_starts, self.key_starts = starts
        segments = itertools.groupby(lengths.T.tolist())
        self.segments = [Segment(len(list(rows)), queries, keys) for (queries, keys), rows in segments]
        self.shared = any(segment.queries != segment.keys for segment in self.segments)
        self.longest_query = max(segment.queries for segment in self.segments)
        self.longest_key = max(segment.keys for segment in self.segments)
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
                if isinstance(value, Tensor):
                    setattr(copy, name, value.to(device))
            self._copies[device] = copy
        return self._copies[device]


def _neighbours(ids_BS: Tensor, start_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of rows by content and, in this order, which leading columns equal those of the previous row.

    Args:
        ids_BS (`Tensor` of shape `(B, S)`): rows aligned at their first token, -1 after their last.
        start_B (`Tensor` of shape `(B,)`): rows share nothing if these differ.
    """
    content = torch.cat([start_B.unsqueeze(1), ids_BS], dim=1)
    order_B = torch.unique(content, dim=0, return_inverse=True)[1].argsort(stable=True)
    content = content[order_B]
    equal_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
    equal_BS[1:] = (content[1:] == content[:-1]).cumprod(dim=1)[:, 1:].bool()
    return order_B, equal_BS
