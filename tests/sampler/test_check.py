"""`sampler_check`: each way to break the sync is reported at the step that it concerns, and nothing else is."""

import re

import pytest
from run_vllm import BROKEN_AT
from test_colocated import column

BROKEN = {
    "everything": ({"broken": "everything"}, "model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight"),
    "a layer": ({"broken": "layers.1."}, "model.layers.1.self_attn.q_proj.weight"),
    "the head": ({"broken": "lm_head"}, "lm_head.weight."),
    "a tied head": ({"broken": "embed_tokens", "model": "sampled_tied"}, "model.embed_tokens.weight."),
    "a layer of LoRA": ({"broken": "layers.1.", "lora": True}, "model.layers.1.self_attn.q_proj.weight"),
    "the prefix cache": ({"broken": "cache", "config": {"num_train_epochs": 3}}, "look at vLLM's prefix cache"),
}
# Rounding hides the prefix cache of one step before
IN_BF16 = ["everything", "a layer", "the head", "a tied head"]


@pytest.mark.parametrize(("kind", "dtype"), [*((x, "float32") for x in BROKEN), *((x, "bfloat16") for x in IN_BF16)])
def test_a_broken_sync_is_reported_at_its_step_and_named(train, kind, dtype):
    case, named = BROKEN[kind]
    printed = train(steps=5, engine={"dtype": dtype}, **case)["printed"]
    said = re.findall(r"Completions are not samples of the policy.*", printed)
    assert len(said) == 1, said
    assert f"since step {BROKEN_AT}," in said[0]
    assert named in said[0]


def test_stop_ends_training(train):
    run = train(broken="everything", config={"sampler_check": "stop"})
    assert run["error"].startswith("RuntimeError: Completions are not samples of the policy")
    assert len(column(run, "loss")) == BROKEN_AT


def test_off_says_nothing(train):
    assert "not samples" not in train(steps=5, broken="everything", config={"sampler_check": "off"})["printed"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["sampled", "sampled_tied"])
def test_200_steps_without_a_break_report_nothing(train, dtype, model):
    run = train(model=model, steps=200, engine={"dtype": dtype})
    assert len(column(run, "loss")) == 200
    assert "not samples" not in run["printed"]
