"""The order of grouped micro-batches: rows stay in their unit, few groups are cut, slices are balanced."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ext.planning.micro_batches import RowTokens, StepRows, micro_batches_per_step, row_order
from trl_ext.planning.rows import ScoredTokens
from trl_ext.trainers.row_balance import in_order


def costs(fed: RowTokens, slices: list[list[int]]) -> list[int]:
    """Tokens of each forward, by definition."""
    tokens = []
    for rows in slices:
        live = [row for row in rows if fed.prompt_B[row] >= 0]
        prompts = {fed.prompt_B[row]: fed.prompt_tokens_B[row] for row in live}
        tokens.append(max(1, sum(prompts.values()) + sum(fed.own_tokens_B[row] for row in live)))
    return tokens


@st.composite
def generation_batches(draw: st.DrawFn) -> tuple[RowTokens, int, int]:
    """Rows in any order, rows of a slice, slices of a unit; group sizes differ, and some rows are not fed."""
    capacity = draw(st.integers(1, 6))
    unit = draw(st.integers(1, 4))
    rows = capacity * unit * draw(st.integers(1, 3)) + draw(st.integers(0, 1))
    lengths = draw(st.lists(st.integers(1, 30), min_size=6, max_size=6))
    prompt_B = draw(st.lists(st.integers(-1, 5), min_size=rows, max_size=rows))
    own_B = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    own_B = [own if prompt >= 0 else 0 for own, prompt in zip(own_B, prompt_B, strict=True)]
    return RowTokens(prompt_B, [lengths[prompt] for prompt in prompt_B], own_B), capacity, unit


def cut(order: list[int], size: int) -> list[list[int]]:
    return [order[i : i + size] for i in range(0, len(order) - size + 1, size)]


@settings(max_examples=100, deadline=None)
@given(generation_batches())
def test_any_batch_is_rearranged_within_units_and_never_feeds_more(batch: tuple[RowTokens, int, int]) -> None:
    fed, capacity, unit = batch
    order = row_order(fed, StepRows(capacity, unit))
    before = list(range(len(fed.prompt_B)))
    assert sorted(order) == before
    for got, want in zip(cut(order, capacity * unit), cut(before, capacity * unit), strict=True):
        assert set(got) == set(want)
        ours, theirs = (costs(fed, cut(order_of_unit, capacity)) for order_of_unit in (got, want))
        assert sum(ours) <= sum(theirs)
        assert max(ours) <= max(theirs)
        if got != want:
            groups = Counter(fed.prompt_B[row] for row in got if fed.prompt_B[row] >= 0)
            met = sum(len({fed.prompt_B[row] for row in rows} - {-1}) for rows in cut(got, capacity))
            assert met < sum(math.ceil(rows / capacity) for rows in groups.values()) + unit
    assert order == row_order(fed, StepRows(capacity, unit))
    whole = len(before) - len(before) % (capacity * unit)
    assert order[whole:] == before[whole:]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 9]),
    st.randoms(use_true_random=False),
)
def test_groups_that_fit_are_whole(size: int, groups: int, factor: int, longest: int, random: Any) -> None:
    """Groups of one size, slices of as many rows or a multiple: each prompt lies in one slice.

    But for completions of several lengths, where TRL's order may have the smaller largest slice, and stays.
    """
    for capacity in {size * factor, size}:
        slices = math.ceil(groups * size / capacity)
        prompt_B = [row // size if row < groups * size else -1 for row in range(slices * capacity)]
        random.shuffle(prompt_B)
        own_B = [random.randint(0, longest) if prompt >= 0 else 0 for prompt in prompt_B]
        fed = RowTokens(prompt_B, [50] * len(prompt_B), own_B)
        order = row_order(fed, StepRows(capacity, slices))
        met = [{prompt_B[row] for row in rows} - {-1} for rows in cut(order, capacity)]
        assert sum(map(len, met)) == groups or (longest > 0 and order == list(range(len(prompt_B))))


def test_slices_are_balanced() -> None:
    """Four groups of two with 40, 30, 20 and 10 tokens, in slices of four rows: 50 and 50."""
    fed = RowTokens([0, 0, 1, 1, 2, 2, 3, 3], [10] * 8, [15, 15, 10, 10, 5, 5, 0, 0])
    order = row_order(fed, StepRows(4, 2))
    assert [fed.of_rows(rows) for rows in cut(order, 4)] == [50, 50]
    # A group of four in two slices: its longest rows lie apart
    fed = RowTokens([0] * 4, [10] * 4, [9, 8, 2, 1])
    order = row_order(fed, StepRows(2, 2))
    assert [fed.of_rows(rows) for rows in cut(order, 2)] == [20, 20]
    # So they do where a group is cut because no slice has room for it
    prompt_B = [0, 0, 1, 2, 2, 0, 1, 1, 2, 2]
    fed = RowTokens(prompt_B, [(50, 50, 10)[x] for x in prompt_B], [0, 0, 0, 9, 9, 0, 0, 0, 1, 1])
    order = row_order(fed, StepRows(5, 2))
    assert [fed.of_rows(rows) for rows in cut(order, 5)] == [70, 70]


def test_what_a_row_feeds_is_found_by_content() -> None:
    batch = {
        # The second row's prompt is the first's beside other padding; the third's differs in its mask alone
        "prompt_ids": torch.tensor([[0, 5, 6], [7, 5, 6], [0, 5, 6], [0, 5, 6]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [0, 1, 1]]),
    }
    tokens_BC = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    fed = RowTokens.of(batch, ScoredTokens(torch.tensor([0, 1, 2]), tokens_BC))
    assert fed.prompt_B[0] == fed.prompt_B[1] != fed.prompt_B[2]
    assert fed.prompt_B[3] == -1
    assert fed.prompt_tokens_B == [2, 2, 3, 2]
    assert fed.own_tokens_B == [2, 0, 1, 0]
    assert fed.of_rows([0, 1]) == 4
    assert fed.of_rows([3]) == 1


@pytest.mark.parametrize(
    ("epoch", "began", "unit"), [(8, 0, 4), (6, 0, 2), (5, 0, 1), (8, 3, 1), (8, 2, 2), (None, 0, 1)]
)
def test_a_unit_divides_every_distance_between_steps(epoch: int | None, began: int, unit: int) -> None:
    assert unit == micro_batches_per_step(
        steps_per_generation=8, accumulation_steps=4, micro_batches_of_an_epoch=epoch, window_began=began
    )


def test_entries_of_every_kind_follow_their_rows() -> None:
    fed = RowTokens([0, 1, 0, 1], [5] * 4, [1] * 4)
    order = row_order(fed, StepRows(2, 2))
    assert order in ([0, 2, 1, 3], [1, 3, 0, 2])
    batch = {
        "rows": torch.arange(4),
        "list": [0, 1, 2, 3],
        "none": None,
        "count": torch.tensor(7.0),
        "wide": torch.eye(4),
    }
    got = in_order(batch, order)
    assert got["rows"].tolist() == got["list"] == got["wide"].argmax(dim=1).tolist() == order
    assert got["none"] is None
    assert got["count"] is batch["count"]


def test_an_order_that_feeds_no_more_stays() -> None:
    # Groups would be whole in another order, and a slice without a live row, which feeds one token
    fed = RowTokens([1, 1, 0, -1, -1, 1], [100, 100, 1, 0, 0, 100], [6, 1, 3, 0, 0, 2])
    assert row_order(fed, StepRows(2, 3)) == list(range(6))
    # A group of long completions would lie in one slice: fewer tokens, and a forward of twice as many
    fed = RowTokens([0, 1, 0, 1], [10] * 4, [100, 1, 100, 1])
    assert row_order(fed, StepRows(2, 2)) == list(range(4))
    # Nothing to gain
    fed = RowTokens([0, 0, 1, 1], [10] * 4, [1] * 4)
    assert row_order(fed, StepRows(2, 2)) == list(range(4))
