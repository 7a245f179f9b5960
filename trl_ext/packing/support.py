"""Which models can be packed."""

from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import other as peft_wrappers
from torch import nn

# Where a class that lends layouts keeps the layer's own class
LENDS_FOR = "_trl_ext_lends_for"


def backbone_of(model: Any) -> Any:
    """Return the model without the head. Llama 4's text model has no such `base_model`, and returns itself."""
    return model.model if model.base_model is model else model.base_model


def text_backbone_of(model: Any) -> Any:
    """Return the part of the backbone that processes tokens. Multimodal models have others for images and sound."""
    backbone = backbone_of(model)
    return backbone if takes_text_only(model) else getattr(backbone, "language_model", backbone)


def takes_text_only(model: Any) -> bool:
    """Whether the model has no inputs for images, sound or video. Batches of the others may be text alone."""
    return model.config.get_text_config() is model.config


def placeholder_ids(config: Any) -> set[int]:
    """Return the token ids that stand for an image or a sound, or are special in another way."""
    fields = vars(config).items()
    return {x for name, x in fields if name.endswith(("token_id", "token_index")) and isinstance(x, int)}


def text_id(config: Any) -> int:
    """Return the lowest token id that is no placeholder."""
    placeholders = placeholder_ids(config)
    return next(x for x in range(len(placeholders) + 1) if x not in placeholders)


def own_class_of(module: nn.Module) -> Any:
    """Return the class of `module`; if that lends layouts, the class that it replaces."""
    return getattr(type(module), LENDS_FOR, type(module))


def mixers_of(model: Any) -> list[nn.Module]:
    """Return the modules that mix tokens by a causal convolution, alone or before a recurrence."""
    # A PEFT that has moved its wrapper is refused where an adapter is trained
    wrapper = getattr(peft_wrappers, "AuxiliaryTrainingWrapper", BaseTunerLayer)
    return [
        module
        for module in text_backbone_of(model).modules()
        if not isinstance(module, BaseTunerLayer | wrapper | nn.ModuleDict)
        and any(map(_is_causal_convolution, module.children()))
    ]


def _is_causal_convolution(module: nn.Module) -> bool:
    """Whether this is a convolution of each channel alone whose padding is as long as what it looks back at."""
    convolution = getattr(module, "original_module", getattr(module, "base_layer", module))  # of PEFT
    return (
        isinstance(convolution, nn.Conv1d)
        and convolution.groups == convolution.in_channels
        and convolution.padding == (convolution.kernel_size[0] - 1,)
    )


_CHUNKED = "chunked_attention"
_MASKABLE = {"full_attention", "sliding_attention", _CHUNKED}
# Kinds of layers, in models that also have mixers, that have none
_WITHOUT_MIXER = {"attention", "mlp", "moe"}
# Rotary embeddings that depend only on the distance between tokens
_RELATIVE_ROTATIONS = {"default", "linear", "llama3", "proportional", "yarn"}
# Rotary embeddings that depend on the length of the batch
_ROTATIONS_BY_LENGTH = {"dynamic", "longrope"}
# Model types whose attention depends on more than the distance: they scale queries by position, or apply a norm or a
# scale of each channel after the rotation
_BY_POSITION = {"beam", "dory", "hunyuan_v1_dense", "hunyuan_v1_moe"}


def padded_reason(model: Any) -> str | None:
    """Return why batches of `model` must stay padded; None if no reason is known."""
    config = model.config.get_text_config()
    if config.is_encoder_decoder:
        return "the model is an encoder-decoder"
    mixers = mixers_of(model)
    if getattr(model, "_is_stateful", False) and not mixers:
        return "the model keeps a state besides keys and values, which would carry over from one row to the next"
    if not getattr(model, "_supports_attention_backend", False) and not mixers:
        return "the model's attention does not use transformers' attention interface"
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters.values()):
        return "an aLoRA adapter starts at a position that PEFT counts from the end of a padded row"
    if has_batch_norm(text_backbone_of(model)):
        return "the model normalises over the tokens of a batch, padding included"
    if trains_expert_modules(model):
        return (
            "the model's experts are separate modules, and in TRL an expert that gets only padding has a gradient of 0"
        )
    known = _MASKABLE | (_WITHOUT_MIXER if mixers else set())
    unsupported = [kind for kind in getattr(config, "layer_types", None) or () if kind not in known]
    if len(unsupported) > len(mixers):
        names = ", ".join(sorted(set(unsupported)))
        return f"the model has layers with neither full, sliding-window nor chunked attention: {names}"
    # "vision" is about the tokens of an image. Batches of text are causal
    is_bidirectional = getattr(config, "use_bidirectional_attention", False) not in (None, False, "vision")
    if is_bidirectional or not getattr(config, "is_causal", True):
        return "the model's attention is not causal"
    return None


def has_batch_norm(model: nn.Module) -> bool:
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
    return any(isinstance(module, kinds) for module in model.modules())


def can_rebase(model: Any) -> bool:
    """Whether attention depends only on the distance between tokens, so that a row may begin at any position."""
    config = model.config.get_text_config()
    by_position = "attn_temperature_tuning", "llama_4_scaling_beta"  # they scale queries by position
    rotations = _rotations(config)
    return (
        bool(rotations)
        and config.model_type not in _BY_POSITION
        and all(rotation.get("rope_type", "default") in _RELATIVE_ROTATIONS for rotation in rotations)
        and not any(rotation.get(name) for rotation in rotations for name in by_position)
        and not any(getattr(config, name, None) for name in by_position)
        and not _has_learned_positions(model)
    )


def has_experts(model: Any) -> bool:
    """Whether a router chooses experts for each token. Rounding can change the choice."""
    config = model.config.get_text_config()
    return any("experts" in name and isinstance(x, int) and x > 1 for name, x in vars(config).items())


def trains_expert_modules(model: Any) -> bool:
    """Whether the model trains experts that are separate modules. An expert without a token then gets no gradient."""
    return any(
        param.requires_grad
        for name, module in model.named_modules()
        if "expert" in name.split(".")[-1] and isinstance(module, nn.ModuleList | nn.ModuleDict)
        for param in module.parameters()
    )


def longest_in_one_chunk(model: Any) -> int | None:
    """Return up to how many tokens of a row chunked attention is full attention; None if no layer is chunked."""
    config = model.config.get_text_config()
    is_chunked = _CHUNKED in (getattr(config, "layer_types", None) or ())
    return config.attention_chunk_size if is_chunked else None


def longest_unscaled_row(model: Any) -> int | None:
    """Return up to how many columns of a row queries are not scaled by their column; None if no layer scales them.

    Llama 4's layers without rotary embeddings count the columns of what they get, whatever the positions.
    """
    config = model.config.get_text_config()
    scales = config.model_type == "llama4_text" and config.attn_temperature_tuning and 0 in config.no_rope_layers
    return int(config.floor_scale) - 1 if scales else None


def longest_equal(model: Any) -> int | None:
    """Return the length up to which rotary embeddings ignore a batch's length; None if they always do."""
    config = model.config.get_text_config()
    lengths = [
        rotation.get("original_max_position_embeddings") or config.max_position_embeddings
        for rotation in _rotations(config)
        if rotation.get("rope_type") in _ROTATIONS_BY_LENGTH
    ]
    return min(lengths, default=None)


def positions_by_length(model: Any, max_length: int | None = None, multiple: int | None = None) -> bool:
    """Whether rotary embeddings can depend on the length of a batch, with rows of at most `max_length` tokens.

    Args:
        multiple (`int`, *optional*): to which batches are padded.
    """
    longest = longest_equal(model)
    if longest is None or max_length is None:
        return longest is not None
    return -(-max_length // (multiple or 1)) * (multiple or 1) >= longest


def _rotations(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of each kind of rotary embedding in the model."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # A model with several kinds of layers has parameters for each kind
    nested = [x for x in parameters.values() if isinstance(x, dict)]
    return nested or ([parameters] if parameters else [])


def _has_learned_positions(model: Any) -> bool:
    words = model.get_input_embeddings()
    modules = text_backbone_of(model).modules()
    return any(isinstance(module, nn.Embedding) and module is not words for module in modules)
