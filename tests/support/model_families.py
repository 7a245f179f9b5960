"""Tiny models of many families, one for each way in which the head's product becomes logits, and a padded batch."""

import torch
import transformers as t

from tiny import MODELS

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# Families beyond those of tiny.MODELS, one for each way to treat the head's product
FAMILIES = {
    "mpt, whose logit_scale is None": lambda: t.MptConfig(
        vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=64
    ),
    "gemma3, softcap": lambda: t.Gemma3TextConfig(**BASE, head_dim=8, final_logit_softcapping=3.0),
    "falcon-h1, lm_head_multiplier": lambda: t.FalconH1Config(
        **BASE, lm_head_multiplier=0.3, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=16
    ),
    "hyperclovax, logits_scaling multiplies": lambda: t.HyperCLOVAXConfig(**BASE, logits_scaling=0.25),
    "minicpm3, logits_scaling divides": lambda: t.MiniCPM3Config(
        **BASE | {"num_key_value_heads": 4},
        dim_model_base=8,  # hidden size 32: its logits_scaling is 4
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "cohere2": lambda: t.Cohere2Config(**BASE, logit_scale=0.125),
    "granite-moe": lambda: t.GraniteMoeConfig(**BASE, **EXPERTS, logits_scaling=3.0),
    "mixtral": lambda: t.MixtralConfig(**BASE, **EXPERTS),
    "gpt-oss": lambda: t.GptOssConfig(**BASE, **EXPERTS, head_dim=8),
    "gpt2, tied, learned positions": lambda: t.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4),
    "bloom": lambda: t.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
    "olmo2": lambda: t.Olmo2Config(**BASE),
    "phi3": lambda: t.Phi3Config(**BASE),
}


def build(name, seed=0, **changes):
    config = (FAMILIES.get(name) or MODELS[name])()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias)
    return model


def batch(vocabulary=97, rows=3, length=9):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, -2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    return {"input_ids": ids, "attention_mask": mask}, labels
