"""Recurrent and convolutional mixers run on rows, on few cells, and a state carried over between rows is noticed."""

import copy
import random
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as t
from hypothesis import given, settings
from peft import LoraConfig, get_peft_model
from test_layout import batches
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.models.lfm2.modeling_lfm2 import Lfm2DecoderLayer

from packing_batches import EXAMPLES, Batch, grpo, words
from packing_models import FAMILIES, HYBRID, attach, build, fresh
from packing_runs import assert_same, see
from trl_ext.packing import mixers
from trl_ext.packing.layout import Layout
from trl_ext.packing.mixer_calls import mixer_calls
from trl_ext.packing.randomness import randomness_of
from trl_ext.packing.support import backbone_of, mixers_of

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
    for run_mixer in (mixers._run_mixer, on_the_packed_row):
        monkeypatch.setattr(mixers, "_run_mixer", run_mixer)
        model = build(name, dtype=DTYPES[dtype])
        scoring = attach(model)
        scoring.packing.checked = False
        see(model, EXAMPLES["dpo"](), grad=False)
        reasons.append(scoring.packing.padded_reason)
    assert reasons[0] is None
    assert "another row" in reasons[1] or "hidden states differ" in reasons[1]


@pytest.mark.parametrize("name", HYBRID)
def test_a_token_changes_no_bit_of_another_row(name: str) -> None:
    model = build(name).eval()
    attach(model)
    batch = EXAMPLES["grpo"]()
    is_scored = batch.labels != -100
    row = next(number for number in range(1, len(is_scored)) if is_scored[number].sum() > 1)
    changed_ids = batch.input_ids.clone()
    last = int(is_scored[row].nonzero()[-1])
    changed_ids[row, last] = 3 + (changed_ids[row, last] + 5) % 90
    before, after = (
        see(model, replace(batch, input_ids=ids, labels=torch.where(is_scored, ids, -100)), grad=False)
        for ids in (batch.input_ids, changed_ids)
    )
    assert before.fed < batch.input_ids.numel()
    others = [number for number in range(len(is_scored)) if number != row]
    assert torch.equal(after.fields["log_probs"][others], before.fields["log_probs"][others])
    assert not torch.equal(after.fields["log_probs"][row], before.fields["log_probs"][row])


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
        "on the first batch, outputs of the model's RecurrentGemmaRecurrentBlock depend on padding"
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


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "bamba", "lfm2"])
def test_a_group_of_grpo_takes_a_third_of_a_padded_pass(name: str) -> None:
    rng = random.Random(0)
    batch = grpo([(words(rng, PROMPT), [words(rng, COMPLETION) for _ in range(GROUP)])])
    tokens, cells = work(name, batch, padding_free=True)
    assert work(name, batch, padding_free=False) == (batch.input_ids.numel(), batch.input_ids.numel())
    print(name, tokens / batch.input_ids.numel(), cells / batch.input_ids.numel())
    assert tokens <= 0.31 * batch.input_ids.numel()
    assert cells <= 0.35 * batch.input_ids.numel()


class DrawingLayer(Lfm2DecoderLayer):
    """A layer of a user that draws."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, *args, **kwargs) + 0.1 * torch.randn_like(hidden_states)


def test_a_layer_that_draws_is_found_below_the_class_that_lends_layouts() -> None:
    model = build("lfm2")
    for layer in model.model.layers:
        layer.__class__ = DrawingLayer
    before = randomness_of(model)
    assert before is not None
    attach(model)
    assert randomness_of(model) == before


@pytest.mark.parametrize("place", ["layer", "mixer"])
def test_a_forward_that_is_replaced_in_a_class_is_found(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("lfm2")
    attach(model)
    assert randomness_of(model) is None
    patched = Lfm2DecoderLayer if place == "layer" else type(mixers_of(model)[0])
    own_forward = patched.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return own_forward(self, *args, **kwargs)

    monkeypatch.setattr(patched, "forward", forward)
    randomness = randomness_of(model)
    assert randomness is not None
    assert "replaced `forward`" in randomness.reason


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "jamba", "mamba", "qwen3_5"])
@pytest.mark.parametrize("how", ["again", "copy"])
def test_a_model_that_accepts_layouts_can_be_attached_again(name: str, how: str) -> None:
    padded, model = build(name), build(name)
    attach(padded, padding_free=False)
    attach(model)
    if how == "copy":
        model = copy.deepcopy(model)
    attach(model)
    batch = EXAMPLES["grpo"]()
    seen = see(model, batch)
    assert seen.fed < batch.input_ids.numel()
    assert_same(seen, see(padded, batch), 2e-4)


def test_a_copy_runs_its_own_mixers_whose_forward_a_user_replaced() -> None:
    model = build("qwen3_5")
    for mixer in mixers_of(model):
        mixer.forward = types.MethodType(type(mixer).forward, mixer)
    attach(model)
    copied = copy.deepcopy(model)
    attach(copied)
    before = see(copied, EXAMPLES["grpo"](), grad=False)
    with torch.no_grad():
        for mixer in mixers_of(model):
            mixer.out_proj.weight.zero_()
    after = see(copied, EXAMPLES["grpo"](), grad=False)
    assert torch.equal(after.fields["log_probs"], before.fields["log_probs"])


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_layers_in_a_checkpoint_wrapper_train_as_padded(name: str) -> None:
    padded, model = build(name), build(name)
    attach(padded, padding_free=False)
    scoring = attach(model)
    scoring.packing.checked = False
    backbone = backbone_of(model)
    layers = backbone.layers
    for number in range(len(layers)):
        layers[number] = checkpoint_wrapper(layers[number], CheckpointImpl.NO_REENTRANT)
    seen, expected = see(model, EXAMPLES["grpo"]()), see(padded, EXAMPLES["grpo"]())
    assert (scoring.packing.padded_reason is None) == (name == "lfm2")  # Mamba's backbone does not pass keywords on
    renamed = {key.replace("_checkpoint_wrapped_module.", ""): x for key, x in seen.gradients.items()}
    assert_same(replace(seen, gradients=renamed), expected, 2e-4)


@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "lfm2"])
def test_a_convolution_that_peft_trains_whole(name: str) -> None:
    convolution = "conv" if name == "lfm2" else "conv1d"
    adapter = LoraConfig(target_modules=["q_proj"], modules_to_save=[convolution])
    runs = []
    for padding_free in (False, True):
        torch.manual_seed(0)  # of the adapter
        wrapped = get_peft_model(build(name), adapter)
        scoring = attach(wrapped, padding_free=padding_free)
        scoring.packing.checked = False
        runs.append(see(wrapped, EXAMPLES["grpo"]()))
    assert scoring.packing.padded_reason is None
    assert any(convolution in key for key in runs[1].gradients)
    assert_same(runs[1], runs[0], 2e-4)


def gathered_by_part(group: Any) -> list[bool]:
    mixer = nn.Sequential(nn.Linear(2, 2))
    before = mixers._is_gathered_by_part(mixer)
    mixer[0] = FullyShardedDataParallel(mixer[0], process_group=group, device_id=torch.device("cpu"))
    return [before, mixers._is_gathered_by_part(mixer)]


def test_ranks_gather_the_parts_of_a_mixer_in_fsdp1_units_equally_often(ranks: Any) -> None:
    assert ranks.run(gathered_by_part, 2) == [[False, True]] * 2
