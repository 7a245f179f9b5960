"""Measure how long the host takes to lay out a micro-batch: from ids, mask and labels to all indices of the packed row.

    python benchmarks/layout.py   # on one thread, 10 seconds

Rows come in groups of 8 with the same prompt, a quarter of the row, and completions of random lengths. The goals are
6 ms for 64 rows of 8192 tokens and 0.5 ms for 8 rows of 2048. Copies to a GPU and back are not in the times.
"""

import statistics
import time

import torch

from trl_ext.packing.packing import HostBatch, _layout

GROUP, CALLS = 8, 30
SIZES = ((64, 8192), (8, 2048))


def milliseconds(rows: int, length: int) -> float:
    """Return the median of the calls."""
    generator = torch.Generator().manual_seed(0)
    prompt = length // 4
    prompts_BP = torch.randint(5, 50_000, (rows // GROUP, prompt), generator=generator).repeat_interleave(GROUP, 0)
    completions_BC = torch.randint(5, 50_000, (rows, length - prompt), generator=generator)
    ends_B = prompt + torch.randint(length // 4, length - prompt, (rows, 1), generator=generator)
    ids_BS, columns_S = torch.cat([prompts_BP, completions_BC], dim=1), torch.arange(length)
    mask_BS = (columns_S < ends_B).long()
    labels_BS = ids_BS.masked_fill((columns_S < prompt) | (mask_BS == 0), -100)
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        batch = HostBatch.of(ids_BS, mask_BS, labels_BS)
        assert batch.padded_reason is None
        _layout(batch, batch.scored_lengths_B, True, True, torch.device("cpu"))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in SIZES:
        print(f"{size[0]} rows of {size[1]} tokens: {milliseconds(*size):.2f} ms")
