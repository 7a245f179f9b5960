"""Measure the store of reference log-probs on disk: writing, opening, reading and merging, by number of sequences.

    python benchmarks/store.py           # 100,000 and 1,000,000 sequences of 100 tokens, 2 GB of disk, 2 minutes
    python benchmarks/store.py --smoke   # a few sequences: a check that it runs; its times mean nothing

`--folder` says where the files go; with a folder in memory (/dev/shm), times do not include the disk. Files that were
just written are read from the system's cache.

Each line that it writes to benchmarks/results/ has the `seconds` of one process:

- `store_write`: adds `sequences`, 1,000 at a time, and flushes them as in training.
- `store_open`: opens the store in a process that does not write.
- `store_read`: reads 100,000 of them in random order; the fastest of three times, and how many `per_second`.
- `store_merge`: opens them from 128 files in the process that writes, which merges the files.
- `store_flush`: adds and flushes so many one by one; `files` says how many files that leaves.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import results

from trl_ext.reference.segments import Entries, segment_files, write_segment
from trl_ext.reference.store import DiskStore

IDENTITY = "0" * 32
TOGETHER, PARTS, READS = 1000, 128, 100_000


def sequences(count: int, tokens: int) -> Iterator[Entries]:
    """Yield random sequences, `TOGETHER` at a time."""
    generator = np.random.default_rng(0)
    for begin in range(0, count, TOGETHER):
        rows = min(TOGETHER, count - begin)
        keys = generator.bytes(16 * rows)
        values = generator.standard_normal((rows, tokens), np.float32)
        yield {keys[16 * i : 16 * (i + 1)]: values[i] for i in range(rows)}


def keys_of(count: int, tokens: int) -> list[bytes]:
    return [key for entries in sequences(count, tokens) for key in entries]


def seconds(do: Callable[[], Any]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def measure(count: int, tokens: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of one size, measured in `folder`."""
    size = {"sequences": count, "tokens": tokens}
    store = DiskStore(folder / "whole", IDENTITY)
    took = sum(seconds(partial(store.add, entries)) for entries in sequences(count, tokens)) + seconds(store.flush)
    yield {"benchmark": "store_write", **size, "seconds": took, "files": len(segment_files(folder / "whole"))}
    opened: list[DiskStore] = []
    took = seconds(lambda: opened.append(DiskStore(folder / "whole", IDENTITY, writes=False)))
    yield {"benchmark": "store_open", **size, "seconds": took}
    wanted = random.Random(0).sample(keys_of(count, tokens), min(count, READS))
    took = min(seconds(lambda: [opened[0].get(key) for key in wanted]) for _ in range(3))
    yield {"benchmark": "store_read", **size, "seconds": took, "per_second": len(wanted) / took}
    (folder / "parts").mkdir()
    part: Entries = {}
    for entries in sequences(count, tokens):
        part |= entries
        if len(part) >= count / PARTS:
            write_segment(folder / "parts", IDENTITY, part)
            part = {}
    before = len(segment_files(folder / "parts"))
    took = seconds(lambda: DiskStore(folder / "parts", IDENTITY))
    files = len(segment_files(folder / "parts"))
    yield {"benchmark": "store_merge", **size, "seconds": took, "files_before": before, "files": files}


def measure_flushes(count: int, tokens: int, folder: Path) -> dict[str, Any]:
    store = DiskStore(folder, IDENTITY, flush_bytes=1)
    alone = [{key: values} for entries in sequences(count, tokens) for key, values in entries.items()]
    took = seconds(lambda: [store.add(entry) for entry in alone])
    files = len(segment_files(folder))
    return {"benchmark": "store_flush", "sequences": count, "tokens": tokens, "seconds": took, "files": files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few sequences, to check that it runs")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder to write the lines to")
    chosen = parser.parse_args()
    counts, flushes = ((2000,), (20, 60)) if chosen.smoke else ((100_000, 1_000_000), (1000, 3000))
    lines = []
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        for i, count in enumerate(counts):
            lines += measure(count, 100, Path(folder) / str(i))
        lines += [measure_flushes(count, 100, Path(folder) / f"flushes-{count}") for count in flushes]
    for line in lines:
        print("  ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in line.values()))
    common = {"run": results.new_run(), **results.origin("cpu")}
    print(results.add([{**line, **common} for line in lines], chosen.results))


if __name__ == "__main__":
    main()
