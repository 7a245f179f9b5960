"""The store on disk: reads return only stored values, even if writers are killed or files are damaged."""

import functools
import hashlib
import os
import pathlib
import random
import resource
import shutil
import signal
import socket
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import trl_ext
from read_only import read_only
from reference_batches import batch, score
from tiny import lora_config, preferences
from trl_ext.reference import segments
from trl_ext.reference import store as store_module
from trl_ext.reference.canary import FILE, Canary
from trl_ext.reference.segments import digest_of, read_segment, segment_files, write_file, write_segment
from trl_ext.reference.sequences import Sequences
from trl_ext.reference.store import DiskStore, MemoryStore

IDENTITY = "0" * 32


def entry(number: int) -> tuple[bytes, np.ndarray]:
    """Return a key, and values of 0 to 40 positions that depend on it."""
    key = hashlib.blake2b(str(number).encode(), digest_size=16).digest()
    return key, np.random.default_rng(number).standard_normal(number % 41).astype(np.float32)


def entries(*numbers: int) -> dict[bytes, np.ndarray]:
    return dict(map(entry, numbers))


def holds(store: MemoryStore, number: int) -> bool:
    """Whether the store has the entry. If so, check its values."""
    key, values = entry(number)
    found = store.get(key)
    if found is not None:
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, values)
    return found is not None


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_entries_are_read_as_they_were_written(store, tmp_path):
    store = MemoryStore() if store == "memory" else DiskStore(tmp_path / "new" / "folder", IDENTITY)
    store.add(entries(*range(100)))
    assert all(holds(store, i) for i in range(100))
    store.flush()
    store.add(entries(*range(50, 150)))
    assert all(holds(store, i) for i in range(150))
    assert not holds(store, 150)


def test_another_run_finds_flushed_entries(tmp_path):
    first = DiskStore(tmp_path, IDENTITY)
    first.add(entries(*range(10)))
    first.flush()
    first.add(entries(10))
    second = DiskStore(tmp_path, IDENTITY)
    assert [holds(second, i) for i in range(11)] == [True] * 10 + [False]
    # Two runs may write to one folder at the same time
    second.add(entries(*range(20, 30)))
    second.flush()
    first.flush()
    assert all(holds(first, i) and holds(DiskStore(tmp_path, IDENTITY), i) for i in [*range(11), *range(20, 30)])


def test_entries_are_flushed_by_size_and_by_time(tmp_path):
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


def test_a_rank_that_does_not_write_frees_entries_that_another_has_written(tmp_path):
    writer, other = DiskStore(tmp_path, IDENTITY), DiskStore(tmp_path, IDENTITY, writes=False)
    for store in (writer, other):
        store.add(entries(*range(10)))
    other.flush()
    assert segment_files(tmp_path) == []
    assert len(other._in_memory) == 10
    writer.flush()
    other.flush()
    assert len(writer._in_memory) == len(other._in_memory) == 0
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
        at = next(i for i in range(len(content)) if content[i : i + 4] == entry(4)[1].tobytes()[:4])
        content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    elif how == "text":
        content = b"what is this"
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["empty", "half", "one byte short", "text"])
def test_a_damaged_file_is_ignored_with_a_warning(how, tmp_path, caplog):
    path = write_segment(tmp_path, IDENTITY, entries(*range(5)))
    write_segment(tmp_path, IDENTITY, entries(*range(5, 10)))
    damaged(path, how)
    store = DiskStore(tmp_path, IDENTITY)
    assert [holds(store, i) for i in range(10)] == [False] * 5 + [True] * 5
    assert f"Ignored {path}" in caplog.text


def test_no_value_with_a_wrong_bit_is_used(tmp_path, caplog):
    path = write_segment(tmp_path, IDENTITY, entries(7, 0, 9))
    content = path.read_bytes()
    used = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        caplog.clear()
        store = DiskStore(tmp_path, IDENTITY)
        found = sum(holds(store, i) for i in (7, 0, 9))
        assert found == 3 or "Ignored" in caplog.text or "wrong checksum" in caplog.text
        used += found
    assert used < 3 * len(content)
    path.write_bytes(content)
    assert all(holds(DiskStore(tmp_path, IDENTITY), i) for i in (7, 0, 9))


def test_only_a_damaged_value_is_written_again(tmp_path, caplog):
    path = write_segment(tmp_path, IDENTITY, entries(*range(5)))
    damaged(path, "one bit")
    for _ in range(2):
        store = DiskStore(tmp_path, IDENTITY)
        assert [holds(store, i) for i in range(5)] == [True] * 4 + [False]
        assert caplog.text.count("has a wrong checksum and is scored again") == 1
        caplog.clear()
    store.add(entries(*range(5)))
    store.flush()
    assert len(read_segment(segment_files(tmp_path)[1], IDENTITY)) == 1
    assert all(holds(x, i) for x in (store, DiskStore(tmp_path, IDENTITY)) for i in range(5))


def test_a_file_that_is_damaged_during_reads_is_detected(tmp_path):
    path = write_segment(tmp_path, IDENTITY, entries(*range(5)))
    store = DiskStore(tmp_path, IDENTITY)
    assert holds(store, 4)
    damaged(path, "one bit")
    assert [holds(store, i) for i in range(5)] == [True] * 4 + [False]
    damaged(path, "half")
    assert not all(holds(store, i) for i in range(5))


def test_values_are_read_one_by_one_and_only_when_needed(tmp_path, monkeypatch):
    write_segment(tmp_path, IDENTITY, entries(*range(100)))
    read, own = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, count, place: read.append(count) or own(file, count, place))
    store = DiskStore(tmp_path, IDENTITY)
    assert read == []
    assert all(holds(store, i) for i in (3, 40, 3))
    assert read == [4 * 3, 4 * 40, 4 * 3]


# Files are merged


def test_many_small_files_are_merged_and_each_entry_is_written_log_n_times(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        segments, "write_file", lambda path, content, own=write_file: written.append(len(content)) or own(path, content)
    )
    store = DiskStore(tmp_path, IDENTITY, flush_bytes=1)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    for number in range(600):
        store.add(entries(41 * number + 20))  # all of one length
    assert all(holds(store, 41 * number + 20) for number in range(600))
    assert len(segment_files(tmp_path)) < 8 * 4
    once = 600 * (4 * 20 + 32)
    header = 500
    assert sum(written) - len(written) * header < once * 4
    assert sum(len(read_segment(path, IDENTITY)) for path in segment_files(tmp_path)) == 600
    assert len(written) < 600 * 8 / 7 + 1


def test_files_of_ranks_and_runs_are_merged_when_a_store_is_opened(tmp_path):
    for number in range(20):
        write_segment(tmp_path, IDENTITY, entries(*range(10 * number, 10 * number + 15)))
    reader = DiskStore(tmp_path, IDENTITY, writes=False)
    assert len(segment_files(tmp_path)) == 20
    DiskStore(tmp_path, IDENTITY)
    (path,) = segment_files(tmp_path)
    assert len(read_segment(path, IDENTITY)) == 205
    # A store that has opened the files still reads its entries
    assert all(holds(reader, i) for i in range(205))
    reader.flush()
    assert all(holds(reader, i) for i in range(205))
    assert [x is not None for x in reader._files] == [False] * 20 + [True]


@pytest.mark.parametrize("open_files", [0, 3])
def test_entries_of_a_merged_file_are_found_in_the_new_one(open_files, tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_OPEN_FILES", open_files + segments.Segment._open)
    numbers = range(30, 40)
    for number in numbers:
        write_segment(tmp_path, IDENTITY, entries(number))
    reader = DiskStore(tmp_path, IDENTITY, writes=False)
    DiskStore(tmp_path, IDENTITY)
    assert len(segment_files(tmp_path)) == 1
    assert all(holds(reader, i) for i in numbers)


def test_large_files_are_not_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_LARGEST", 15_000)
    for number in range(10):
        write_segment(tmp_path, IDENTITY, entries(*range(20 * number, 20 * number + 20)))
    assert sum(path.stat().st_size for path in segment_files(tmp_path)) > 2500 * 7
    DiskStore(tmp_path, IDENTITY)
    assert len(segment_files(tmp_path)) == 10


def test_damaged_entries_are_not_merged(tmp_path):
    for number in range(8):
        path = write_segment(tmp_path, IDENTITY, entries(4, 50 + number))
        damaged(path, "one bit")
    store = DiskStore(tmp_path, IDENTITY)
    assert [holds(store, i) for i in (4, *range(50, 58))] == [False] + [True] * 8
    (path,) = segment_files(tmp_path)
    assert len(read_segment(path, IDENTITY)) == 8


@pytest.mark.parametrize("at", ["rename", "unlink", "third unlink"])
def test_a_process_killed_during_a_merge_loses_nothing(at, tmp_path):
    for number in range(9):
        write_segment(tmp_path, IDENTITY, entries(number, number + 1))
    child = os.fork()
    if child == 0:
        name = at.split()[-1]
        own, left = getattr(pathlib.Path, name), iter([0, 0, 1] if at == "third unlink" else [1])
        setattr(pathlib.Path, name, lambda *args, **kwargs: os._exit(7) if next(left) else own(*args, **kwargs))
        try:
            DiskStore(tmp_path, IDENTITY)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(segment_files(tmp_path)) == {"rename": 9, "unlink": 10, "third unlink": 8}[at]
    assert all(holds(DiskStore(tmp_path, IDENTITY, writes=False), i) for i in range(10))
    assert all(holds(DiskStore(tmp_path, IDENTITY), i) for i in range(10))


def test_files_that_cannot_be_deleted_are_merged_at_most_once(tmp_path, monkeypatch):
    def refused(path, missing_ok=False):
        raise PermissionError(path)

    for number in range(50, 58):
        write_segment(tmp_path, IDENTITY, entries(number))
    monkeypatch.setattr(pathlib.Path, "unlink", refused)
    store = DiskStore(tmp_path, IDENTITY)
    for number in range(58, 62):
        store.add(entries(number))
        store.flush()
    assert len(segment_files(tmp_path)) == 8 + 1 + 4
    assert all(holds(x, i) for x in (store, DiskStore(tmp_path, IDENTITY, writes=False)) for i in range(50, 62))


def test_processes_that_merge_the_same_files_lose_nothing(tmp_path):
    children = []
    for first in range(0, 400, 100):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                store = DiskStore(tmp_path, IDENTITY, flush_bytes=1)
                for number in range(first, first + 100):
                    store.add(entries(number))
                    assert holds(store, number)
                    assert holds(store, first)
                os._exit(0)
            finally:
                os._exit(1)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert all(holds(DiskStore(tmp_path, IDENTITY), i) for i in range(400))
    assert len(segment_files(tmp_path)) < 40


def test_a_file_of_another_reference_or_another_format_is_ignored(tmp_path):
    path = write_segment(tmp_path, "1" * 32, entries(1))
    save_file(load_file(path), tmp_path / "other.safetensors")
    store = DiskStore(tmp_path, IDENTITY)
    assert not holds(store, 1)
    assert read_segment(path, "1" * 32) is not None


# Files that are complete and have a right digest, but that no version of the store writes


def rewritten(path, arrays):
    """Write a segment's arrays, changed, with the digest that belongs to them."""
    digested = {name: arrays[name] for name in ("keys", "checks", "bounds")}
    metadata = {"format": "trl_ext reference log-probs, version 2", "digest": digest_of(IDENTITY, digested)}
    save_file({name: np.ascontiguousarray(value) for name, value in arrays.items()}, path, metadata)


def with_bounds(change):
    return lambda x: {**x, "bounds": change(x["bounds"])}


WRONG_CONTENT = {
    "bounds past the end": with_bounds(lambda x: x + np.eye(len(x), dtype=np.int64)[-1] * 1000),
    "bounds far past the end": with_bounds(lambda x: x * 2**40),
    "bounds that fall": with_bounds(lambda x: x[::-1]),
    "bounds below 0": with_bounds(lambda x: x - 3),
    "bounds of another dtype": with_bounds(lambda x: x.astype(np.int32)),
    "real bounds": with_bounds(lambda x: x.astype(np.float64)),
    "bounds of rank 2": with_bounds(lambda x: x[None]),
    "bounds of rank 0": with_bounds(lambda x: x[-1:].reshape(())),
    "no bounds": with_bounds(lambda x: x[:0]),
    "too few bounds": with_bounds(lambda x: x[:-1]),
    "short keys": lambda x: {**x, "keys": x["keys"][:, :8]},
    "too few keys": lambda x: {**x, "keys": x["keys"][:-1]},
    "keys of another dtype": lambda x: {**x, "keys": x["keys"].astype(np.int64)},
    "no checks": lambda x: {**x, "checks": x["checks"][:0]},
    "values in half precision": lambda x: {**x, "values": x["values"].astype(np.float16)},
    "values of rank 2": lambda x: {**x, "values": x["values"][None]},
    "too few values": lambda x: {**x, "values": x["values"][:-1]},
    "no values": lambda x: {name: value for name, value in x.items() if name != "values"},
}


@pytest.mark.parametrize("how", WRONG_CONTENT)
def test_a_file_with_a_right_digest_and_wrong_content_is_ignored(how, tmp_path, caplog):
    path = write_segment(tmp_path, IDENTITY, entries(*range(5)))
    write_segment(tmp_path, IDENTITY, entries(*range(5, 10)))
    arrays = load_file(path)
    rewritten(path, arrays)
    assert all(holds(DiskStore(tmp_path, IDENTITY), i) for i in range(10))
    rewritten(path, WRONG_CONTENT[how](arrays))
    store = DiskStore(tmp_path, IDENTITY)
    assert [holds(store, i) for i in range(10)] == [False] * 5 + [True] * 5
    store.add(entries(*range(5)))
    store.flush()
    assert all(holds(DiskStore(tmp_path, IDENTITY), i) for i in range(10))
    assert f"Ignored {path} in the store" in caplog.text


def test_a_file_without_entries_is_no_mistake(tmp_path, caplog):
    for _ in range(8):
        write_segment(tmp_path, IDENTITY, {})
    store = DiskStore(tmp_path, IDENTITY)
    store.add(entries(1))
    store.flush()
    assert holds(DiskStore(tmp_path, IDENTITY), 1)
    assert not caplog.text


@pytest.mark.parametrize("values", [np.full(2, np.nan), np.array([-1.0, -np.inf]), np.zeros(0), np.zeros(7)], ids=str)
def test_an_entry_that_cannot_be_the_sequences_is_replaced(values, tmp_path):
    rows = batch([([5, 6, 7], 1), ([5, 8], 1)])
    sequences = Sequences(rows, IDENTITY)
    right = sequences.values_of([0, 1], score(rows))
    first, second = sequences.keys
    write_segment(tmp_path, IDENTITY, {first: values, second: right[1]})
    store = DiskStore(tmp_path, IDENTITY)
    assert list(store.find(sequences)) == [1]
    store.add({first: right[0]})
    store.flush()
    for opened in (store, DiskStore(tmp_path, IDENTITY)):
        np.testing.assert_array_equal(opened.find(sequences)[0], right[0])


# Names of the store's files that are not regular files


def fifo(path):
    os.mkfifo(path)


def linked_fifo(path):
    os.mkfifo(path.with_suffix(".fifo"))
    path.symlink_to(path.with_suffix(".fifo"))


def bound_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def dangling(path):
    path.symlink_to("nowhere")


def ends_in_time(child, seconds=20):
    """Run `child` in another process, and return whether it ended well in time: Python cannot interrupt an `open`."""
    process = os.fork()
    if process == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            child()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("make", [fifo, linked_fifo, bound_socket, pathlib.Path.mkdir, dangling])
def test_what_is_no_regular_file_is_ignored_with_one_warning(make, tmp_path, caplog):
    write_segment(tmp_path, IDENTITY, entries(*range(5)))
    for name in ("a", "b"):
        make(tmp_path / f"{name}.safetensors")

    def read():
        store = DiskStore(tmp_path, IDENTITY)
        assert all(holds(store, i) for i in range(5))
        store.add(entries(7))
        store.flush()
        assert holds(DiskStore(tmp_path, IDENTITY, writes=False), 7)

    assert ends_in_time(read)
    read()
    (warning,) = caplog.messages
    assert f"Ignored {tmp_path / 'a.safetensors'} and 1 more in the store" in warning


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("make", [fifo, linked_fifo, pathlib.Path.mkdir, dangling])
def test_a_canary_that_is_no_regular_file_is_ignored(make, tmp_path, caplog):
    make(tmp_path / FILE)
    assert ends_in_time(lambda: Canary.read(tmp_path, IDENTITY))
    assert Canary.read(tmp_path, IDENTITY) is None
    assert f"Ignored {tmp_path / FILE} in the store" in caplog.text


def test_a_file_that_another_reads_is_no_mistake(tmp_path, caplog):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    path = write_segment(folder, IDENTITY, entries(*range(5)))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    link.symlink_to(folder)
    store = DiskStore(link, IDENTITY)
    assert all(holds(store, i) for i in range(5))
    assert not caplog.text


# Folders that cannot be written


def test_a_filled_store_on_a_read_only_file_system_is_read(tmp_path, caplog):
    for number in range(20):
        write_segment(tmp_path, IDENTITY, entries(number))
    (tmp_path / "a.unfinished").write_bytes(b"half")
    os.utime(tmp_path / "a.unfinished", (0, 0))
    with read_only(tmp_path):
        stores = DiskStore(tmp_path, IDENTITY), DiskStore(tmp_path, IDENTITY, writes=False)
        assert not caplog.text
        for store in stores:
            assert all(holds(store, i) for i in range(20))
            store.add(entries(20))
            store.flush()
            store.add(entries(21))
            store.flush()
            assert all(holds(store, i) for i in range(22))
        (warning,) = caplog.messages
    assert "Read-only file system" in warning
    assert "Set `reference_store_dir` to use another folder" in warning


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_full_disk_loses_no_value_of_this_run(tmp_path, caplog):
    write_segment(tmp_path, IDENTITY, entries(*range(5)))

    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))  # `write` fails, as on a full disk
        store = DiskStore(tmp_path, IDENTITY)
        store.add(entries(*range(5, 30)))
        store.flush()
        assert all(holds(store, i) for i in range(30))
        assert "Cannot write reference log-probs" in caplog.text

    assert ends_in_time(run)
    assert len(os.listdir(tmp_path)) == 1  # no part of a file


def test_a_read_only_folder_loses_no_value_of_this_run(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    store = DiskStore(tmp_path / "file" / "folder", IDENTITY)
    store.add(entries(*range(5)))
    store.flush()
    assert all(holds(store, i) for i in range(5))
    assert "Set `reference_store_dir` to use another folder" in caplog.text


def test_a_folder_that_is_deleted_loses_no_value(tmp_path, caplog):
    store = DiskStore(tmp_path / "folder", IDENTITY)
    store.add(entries(*range(5)))
    store.flush()
    shutil.rmtree(tmp_path / "folder")
    store.add(entries(*range(5, 10)))
    store.flush()
    assert all(holds(store, i) for i in range(10))
    assert "Set `reference_store_dir` to use another folder" in caplog.text


def test_unfinished_files_of_dead_processes_are_removed(tmp_path):
    old, new = tmp_path / "a.unfinished", tmp_path / "b.unfinished"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    DiskStore(tmp_path, IDENTITY)
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_time_leaves_only_right_values(kills, tmp_path):
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
        while len(segment_files(tmp_path)) < files + 2:  # while it is writing
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = DiskStore(tmp_path, IDENTITY)
        last = wrote
        wrote = next(number for number in range(10**9) if not holds(store, number))
        assert wrote > last
        assert not any(holds(store, number) for number in range(wrote, wrote + 200))
        for path in segment_files(tmp_path):  # every file with a final name is complete
            assert read_segment(path, IDENTITY) is not None


def all_entries(folder):
    """Return the entries of all files below `folder`, and check that each file is valid."""
    found = {}
    for path in folder.glob("*/*.safetensors"):
        segment = read_segment(path, path.parent.name)
        assert segment is not None
        found |= {key: segment.entry(i) for i, key in enumerate(segment.keys)}
    return found


def train(model, folder, data, **config):
    """Train one epoch of DPO with the base model as the reference, one pair at a time."""
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
def test_a_training_run_killed_at_any_time_leaves_only_right_values(kills, workshop, tmp_path, monkeypatch):
    rng = random.Random(1)
    model, data = workshop.model("untied"), preferences(10 * kills, 1)
    train(model, tmp_path / "whole", data)
    wanted = all_entries(tmp_path / "whole" / "store")
    folder = tmp_path / "killed"
    # Written after every batch
    often = functools.partial(DiskStore, flush_bytes=1)
    monkeypatch.setattr("trl_ext.trainers.reference_source.DiskStore", often)

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
