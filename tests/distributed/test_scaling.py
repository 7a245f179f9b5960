"""Gloo ranks receive as many bytes as the formulas of docs/scaling.md and the rule of the head predict."""

from pathlib import Path

import balance
import pytest
import torch
from scaling import STEPS, head_cases, step_formula
from scaling_counts import count_head, count_heads, count_steps, on_ranks
from scaling_formulas import HeadCase, head_held, head_payloads, head_received
from scaling_tables import tables

from tiers import fast_first

DOCS = Path(__file__).parents[2] / "docs" / "scaling.md"

# A weight that is much larger than tiles and slices: 16 MiB, 8 on each of 2 ranks
LARGE = HeadCase(2, tokens=2, hidden=64, vocabulary=65536, item=4, device="cpu")
SPREAD = ("local", "in turn", "tensor parallel")
# The ranks have different numbers of tokens and of rows
UNEVEN = HeadCase(2, tokens=9, hidden=8, vocabulary=301, item=4, device="cpu")
TOKENS = (9, 4)


def everything(ranks):
    """Return the counts of one rank, in one launch."""
    large = {way: count_head(LARGE, way) for way in (*SPREAD, "whole")} if ranks == 2 else {}
    uneven = {way: count_head(UNEVEN, way, list(TOKENS)) for way in ("local", "in turn")} if ranks == 2 else {}
    return {
        "heads": count_heads(head_cases(ranks)),
        "large": large,
        "uneven": uneven,
        "steps": count_steps(list(STEPS)),
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


@pytest.mark.slow
def test_the_head_moves_what_the_formula_says(counted):
    for number, (case, way) in enumerate(head_cases(len(counted))):
        seen = [rank["heads"][number] for rank in counted]
        payloads = {kind: count for kind, count in head_payloads(case, way).items() if count}
        assert all(x.payloads == payloads for x in seen), (way, case, payloads, seen[0].payloads)
        mean = sum(x.received for x in seen) / len(seen)
        assert mean == pytest.approx(head_received(case, way), rel=1e-12), (way, case)


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


@pytest.mark.slow
def test_the_head_holds_what_the_formula_says(of_two):
    for way in SPREAD:
        peak = max(rank["large"][way].peak for rank in of_two)
        assert peak == pytest.approx(head_held(LARGE, way), rel=0.05), way


@pytest.mark.slow
def test_a_step_moves_what_the_formula_says(counted):
    for number, (engine, lora) in enumerate(STEPS):
        mean = sum(rank["steps"][number][0].received for rank in counted) / len(counted)
        if engine == "FSDP2" and lora:
            mean -= 8 * (len(counted) - 1)  # how many tokens each rank has
        assert mean == pytest.approx(step_formula(len(counted), engine, lora), rel=1e-12), (engine, lora)


def test_the_documentation_has_the_tables_of_the_formulas():
    written = DOCS.read_text()
    for table in tables().split("\n\n"):
        assert table in written


def test_the_documentation_has_the_newest_simulation_of_balance():
    written = DOCS.read_text()
    for table in balance.tables(balance.newest()).split("\n\n"):
        assert table in written
