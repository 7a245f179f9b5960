"""Model families without rules for their name: packed or padded as they need, they score as padded."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from packing_batches import EXAMPLES
from packing_models import attach, fresh
from packing_runs import assert_same, see

# Each family uses the names that its config has
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 7,
    # GPT-2's names
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "ffn_dim": 48,
    # Experts
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "input_jitter_noise": 0.0,
    "router_jitter_noise": 0.0,
    # Dropout would make two passes differ
    **dict.fromkeys(
        (
            "attention_dropout",
            "hidden_dropout",
            "residual_dropout",
            "dropout",
            "embd_pdrop",
            "attn_pdrop",
            "resid_pdrop",
        ),
        0.0,
    ),
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
OF_ITS_OWN = {
    "deepseek_v2": LATENT,
    "longcat_flash": LATENT,
    "minicpm3": LATENT,
    "opt": {"word_embed_proj_dim": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"]},
}
PACKED = [
    "afmoe",
    "apertus",
    "arcee",
    "beam",
    "cohere",
    "cohere2",
    "cwm",
    "deepseek_v2",
    "diffllama",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "flex_olmo",
    "gemma",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_bigcode",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jetmoe",
    "longcat_flash",
    "minicpm3",
    "minimax_m2",
    "ministral",
    "ministral3",
    "modernbert-decoder",
    "nanochat",
    "olmo",
    "olmo2",
    "olmoe",
    "persimmon",
    "phi",
    "qwen2_moe",
    "seed_oss",
    "starcoder2",
    "vaultgemma",
]
PADDED = ["doge", "falcon", "lfm2_moe", "moshi", "nemotron", "opt", "phimoe", "stablelm"]


def tiny(name: str) -> Any:
    config = CONFIG_MAPPING[name]
    known = config()
    of_its_own = OF_ITS_OWN.get(name, {})
    fields = {
        key: x for key, x in SHAPE.items() if hasattr(known, key) and not (name == "falcon" and key == "head_dim")
    }
    return config(**{**fields, **of_its_own})


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PACKED, *PADDED])
def test_every_family_scores_as_padded(name: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"no {name} in this release of transformers")
    attention = "eager" if name in ("vaultgemma", "stablelm", "falcon") else "sdpa"
    ours, padded = fresh(tiny(name), attention).train(), fresh(tiny(name), attention).train()
    scoring = attach(ours)
    scoring.packing.checked = False
    attach(padded, padding_free=False)
    for example in (*EXAMPLES.values(), *EXAMPLES.values()):
        batch = example()
        seen = see(ours, batch)
        assert_same(seen, see(padded, batch), 1e-5)
    assert (seen.fed < int(batch.attention_mask.sum())) == (name in PACKED)
    assert bool(scoring.packing.padded_reason) == (name in PADDED)
