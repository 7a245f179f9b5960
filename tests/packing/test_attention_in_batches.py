"""Attention without a varlen kernel: rows in padded batches have the results of each row alone, in few calls."""

import contextlib
import importlib.util
import json
import shutil
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as t
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_cases
import pretended_gpu
from attention_cases import HEADS, KINDS, NO_MASK, SIZE, layout_of, module_of, options_of, tensors
from packing_models import TrueFloat64
from trl_ext.packing import attention
from trl_ext.packing.attention import packed_attention
from trl_ext.packing.layout import Layout, Segment


def packed(kind: str, layout: Layout, qkv: list[torch.Tensor], window: int | None, pairs: float) -> torch.Tensor:
    """Return `(T, heads, size)`; a call costs so many `pairs`."""
    module, layout = module_of(kind, qkv[1].shape[1], qkv[0].dtype), layout.for_pass(layout.implementation)
    with patch.object(attention, "_PAIRS_OF_A_CALL", {"cpu": pairs}):
        options = options_of(kind, module, window)
        output, _ = packed_attention(module, *qkv, NO_MASK, packed_layout=layout, **options)
    ((shapes, masks, *_),) = layout.calls.values()
    # On some devices the softmax of a query without a key is NaN
    assert all((mask == 0).any(-1).all() for mask in masks if mask is not None)
    assert len(shapes) <= len(layout.segments) if pairs else len(shapes) == len({x[1:] for x in layout.segments})
    return output[0]


def row_by_row(kind: str, layout: Layout, qkv: list[torch.Tensor], window: int | None) -> torch.Tensor:
    """The same by transformers' function for a batch of one row."""
    module = module_of(kind, qkv[1].shape[1], qkv[0].dtype)
    attend = t.AttentionInterface()["sdpa"] if kind == "sdpa" else attention._eager_attention(module)
    outputs: list[Any] = [None] * layout.tokens
    for at_S in layout.at_BS:
        at_n = at_S[at_S >= 0]
        distance = torch.arange(len(at_n))[:, None] - torch.arange(len(at_n))
        seen = (distance >= 0) & (distance < (window or len(at_n)))
        mask = seen if kind == "sdpa" else torch.zeros(seen.shape, dtype=qkv[0].dtype).masked_fill(~seen, -torch.inf)
        if len(at_n):
            options = options_of(kind, module, None)
            output, _ = attend(module, *(x[:, :, at_n] for x in qkv), mask[None, None], dropout=0.0, **options)
            for token, result in zip(at_n.tolist(), output[0], strict=True):
                outputs[token] = result if outputs[token] is None else outputs[token]
    return torch.stack(outputs)


@st.composite
def rows(draw: st.DrawFn) -> list[list[int]]:
    """Draw rows of few words, some with the same start."""
    word = st.integers(0, 2)
    starts = draw(st.lists(st.lists(word, max_size=9), min_size=1, max_size=3))
    of_row = st.tuples(st.sampled_from(starts), st.lists(word, min_size=1, max_size=9))
    return [start + end for start, end in draw(st.lists(of_row, min_size=1, max_size=7))]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_batch_rows_equals_each_row_alone(kind: str, dtype: torch.dtype, close: float) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(rows(), st.booleans(), st.sampled_from([None, 1, 3]), st.sampled_from([1, 2, 4]))
    def check(drawn: list[list[int]], share: bool, window: int | None, kv_heads: int) -> None:
        layout = layout_of(drawn, share=share, kind=kind)
        qkv = tensors(layout, kv_heads, dtype)
        module = module_of(kind, kv_heads, dtype)
        inputs = [*qkv, *([module.sinks] if kind == "sinks" else [])]
        upstream = torch.randn(layout.tokens, HEADS, SIZE, generator=torch.Generator().manual_seed(2)).to(dtype)
        with TrueFloat64() if dtype == torch.float64 else contextlib.nullcontext():
            ways = [packed(kind, layout, qkv, window, pairs) for pairs in (0, 200, 1e9)]
            want = row_by_row(kind, layout, qkv, window)
        gradients = torch.autograd.grad(want, inputs, upstream, retain_graph=True)
        for got in ways:
            assert (got - want).abs().max() <= close * want.abs().max()
            for a, b in zip(torch.autograd.grad(got, inputs, upstream), gradients, strict=True):
                assert (a - b).abs().max() <= close * max(x.abs().max() for x in gradients)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_changes_no_other_row(kind: str) -> None:
    layout = layout_of([[1, 2, 3], [4] * 9, [5, 6, 7, 8, 7]], share=False, kind=kind)
    qkv = tensors(layout, 2, torch.float32)
    want = packed(kind, layout, qkv, None, 1e9)
    for x in qkv:
        x.data[:, :, :3] = torch.inf
    got = packed(kind, layout, qkv, None, 1e9)
    assert got[:3].isnan().any()
    torch.testing.assert_close(got[3:], want[3:])
    (gradient,) = torch.autograd.grad(got[3:].sum(), qkv[2])
    assert gradient[:, :, 3:].isfinite().all()


def test_rows_share_a_call_if_their_padding_costs_less() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")

    def groups(lengths: list[Any], device: torch.device = gpu, eager: bool = True) -> list[list[int]]:
        segments = [Segment(1, *(x if isinstance(x, tuple) else (x, x))) for x in lengths]
        return attention._groups(segments, 16, 8192, eager, device)

    assert groups([100, 300, 200, 64]) == [[0, 1, 2, 3]]
    assert groups([4096, 100, 4090, 300]) == [[0, 2], [1, 3]]
    assert groups([4096, 3000]) == [[0], [1]]
    assert groups([7, 5, 6], cpu) == [[0], [1], [2]]
    # Prompt and completion, then completions of other lengths, of two prompts
    assert groups([(4000, 4000), (200, 4000), (190, 3990), (3000, 3000), (200, 3000)]) == [[0], [1, 2, 4], [3]]
    # A mask keeps sdpa from skipping what is after a query
    assert groups([2048, 2047], eager=False) == [[0], [1]]
    assert groups([200, 199], eager=False) == [[0, 1]]


@pytest.mark.skipif(shutil.which("g++") is None, reason="the pretended GPU needs g++")
@pytest.mark.skipif(torch.version.cuda is not None, reason="the pretended GPU needs a build of torch for the CPU")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the pretended GPU needs Triton")
def test_a_gpu_runs_few_calls_without_waits_and_what_is_slow_is_said_once() -> None:
    costs, logged, warned = json.loads(pretended_gpu.python(attention_cases.__file__))
    # What two layers took row by row, in 32 calls
    row_by_row = {"sdpa": 114, "softcap": 1030, "sinks": 1061}
    for kind, cost in costs.items():
        assert (cost["calls"], cost["waits"]) == (2, 0)
        assert cost["launches"] < row_by_row[kind]
    assert [line.split(", which")[0] for line in logged] == [
        "Attention runs in torch.float32",
        "Attention has a softcap",
        "Attention has sinks",
    ]
    assert all("several calls in each layer" in line for line in logged)
    assert [line.split(" multiplies fp32")[0] for line in warned] == ["The backward of `head='dense'`", "The LM head"]
    assert all("15 times faster" in line for line in warned)
