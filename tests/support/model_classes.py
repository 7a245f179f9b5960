"""Every class of transformers' `AutoModelForCausalLM`, built tiny: rules for the names in configs, and exceptions.

The rules make at least one layer of each kind that a config names, windows and choices of tokens shorter than the rows,
several experts, and no dropout.
"""

import dataclasses
from typing import Any

import torch
import transformers as t
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from packing_models import V, fresh

# Model class -> the model types that load it
MODEL_TYPES: dict[str, list[str]] = {}
for _type, _class in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
    MODEL_TYPES.setdefault(_class, []).append(_type)

_LAYERS = 3
# Name in a config -> value, where the config has the name
_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner", "ff_dim"), 48),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks"), _LAYERS
    ),
    "encoder_layers": 1,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "sliding_window_size"), 7),
    "type_vocab_size": 2,
    "is_decoder": True,
    # Experts
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    "first_k_dense_replace": 1,
    # Latent attention, and attention to the tokens that an indexer chooses
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 2),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim"), 8),
    "index_topk": 5,
    # Recurrent layers
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "mamba_dt_rank": 4,
    "lru_width": 32,
    # Inputs of each layer
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": V,
}
# Lists with an entry for each layer
_KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types")
_FULL_AND_SLIDING = ["full_attention", "sliding_attention", "full_attention"]
_CONV_AND_FULL = ["conv", "full_attention", "conv"]
# Two layers attend to the keys of earlier ones, one of each kind
_GEMMA_4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 16,
}
# Model class -> what the rules do not give
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "CTRLLMHeadModel": {"dff": 48},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "CohereCompassForCausalLM": {
        "layer_types": _FULL_AND_SLIDING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in _FULL_AND_SLIDING
        },
    },
    "CpmAntForCausalLM": {"dim_head": 8, "dim_ff": 48},
    "DbrxForCausalLM": {
        "attn_config": {"rope_theta": 10000.0, "clip_qkv": 3.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "DeepseekV4ForCausalLM": {
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "moe_topk": 2,
    },
    "DoryForCausalLM": {
        "n_input_layers": 1,
        "n_output_layers": 1,
        "layer_types": _FULL_AND_SLIDING,
        "initializer_range": 1.0,  # the model divides weights by it, and a small one magnifies rounding
    },
    "Dots1ForCausalLM": {"n_shared_experts": 1, "layer_types": _FULL_AND_SLIDING},
    "Dots3NoteForCausalLM": {
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16},
        **{"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
        "head_dim": 16,
        "shared_experts_intermediate_size": 24,
    },
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "Gemma3nForCausalLM": {  # as Gemma 4
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5] * 4,
    },
    **dict.fromkeys(("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"), _GEMMA_4),
    **{
        name: {"text_config": {"global_head_dim": 16}}
        for name in ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
    },
    "GotOcr2ForConditionalGeneration": {"vision_config": {"output_channels": 16, "mlp_dim": 48}},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention", "mamba"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **{
        name: {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
        for name in ("InklingForCausalLM", "Inkling2ForCausalLM")
    },
    "LagunaForCausalLM": {"layer_types": _FULL_AND_SLIDING},
    "Lfm2ForCausalLM": {"layer_types": _CONV_AND_FULL},
    "Lfm2MoeForCausalLM": {"layer_types": _CONV_AND_FULL, "num_dense_layers": 1},
    "LongcatFlashForCausalLM": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "moe_topk": 2},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MellumForCausalLM": {"layer_types": _FULL_AND_SLIDING, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "MiniMaxM3VLForCausalLM": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "MinistralForCausalLM": {"layer_types": _FULL_AND_SLIDING},
    "NemotronHForCausalLM": {"moe_shared_expert_intermediate_size": 24},
    "OPTForCausalLM": {"word_embed_proj_dim": 32},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "layer_types": _FULL_AND_SLIDING},
    "Qwen3ForCausalLM": {"use_sliding_window": True, "layer_types": _FULL_AND_SLIDING},
    "Qwen4ExpForCausalLM": {
        **{"indexer_kv_heads": 1, "indexer_budget": 4, "indexer_compress_ratio": 2},
        # Embeddings of successive tokens
        **{"ple_layer_ids": [1, 3], "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 1},
    },
    "ReformerModelWithLMHead": {
        "attn_layers": ["local", "lsh"],
        **{"hash_seed": 0, "num_buckets": 2, "num_hashes": 1, "lsh_attn_chunk_length": 2},
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 2,
    },
    "RemBertForCausalLM": {"input_embedding_size": 16, "output_embedding_size": 40},
    "RoCBertForCausalLM": {"pronunciation_vocab_size": V, "shape_vocab_size": V},
    "XmodForCausalLM": {"default_language": "en_XX"},
    **{
        name: {"n_mamba_heads": 2, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]}
        for name in ("ZambaForCausalLM", "Zamba2ForCausalLM")
    },
    "ZayaForCausalLM": {
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
}
# Model class -> why it cannot be run
NOT_RUN = {
    "Gemma3nForConditionalGeneration": "its vision tower needs timm",
    **dict.fromkeys(
        ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), "it reads another model's keys and values"
    ),
    **dict.fromkeys(("MusicgenForCausalLM", "MusicgenMelodyForCausalLM"), "its tokens are codes of sound"),
}


def build_class(model_class: str, dtype: torch.dtype) -> Any:
    """Return a model of the class in training mode, with random weights, the same on every call."""
    try:
        model = fresh(tiny_config(model_class), dtype=dtype, model_class=getattr(t, model_class))
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        model = fresh(tiny_config(model_class), "eager", dtype, model_class=getattr(t, model_class))
    return model.train()


def tiny_config(model_class: str) -> Any:
    """Return a tiny config of the model class."""
    config_class = getattr(t, model_class).config_class
    return config_class(**_merged(_fields(config_class), _EXCEPTIONS.get(model_class, {})))


def _merged(fields: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    inside = {name: _merged(fields[name], x) for name, x in other.items() if isinstance(fields.get(name), dict)}
    return fields | other | inside


def _fields(config_class: Any) -> dict[str, Any]:
    """Return what the rules give for a config class; for configs inside of it, as dictionaries."""
    default = config_class()
    aliases = config_class.attribute_map.keys()
    fields_of_class = {field.name for field in dataclasses.fields(config_class)}
    names = {name for name in fields_of_class | aliases if _is_settable(config_class, name)}
    fields = {name: x for name, x in _SIZES.items() if name in names}
    if "kv_lora_rank" in names:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    # Some fields must be an int
    fields |= {name: type(getattr(default, name))(0) for name in names if _is_dropout(default, name)}
    kinds = {
        name: list(dict.fromkeys(getattr(default, name, None) or ()))
        for name in _KINDS_OF_LAYERS
        if name in names - aliases
    }
    layers = max([_LAYERS, *map(len, kinds.values())])
    for name, kinds_of_layers in kinds.items():
        if kinds_of_layers:
            fields |= {name: (kinds_of_layers * layers)[:layers], "num_hidden_layers": layers}
    for name in config_class.sub_configs:
        sub_config = getattr(default, name, None)
        if dataclasses.is_dataclass(sub_config):
            fields[name] = _fields(type(sub_config)) | {"model_type": sub_config.model_type}
    return fields


def _is_settable(config_class: Any, name: str) -> bool:
    """Whether a name in the config is no alias of another and no computed value."""
    attribute = getattr(config_class, config_class.attribute_map.get(name, name), None)
    return not (isinstance(attribute, property) and attribute.fset is None)


def _is_dropout(default: Any, name: str) -> bool:
    value = vars(default).get(name)
    return isinstance(value, int | float) and ("drop" in name or "jitter" in name) and not isinstance(value, bool)
