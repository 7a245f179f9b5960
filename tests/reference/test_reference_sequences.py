"""The sequences of a padded batch: which have the same key, where values go, and which rows need a pass."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from reference_batches import batch, score
from tiny import V_WORDS
from trl_ext.reference.sequences import Sequences
from trl_ext.reference.store import MemoryStore
from trl_ext.reference.stored import StoredReference


def keys(*args, identity="reference", **kwargs):
    return Sequences(batch(*args, **kwargs), identity).keys


class Counted:
    """A reference pass that records the shapes of its batches."""

    def __init__(self, values=score):
        self.shapes, self.values = [], values

    def __call__(self, fed):
        self.shapes.append(tuple(fed["input_ids"].shape))
        return self.values(fed)


def stored():
    return StoredReference(MemoryStore(), "reference", lambda counts: [counts], lambda entries: [entries])


def test_a_sequence_has_the_same_key_in_any_batch():
    (alone,) = keys([([5, 6, 7], 1)])
    assert keys([([5, 6, 7], 1)], width=9) == [alone]
    assert keys([([8] * 7, 2), ([5, 6, 7], 1)])[1] == alone


@pytest.mark.parametrize(
    "other",
    [
        {"rows": [([5, 6, 8], 1)]},
        {"rows": [([5, 6, 7, 0], 1)]},  # the pad token is part of the sequence
        {"rows": [([5, 6], 1)]},
        {"rows": [([5, 6, 7], 2)]},  # the prompt ends later
        {"rows": [([5, 6, 7], 1)], "left": 1},  # padding on the left shifts the positions
        {"rows": [([5, 6, 7], 1)], "identity": "another"},
    ],
    ids=str,
)
def test_any_difference_that_may_matter_changes_the_key(other):
    assert keys(**other) != keys([([5, 6, 7], 1)])
    assert len(keys(**other)) == 1


def test_a_gap_in_the_attention_changes_the_key():
    given, gap = batch([([5, 6, 7], 1)]), batch([([5, 6, 7], 1)])
    gap["attention_mask"][0, 1] = 0
    assert Sequences(given, "").keys != Sequences(gap, "").keys


@pytest.mark.parametrize("name", ["pixel_values", "token_type_ids"])
def test_rows_with_other_model_inputs_are_scored_each_time_and_not_stored(name):
    data = {**batch([([5, 6, 7], 1), ([5, 8], 1)]), name: torch.zeros(2, 3)}
    reference, reference_pass = stored(), Counted()
    for _ in range(2):
        answer = reference(data, reference_pass)
        torch.testing.assert_close(answer.log_probs, score(data))
        assert (answer.passes, answer.tokens) == (1, 6)
    assert reference.store._in_memory == {}
    assert not reference.holds(data)


row = st.lists(st.integers(1, V_WORDS - 1), min_size=2, max_size=8).flatmap(
    lambda ids: st.tuples(st.just(ids), st.integers(0, len(ids) - 1))
)
rows = st.lists(row, min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(batches=st.lists(rows, min_size=1, max_size=4), extra=st.integers(0, 3))
def test_values_equal_the_reference_and_only_missing_rows_are_scored(batches, extra):
    reference, reference_pass = stored(), Counted()
    met = set()
    for i, given_rows in enumerate(batches):
        data = batch(given_rows, width=8 + extra * (i % 2))
        new = [r for r in given_rows if (tuple(r[0]), r[1]) not in met]
        met |= {(tuple(ids), start) for ids, start in given_rows}
        before = len(reference_pass.shapes)
        answer = reference(data, reference_pass)
        torch.testing.assert_close(answer.log_probs, score(data), rtol=1e-6, atol=1e-6)
        shapes = reference_pass.shapes[before:]
        whole = len(new) == len(given_rows)
        width = data["input_ids"].shape[1] if whole else max((len(ids) for ids, _ in new), default=0)
        assert shapes == ([(len(new), width)] if new else [])
        assert answer.passes == len(shapes)
        assert answer.tokens == sum(r * w for r, w in shapes)
        assert answer.tokens_of_batch == data["input_ids"].numel()
        assert reference.holds(data)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_not_finite_is_not_stored(value):
    data = batch([([5, 6, 7], 1), ([5, 8], 1)])

    def broken(fed):
        values = score(fed)
        values[0, -1] = value
        return values

    reference = stored()
    reference(data, broken)
    torch.testing.assert_close(reference(data, score).log_probs, score(data))


@pytest.mark.parametrize("missing", [(0,), (1,), (0, 1), ()])
def test_either_every_rank_runs_one_pass_or_none_does(missing):
    """Runs two ranks in turn, with a recorded exchange between them."""
    batches = [batch([([5, 6, 7], 1), ([5, 8], 1)]), batch([([9, 6, 7, 4], 1), ([9, 8], 1)])]
    passes, shared, answers = [Counted(), Counted()], [], []
    counts = [[2 if r in missing else 0, batches[r]["input_ids"].numel(), 0, 0] for r in range(2)]
    for r in range(2):
        reference = StoredReference(MemoryStore(), "", lambda own: [own, counts[1 - r]], lambda own: [own])  # noqa: B023
        if r not in missing:
            StoredReference(reference.store, "", lambda own: [own], lambda own: [own])(batches[r], score)
        reference._gather = lambda own: shared.append(own) or [own]
        answers.append(reference(batches[r], passes[r]))
        torch.testing.assert_close(answers[r].log_probs, score(batches[r]))
    assert [len(p.shapes) for p in passes] == [int(bool(missing))] * 2
    assert len(shared) == (2 if missing else 0)
    for r in range(2):
        if missing and r not in missing:
            assert passes[r].shapes == [(1, 2)]  # its shortest row
            assert shared[r] == {}


def test_a_row_without_values_is_an_error():
    sequences = Sequences(batch([([5, 6, 7], 1), ([8, 9], 1)]), "reference")
    entries = sequences.values_of([0], torch.tensor([[-1.0, -2.0]]))
    with pytest.raises(RuntimeError, match=r"Rows \[1\] of a batch have no reference log-probs"):
        sequences.filled(entries, torch.device("cpu"))


def test_rows_that_are_not_wanted_are_not_looked_up_or_scored():
    count = Counted()
    answer = stored()(batch([([5, 6, 7], 1), ([8, 9], 1)]), count, is_needed=False)
    assert not count.shapes
    assert not answer.log_probs.any()
