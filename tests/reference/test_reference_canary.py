"""The canary of a store: which sequences it has, what it detects, and which folders are checked."""

import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from reference_batches import batch, score
from trl_ext.reference.canary import COARSE, EXACT, Canary
from trl_ext.reference.sequences import Sequences
from trl_ext.reference.store import DiskStore, MemoryStore
from trl_ext.reference.stored import StoredReference, Variants

CPU = torch.device("cpu")


def rows(*lengths, start=1):
    return batch([([5 + i] * length, start) for i, length in enumerate(lengths)])


def canary_of(data, without=()):
    sequences, values = Sequences(data, ""), score(data)
    kept = [row for row in range(len(values)) if row not in without]
    entries = sequences.values_of(kept, values[kept])
    return Canary.of("reference", sequences, entries)


def first_tokens(canary):
    return [row[0] - 5 for row in canary.arrays["input_ids"].tolist()]


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ((3, 9, 4, 8, 5, 7), [4, 5, 3, 1]),  # the longest
        ((600, 512, 30, 513), [2, 1]),  # of at most 512 tokens
        ((700, 600, 800), [1]),  # or the shortest
        ((3,), [0]),
    ],
)
def test_it_has_a_few_sequences_of_limited_length(lengths, chosen):
    canary = canary_of(rows(*lengths))
    assert first_tokens(canary) == chosen
    assert canary.arrays["input_ids"].shape[1] == max(lengths[row] for row in chosen)
    assert canary.tokens == canary.arrays["input_ids"].size
    assert canary.difference(score(canary.batch(CPU)), EXACT) is None


def test_rows_without_values_or_labels_are_not_chosen():
    data = rows(3, 4, 5)
    data["completion_mask"][2] = 0
    data["completion_mask"][1, 1:] = torch.tensor([0, 0, 1, 0])
    assert first_tokens(canary_of(data, without=(0,))) == [1]
    assert canary_of(data, without=(0, 1)) is None
    overflowed = score(rows(3, 4))
    overflowed[1, -1] = -torch.inf
    sequences = Sequences(rows(3, 4), "")
    found = Canary.of("", sequences, sequences.values_of([0, 1], overflowed))
    assert first_tokens(found) == [0]


def test_only_padding_on_the_right_is_removed():
    data = batch([([5, 6, 7], 1), ([8, 9], 1)], left=2)
    canary = canary_of({name: torch.nn.functional.pad(x, (0, 5)) for name, x in data.items()})
    assert canary.arrays["attention_mask"].tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert canary.difference(score(canary.batch(CPU)), EXACT) is None


@pytest.mark.parametrize(
    ("change", "tolerance", "another"),
    [
        (lambda x: x + 5e-4, EXACT, False),
        (lambda x: x + 5e-3, EXACT, True),
        (lambda x: 100 * x, EXACT, True),
        (lambda x: x + 5e-3 * (x == x.min()), EXACT, True),  # a single token
        (lambda x: x + 0.05, COARSE, False),
        (lambda x: x + 0.2, COARSE, True),
        (lambda x: x + 3.0 * (x == x.min()), COARSE, False),
        (lambda x: x * torch.nan, COARSE, True),
        (lambda x: x * torch.nan, EXACT, True),
    ],
)
def test_it_detects_another_reference_beyond_rounding(change, tolerance, another):
    canary = canary_of(batch([(list(range(1, 13)), 1), ([8, 9], 1)]))
    why = canary.difference(change(score(canary.batch(CPU))), tolerance)
    assert (why is not None) == another
    assert not another or " differ, by up to " in why


@pytest.mark.parametrize(("tokens", "may_be_off"), [(1, 0), (2, 1), (11, 1), (12, 2)])
def test_in_low_precision_a_tenth_of_the_tokens_may_differ_but_never_all(tokens, may_be_off):
    canary = canary_of(rows(tokens + 1))
    for count in (may_be_off, may_be_off + 1):
        values = score(canary.batch(CPU))
        values[0, :count] += 3.0
        assert (canary.difference(values, COARSE) is None) == (count == may_be_off)


def test_a_log_prob_far_from_zero_may_differ_more():
    canary = canary_of(rows(5))
    canary.arrays["values"][:] = -20.0
    assert canary.difference(torch.full((1, 4), -20.01), EXACT) is None
    assert canary.difference(torch.full((1, 4), -20.1), EXACT) == "4 of 4 differ, by up to 0.1"


def test_it_is_read_from_a_folder_unless_a_bit_is_wrong(tmp_path, caplog):
    canary = canary_of(rows(3, 4))
    canary.write(tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    assert Canary.read(tmp_path, "reference").digest == canary.digest
    assert Canary.read(tmp_path, "another") is None
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        found = Canary.read(tmp_path, "reference")
        assert found is None or found.digest == canary.digest
    assert f"Ignored {path}" in caplog.text
    path.write_bytes(content)
    canary_of(rows(5)).write(tmp_path)  # the first canary stays
    assert Canary.read(tmp_path, "reference").digest == canary.digest


WRONG_CONTENT = {
    "a negative id": lambda x: {**x, "input_ids": x["input_ids"] - 6},
    "an id past the vocabulary": lambda x: {**x, "input_ids": x["input_ids"] + 100},
    "ids of another dtype": lambda x: {**x, "input_ids": x["input_ids"].astype(np.int32)},
    "real ids": lambda x: {**x, "input_ids": x["input_ids"].astype(np.float32)},
    "ids of rank 1": lambda x: {**x, "input_ids": x["input_ids"][0]},
    "a mask of another shape": lambda x: {**x, "attention_mask": x["attention_mask"][:, :-1]},
    "values of another shape": lambda x: {**x, "values": x["values"][:, :-1]},
    "values of rank 1": lambda x: {**x, "values": x["values"][0]},
    "values in half precision": lambda x: {**x, "values": x["values"].astype(np.float16)},
    "values that are not finite": lambda x: {**x, "values": x["values"] * np.nan},
    "no rows": lambda x: {name: value[:0] for name, value in x.items()},
    "no columns": lambda x: {name: value[:, :0] for name, value in x.items()},
    "no label": lambda x: {**x, "completion_mask": 0 * x["completion_mask"]},
}


@pytest.mark.parametrize("how", WRONG_CONTENT)
def test_a_canary_with_a_right_digest_and_wrong_content_is_ignored(how, tmp_path, caplog):
    canary = canary_of(rows(3, 4))
    Canary("reference", WRONG_CONTENT[how](canary.arrays)).write(tmp_path)
    assert Canary.read(tmp_path, "reference", tokens=100) is None
    assert f"Ignored {tmp_path / 'canary'} in the store" in caplog.text
    (tmp_path / "canary").unlink()
    canary.write(tmp_path)
    for tokens in (None, 7, 100):
        assert Canary.read(tmp_path, "reference", tokens).digest == canary.digest


class Reference:
    """Returns log-probs times `factor`, and counts its passes."""

    def __init__(self, root, factor=1.0, is_main=True):
        self.root, self.factor, self.is_main, self.passes = root, factor, is_main, []

    def stored(self):
        variants = Variants(self.root, "a" * 32, self.open, EXACT, nullcontext, self.is_main)
        return StoredReference(MemoryStore(), "a" * 32, lambda x: [x], lambda x: [x], variants=variants)

    def open(self, name, canary):
        return DiskStore(self.root / name, name, canary=canary)

    def __call__(self, fed):
        self.passes.append(tuple(fed["input_ids"].shape))
        return self.factor * score(fed)

    def run(self, *batches):
        stored = self.stored()
        for data in batches:
            torch.testing.assert_close(stored(data, self).log_probs, self.factor * score(data))
        stored.store.flush()
        return stored


def folders(root):
    return sorted(path.name for path in root.iterdir())


def test_a_run_finds_its_folder_among_several(tmp_path, caplog):
    data = rows(3, 4, 5)
    for factor in (1.0, 2.0, 3.0):
        Reference(tmp_path, factor).run(data)
    assert len(folders(tmp_path)) == 3
    assert caplog.text.count("Stored reference log-probs are not used") == 2
    caplog.clear()
    for factor, checks in ((3.0, 1), (2.0, 2), (1.0, 3)):  # the newest is checked first
        reference = Reference(tmp_path, factor)
        reference.run(data)
        assert reference.passes == [(3, 5)] * checks
    assert len(folders(tmp_path)) == 3
    assert not caplog.text


def test_only_the_newest_folders_are_checked(tmp_path):
    for factor in range(1, 11):
        Reference(tmp_path, factor).run(rows(3, 4))
    reference = Reference(tmp_path, 20.0)
    reference.run(rows(3, 4))
    assert len(reference.passes) == 8 + 1


def test_only_the_first_rank_looks_for_folders(tmp_path):
    Reference(tmp_path).run(rows(3, 4))
    assert Reference(tmp_path, is_main=False).stored()._variants.stored_canaries() == []


def test_a_batch_that_is_not_wanted_or_cannot_be_stored_checks_nothing(tmp_path):
    Reference(tmp_path).run(rows(3, 4))
    reference = Reference(tmp_path)
    stored = reference.stored()
    stored(rows(3, 4), reference, is_needed=False)
    assert reference.passes == []
    stored({**rows(3, 4), "pixel_values": torch.zeros(2)}, reference)
    assert reference.passes == [(2, 4)]
    answer = stored(rows(3, 4), reference)
    assert reference.passes == [(2, 4)] * 2
    assert (answer.passes, answer.tokens) == (1, 8)


def test_values_from_before_the_canary_are_stored_with_it(tmp_path):
    empty = rows(3, 4)
    empty["completion_mask"][:] = 0
    reference = Reference(tmp_path)
    stored = reference.run(empty, rows(5))
    assert stored.canary.arrays["input_ids"].shape == (1, 5)
    assert stored.holds(empty)
    again = Reference(tmp_path).run(empty, rows(5))
    assert again.holds(empty)
    assert again.holds(rows(5))


def test_a_folder_with_a_damaged_or_missing_canary_is_not_used(tmp_path, caplog):
    for change in (lambda path: path.write_bytes(b"what"), os.remove):
        Reference(tmp_path, 2.0).run(rows(3, 4))
        (folder,) = tmp_path.iterdir()
        change(folder / "canary")
        reference = Reference(tmp_path)
        reference.run(rows(3, 4))
        assert len(reference.passes) == 1
        for name in folders(tmp_path):
            for path in (tmp_path / name).iterdir():
                path.unlink()
            (tmp_path / name).rmdir()
    assert "canary in the store of reference log-probs" in caplog.text


def test_a_folder_of_another_reference_or_without_a_canary_is_not_checked(tmp_path):
    for name in ("a" * 32, "b" * 32 + "-0"):
        (tmp_path / name).mkdir()
        canary_of(rows(3, 4)).write(tmp_path / name)
    reference = Reference(tmp_path)
    reference.run(rows(3, 4))
    assert reference.passes == [(2, 4)]
    assert len(folders(tmp_path)) == 3


@pytest.mark.parametrize("name", ["file", "x" * 300], ids=["file", "name-too-long"])
def test_a_read_only_folder_loses_no_value(name, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    reference = Reference(tmp_path / name)
    stored = reference.run(rows(3, 4), rows(5), rows(3, 4))
    assert len(reference.passes) == 2
    assert np.array_equal(stored.store.get(Sequences(rows(5), "a" * 32).keys[0]), score(rows(5))[0])
    assert "Cannot write reference log-probs" in caplog.text
