"""The store of reference log-probs on disk: to write, open, read and merge it, by how many sequences it holds.

    python benchmarks/store.py           # 100,000 and 1,000,000 sequences of 100 tokens, 2 GB of disk, 2 minutes
    python benchmarks/store.py --smoke   # a few: that it runs; its times say nothing

`--folder` names where the files go, such as one in memory (/dev/shm), which leaves out what the disk takes. What was
just written is still in the memory of the system when it is read.

Benchmarks of the lines that it writes to benchmarks/results/, each with the `seconds` of one process:

- `store_write`: `sequences` are added, 1,000 at a time, and flushed as in training.
- `store_open`: these are opened by a process that does not write.
- `store_read`: 100,000 of them are read, in random order; the fastest of three times; `per_second`.
- `store_merge`: they lie in 128 files, and the store is opened by the process that writes.
- `store_flush`: so many are flushed one by one, to `files` in the end.
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
    """Random ones, some at a time."""
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
    """The lines of one size, in a folder of their own."""
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
    parser.add_argument("--smoke", action="store_true", help="a few sequences: that it runs; its times say nothing")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder, if it is left out")
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
