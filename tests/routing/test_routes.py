"""Routes go from forwards to a batch, and from a batch to a packed row, as a definition with loops says.

Dimensions: B rows, S columns, N tokens of a forward, T packed tokens, L routers, k experts of a token.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trl_ext.packing.layout import Layout
from trl_ext.routing.routers import unknown_in
from trl_ext.routing.routes import PackedRoutes, RowRoutes, RowsOfForward, of_batch, padded, routes_of_columns

SMALL = settings(deadline=None, max_examples=60)
EXPERTS = 3  # few, so that routes of equal tokens are often equal, or equal in another order

dtypes = st.sampled_from([torch.uint8, torch.int16])
both_dtypes = pytest.mark.parametrize("dtype", [torch.uint8, torch.int16], ids=str)


def test_what_stands_for_an_unknown_expert() -> None:
    assert unknown_in(torch.uint8) == 255
    assert unknown_in(torch.int16) == -1


@st.composite
def routes(draw: Any, *tokens: int, layers: int = 2, chosen: int = 2, dtype: torch.dtype) -> Tensor:
    """Draw routes `(*tokens, L, k)`, some of them unknown."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    drawn = torch.rand(*tokens, layers, EXPERTS, generator=generator).argsort(-1)[..., :chosen].to(dtype)
    drawn[torch.rand(tokens, generator=generator) < draw(st.sampled_from([0, 0.3, 0.7]))] = unknown_in(dtype)
    return drawn


def is_known(route_Lk: Tensor) -> bool:
    return bool((route_Lk != unknown_in(route_Lk.dtype)).all())


def unknown_like(route_Lk: Tensor) -> Tensor:
    return torch.full_like(route_Lk, unknown_in(route_Lk.dtype))


# The routes of a packed row


class Case(NamedTuple):
    """A batch with a packed row. What rows may share says `share` and `rebase`, as in `Layout`."""

    ids_BS: Any
    lengths_B: Any
    first_B: Any
    share: bool
    rebase: bool
    routes_BSLk: Tensor

    @property
    def layout(self) -> Layout:
        return Layout(self.ids_BS, self.lengths_B, self.first_B, share=self.share, rebase=self.rebase)

    def prefixes(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return for each packed token (row, column) what it has in common with those packed in the same place."""
        prefixes = {}
        for row, (first, length) in enumerate(zip(self.first_B.tolist(), self.lengths_B.tolist(), strict=True)):
            for column in range(first, first + length):
                row_of_its_own = -1 if self.share else row
                start = 0 if self.rebase else first
                prefixes[row, column] = (row_of_its_own, start, *self.ids_BS[row, first : column + 1].tolist())
        return prefixes


@st.composite
def cases(draw: Any, *, shares: bool = True) -> Case:
    """Draw a batch. Without `shares`, its rows begin with different ids, so that none shares a token."""
    B, S = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    ids = st.integers(0, draw(st.integers(0, 1)))
    ids_BS = np.array(draw(st.lists(st.lists(ids, min_size=S, max_size=S), min_size=B, max_size=B)))
    first_B = np.array([draw(st.integers(0, S - 1)) for _ in range(B)]) * draw(st.integers(0, 1))
    lengths_B = np.array([draw(st.integers(0, S - first)) for first in first_B])
    if not lengths_B.any():
        first_B[0], lengths_B[0] = 0, 1
    if not shares:
        ids_BS[np.arange(B), first_B] = 2 + np.arange(B)[draw(st.permutations(range(B)))]
    layers, chosen = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    routes_BSLk = draw(routes(B, S, layers=layers, chosen=chosen, dtype=draw(dtypes)))
    return Case(ids_BS, lengths_B, first_B, draw(st.booleans()), draw(st.booleans()), routes_BSLk)


@SMALL
@given(cases())
def test_routes_of_a_packed_row_equal_their_definition(case: Case) -> None:
    first_routes: dict[tuple[int, ...], Tensor] = {}
    shared = 0
    conflicts = 0
    for place, prefix in case.prefixes().items():
        route_Lk = case.routes_BSLk[place]
        if not is_known(route_Lk):
            continue
        if prefix in first_routes:
            shared += 1
            conflicts += any(
                {*experts.tolist()} != {*first_experts.tolist()}
                for experts, first_experts in zip(route_Lk, first_routes[prefix], strict=True)
            )
        else:
            first_routes[prefix] = route_Lk
    packed_row = case.layout
    given_BSLk = case.routes_BSLk.clone()
    packed = PackedRoutes.of(case.routes_BSLk, packed_row)
    assert torch.equal(case.routes_BSLk, given_BSLk)
    assert packed.routes_TLk.dtype == case.routes_BSLk.dtype
    assert packed.routes_TLk.shape == (packed_row.tokens, *case.routes_BSLk.shape[2:])
    assert (packed.shared, packed.conflicts) == (shared, conflicts)
    at_BS = packed_row.at_BS
    expected_BSLk = unknown_like(case.routes_BSLk)
    for place, prefix in case.prefixes().items():
        expected_BSLk[place] = first_routes.get(prefix, expected_BSLk[place])
        assert torch.equal(packed.routes_TLk[at_BS[place]], expected_BSLk[place])
    assert torch.equal(of_batch(packed.routes_TLk, packed_row), expected_BSLk)


@SMALL
@given(cases(shares=False))
def test_without_shared_tokens_a_batch_gets_its_routes_back(case: Case) -> None:
    packed_row = case.layout
    packed = PackedRoutes.of(case.routes_BSLk, packed_row)
    assert (packed.shared, packed.conflicts) == (0, 0)
    is_packed_BS = torch.zeros(case.routes_BSLk.shape[:2], dtype=torch.bool)
    for place in case.prefixes():
        is_packed_BS[place] = True
    restored_BSLk = of_batch(packed.routes_TLk, packed_row)
    assert restored_BSLk.dtype == case.routes_BSLk.dtype
    assert torch.equal(restored_BSLk[is_packed_BS], case.routes_BSLk[is_packed_BS])
    assert (restored_BSLk[~is_packed_BS] == unknown_in(restored_BSLk.dtype)).all()


@both_dtypes
def test_a_shared_token_has_the_first_known_route(dtype: torch.dtype) -> None:
    unknown = unknown_in(dtype)
    # Three rows that share [5, 6]; the second is packed before the others, because it is shorter
    ids_BS = np.array([[5, 6, 7], [5, 6, 0], [5, 6, 7]])
    layout = Layout(ids_BS, np.array([3, 2, 3]), np.zeros(3, int), share=True, rebase=True)
    routes_BSk = torch.tensor(
        [
            [[0, 1], [unknown, unknown], [2, 1]],
            [[1, 2], [0, 2], [1, 1]],
            [[1, 0], [2, 1], [unknown, unknown]],
        ]
    )
    packed = PackedRoutes.of(routes_BSk[:, :, None].to(dtype), layout)
    assert layout.input_ids.tolist() == [[5, 6, 7]]
    assert packed.routes_TLk[:, 0].tolist() == [[0, 1], [0, 2], [2, 1]]
    # The second row's 5 differs and the third's does not, but for the order; the third's 6 differs from the second's
    assert (packed.shared, packed.conflicts) == (3, 2)
    restored_BSLk = of_batch(packed.routes_TLk, layout)
    assert restored_BSLk[1, :, 0].tolist() == [[0, 1], [0, 2], [unknown, unknown]]


# The routes of forwards


@both_dtypes
def test_columns_of_generate_become_routes_of_rows(dtype: torch.dtype) -> None:
    unknown = unknown_in(dtype)
    prefill_NLk = torch.tensor([1, 2, 3, 4], dtype=dtype).view(4, 1, 1)  # two rows of two columns
    step_NLk = torch.tensor([5], dtype=dtype).view(1, 1, 1)
    forwards = [
        (prefill_NLk, RowsOfForward(torch.tensor([0, 1, 2]), torch.tensor([1, 0, 1]))),
        (step_NLk, RowsOfForward(torch.tensor([2]), torch.tensor([0]))),
    ]
    routes_BSLk = routes_of_columns(*map(list, zip(*forwards, strict=True)), prompts_shape=(3, 2))
    assert routes_BSLk.dtype == dtype
    assert routes_BSLk[..., 0, 0].tolist() == [[3, 4, unknown], [1, 2, unknown], [3, 4, 5]]


@SMALL
@given(st.data())
def test_routes_of_columns_equal_their_definition(data: Any) -> None:
    batch_size, dtype = data.draw(st.integers(1, 5)), data.draw(dtypes)
    prefill_columns = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    columns_of_forwards = [*prefill_columns, *[1] * data.draw(st.integers(0, 3))]
    forwards, rows_of_forwards, expected = [], [], []
    for columns in columns_of_forwards:
        rows = data.draw(st.lists(st.integers(0, batch_size - 1), min_size=1, unique=True))
        # Each row that the model runs stands for one of the batch at least
        run_rows = data.draw(st.integers(1, len(rows)))
        others = [data.draw(st.integers(0, run_rows - 1)) for _ in rows[run_rows:]]
        places = data.draw(st.permutations([*range(run_rows), *others]))
        routes_NLk = data.draw(routes(run_rows * columns, dtype=dtype))
        forwards.append(routes_NLk)
        rows_of_forwards.append(RowsOfForward(torch.tensor(rows), torch.tensor(places)))
        place_of_row = dict(zip(rows, places, strict=True))
        for column in range(columns):
            expected.append(
                torch.stack(
                    [
                        routes_NLk[place_of_row[row] * columns + column]
                        if row in place_of_row
                        else unknown_like(routes_NLk[0])
                        for row in range(batch_size)
                    ]
                )
            )
    routes_BSLk = routes_of_columns(forwards, rows_of_forwards, (batch_size, sum(prefill_columns)))
    assert routes_BSLk.dtype == dtype
    assert torch.equal(routes_BSLk, torch.stack(expected, dim=1))


def test_all_rows_of_a_forward() -> None:
    rows_R, place_R = RowsOfForward.all(3)
    assert rows_R.tolist() == place_R.tolist() == [0, 1, 2]
    routes_NLk = torch.arange(12, dtype=torch.uint8).view(6, 1, 2)
    assert torch.equal(routes_of_columns([routes_NLk], [RowsOfForward.all(3)], (3, 2)), routes_NLk.view(3, 2, 1, 2))


def test_forwards_without_rows_are_an_error() -> None:
    forward = torch.zeros(2, 1, 1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="ran in 2 forward passes of `generate`, and the model in 1"):
        routes_of_columns([forward, forward], [RowsOfForward.all(2)], (2, 1))


@pytest.mark.parametrize("columns", [(3,), (2, 2), (2, 1, 3)], ids=["beams", "next", "no cache"])
def test_tokens_that_run_again_are_an_error(columns: tuple[int, ...]) -> None:
    forwards = [torch.zeros(2 * n, 1, 1, dtype=torch.uint8) for n in columns]
    with pytest.raises(RuntimeError, match="runs tokens more than once"):
        routes_of_columns(forwards, [RowsOfForward.all(2)] * len(columns), (2, 2))


# The routes of rows


@SMALL
@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 10), st.data())
def test_routes_of_a_row_are_split_and_may_lack_the_last(
    prompt_tokens: int, completion_tokens: int, tokens: int, data: Any
) -> None:
    routes_SLk = data.draw(routes(tokens, dtype=data.draw(dtypes)))
    row = RowRoutes.of(routes_SLk, prompt_tokens, completion_tokens)
    assert row.prompt.dtype == row.completion.dtype == routes_SLk.dtype
    assert (len(row.prompt), len(row.completion)) == (prompt_tokens, completion_tokens)
    for token, route_Lk in enumerate([*row.prompt, *row.completion]):
        if token < tokens:
            assert torch.equal(route_Lk, routes_SLk[token])
        else:
            assert route_Lk.shape == routes_SLk.shape[1:]
            assert (route_Lk == unknown_in(routes_SLk.dtype)).all()


@both_dtypes
def test_the_last_sampled_token_has_no_route(dtype: torch.dtype) -> None:
    row = RowRoutes.of(torch.tensor([1, 2, 3], dtype=dtype).view(3, 1, 1), prompt_tokens=2, completion_tokens=2)
    assert row.prompt.flatten().tolist() == [1, 2]
    assert row.completion.flatten().tolist() == [3, unknown_in(dtype)]


@both_dtypes
def test_rows_are_padded_on_a_side(dtype: torch.dtype) -> None:
    unknown = unknown_in(dtype)
    rows = [torch.tensor(row, dtype=dtype).view(-1, 1, 1) for row in ([1, 2], [], [3])]
    left_BWLk, right_BWLk = (padded(rows, 3, pads_left=pads_left) for pads_left in (True, False))
    assert left_BWLk.dtype == right_BWLk.dtype == dtype
    assert left_BWLk[..., 0, 0].tolist() == [[unknown, 1, 2], [unknown, unknown, unknown], [unknown, unknown, 3]]
    assert right_BWLk[..., 0, 0].tolist() == [[1, 2, unknown], [unknown, unknown, unknown], [3, unknown, unknown]]


@SMALL
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 2), st.booleans(), st.data())
def test_padding_has_no_routes(lengths: list[int], extra: int, pads_left: bool, data: Any) -> None:
    dtype = data.draw(dtypes)
    rows = [data.draw(routes(length, dtype=dtype)) for length in lengths]
    width = max(lengths) + extra
    routes_BWLk = padded(rows, width, pads_left=pads_left)
    assert routes_BWLk.dtype == dtype
    assert routes_BWLk.shape == (len(rows), width, *rows[0].shape[1:])
    for row_routes, routes_WLk in zip(rows, routes_BWLk, strict=True):
        start = width - len(row_routes) if pads_left else 0
        is_padding_W = torch.ones(width, dtype=torch.bool)
        is_padding_W[start : start + len(row_routes)] = False
        assert torch.equal(routes_WLk[~is_padding_W], row_routes)
        assert (routes_WLk[is_padding_W] == unknown_in(dtype)).all()
