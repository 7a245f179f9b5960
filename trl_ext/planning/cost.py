"""The cost of a row, relative to one token in the backbone's linear layers: from the model's config."""

from dataclasses import dataclass, replace
from typing import Any

from .micro_batches import RowTokens


@dataclass(frozen=True)
class CostModel:
    """FLOPs of a forward pass. A backward takes twice as many for each part, so the proportions stay.

    Products alone are counted, as in PaLM (https://huggingface.co/papers/2204.02311, appendix B): 2 FLOPs for each
    weight and token, and in attention 4 for each pair of query and key, layer and feature of the heads.
    """

    of_token: float  # the backbone's linear layers
    of_pair: float  # of query and key, in all layers
    of_scored_token: float  # the head

    @classmethod
    def of(cls, config: Any) -> "CostModel":
        """Return the model's constants. Missing fields have a transformer's usual proportions."""
        hidden = _read(config, "hidden_size")
        if not isinstance(hidden, int):  # only tokens count
            return cls(1.0, 0.0, 0.0)
        heads = _read(config, "num_attention_heads") or 1
        features = _read(config, "head_dim") or hidden // heads
        kv_heads = _read(config, "num_key_value_heads") or heads
        inner = _read(config, "intermediate_size") or 4 * hidden
        inner = max(inner) if isinstance(inner, list | tuple) else inner  # a size for each layer
        experts = _read(config, "num_experts_per_tok")
        if experts:
            inner = experts * (_read(config, "moe_intermediate_size") or inner)
        weights = hidden * features * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
        layers = _read(config, "num_hidden_layers") or 1
        return cls(2.0 * layers * weights, 4.0 * layers * heads * features, 2.0 * hidden * config.vocab_size)

    def costs(self, tokens: RowTokens, completions: int = 1) -> RowTokens:
        """Return the costs of prompts and completions in place of their tokens, as integers.

        `completions` is the number of completions of a row: 2 for a pair.
        """
        pair_cost = self.of_pair / self.of_token
        scored_token_cost = self.of_scored_token / self.of_token

        def of_prompt(length: int) -> int:
            return round(length + pair_cost * length * length / 2)

        def of_completion(prompt: int, length: int, scored_tokens: int) -> int:
            attention = pair_cost * length * (prompt + length / 2 / completions)
            return round(length + attention + scored_token_cost * scored_tokens)

        rows = zip(tokens.prompt_tokens_B, tokens.own_tokens_B, tokens.scored_tokens_B, strict=True)
        return replace(
            tokens,
            prompt_tokens_B=[of_prompt(x) for x in tokens.prompt_tokens_B],
            own_tokens_B=[of_completion(*row) for row in rows],
        )


def _read(config: Any, name: str) -> Any:
    """Return a field of a config; `None` if it is missing, or differs by layer, for which transformers raises."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None
