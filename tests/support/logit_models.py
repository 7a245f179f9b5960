"""Tiny models whose logits are not what their config, or TRL's head, says; others as controls; and a batch."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

from packing_models import fresh

_IDS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE: dict[str, Any] = {
    **_IDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_BERT = {
    **{name: x for name, x in SHAPE.items() if name != "num_key_value_heads"},
    "is_decoder": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}

# Models whose logits TRL's head does not compute
CONFIGS: dict[str, Callable[[], Any]] = {
    "recurrent_gemma": lambda: t.RecurrentGemmaConfig(
        **{**SHAPE, "num_key_value_heads": 1}, lru_width=32, attention_window_size=16, logits_soft_cap=3.0
    ),
    "xlstm": lambda: t.xLSTMConfig(
        vocab_size=97, hidden_size=32, num_blocks=2, num_heads=4, chunk_size=4, output_logit_soft_cap=3.0
    ),
    "inkling": lambda: t.CONFIG_MAPPING["inkling_text"](
        **{**SHAPE, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        logits_mup_width_multiplier=3.0,
    ),
    "inkling, padded vocabulary": lambda: t.CONFIG_MAPPING["inkling_text"](
        **{**SHAPE, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        logits_mup_width_multiplier=3.0,
        unpadded_vocab_size=95,
    ),
    "mpt": lambda: t.MptConfig(vocab_size=97, d_model=32, n_heads=4, n_layers=2, max_seq_len=64, logit_scale=0.25),
    "modernbert-decoder": lambda: t.ModernBertDecoderConfig(
        **{name: x for name, x in SHAPE.items() if name != "num_key_value_heads"}, cls_token_id=1, sep_token_id=2
    ),
    "bert": lambda: t.BertConfig(**_BERT),
    "roberta": lambda: t.RobertaConfig(**_BERT),
    "roformer": lambda: t.RoFormerConfig(**_BERT),
    "xlm-roberta-xl": lambda: t.XLMRobertaXLConfig(**_BERT),
    # The output embedding is narrower or wider than the hidden states: TRL crashes
    "rembert": lambda: t.RemBertConfig(
        **_BERT, input_embedding_size=16, output_embedding_size=40, classifier_dropout_prob=0.0
    ),
    "electra": lambda: t.ElectraConfig(**_BERT, embedding_size=16),
}

# Models that TRL's head is right for. OPT and BART call a part of their backbone
CONTROLS: dict[str, Callable[[], Any]] = {
    "llama": lambda: t.LlamaConfig(**SHAPE),
    "gemma2": lambda: t.Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=3.0, attn_implementation="eager"),
    "cohere": lambda: t.CohereConfig(**SHAPE, logit_scale=0.25),
    "granite": lambda: t.GraniteConfig(**SHAPE, logits_scaling=3.0),
    "hyperclovax": lambda: t.HyperCLOVAXConfig(**SHAPE, logits_scaling=0.25),
    "phi": lambda: t.PhiConfig(**SHAPE),
    "bert-generation": lambda: t.BertGenerationConfig(**_BERT),
    "opt": lambda: t.OPTConfig(
        **_IDS, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        dropout=0.0,
    ),
    "bart": lambda: t.BartConfig(
        **_IDS, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, **_NO_DROPOUT
    ),
}  # fmt: skip


class LlamaWithLogits(t.LlamaForCausalLM):
    """A model with code of its own between hidden states and logits."""

    def product(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        return t.modeling_outputs.CausalLMOutputWithPast(logits=self.product(outputs.last_hidden_state))


class Scaled(LlamaWithLogits):
    def product(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden) * 0.25  # type: ignore[no-any-return]


class ScaledHidden(LlamaWithLogits):
    def product(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden * 0.25)  # type: ignore[no-any-return]


class Capped(LlamaWithLogits):
    def product(self, hidden: Tensor) -> Tensor:
        return 2.0 * torch.tanh(self.lm_head(hidden) * 0.7 / 2.0)


class Shifted(LlamaWithLogits):
    """One class has another logit."""

    def product(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden) + 3.0 * (torch.arange(97) == 5)  # type: ignore[no-any-return]


class Excluded(LlamaWithLogits):
    """Some classes have no probability."""

    def product(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).masked_fill(torch.arange(97) >= 90, -torch.inf)  # type: ignore[no-any-return]


class Doubled(LlamaWithLogits):
    """The output embedding runs twice."""

    def product(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden) + self.lm_head(hidden.flip(-1))  # type: ignore[no-any-return]


class Functional(LlamaWithLogits):
    """The output embedding's weight is used without its module."""

    def product(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.lm_head.weight) * 0.5


class Tied(LlamaWithLogits):
    """The logits come from the input embedding, and `lm_head` has other weights."""

    def product(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.model.embed_tokens.weight)


OWN_CODE = [Scaled, ScaledHidden, Capped, Shifted, Excluded, Doubled, Functional, Tied]


class ScaledInputs(LlamaWithLogits):
    """The backbone gets other inputs than the model."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids) * 0.5
        hidden = self.model(inputs_embeds=embedded, attention_mask=attention_mask, **kwargs).last_hidden_state
        return t.modeling_outputs.CausalLMOutputWithPast(logits=self.product(hidden))


class AllLayers(LlamaWithLogits):
    """The logits come from more than the last hidden states."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, **kwargs)
        return t.modeling_outputs.CausalLMOutputWithPast(logits=self.product(sum(outputs.hidden_states)))


UNREADABLE = [ScaledInputs, AllLayers]


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return fresh({**CONFIGS, **CONTROLS}[name](), "eager", dtype).train()


def build_class(cls: type[Any], dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(t.LlamaConfig(**SHAPE, initializer_range=0.2))
    return model.to(dtype).train()


def batch() -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch without padding, and its labels."""
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels
