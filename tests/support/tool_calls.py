"""A tool, and a tokenizer with which models of random weights call it: with each completion that has a certain word."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from tiny import Workshop, word_tokenizer

# Many tokens end a completion, so that rows end one after the other
ENDS = (1, *range(60, 80))
_CHAT_TEMPLATE = (
    "{%- for m in messages %}{{ {'user': 'w80', 'assistant': 'w81', 'tool': 'w82'}[m.role] }} {{ m.content }}"
    "{%- for call in m.tool_calls or [] %} {{ call.function.name }}"
    "{%- for name, value in call.function.arguments.items() %} {{ name }} {{ value }}{% endfor %}{% endfor %}"
    " </s> {% endfor %}{% if add_generation_prompt %}w81{% endif %}"
)


def tool_tokenizer(calling_words: str = r"w[1-6]\d") -> PreTrainedTokenizerFast:
    """Return `word_tokenizer` with a chat template; the first of the calling words (a pattern) calls the tool."""
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "{word}"}}}
    end = {"close_pattern": r"</s>\s*", "content": "text"}
    tokenizer = word_tokenizer()
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "w81",
        "fields": {
            "tool_calls": {"open_pattern": rf"\b(?P<word>{calling_words})\b", "transform": [call], **end},
            "content": end,
        },
    }
    return tokenizer


def look_up(word: str) -> str:
    """Return one to four words.

    Args:
        word: that the words depend on.
    """
    number = int(word.removeprefix("w"))
    return " ".join(f"w{number * place % 70}" for place in range(1, 2 + number % 4))


def model_that_ends(workshop: Workshop, name: str = "tied", dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(workshop.model(name), dtype=dtype)
    model.generation_config = GenerationConfig(eos_token_id=list(ENDS), pad_token_id=0)
    return model
