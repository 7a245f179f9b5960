"""Tiny mixtures of experts, made on the fly: families whose routers choose by `topk`, and families whose do not.

Weights depend only on the seed, and in bf16 they are the rounded fp32 weights. Those of a router are large, so that it
chooses by the token and not by rounding. The ids of padding and EOS are those of `tiny.word_tokenizer`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as t
from transformers import PreTrainedConfig, PreTrainedModel

_LOGIT_STD = 2.5  # of a router's logits: the two likeliest of 8 experts have most of the probability
_EXPERT_WIDTHS = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}


@dataclass(frozen=True)
class Size:
    """What a test may want to be larger or smaller."""

    vocab_size: int
    experts: int = 8
    top_k: int = 2
    layers: int = 2
    hidden_size: int = 32

    def shape(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            "hidden_size": self.hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts_per_tok": self.top_k,
            "max_position_embeddings": 512,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
        }

    def alternate(self, *kinds: str) -> list[str]:
        """Return the kind of each layer."""
        return [kinds[layer % len(kinds)] for layer in range(self.layers)]


def _qwen3_moe(size: Size) -> dict[str, Any]:
    return {"head_dim": 8, "num_experts": size.experts, "norm_topk_prob": True, **_EXPERT_WIDTHS}


def _mixtral(size: Size) -> dict[str, Any]:
    return {"head_dim": 8, "num_local_experts": size.experts}


def _gpt_oss(size: Size) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {"head_dim": 8, "num_local_experts": size.experts, "rope_parameters": rope}


def _deepseek_v3(size: Size) -> dict[str, Any]:
    """Experts in two groups, of which a token chooses one. The first layer has no router."""
    return {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **_EXPERT_WIDTHS,
    }


def _granite_hybrid(size: Size) -> dict[str, Any]:
    return {
        "num_local_experts": size.experts,
        "shared_intermediate_size": 24,
        "layer_types": size.alternate("mamba", "attention"),
        "mamba_n_heads": 8,
        "mamba_d_head": size.hidden_size * 2 // 8,  # Mamba is twice as wide as the model
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    }


def _qwen3_5_moe(size: Size) -> dict[str, Any]:
    return {
        "head_dim": 8,
        "num_experts": size.experts,
        "layer_types": size.alternate("linear_attention", "full_attention"),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        **_EXPERT_WIDTHS,
    }


def _phimoe(size: Size) -> dict[str, Any]:
    return {"num_local_experts": size.experts}


def _llama4(size: Size) -> dict[str, Any]:
    return {"head_dim": 8, "num_local_experts": size.experts, "intermediate_size_mlp": 48}


def _builder(
    config_class: Callable[..., PreTrainedConfig], settings: Callable[[Size], dict[str, Any]], layers: int = 2
) -> Callable[..., PreTrainedModel]:
    def build(
        vocab_size: int,
        experts: int = 8,
        top_k: int = 2,
        layers: int = layers,
        hidden_size: int = 32,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        **changes: Any,
    ) -> PreTrainedModel:
        """Return a model in evaluation mode; `changes` are of its config."""
        size = Size(vocab_size, experts, top_k, layers, hidden_size)
        config = config_class(**{**size.shape(), **settings(size), **changes})
        with torch.random.fork_rng():
            torch.manual_seed(1234 + seed)
            model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _sharpen_routers(model)
            if dtype == torch.float32:
                return model.eval()
            # Not `model.to(dtype)`: DeepSeek's router and its bias stay in fp32, as in a checkpoint that is loaded
            rounded = t.AutoModelForCausalLM.from_config(config, dtype=dtype)
        rounded.load_state_dict(model.state_dict())
        return rounded.eval()

    return build


@torch.no_grad()
def _sharpen_routers(model: PreTrainedModel) -> None:
    """Draw the weights of the routers anew. What they read is normalised, so that its size is known."""
    for module in model.modules():
        if "Router" in type(module).__name__:
            experts, hidden_size = module.weight.shape
            module.weight.normal_(0, _LOGIT_STD / hidden_size**0.5)
            if getattr(module, "bias", None) is not None:  # GPT-OSS adds it to the logits
                module.bias.normal_(0, 0.5)
            if hasattr(module, "e_score_correction_bias"):  # of the choice, but not of the weights, in DeepSeek V3
                module.e_score_correction_bias.copy_(torch.linspace(-0.1, 0.1, experts))


# Routers whose `topk` gives the indices that they return
WITH_TOPK: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen3_moe": _builder(t.Qwen3MoeConfig, _qwen3_moe),
    "mixtral": _builder(t.MixtralConfig, _mixtral),
    "gpt_oss": _builder(t.GptOssConfig, _gpt_oss),
    "deepseek_v3": _builder(t.DeepseekV3Config, _deepseek_v3, layers=3),
    "granite_hybrid": _builder(t.GraniteMoeHybridConfig, _granite_hybrid),
    "qwen3_5_moe": _builder(t.Qwen3_5MoeTextConfig, _qwen3_5_moe),
}
# Phi-MoE takes a maximum twice, and in training a random choice. Llama 4 returns scores of all experts, and no indices
WITHOUT_TOPK: dict[str, Callable[..., PreTrainedModel]] = {
    "phimoe": _builder(t.PhimoeConfig, _phimoe),
    "llama4": _builder(t.Llama4TextConfig, _llama4),
}
MIXTURES = {**WITH_TOPK, **WITHOUT_TOPK}
