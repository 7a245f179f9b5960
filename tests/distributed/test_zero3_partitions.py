"""Each row of a weight that ZeRO-3 has cut into flat parts is found exactly once and whole, even if it is cut."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_ext.distributed.shards import blocks_of_part, rows_of_parts


@settings(deadline=None, max_examples=300)
@given(
    rows=st.integers(1, 60), width=st.integers(1, 40), ranks=st.integers(1, 9), padding=st.sampled_from([0, 1, 7, 64])
)
def test_every_row_is_whole_on_exactly_one_rank(rows, width, ranks, padding):
    # DeepSpeed pads to a multiple of the ranks, and more for alignment
    size = max(-(-(rows * width + padding) // ranks), width)
    flat = torch.full((ranks * size,), torch.nan)
    weight = torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    flat[: rows * width] = weight.view(-1)
    parts = flat.chunk(ranks)
    heads = torch.stack([part[:width] for part in parts])
    ranges = rows_of_parts(rows, width, size, ranks)
    end = 0
    for rank, (part, of_rank) in enumerate(zip(parts, ranges, strict=True)):
        blocks = blocks_of_part(part, rank, of_rank, width, heads if any(len(x) > 1 for x in ranges) else None)
        assert [(first, len(block)) for first, block in blocks] == of_rank
        for first, block in blocks:
            assert first == end
            assert torch.equal(block, weight[first : first + len(block)])
            end += len(block)
        # Only the rows that begin here, and copies only of rows that are cut
        assert blocks[0][1].data_ptr() in range(part.data_ptr(), part.data_ptr() + 4 * size) or not len(blocks[0][1])
        begin = [row for row in range(rows) if rank * size <= row * width < (rank + 1) * size]
        assert sum(len(block) for _, block in blocks) == len(begin)
    assert end == rows


def test_a_rank_that_holds_only_padding_has_no_rows():
    assert rows_of_parts(rows=3, width=4, size=8, ranks=4) == [[(0, 2)], [(2, 1)], [(3, 0)], [(3, 0)]]
    assert blocks_of_part(torch.zeros(8), 3, [(3, 0)], 4, None)[0][1].shape == (0, 4)
