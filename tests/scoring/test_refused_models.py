"""A model that is no decoder-only language model is refused before the first step."""

import re
from typing import Any

import pytest
import torch
import transformers as t

from logit_models import CONTROLS, SHAPE, build
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward

SMALL = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
IDS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
MODELS: dict[str, tuple[Any, str]] = {
    "t5": (
        lambda: t.T5ForConditionalGeneration(t.T5Config(vocab_size=97, d_model=32, d_ff=48, num_layers=2, num_heads=4)),
        "`model` is a T5ForConditionalGeneration, which has an encoder",
    ),
    # TRL trains it, but its encoder sees the tokens that its decoder predicts
    "bart": (
        lambda: t.BartForConditionalGeneration(t.BartConfig(**IDS, **SMALL, **HEADS)),
        "`model` is a BartForConditionalGeneration, which has an encoder",
    ),
    "classifier": (
        lambda: t.LlamaForSequenceClassification(t.LlamaConfig(**SHAPE)),
        "`model` is a LlamaForSequenceClassification, which has no output embedding",
    ),
    "llama4": (
        lambda: t.Llama4ForConditionalGeneration(
            t.Llama4Config(
                text_config={**SHAPE, "intermediate_size_mlp": 48, "num_local_experts": 2}, vision_config=VISION
            )
        ),
        "`model` is a Llama4ForConditionalGeneration, which has no backbone",
    ),
    "backbone": (lambda: t.LlamaModel(t.LlamaConfig(**SHAPE)), "`model` is a LlamaModel, which has no output"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_error_names_the_models_class(name: str) -> None:
    make, message = MODELS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        attach_scoring_forward(make(), ScoringOptions())


def test_a_reference_model_is_named_as_such() -> None:
    with pytest.raises(ValueError, match="`ref_model` is a LlamaModel"):
        attach_scoring_forward(MODELS["backbone"][0](), ScoringOptions(), "ref_model")


@pytest.mark.parametrize("name", CONTROLS)
def test_decoders_are_accepted(name: str) -> None:
    """Also those of families that have an encoder elsewhere."""
    attach_scoring_forward(build(name), ScoringOptions())


def test_a_head_that_is_no_linear_layer_is_not_cast() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model = build("llama")
    model.lm_head = Doubled(model.config.hidden_size, model.config.vocab_size, bias=False)
    with pytest.raises(ValueError, match="is not supported with this model's LM head: it is a `Doubled`, not a"):
        attach_scoring_forward(model, ScoringOptions(cast_lm_head_to_fp32=True))
