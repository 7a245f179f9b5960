"""The store on disk: nothing but what was stored is ever read, whenever a writer is killed and whatever lies there."""

import functools
import hashlib
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import trl_ext
from tiny import lora_config, preferences
from trl_ext.reference import DiskStore, MemoryStore
from trl_ext.reference.segments import read_segment, segment_files, write_segment

IDENTITY = "0" * 32


def entry(number: int) -> tuple[bytes, np.ndarray]:
    """A key, and values that follow from it: of 0 to 40 positions."""
    key = hashlib.blake2b(str(number).encode(), digest_size=16).digest()
    return key, np.random.default_rng(number).standard_normal(number % 41).astype(np.float32)


def entries(*numbers: int) -> dict[bytes, np.ndarray]:
    return dict(map(entry, numbers))


def holds(store: MemoryStore, number: int) -> bool:
    """Whether the store has the entry; if it has, it must be the right one."""
    key, values = entry(number)
    found = store.get(key)
    if found is not None:
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, values)
    return found is not None


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_entries_come_back_as_they_were_put_in(store, tmp_path):
    store = MemoryStore() if store == "memory" else DiskStore(tmp_path / "new" / "folder", IDENTITY)
    store.add(entries(*range(100)))
    assert all(holds(store, i) for i in range(100))
    store.flush()
    store.add(entries(*range(50, 150)))
    assert all(holds(store, i) for i in range(150))
    assert not holds(store, 150)


def test_another_run_finds_what_was_flushed(tmp_path):
    first = DiskStore(tmp_path, IDENTITY)
    first.add(entries(*range(10)))
    first.flush()
    first.add(entries(10))
    second = DiskStore(tmp_path, IDENTITY)
    assert [holds(second, i) for i in range(11)] == [True] * 10 + [False]
    # Two runs may fill one folder at the same time
    second.add(entries(*range(20, 30)))
    second.flush()
    first.flush()
    assert all(holds(first, i) and holds(DiskStore(tmp_path, IDENTITY), i) for i in [*range(11), *range(20, 30)])


def test_entries_are_written_when_there_are_many_or_time_has_passed(tmp_path):
    store = DiskStore(tmp_path, IDENTITY, flush_bytes=1000, flush_seconds=1e9)
    store.add(entries(40))
    assert segment_files(tmp_path) == []
    store.add(entries(*range(30, 40)))
    assert len(segment_files(tmp_path)) == 1
    store = DiskStore(tmp_path, IDENTITY, flush_seconds=0.2)
    store.add(entries(1))
    time.sleep(0.3)
    store.add(entries(2))
    assert len(segment_files(tmp_path)) == 2


def test_a_rank_that_does_not_write_lets_go_of_what_another_has_written(tmp_path):
    writer, other = DiskStore(tmp_path, IDENTITY), DiskStore(tmp_path, IDENTITY, writes=False)
    for store in (writer, other):
        store.add(entries(*range(10)))
    other.flush()
    assert segment_files(tmp_path) == []
    assert len(other._held) == 10
    writer.flush()
    other.flush()
    assert len(writer._held) == len(other._held) == 0
    assert all(holds(other, i) for i in range(10))


def damaged(path, how):
    content = path.read_bytes()
    if how == "empty":
        content = b""
    elif how == "half":
        content = content[: len(content) // 2]
    elif how == "one byte short":
        content = content[:-1]
    elif how == "one bit":
        content = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    elif how == "text":
        content = b"what is this"
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["empty", "half", "one byte short", "one bit", "text"])
def test_a_damaged_file_is_ignored_with_a_warning(how, tmp_path, caplog):
    path = write_segment(tmp_path, IDENTITY, entries(*range(5)))
    write_segment(tmp_path, IDENTITY, entries(*range(5, 10)))
    damaged(path, how)
    store = DiskStore(tmp_path, IDENTITY)
    assert [holds(store, i) for i in range(10)] == [False] * 5 + [True] * 5
    assert f"Ignored {path}" in caplog.text


def test_a_file_of_another_reference_or_another_format_is_ignored(tmp_path):
    path = write_segment(tmp_path, "1" * 32, entries(1))
    save_file(load_file(path), tmp_path / "other.safetensors")
    store = DiskStore(tmp_path, IDENTITY)
    assert not holds(store, 1)
    assert read_segment(path, "1" * 32) is not None


def test_a_folder_that_cannot_be_written_costs_no_value(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    store = DiskStore(tmp_path / "file" / "folder", IDENTITY)
    store.add(entries(*range(5)))
    store.flush()
    assert all(holds(store, i) for i in range(5))
    assert "`reference_store_dir` names another folder" in caplog.text


def test_a_folder_that_goes_away_costs_no_value(tmp_path, caplog):
    store = DiskStore(tmp_path / "folder", IDENTITY)
    store.add(entries(*range(5)))
    store.flush()
    shutil.rmtree(tmp_path / "folder")
    store.add(entries(*range(5, 10)))
    store.flush()
    assert all(holds(store, i) for i in range(10))
    assert "`reference_store_dir` names another folder" in caplog.text


def test_what_a_dead_process_left_is_removed(tmp_path):
    old, new = tmp_path / "a.unfinished", tmp_path / "b.unfinished"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    DiskStore(tmp_path, IDENTITY)
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_moment_leaves_only_right_values(kills, tmp_path):
    rng = random.Random(0)
    wrote = 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            try:
                store = DiskStore(tmp_path, IDENTITY, flush_bytes=2000)
                for number in range(wrote, wrote + 100_000):
                    if not holds(store, number):
                        store.add(entries(number))
            finally:
                os._exit(1)
        files = len(segment_files(tmp_path))
        while len(segment_files(tmp_path)) < files + 2:  # it is in the middle of filling
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = DiskStore(tmp_path, IDENTITY)
        last = wrote
        wrote = next(number for number in range(10**9) if not holds(store, number))
        assert wrote > last
        assert not any(holds(store, number) for number in range(wrote, wrote + 200))
        for path in segment_files(tmp_path):  # nothing that was given its name was half a file
            assert read_segment(path, IDENTITY) is not None


def all_entries(folder):
    """Every entry of every file below `folder`; each file must read as good."""
    found = {}
    for path in folder.glob("*/*.safetensors"):
        segment = read_segment(path, path.parent.name)
        assert segment is not None
        found |= {key: segment.entry(i) for i, key in enumerate(segment.keys)}
    return found


def train(model, folder, data, **config):
    """One epoch of DPO with the base model as the reference, one pair at a time."""
    trainer = trl_ext.DPOTrainer(
        model,
        args=trl_ext.DPOConfig(
            str(folder / "run"),
            reference_store_dir=str(folder / "store"),
            per_device_train_batch_size=1,
            num_train_epochs=1,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            gradient_checkpointing=False,
            **config,
        ),
        train_dataset=data,
        peft_config=lora_config(),
    )
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_training_run_killed_at_any_moment_leaves_only_right_values(kills, workshop, tmp_path, monkeypatch):
    rng = random.Random(1)
    model, data = workshop.model("untied"), preferences(10 * kills, 1)
    train(model, tmp_path / "whole", data)
    wanted = all_entries(tmp_path / "whole" / "store")
    folder = tmp_path / "killed"
    # Written after every batch
    often = functools.partial(DiskStore, flush_bytes=1)
    monkeypatch.setattr("trl_ext.trainers.dpo_reference.DiskStore", often)

    def files():
        return len(list((folder / "store").glob("*/*.safetensors")))

    killed = 0
    for seed in range(kills):
        child, before = os.fork(), files()
        if child == 0:
            try:
                train(model, folder, data, seed=seed)
            finally:
                os._exit(1)
        while files() == before and not os.waitpid(child, os.WNOHANG)[0]:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = all_entries(folder / "store")
        killed += len(found) < len(wanted)
        for key, values in found.items():
            np.testing.assert_allclose(values, wanted[key], rtol=1e-5, atol=1e-5)
    assert killed > kills / 2
    last = train(model, folder, data)
    assert all_entries(folder / "store").keys() == wanted.keys()
    assert 0 < sum(log.get("skipped/passes", 0) for log in last.state.log_history) < len(data)
