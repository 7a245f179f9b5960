"""GRPO with vLLM in the same process: the sampler's log-probs are those of the policy, to rounding, at every step."""

import pytest
import torch

KL, DIFFERENCE = "sampling/mismatch_kl", "sampling/sampling_logp_difference/mean"
KINDS = {
    "untied": {"model": "sampled"},
    "tied": {"model": "sampled_tied"},
    "lora": {"model": "sampled", "lora": True},
}


def column(run, name):
    return [float(entry[name]) for entry in run["log"] if name in entry]


@pytest.mark.parametrize("kind", KINDS)
def test_an_fp32_engine_agrees_with_the_policy_and_training_equals_stock_trl(train, kind):
    ours, stock = train(**KINDS[kind]), train(**KINDS[kind], trainer="stock")
    assert len(column(ours, KL)) == 6
    assert max(column(ours, KL)) <= 1e-9
    assert "not samples" not in ours["printed"]
    for name in ("loss", "reward", "grad_norm"):
        assert column(ours, name) == pytest.approx(column(stock, name), rel=1e-3, abs=1e-5), name
    theirs = torch.load(stock["weights"])
    for name, weight in torch.load(ours["weights"]).items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-4)
    assert ours["changed"]


def test_with_enable_lora_the_adapter_alone_is_sent(train):
    merged, adapter = (train(lora=True, engine={"enable_lora": x, "max_lora_rank": 8}) for x in (False, True))
    assert max(column(adapter, KL)) <= 1e-9
    assert column(adapter, "loss") == pytest.approx(column(merged, "loss"), rel=1e-3, abs=1e-5)
    assert adapter["bytes_sent"] < merged["bytes_sent"] / 4


def test_an_adapter_that_vllm_does_not_support_is_merged(train):
    run = train(lora=True, engine={"enable_lora": True, "max_lora_rank": 8}, peft={"use_dora": True}, steps=3)
    assert "so each update sends all weights: vLLM does not support `use_dora=True`." in run["printed"]
    assert max(column(run, KL)) <= 1e-9


def test_a_base_model_that_is_not_as_on_disk_is_sent_whole(train):
    changed = "model.layers.1.mlp.up_proj.weight"
    run = train(lora=True, changed=changed, engine={"enable_lora": True, "max_lora_rank": 8}, steps=2)
    assert f"the base model on disk, which vLLM reads, is not the policy's (`{changed}`)" in run["printed"]
    assert max(column(run, KL)) <= 1e-9


def test_stock_trl_cannot_sync_with_a_cpu(train):
    assert "has no attribute 'weight_loader'" in train(trainer="untouched")["error"]


def test_in_bf16_rounding_is_what_remains(train):
    run = train(engine={"dtype": "bfloat16"})
    assert 1e-6 < max(column(run, KL)) < 1e-3


@pytest.mark.parametrize("name", ["dtyp", "max_num_seq"])
def test_an_unknown_argument_of_the_engine_is_named(train, name):
    with pytest.raises(AssertionError, match=f"`vllm_engine_args` names '{name}'"):
        train(engine={name: 1})


def test_100_syncs_of_an_adapter_leave_the_weights_as_they_are(train):
    drift = train(lora=True, dtype="bfloat16", engine={"dtype": "bfloat16"}, steps=2, syncs=100)["drift"]
    assert drift["ours"] == 0
    assert drift["trl"] > 1e-3


def test_with_a_lag_training_equals_stock_trl_with_older_weights(train):
    # In the order of the data, two prompts in turn
    order = {"shuffle_dataset": False}
    ours = train(config={**order, "generation_lag": 1})
    stock = train(config=order, trainer="stock", delayed=True)
    assert column(ours, "generation_ahead/age_in_steps") == [0, 1, 1, 1, 1, 1]
    assert column(ours, KL)[0] < 1e-9 < min(column(ours, KL)[1:])
    assert "not samples" not in ours["printed"]
    assert "sampled before one trains, with the weights from before" in " ".join(ours["printed"].split())
    for name in ("loss", "reward", "grad_norm"):
        assert column(ours, name) == pytest.approx(column(stock, name), rel=1e-3, abs=1e-5), name
