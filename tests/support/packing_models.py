"""Tiny models of the families that packing is tested on, and a mode that computes everything in float64.

All weights are random and large, also norms, biases and sinks. So a token that sees too much or too little changes
every later log-prob. Windows are shorter than the sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as t
from peft import get_peft_model
from torch.overrides import TorchFunctionMode

from tiny import lora_config
from trl_ext.scoring.forward import ScoringForward, ScoringOptions, attach_scoring_forward

V = 97
WINDOW = 7
_IDS = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_BASE = {**_IDS, **_SHAPE, "tie_word_embeddings": False}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
_QUERY_AND_VALUE = ("q_proj", "v_proj")
_TEXT = {**_IDS, **_SHAPE, "head_dim": 8}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_RECURRENT = {"num_hidden_layers": 4, "head_dim": 8}
_DELTA_NET = {
    **_RECURRENT,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_MAMBA = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}


@dataclass(frozen=True)
class Family:
    """A configuration that can be packed.

    Args:
        config: makes the configuration.
        eager_only: whether transformers has only eager attention for it.
        router: whether it has a router loss.
        learned_positions: whether a token's vector depends on its column, so that only equal columns are shared.
        adapted: modules for LoRA, if "all-linear" does not work.
        rounding: how many times larger rounding is than in the other families.
    """

    config: Callable[[], t.PreTrainedConfig]
    eager_only: bool = False
    router: bool = False
    learned_positions: bool = False
    adapted: tuple[str, ...] = ()
    rounding: float = 1.0


def _of(config: type, **changes: Any) -> Callable[[], t.PreTrainedConfig]:
    return lambda: config(**{**_BASE, **changes})


def _placeholders(*names: str) -> dict[str, int]:
    """Return the last ids of the vocabulary, which stand for images."""
    return {name: V - number for number, name in enumerate(names, 1)}


_BY_COLUMN: dict[str, Any] = {"learned_positions": True}  # their attention has no rotary embeddings
# With each kind of mixer
HYBRID: dict[str, tuple[Callable[[], t.PreTrainedConfig], dict[str, Any]]] = {
    "qwen3_5": (_of(t.Qwen3_5TextConfig, **_DELTA_NET), {}),
    "qwen3_next": (_of(t.Qwen3NextConfig, **_DELTA_NET, **_EXPERTS), {"router": True, "adapted": _QUERY_AND_VALUE}),
    "olmo_hybrid": (_of(t.OlmoHybridConfig, **_DELTA_NET), {}),
    "lfm2": (_of(t.Lfm2Config, **_RECURRENT, layer_types=["conv", "full_attention"] * 2), {}),
    "lfm3": (_of(t.Lfm3Config, **_RECURRENT, layer_types=["conv", "full_attention"] * 2), {}),
    "bamba": (_of(t.BambaConfig, **_MAMBA, attn_layer_indices=[1, 3]), {"adapted": _QUERY_AND_VALUE}),
    "granitemoehybrid": (
        _of(
            t.GraniteMoeHybridConfig,
            **_MAMBA,
            layer_types=["mamba", "attention"] * 2,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=24,
        ),
        {"router": True, "adapted": _QUERY_AND_VALUE},
    ),
    "falcon_h1": (_of(t.FalconH1Config, **_MAMBA, head_dim=8, mamba_d_ssm=64), {"adapted": _QUERY_AND_VALUE}),
    "nemotron_h": (
        lambda: t.NemotronHConfig(
            **{key: x for key, x in _BASE.items() if key != "num_hidden_layers"},
            hybrid_override_pattern="M*M-",
            mamba_num_heads=8,
            mamba_head_dim=8,
            ssm_state_size=8,
            n_groups=1,
            chunk_size=16,
        ),
        {"adapted": _QUERY_AND_VALUE, **_BY_COLUMN},
    ),
    "jamba": (
        _of(
            t.JambaConfig,
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=4,
            mamba_d_state=8,
            mamba_dt_rank=4,
        ),
        {"router": True, "adapted": _QUERY_AND_VALUE, **_BY_COLUMN},
    ),
    # Its backbone does not pass its keyword arguments to its layers
    "mamba": (
        lambda: t.MambaConfig(**_IDS, hidden_size=32, num_hidden_layers=2, state_size=8, time_step_rank=4),
        {"adapted": ("in_proj",), "eager_only": True, **_BY_COLUMN},
    ),
    "mamba2": (
        lambda: t.Mamba2Config(
            **_IDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=8,
            state_size=8,
            n_groups=1,
            chunk_size=16,
        ),
        {"adapted": ("in_proj",), "eager_only": True, **_BY_COLUMN},
    ),
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_of(t.LlamaConfig, head_dim=8)),
    "llama-yarn": Family(
        _of(
            t.LlamaConfig,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        )
    ),
    "qwen2": Family(_of(t.Qwen2Config)),
    "qwen2-windows": Family(
        _of(t.Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, num_hidden_layers=3)
    ),
    "qwen3": Family(_of(t.Qwen3Config, head_dim=8, tie_word_embeddings=True)),
    "gemma2": Family(
        _of(t.Gemma2Config, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
        eager_only=True,
    ),
    "gemma3": Family(
        _of(
            t.Gemma3TextConfig,
            head_dim=8,
            sliding_window=WINDOW,
            query_pre_attn_scalar=8,
            layer_types=_MIXED,
            num_hidden_layers=3,
        )
    ),
    "mistral": Family(_of(t.MistralConfig, sliding_window=None, head_dim=8)),
    "mistral-window": Family(_of(t.MistralConfig, sliding_window=WINDOW, head_dim=8)),
    "phi3": Family(_of(t.Phi3Config, sliding_window=WINDOW)),
    "olmo3": Family(_of(t.Olmo3Config, sliding_window=WINDOW, layer_types=_MIXED, num_hidden_layers=3)),
    "gpt_neox": Family(
        lambda: t.GPTNeoXConfig(**{k: v for k, v in _BASE.items() if k != "num_key_value_heads"}, rotary_pct=0.5)
    ),
    "gpt2": Family(
        lambda: t.GPT2Config(
            **_IDS, n_embd=32, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        ),
        learned_positions=True,
        adapted=("c_attn", "c_proj", "c_fc"),
    ),
    "qwen3_moe": Family(
        _of(t.Qwen3MoeConfig, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
        router=True,
        adapted=_QUERY_AND_VALUE,
    ),
    "mixtral": Family(
        _of(t.MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
        router=True,
        adapted=_QUERY_AND_VALUE,
    ),
    "gpt_oss": Family(
        _of(
            t.GptOssConfig,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        eager_only=True,
        router=True,
        adapted=_QUERY_AND_VALUE,
    ),
    "deepseek_v3": Family(
        _of(
            t.DeepseekV3Config,
            **_LATENT,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
        ),
        adapted=("q_b_proj", "kv_b_proj", "o_proj"),
    ),
    "smollm3": Family(_of(t.SmolLM3Config, no_rope_layer_interval=2)),
    "llama4": Family(
        _of(
            t.Llama4TextConfig,
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=4,
            num_experts_per_tok=1,
            attention_chunk_size=128,
            num_hidden_layers=4,
        ),
        learned_positions=True,  # queries are scaled by their position
        adapted=_QUERY_AND_VALUE,
    ),
    "gemma3-with-vision": Family(
        lambda: t.Gemma3Config(
            text_config={**_TEXT, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
            vision_config=_VISION,
            mm_tokens_per_image=4,
            **_placeholders("image_token_index", "boi_token_index", "eoi_token_index"),
        ),
        adapted=_QUERY_AND_VALUE,
    ),
    "mistral3-with-vision": Family(
        lambda: t.Mistral3Config(
            text_config={**_TEXT, "model_type": "mistral"},
            vision_config={**_VISION, "model_type": "pixtral"},
            **_placeholders("image_token_index"),
        ),
        adapted=_QUERY_AND_VALUE,
    ),
    "qwen3_vl": Family(
        lambda: t.Qwen3VLConfig(
            text_config={
                **_TEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            },
            vision_config={
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "patch_size": 4,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            **_placeholders("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        ),
        adapted=_QUERY_AND_VALUE,
    ),
    # A recurrence multiplies rounding errors
    **{name: Family(config, rounding=20.0, **flags) for name, (config, flags) in HYBRID.items()},
}


def fresh(
    config: t.PreTrainedConfig,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    model_class: Any = None,
) -> Any:
    """Make a model with random weights, the same on every call.

    Args:
        model_class (`type`, *optional*): the class of the model, if no `AutoModel` should choose it.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if model_class is None:
            has_vision = config.get_text_config() is not config
            auto_class: Any = t.AutoModelForImageTextToText if has_vision else t.AutoModelForCausalLM
            from_config = auto_class.from_config
        else:
            from_config = model_class._from_config
        model = from_config(
            # Grouped products of experts do not support float64
            config,
            attn_implementation=attention,
            experts_implementation="eager",
            dtype=torch.float32,
        )
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            for parameter in model.parameters():
                if parameter is embedding:
                    parameter.normal_(0, 0.6)
                elif parameter.ndim >= 2:
                    parameter.normal_(0, 0.2)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.to(dtype)


def build(
    name: str, attention: str | None = None, dtype: torch.dtype = torch.float32, lora: bool = False, **changes: Any
) -> Any:
    """Build the family's model in training mode; with `lora`, inside PEFT with nonzero adapter weights."""
    family = FAMILIES[name]
    config = family.config()
    for key, value in changes.items():
        setattr(config, key, value)
    model = fresh(config, attention or ("eager" if family.eager_only else "sdpa"), dtype)
    if lora:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            adapted = {"target_modules": list(family.adapted)} if family.adapted else {}
            model = get_peft_model(model, lora_config(fan_in_fan_out=name == "gpt2", **adapted)).to(dtype)
    return model.train()


def attach(model: Any, **options: Any) -> ScoringForward:
    """Attach the scoring forward to the model inside PEFT, and skip the check of the first batch."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    scoring = attach_scoring_forward(inner, ScoringOptions(**{"outputs": ("log_probs", "entropy"), **options}))
    scoring.packing.checked = True
    scoring.is_compared = True
    return scoring


class TrueFloat64(TorchFunctionMode):
    """Replace fp32 by float64 in the `with` block.

    transformers computes norms, softmaxes, rotary angles and routers in fp32 for every dtype of the model, which would
    hide differences below 1e-7.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()}
        return func(*args, **kwargs)
