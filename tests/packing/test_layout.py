"""The layout of a packed row equals its definition, and passes over the same tensors share it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from trl_ext.packing.layout import Layout
from trl_ext.packing.packing import HostBatch, LastResult, Packing


@st.composite
def batches(draw: Any) -> tuple[Any, Any, Any, Any]:
    """Draw ids `(B, S)` of few words, each row's first column and length, and the tokens that predict a label."""
    B, S = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    words = st.integers(0, draw(st.integers(0, 3)))
    ids_BS = np.array(draw(st.lists(st.lists(words, min_size=S, max_size=S), min_size=B, max_size=B)))
    first_B = np.array([draw(st.integers(0, S - 1)) for _ in range(B)]) * draw(st.integers(0, 1))
    lengths_B = np.array([draw(st.integers(0, S - first)) for first in first_B])
    if not lengths_B.any():
        first_B[0], lengths_B[0] = 0, 1
    columns_S = np.arange(S)
    needed_BS = (columns_S >= first_B[:, None]) & (columns_S < (first_B + lengths_B)[:, None])
    chosen = draw(st.lists(st.booleans(), min_size=B * S, max_size=B * S))
    return ids_BS, lengths_B, first_B, needed_BS & np.array(chosen).reshape(B, S)


@settings(deadline=None)
@given(batches(), st.sampled_from([(False, False), (True, False), (True, True)]))
def test_it_equals_its_definition(batch: tuple[Any, Any, Any, Any], how: tuple[bool, bool]) -> None:
    ids_BS, lengths_B, first_B, scored_BS = batch
    share, rebase = how
    layout = Layout(ids_BS, lengths_B, first_B, scored_BS=scored_BS, share=share, rebase=rebase)
    rows = [ids[first : first + n].tolist() for ids, first, n in zip(ids_BS, first_B, lengths_B, strict=True)]
    start_B = [0] * len(rows) if rebase else first_B.tolist()
    order = sorted(range(len(rows)), key=lambda i: (start_B[i], rows[i])) if share else list(range(len(rows)))
    # A packed token for each prefix, in the order of the rows
    places: dict[tuple[int, ...], int] = {}
    at_BS = np.full(ids_BS.shape, -1)
    tokens, positions, keys, lengths = [], [], [], []
    for i in order:
        before = len(places)
        for column, word in enumerate(rows[i]):
            prefix = (0 if share else i, start_B[i], *rows[i][: column + 1])
            if prefix not in places:
                tokens.append(word)
                positions.append(start_B[i] + column)
            at_BS[i, first_B[i] + column] = places.setdefault(prefix, len(places))
        if len(places) > before:
            keys += at_BS[i, first_B[i] : first_B[i] + lengths_B[i]].tolist()
            lengths.append((len(places) - before, int(lengths_B[i])))
    assert layout.input_ids.tolist() == [tokens]
    assert layout.position_ids.tolist() == [positions]
    assert layout.at_BS.tolist() == at_BS.tolist()
    assert layout.keys_K.tolist() == keys
    assert layout.query_starts.tolist() == [0, *np.cumsum([queries for queries, _ in lengths])]
    assert layout.key_starts.tolist() == [0, *np.cumsum([keys for _, keys in lengths])]
    assert layout.query_starts.dtype == layout.key_starts.dtype == torch.int32
    assert [x for rows, *x in layout.segments for _ in range(rows)] == [[*x] for x in lengths]
    assert (layout.longest_query, layout.longest_key) == tuple(max(x) for x in zip(*lengths, strict=True))
    assert layout.shares_tokens == any(queries != keys for queries, keys in lengths)
    assert layout.tokens == len(tokens)
    row_N, column_N = np.nonzero(scored_BS)
    at_N = at_BS[row_N, column_N]
    found, same_N = [x.tolist() for x in (layout.row_N, layout.column_N, layout.at_N)], layout.same_N.tolist()
    assert found == [row_N.tolist(), column_N.tolist(), at_N.tolist()]
    # One number for all tokens with an index, that of one of them
    assert at_N[same_N].tolist() == at_N.tolist()
    assert len({*same_N}) == len({*at_N})
    assert layout.no_mask.shape == (1, 1, 1, 1)
    assert layout.no_mask.isnan().all()


def test_a_result_is_kept_while_its_tensors_live_and_are_not_written_to():
    made: list[int] = []
    last, x, y = LastResult(), torch.zeros(2), torch.zeros(2)

    def make() -> int:
        made.append(0)
        return len(made)

    assert [last.of(x, None, y, make=make) for _ in range(2)] == [1, 1]
    y.add_(1)
    assert last.of(x, y, make=make) == 2
    assert last.of(x, y.clone(), make=make) == 3
    assert last.of(x, make=make) == 4
    with torch.inference_mode():
        z = torch.zeros(2)
        assert [last.of(z, make=make) for _ in range(2)] == [5, 6]
        assert last.of(x, make=make) == 7
    assert last.of(x, make=make) == 8


def test_a_batch_that_is_too_long_is_checked_too():
    """Batches of ranks differ in length, and a check needs every rank."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, max_position_embeddings=32, rope_parameters=rope))
    ids = torch.arange(3, 23).repeat(2, 2)
    packing = Packing(model, padding_free=True, share_prompts=True)
    assert packing.layout(model, (), {"input_ids": ids}, ids, share=True) is None
    assert packing.checked
    assert packing.padded_reason is None
    assert packing.layout(model, (), {"input_ids": ids[:, :20]}, ids[:, :20], share=True) is not None


@pytest.mark.parametrize("mask", [None, torch.tensor([[0, 1, 1], [1, 1, 0]])])
def test_a_batch_on_the_host(mask: torch.Tensor | None) -> None:
    batch = HostBatch.of(torch.tensor([[1, 2, 3], [4, 5, 6]]), mask, torch.tensor([[-100, 2, 3], [-100, 5, -100]]))
    assert batch.scored_BS.tolist() == [[True, True, False], [True, False, False]]
    assert (batch.padded_reason is None) == (mask is None)
    if mask is not None:
        assert batch.padded_reason == "it has labels that are predicted from padding"
        assert batch.first_B.tolist() == [1, 0]
        assert batch.lengths_B.tolist() == [2, 2]
        assert batch.scored_lengths_B.tolist() == [1, 1]
