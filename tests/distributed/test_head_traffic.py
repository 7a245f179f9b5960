"""Gloo ranks receive as many bytes for the head as its rule predicts, and each way gives the same values."""

import pytest
import torch

from head_traffic import HeadCase, count_head, count_heads, head_cases, on_ranks
from tiers import fast_first

# A weight that is much larger than tiles and slices: 16 MiB, 8 on each of 2 ranks
LARGE = HeadCase(2, tokens=2, hidden=64, vocabulary=65536)
SPREAD = ("local", "in turn", "tensor parallel")
# The ranks have different numbers of tokens and of rows
UNEVEN = HeadCase(2, tokens=9, hidden=8, vocabulary=301)
TOKENS = (9, 4)


def everything(ranks):
    """Return the counts of one rank, in one launch."""
    large = {way: count_head(LARGE, way) for way in (*SPREAD, "whole")} if ranks == 2 else {}
    uneven = {way: count_head(UNEVEN, way, list(TOKENS)) for way in ("local", "in turn")} if ranks == 2 else {}
    return {
        "heads": count_heads(head_cases(ranks)),
        "large": large,
        "uneven": uneven,
    }


@pytest.fixture(scope="module", params=fast_first([2, 4, 8], 2))
def counted(request):
    """Return the counts of each rank."""
    return on_ranks(request.param, everything, request.param)


@pytest.fixture
def of_two(counted):
    if len(counted) > 2:
        pytest.skip("counted at 2 ranks")
    return counted


def test_the_rule_weighs_the_bytes_that_move(counted):
    asked = 0
    for number, (case, way) in enumerate(head_cases(len(counted))):
        seen = [rank["heads"][number] for rank in counted]
        if seen[0].predicted is not None:
            asked += 1
            assert {x.predicted for x in seen} == {round(sum(x.received for x in seen) / len(seen))}, (way, case)
    assert asked == 8


@pytest.mark.slow
def test_the_rule_weighs_the_bytes_of_uneven_ranks(of_two):
    for way in ("local", "in turn"):
        seen = [rank["uneven"][way] for rank in of_two]
        assert {x.predicted for x in seen} == {int(sum(x.received for x in seen) / 2)}
        assert [len(x.values[0]) for x in seen] == list(TOKENS)


@pytest.mark.slow
def test_every_way_gives_the_same_values_and_gradients(counted):
    cases = head_cases(len(counted))
    for rank in counted:
        results = {}
        for (case, way), seen in zip(cases, rank["heads"], strict=True):
            if way == "tensor parallel":
                continue  # different tokens
            first = results.setdefault(case, seen.values)
            for a, b in zip(seen.values, first, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
        assert len(results) == 5


@pytest.mark.slow
def test_local_and_in_turn_make_no_tensor_as_large_as_the_weight(of_two):
    for rank in of_two:
        for way in SPREAD:
            assert rank["large"][way].largest <= LARGE.weight // 4, way
            assert rank["large"][way].peak < LARGE.weight // 2, way
        assert rank["large"]["whole"].largest == LARGE.weight  # the watch sees it
