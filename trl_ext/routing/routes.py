"""The routes of a batch's tokens: from the forward passes that chose them, and to those that use them.

A route is the experts that L routers choose for a token: `(L, k)`, uint8 or int16, on the host. In one that is unknown,
each expert is `unknown_in(dtype)`; routers then choose for themselves.

Dimensions: B rows, S columns, N tokens of a forward pass, T packed tokens, L routers, k experts of a token.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .routers import unknown_in

RUNS_AGAIN = (
    "`replay_routes`: `generate` runs tokens more than once. Look in `model.generation_config` for beam search "
    "(`num_beams`), `guidance_scale` or `use_cache=False`, and remove it."
)


class RowsOfForward(NamedTuple):
    """Which rows of a batch one forward pass of `generate` runs, with equally many columns for each.

    A row that the model runs can stand for several of the batch.
    """

    rows_R: Tensor  # int64
    place_R: Tensor  # of each of them among the rows that the model runs, int64

    @classmethod
    def all(cls, rows: int) -> "RowsOfForward":
        return cls(torch.arange(rows), torch.arange(rows))


def routes_of_columns(
    forwards: list[Tensor], rows_of_forwards: list[RowsOfForward], prompts_shape: tuple[int, int]
) -> Tensor:
    """Return the routes of the columns that `generate` has run, `(B, S, L, k)`; they stay unknown in other rows.

    Args:
        forwards (`list[Tensor]`): the routes that each forward pass chose, `(N, L, k)`.
        prompts_shape (`tuple[int, int]`): `(B, P)`.

    Raises:
        `RuntimeError`: the model ran other forward passes than those over the prompts, and one over each next column.
    """
    batch_size, prompt_width = prompts_shape
    if len(forwards) != len(rows_of_forwards):
        raise RuntimeError(
            f"`replay_routes`: the routers ran in {len(forwards)} forward passes of `generate`, and the model in "
            f"{len(rows_of_forwards)}."
        )
    columns: list[Tensor] = []
    for device_routes_NLk, (rows_R, place_R) in zip(forwards, rows_of_forwards, strict=True):
        routes_NLk = device_routes_NLk.cpu()
        routes_rCLk = routes_NLk.unflatten(0, (int(place_R.max()) + 1, -1))
        done = sum(x.size(1) for x in columns)
        if routes_rCLk.size(1) > max(1, prompt_width - done):
            raise RuntimeError(RUNS_AGAIN)
        shape = (batch_size, *routes_rCLk.shape[1:])
        routes_BCLk = routes_NLk.new_full(shape, unknown_in(routes_NLk.dtype))
        routes_BCLk[rows_R.cpu()] = routes_rCLk[place_R.cpu()]
        columns.append(routes_BCLk)
    return torch.cat(columns, dim=1)


@dataclass(frozen=True)
class RowRoutes:
    """The routes of a prompt and of its completion, `(P, L, k)` and `(C, L, k)`."""

    prompt: Tensor
    completion: Tensor

    @classmethod
    def of(cls, routes_SLk: Tensor, prompt_tokens: int, completion_tokens: int) -> "RowRoutes":
        """Return the routes of a row without padding. Tokens that `routes_SLk` lacks at its end have none."""
        missing = prompt_tokens + completion_tokens - len(routes_SLk)
        unknown = routes_SLk.new_full((max(missing, 0), *routes_SLk.shape[1:]), unknown_in(routes_SLk.dtype))
        prompt, completion = torch.cat([routes_SLk, unknown])[: prompt_tokens + completion_tokens].split(
            [prompt_tokens, completion_tokens]
        )
        return cls(prompt, completion)


def padded(rows: list[Tensor], width: int, *, pads_left: bool) -> Tensor:
    """Return routes of rows `(W, L, k)` as one tensor with `width` columns; those of padding are unknown."""
    first = rows[0]
    routes_BWLk = first.new_full((len(rows), width, *first.shape[1:]), unknown_in(first.dtype))
    for row, routes_WLk in enumerate(rows):
        start = width - len(routes_WLk) if pads_left else 0
        routes_BWLk[row, start : start + len(routes_WLk)] = routes_WLk
    return routes_BWLk


class HostRoutes:
    """Routes of a batch as an argument of a model. DDP and FSDP2 move tensors to the device, but leave objects alone.

    It is not a dataclass, whose fields FSDP moves too.

    Args:
        routes_BSLk (`Tensor`): on the host.
    """

    def __init__(self, routes_BSLk: Tensor) -> None:
        self.routes_BSLk = routes_BSLk

    def __getitem__(self, rows: Any) -> "HostRoutes":
        return HostRoutes(self.routes_BSLk[rows.cpu() if isinstance(rows, Tensor) else rows])


class PackedRow(Protocol):
    """The packed row of a batch."""

    tokens: int

    @property
    def at_BS(self) -> Tensor: ...  # the index in the packed row of each token, -1 if it is not packed; on the host


@dataclass(frozen=True)
class PackedRoutes:
    """The routes of a packed row."""

    routes_TLk: Tensor
    shared: int  # tokens of the batch with a known route that another row has before them
    conflicts: int  # those of them whose route differs from it

    @classmethod
    def of(cls, routes_BSLk: Tensor, packed_row: PackedRow) -> "PackedRoutes":
        """Return the routes of a packed row. A token that rows share has that of the first row that knows one."""
        routes_FLk = routes_BSLk.flatten(0, 1)
        unknown = unknown_in(routes_FLk.dtype)
        is_known_F = (routes_FLk != unknown).flatten(1).all(dim=1)
        at_F = torch.where(is_known_F, packed_row.at_BS.flatten(), -1)
        places_N = (at_F >= 0).nonzero().squeeze(1)
        at_N = at_F[places_N]
        first_T = torch.full((packed_row.tokens,), len(routes_FLk))
        first_T.scatter_reduce_(0, at_N, places_N, "amin")
        is_known_T = first_T < len(routes_FLk)
        routes_TLk = routes_FLk.new_full((packed_row.tokens, *routes_FLk.shape[1:]), unknown)
        routes_TLk[is_known_T] = routes_FLk[first_T[is_known_T]]
        is_later_N = first_T[at_N] != places_N
        later_routes = routes_FLk[places_N[is_later_N]].sort(dim=-1).values
        first_routes = routes_TLk[at_N[is_later_N]].sort(dim=-1).values
        conflicts = (later_routes != first_routes).flatten(1).any(dim=1)
        return cls(routes_TLk, shared=len(conflicts), conflicts=int(conflicts.sum()))


def of_batch(routes_TLk: Tensor, packed_row: PackedRow) -> Tensor:
    """Return the routes of a packed row at the tokens of its batch, `(B, S, L, k)`."""
    at_BS = packed_row.at_BS.to(routes_TLk.device)
    is_packed_BS11 = (at_BS >= 0)[..., None, None]
    return torch.where(is_packed_BS11, routes_TLk[at_BS.clamp(min=0)], unknown_in(routes_TLk.dtype))
