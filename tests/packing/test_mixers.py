"""Recurrent and convolutional mixers run on rows, on few cells, and a state carried over between rows is noticed."""

import random
from typing import Any

import pytest
import torch
import transformers as t
from hypothesis import given, settings
from test_layout import batches
from torch import Tensor, nn

from packing_batches import EXAMPLES, Batch, grpo, words
from packing_models import FAMILIES, HYBRID, attach, build, fresh
from packing_runs import see
from trl_ext.packing import mixers
from trl_ext.packing.layout import Layout
from trl_ext.packing.mixer_calls import mixer_calls
from trl_ext.packing.support import mixers_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def on_the_packed_row(mixer: Any, run: Any, layout: Layout, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a mixer as if the packed row were one row, so that its state carries over from one row to the next."""
    layout.reads[0] += 1
    no_mask = [None if isinstance(x, Tensor) and x.shape == (1, 1, 1, 1) else x for x in args]
    return run(*no_mask, **{**kwargs, "attention_mask": None} if "attention_mask" in kwargs else kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HYBRID)
def test_the_first_batch_notices_a_state_that_is_carried_over(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = []
    for mixed in (mixers._mixed, on_the_packed_row):
        monkeypatch.setattr(mixers, "_mixed", mixed)
        model = build(name, dtype=DTYPES[dtype])
        scoring = attach(model)
        scoring.packing.checked = False
        see(model, EXAMPLES["dpo"](), grad=False)
        reasons.append(scoring.packing.padded_reason)
    assert reasons[0] is None
    assert "another row" in reasons[1] or "hidden states differ" in reasons[1]


def test_a_mixer_that_reads_padding_stays_padded() -> None:
    """In TRL, RecurrentGemma's state takes in the padding before a row."""
    config = t.RecurrentGemmaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, lru_width=32
    )
    model = fresh(config, attention="eager").train()
    scoring = attach(model)
    scoring.packing.checked = False
    see(model, EXAMPLES["dpo"](), grad=False)
    assert scoring.packing.padded_reason == (
        "on the first batch, outputs of its RecurrentGemmaRecurrentBlock depend on padding"
    )


@settings(deadline=None)
@given(batch=batches())
@pytest.mark.parametrize(("continues", "in_one_call"), [(False, False), (True, False), (False, True)])
def test_each_row_is_whole_in_the_calls(batch: Any, continues: bool, in_one_call: bool) -> None:
    ids_BS, lengths_B, first_B, scored_BS = batch
    layout = Layout(ids_BS, lengths_B, first_B, scored_BS=scored_BS, share=True, rebase=True)
    calls = mixer_calls(layout, torch.device("cpu"), continues=continues, in_one_call=in_one_call)
    assert len(calls.calls) == 1 or not in_one_call
    # The tokens from a row's beginning to each cell of all calls
    prefixes: list[list[int]] = [[]]
    begun: list[list[int]] = []
    for tokens_RC, prefix_R, is_prefix in calls.calls:
        starts = [[]] * len(tokens_RC) if prefix_R is None else [prefixes[number] for number in prefix_R.tolist()]
        rows = [start + row for start, row in zip(starts, tokens_RC.tolist(), strict=True)]
        begun += [
            row[: len(start) + column + 1]
            for start, row in zip(starts, rows, strict=True)
            for column in range(tokens_RC.shape[1])
        ]
        prefixes += rows if is_prefix else []
    beginnings = {tuple(path[: n + 1]) for path in (x.copy() for x in layout.paths()) for n in range(len(path))}
    for token, cell in enumerate(calls.place_T.tolist()):
        assert begun[cell][-1] == token
        assert tuple(begun[cell]) in beginnings


PROMPT, COMPLETION, GROUP = 256, 64, 8


def work(name: str, batch: Batch, padding_free: bool) -> tuple[int, float]:
    """Return the tokens at the embedding, and the cells of each mixer, of one forward, counted by hooks."""
    model = fresh(FAMILIES[name].config()).train()
    attach(model, padding_free=padding_free)
    model.base_model.config.use_cache = False
    cells: list[int] = []
    counted = mixers_of(model)
    for mixer in counted:
        first_linear = next(x for x in mixer.modules() if isinstance(x, nn.Linear))
        first_linear.register_forward_pre_hook(lambda _, args: cells.append(args[0].shape[:-1].numel()))
    seen = see(model, batch, grad=False)
    return seen.fed, sum(cells) / len(counted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "bamba", "lfm2"])
def test_a_group_of_grpo_takes_a_third_of_a_padded_pass(name: str) -> None:
    rng = random.Random(0)
    batch = grpo([(words(rng, PROMPT), [words(rng, COMPLETION) for _ in range(GROUP)])])
    tokens, cells = work(name, batch, padding_free=True)
    assert work(name, batch, padding_free=False) == (batch.input_ids.numel(), batch.input_ids.numel())
    print(name, tokens / batch.input_ids.numel(), cells / batch.input_ids.numel())
    assert tokens <= 0.31 * batch.input_ids.numel()
    assert cells <= 0.35 * batch.input_ids.numel()
