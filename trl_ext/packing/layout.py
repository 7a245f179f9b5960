"""Which tokens of a padded batch are fed, in which order, and where each place of the batch finds its token.

The tokens fed are the nodes of a trie over the rows: leading tokens that rows have in common are one node. Sorted by
content, a row has its longest common start with an earlier row in common with the row just before it, so one comparison
of neighbours finds the trie. Rows without anything in common are plain padding-free packing.

Dimensions: B rows, S columns, T fed tokens, K keys (the tokens that each row with tokens of its own sees, row by row).
"""

import itertools
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class _IndexSelectFP32Grad(torch.autograd.Function):
    """`x.index_select(dim, index)`. Its own backward would add half-precision copies in half precision: with 64
    completions of a prompt the sum's error is 8 times that of one rounding."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, dim: int) -> Tensor:
        return x.index_select(dim, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        x, index, ctx.dim = inputs
        ctx.save_for_backward(index)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        sums = torch.float32 if gradient.dtype in (torch.bfloat16, torch.float16) else gradient.dtype
        total = gradient.new_zeros(ctx.shape, dtype=sums)
        return total.index_add_(ctx.dim, index, gradient.to(sums)).to(gradient.dtype), None, None


def index_select_fp32_grad(x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """`x.index_select(dim, index)`, whose gradient sums repeated places in fp32 (float64 for float64)."""
    return _IndexSelectFP32Grad.apply(x, index, dim)  # type: ignore[no-any-return, no-untyped-call]


class Segment(NamedTuple):
    """Successive rows that feed equally many tokens and see equally many.

    Args:
        rows (`int`): how many.
        queries (`int`): tokens that each feeds.
        keys (`int`): tokens that each sees; its own are the last of them.
    """

    rows: int
    queries: int
    keys: int


class Shard(Protocol):
    """What of the fed row is this rank's, where several ranks each feed their share: c of T tokens, all heads.

    Attention sees all tokens of the rank's share of the heads.
    """

    def columns(self, row_1T: Tensor) -> Tensor:
        """This rank's columns of a row: `(1, c)`."""

    def to_heads(self, x_cAD: Tensor) -> Tensor:
        """All tokens, of this rank's heads: `(T, A / n, D)`."""

    def to_tokens(self, x_TAD: Tensor) -> Tensor:
        """This rank's tokens, all heads: `(c, A, D)`."""

    def heads(self, x_A: Tensor) -> Tensor:
        """What of one value a head is of this rank's heads: `(A / n,)`."""


class Layout:
    """One fed row for a padded batch.

    A class of its own, not a dataclass: what wraps a model (FSDP) rebuilds dataclasses among its arguments.

    Attributes:
        input_ids (`Tensor` of shape `(1, T)`): the tokens that are fed.
        position_ids (`Tensor` of shape `(1, T)`): their positions.
        at_BS (`Tensor` of shape `(B, S)`): where in the fed row the token of each place lives; -1 where it is not fed.
        keys_K (`Tensor` of shape `(K,)`): where in the fed row each key lives.
        query_starts, key_starts (`Tensor`, int32): where each row with tokens of its own begins, and the end.
        segments (`list[Segment]`): the fed row in parts, each of which is a batch without padding.
        shared (`bool`): whether some token is fed once for several rows; else keys are the fed tokens in order.
        longest_query, longest_key (`int`): of a row.
        implementation (`str`): the attention that the model's user chose.
        shard (`Shard`, *optional*): of this rank, where the tokens are split over several.
    """

    shard: Shard | None = None

    def __init__(
        self, input_ids: Tensor, lengths_B: Tensor, first_B: Tensor, *, share: bool, rebase: bool, implementation: str
    ) -> None:
        """
        Args:
            input_ids (`Tensor` of shape `(B, S)`): the batch.
            lengths_B (`Tensor` of shape `(B,)`): tokens that each row needs, from its first one on.
            first_B (`Tensor` of shape `(B,)`): the column of each row's first token.
            share (`bool`): whether tokens that rows have in common are fed once.
            rebase (`bool`): whether a row's first token has position 0, instead of its column. Then rows share wherever
                they start alike, else only in the same columns.
        """
        B, S = input_ids.shape
        device = input_ids.device
        columns_S = torch.arange(S, device=device)
        needed_BS = columns_S < lengths_B.unsqueeze(1)
        source_BS = (first_B.unsqueeze(1) + columns_S).clamp(max=S - 1)  # rows aligned at their first token
        ids_BS = input_ids.gather(1, source_BS).masked_fill(~needed_BS, -1)
        order_B, alike_BS = torch.arange(B, device=device), torch.zeros_like(needed_BS)
        if share and B > 1:
            order_B, alike_BS = _neighbours(ids_BS, torch.zeros_like(first_B) if rebase else first_B)
        needed_BS, first_B = needed_BS[order_B], first_B[order_B]
        own_BS = needed_BS & ~alike_BS
        fed_T = own_BS.flatten().nonzero().squeeze(1)
        number_BS = own_BS.flatten().cumsum(0).view(B, S) - 1
        # A shared token lives in the last row before it, in sorted order, that has one of its own in this column
        owner_BS = torch.where(own_BS, torch.arange(B, device=device).unsqueeze(1), 0).cummax(dim=0).values
        at_BS = number_BS.gather(0, owner_BS)
        self._device = device
        self.input_ids = ids_BS[order_B].flatten()[fed_T].unsqueeze(0)
        position_BS = columns_S if rebase else first_B.unsqueeze(1) + columns_S
        self.position_ids = position_BS.expand(B, S).flatten()[fed_T].unsqueeze(0)
        self.at_BS = torch.full_like(input_ids, -1, dtype=torch.long)
        rows, columns = needed_BS.nonzero(as_tuple=True)
        places = at_BS[rows, columns]
        self.at_BS[order_B[rows], first_B[rows] + columns] = places
        queries_B, keys_B = own_BS.sum(dim=1), needed_BS.sum(dim=1)
        lives_B = queries_B > 0
        self.keys_K = places[lives_B[rows]]
        lengths = torch.stack([queries_B[lives_B], keys_B[lives_B]])
        starts = F.pad(lengths.cumsum(dim=1), (1, 0)).int()
        self.query_starts, self.key_starts = starts[0], starts[1]
        segments = itertools.groupby(lengths.T.tolist())
        self.segments = [Segment(len(list(rows)), queries, keys) for (queries, keys), rows in segments]
        self.shared = any(segment.queries != segment.keys for segment in self.segments)
        self.longest_query = max(segment.queries for segment in self.segments)
        self.longest_key = max(segment.keys for segment in self.segments)
        self.implementation = implementation
        self._meetings = [0]  # one list for the copies on all devices
        self._masks: dict[tuple[int, int, int | None, torch.device], Tensor] = {}
        self._copies: dict[torch.device, Layout] = {}

    def meet(self) -> None:
        """Note that an attention module has read this layout."""
        self._meetings[0] += 1

    @property
    def reads(self) -> int:
        """How often an attention module has read this layout."""
        return self._meetings[0]

    @property
    def tokens(self) -> int:
        """How many tokens are fed."""
        return self.input_ids.numel()

    def mask(self, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
        """`(queries, keys)`, bool: whether a row's last `queries` tokens see each of its `keys` tokens.

        Args:
            window (`int`, *optional*): how many tokens are seen at most, itself included.
        """
        name = queries, keys, window, device
        if name not in self._masks:
            columns = torch.arange(keys, device=device)
            distance = columns[keys - queries :].unsqueeze(1) - columns
            seen = distance >= 0
            self._masks[name] = seen if window is None else seen & (distance < window)
        return self._masks[name]

    def to(self, device: Any, **_: Any) -> "Layout":
        """The layout for a layer on another device (`device_map` moves what it finds a `to` on)."""
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
    """The order of rows by content, and, in this order, the columns up to which each equals the row before it.

    Args:
        ids_BS (`Tensor` of shape `(B, S)`): rows aligned at their first token, -1 behind their last.
        start_B (`Tensor` of shape `(B,)`): rows of which this differs have nothing in common.
    """
    content = torch.cat([start_B.unsqueeze(1), ids_BS], dim=1)
    order_B = torch.unique(content, dim=0, return_inverse=True)[1].argsort(stable=True)
    content = content[order_B]
    alike_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
    alike_BS[1:] = (content[1:] == content[:-1]).cumprod(dim=1)[:, 1:].bool()
    return order_B, alike_BS
