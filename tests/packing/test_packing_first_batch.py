"""The check of the first batch has no side effects, runs on any batch, and detects what the rules cannot."""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers as t
from datasets import Dataset

import trl_ext
from fp32_precision import WAYS, fewer_digits
from head_definition import floats_apart
from model_families import batch, build
from short_training import Bench
from tiny import Workshop
from token_counts import as_of_a_library
from trl_ext.packing.first_batch import multiplies_fp32
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward


def scored(model, checked: bool):
    """Return log-probs, gradients and the random state after one training forward and backward."""
    scoring = attach_scoring_forward(model, ScoringOptions(outputs=("log_probs", "entropy")))
    scoring.packing.checked = checked
    scoring.is_compared = checked
    fed: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(
        as_of_a_library(lambda _, args, output: fed.append(args[0].numel()))
    )
    torch.manual_seed(0)
    inputs, labels = batch()
    out = model(**inputs, labels=labels, fused_lm_head=True)
    out.log_probs.sum().backward()
    handle.remove()
    gradients = [param.grad.clone() for param in model.parameters()]
    return out.log_probs.detach(), gradients, torch.random.get_rng_state(), fed


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_check_does_not_change_training(dropout):
    def model():
        made = build("untied", attention_dropout=dropout).train()
        made.base_model.layers[0].eval()  # the user turned dropout off in this part
        return made

    checked_model, unchecked_model = model(), model()
    log_probs, gradients, state, fed = scored(checked_model, checked=False)
    others = scored(unchecked_model, checked=True)
    assert len(fed) > len(others[3]) == 1  # the check ran
    assert torch.equal(log_probs, others[0])
    assert all(torch.equal(x, y) for x, y in zip(gradients, others[1], strict=True))
    assert torch.equal(state, others[2])
    modes = [[module.training for module in made.modules()] for made in (checked_model, unchecked_model)]
    assert modes[0] == modes[1]
    assert not all(modes[0])


def test_a_model_with_other_positions_in_padded_rows_stays_padded(caplog):
    """OPT counts positions by its mask, so padding before a row does not change them."""
    torch.manual_seed(0)
    config = t.OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    )
    inputs, labels = batch()
    results = []
    for free in (False, True):
        torch.manual_seed(0)
        model = t.OPTForCausalLM(config).eval()
        scoring = attach_scoring_forward(model, ScoringOptions(padding_free=free))
        with torch.no_grad():
            results.append(model(**inputs, labels=labels, fused_lm_head=True).log_probs)
    assert "packed hidden states differ from padded ones" in scoring.packing.padded_reason
    assert scoring.packing.padded_reason in caplog.text
    assert floats_apart(results[1], results[0]) == 0


def feeds(model, inputs, labels):
    """Return the shape of each forward of one training pass, including those of the check."""
    shapes = []
    handle = model.get_input_embeddings().register_forward_hook(
        as_of_a_library(lambda _, args, out: shapes.append(tuple(args[0].shape)))
    )
    model(**inputs, labels=labels, fused_lm_head=True).log_probs.sum().backward()
    handle.remove()
    return shapes


def test_a_batch_may_be_as_wide_as_the_model_has_positions():
    inputs, labels = batch()
    torch.manual_seed(0)
    model = t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=labels.shape[1])
    ).train()
    scoring = attach_scoring_forward(model, ScoringOptions())
    assert len(feeds(model, inputs, labels)) == 6
    assert scoring.packing.padded_reason is None


def test_a_model_may_have_no_limit_of_positions():
    model = build("untied").train()
    object.__setattr__(model.config, "max_position_embeddings", None)  # as in a family without a limit
    scoring = attach_scoring_forward(model, ScoringOptions())
    assert len(feeds(model, *batch())) == 6
    assert scoring.packing.padded_reason is None


@pytest.mark.parametrize("what", ["as usual", "padding alone", "a gap", "nothing scored", "predicted from padding"])
def test_every_rank_runs_the_same_number_of_forwards(what):
    """Each forward of a sharded model needs all ranks, because it exchanges weights."""
    inputs, labels = batch()
    if what == "padding alone":
        inputs["attention_mask"] = torch.zeros_like(inputs["attention_mask"])
    if what in ("padding alone", "nothing scored"):
        labels = torch.full_like(labels, -100)
    if what == "a gap":
        inputs["attention_mask"][0, -3] = 0
        labels[0, -3:] = -100
    if what == "predicted from padding":
        inputs["attention_mask"][0, :4] = 0
        labels[0, 4] = 5
    model = build("untied").train()
    attach_scoring_forward(model, ScoringOptions())
    # Twice for the check of the logits, then padded, shared, unshared, and the pass itself
    assert len(feeds(model, inputs, labels)) == 6


def test_attention_that_is_not_causal_is_detected():
    torch.manual_seed(0)
    config = t.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    inputs, labels = batch()
    results = []
    for free in (False, True):
        torch.manual_seed(0)
        model = t.BertLMHeadModel(config).eval()  # its config has `is_decoder=False`
        scoring = attach_scoring_forward(model, ScoringOptions(padding_free=free))
        with torch.no_grad():
            results.append(model(**inputs, labels=labels, fused_lm_head=True).log_probs)
    assert "not causal" in scoring.packing.padded_reason
    assert floats_apart(results[1], results[0]) == 0


def test_sdpa_treats_a_softcap_as_without_packing():
    config = t.Gemma2Config(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, attn_logit_softcapping=2.0
    )  # fmt: skip
    inputs, labels = batch()
    results = []
    for free in (False, True):
        torch.manual_seed(0)
        model = t.Gemma2ForCausalLM(copy.deepcopy(config)).eval()
        model.config._attn_implementation = "sdpa"  # the default in some releases
        attach_scoring_forward(model, ScoringOptions(padding_free=free)).packing.checked = True
        try:
            with torch.no_grad():
                results.append(model(**inputs, labels=labels, fused_lm_head=True).log_probs)
        except ValueError as error:  # an error in newer releases of transformers
            results.append(str(error))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        assert floats_apart(results[1], results[0]) <= 1e-5


def test_a_users_own_attention_still_runs(caplog):
    t.AttentionInterface.register("of_my_own", t.AttentionInterface()["sdpa"])
    t.AttentionMaskInterface.register("of_my_own", t.AttentionMaskInterface()["sdpa"])
    model = build("untied").train()
    model.set_attn_implementation("of_my_own")
    attach_scoring_forward(model, ScoringOptions())
    inputs, labels = batch()
    assert feeds(model, inputs, labels)[2:] == [tuple(labels.shape)]  # after the check of the logits
    assert "`of_my_own`" in caplog.text


def test_layers_that_make_their_own_mask_are_detected_at_the_start():
    """Doge learns its mask. While the mask is 0, hidden states are right but gradients are missing."""
    torch.manual_seed(0)
    config = t.DogeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = t.DogeForCausalLM(config).train()
    scoring = attach_scoring_forward(model, ScoringOptions())
    inputs, labels = batch()
    model(**inputs, labels=labels, fused_lm_head=True).log_probs.sum().backward()
    assert "make their own attention mask" in scoring.packing.padded_reason
    assert [name for name, param in model.named_parameters() if param.grad is None] == []


@pytest.mark.parametrize("kind", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_an_fp32_model_trains_with_every_switch_of_fp32_products(
    way: str, kind: str, workshop: Workshop, tmp_path: Path
):
    bench = Bench(workshop, tmp_path)
    with fewer_digits(way):
        getattr(bench, kind)()
    assert bench.trainer.state.global_step == 1
    assert bench.trainer.explain()["packing"].action == "run"


@pytest.mark.parametrize("way", [None, *WAYS])
def test_every_switch_of_fp32_products_is_detected_on_its_device(way: str | None):
    of_cuda, of_cpu = ("mkldnn" not in (way or "mkldnn")), ("cuda" not in (way or "cuda"))
    with fewer_digits(way) if way else nullcontext():
        assert multiplies_fp32(torch.device("cuda")) is not of_cuda
        assert multiplies_fp32(torch.device("cpu")) is not of_cpu


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_another_half_precision_than_autocasts_are_checked(
    dtype: str, workshop: Workshop, tmp_path: Path
) -> None:
    """On a CPU, torch's autocast to bf16 refuses some operations on fp16."""
    trainer = trl_ext.SFTTrainer(
        workshop.model("untied"),
        args=trl_ext.SFTConfig(
            str(tmp_path),
            model_init_kwargs={"dtype": dtype},
            bf16=True,
            use_cpu=True,
            max_steps=1,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list([{"text": f"w{i} w2 w3"} for i in range(8)]),
    )
    trainer.train()
    assert trainer.explain()["packing"].action == "run"
