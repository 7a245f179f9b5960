"""The router loss of mixtures of experts: TRL's where TRL computes one, and the model's own where TRL crashes."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from transformers import CONFIG_MAPPING
from trl.trainer.utils import add_fused_lm_head

from head_definition import floats_apart
from logit_models import SHAPE, batch
from packing_models import fresh
from tiny import preferences, word_tokenizer
from trl_ext import DPOConfig, DPOTrainer
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "input_jitter_noise": 0.0,
    "router_jitter_noise": 0.0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def of(name: str, **changes: Any) -> Callable[[], t.PreTrainedConfig]:
    config = CONFIG_MAPPING[name]
    known = {**SHAPE, **EXPERTS}
    return lambda: config(**{**{key: x for key, x in known.items() if hasattr(config(), key)}, **changes})


# TRL crashes
CRASH = {
    "granitemoe": of("granitemoe"),
    "granitemoeshared": of("granitemoeshared"),
    "granitemoehybrid": of("granitemoehybrid", layer_types=["attention", "attention"], mamba_n_heads=8),
    "phimoe": of("phimoe", sliding_window=7),
    "jetmoe": of("jetmoe"),
    "doge": of("doge", is_moe=True, num_experts=16),
    "deepseek_v4": of("deepseek_v4", mlp_layer_types=["hash_moe", "moe"]),
}
# Its own forward has no such loss either
CRASH_WITHOUT_OWN = {
    "llama4": of(
        "llama4_text", intermediate_size_mlp=48, layer_types=["full_attention"] * 2, no_rope_layers=[1, 1],
    ),
    "deepseek_v3": of("deepseek_v3", **LATENT),
    "glm4_moe": of("glm4_moe"),
    "longcat_flash": of("longcat_flash", **LATENT, moe_topk=2),
}  # fmt: skip
# Without a layer of experts
DENSE = {
    "doge": of("doge"),
    "flint": of("flint", mlp_only_layers=[0, 1]),
    "beam": of("beam", mlp_layer_types=["dense", "dense"]),
}
TRAINED_BY_TRL = {
    "mixtral": of("mixtral"),
    "qwen3_moe": of("qwen3_moe"),
    "deepseek_v2": of("deepseek_v2", **LATENT),
    "flint": of("flint", mlp_only_layers=[0]),
    "gpt_oss": of("gpt_oss"),
}


def scored(model: Any, attach: Callable[[Any], Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the router loss, and the gradients of the log-probs and of a hundred times that loss."""
    model = copy.deepcopy(model)
    attach(model)
    inputs, labels = batch()
    inputs["attention_mask"][0, :3] = 0
    out = model(**inputs, labels=labels, fused_lm_head=True, output_router_logits=True)
    (out.log_probs.sum() + 100 * out.aux_loss).backward()
    return float(out.aux_loss.detach()), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def ours(**options: Any) -> Callable[[Any], Any]:
    return lambda model: attach_scoring_forward(model, ScoringOptions(**options))


def own_loss(model: Any) -> float:
    inputs, _ = batch()
    inputs["attention_mask"][0, :3] = 0
    return float(model(**inputs, use_cache=False, output_router_logits=True).aux_loss.detach())


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    largest = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        assert floats_apart(found[name], x) <= 1e-4 * max(float(x.abs().max()), 1e-2 * largest), name


@pytest.mark.parametrize("name", CRASH)
def test_the_models_own_loss_where_trl_crashes(name: str) -> None:
    model = fresh(CRASH[name](), "eager").train()
    with pytest.raises((AttributeError, RuntimeError)):
        scored(model, add_fused_lm_head)
    padded, padded_gradients = scored(model, ours(padding_free=False))
    packed, packed_gradients = scored(model, ours())
    assert padded == pytest.approx(own_loss(model), rel=1e-5)
    assert packed == pytest.approx(padded, rel=1e-5)
    if name != "doge":  # its router mixes tokens, so that it stays padded
        assert_same(packed_gradients, padded_gradients)


@pytest.mark.parametrize("name", CRASH_WITHOUT_OWN)
def test_the_loss_of_mixtral_where_the_model_has_none(name: str) -> None:
    model = fresh(CRASH_WITHOUT_OWN[name](), "eager").train()
    with pytest.raises(AttributeError):
        scored(model, add_fused_lm_head)
    found, gradients = scored(model, ours())
    # With these names, TRL computes it
    config = model.config
    named = copy.deepcopy(model)
    for key, x in (("num_experts", 4), ("num_experts_per_tok", getattr(config, "moe_topk", 2))):
        object.__setattr__(named.config, key, x)
    if name == "longcat_flash":  # its experts include some that return their input
        object.__setattr__(named.config, "num_experts", config.n_routed_experts + config.zero_expert_num)
    named.base_model_prefix = "model"  # TRL does not find the backbone of Llama 4
    expected, of_trl = scored(named, add_fused_lm_head)
    assert found == pytest.approx(expected, rel=1e-5)
    assert_same(gradients, of_trl)


@pytest.mark.parametrize("name", DENSE)
def test_without_experts_the_loss_is_0(name: str) -> None:
    model = fresh(DENSE[name](), "eager").train()
    with pytest.raises(IndexError):
        scored(model, add_fused_lm_head)
    loss, gradients = scored(model, ours())
    assert loss == 0.0
    assert gradients


@pytest.mark.parametrize("name", TRAINED_BY_TRL)
def test_trls_loss_where_trl_computes_one(name: str) -> None:
    model = fresh(TRAINED_BY_TRL[name](), "eager").train()
    expected, of_trl = scored(model, add_fused_lm_head)
    for options in ({"padding_free": False}, {}):
        found, gradients = scored(model, ours(**options))
        assert found == pytest.approx(expected, rel=1e-5)
        assert_same(gradients, of_trl)


@pytest.mark.parametrize(
    "config",
    [CRASH["granitemoe"], CRASH["doge"], CRASH_WITHOUT_OWN["llama4"], DENSE["doge"], DENSE["flint"]],
    ids=["granitemoe", "doge", "llama4", "doge without experts", "flint without experts"],
)
def test_training_with_the_defaults(config: Callable[[], t.PreTrainedConfig], tmp_path: Path) -> None:
    model = fresh(config(), "eager")
    model.config._name_or_path = str(tmp_path)
    trainer = DPOTrainer(
        model,
        copy.deepcopy(model),
        DPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
            max_steps=1, gradient_checkpointing=False, per_device_train_batch_size=2, logging_steps=1,
        ),
        train_dataset=preferences(4, 0),
        processing_class=word_tokenizer(),
    )  # fmt: skip
    trainer.train()
    assert trainer.aux_loss_enabled
    assert "aux_loss" in trainer.state.log_history[0]
