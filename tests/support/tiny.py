"""Tiny tokenizers, models, adapters, datasets and rollouts, made on the fly and saved as local checkpoints.

Everything depends only on fixed seeds, so two runs, trainers or environments get the same numbers. Weights have a large
spread (`initializer_range` 0.15 and more), so that log-probs differ from token to token.
"""

import functools
import random
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTJConfig,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
N_WORDS = 94
V_WORDS = N_WORDS + 3  # 97 is prime, so no tile or shard divides it
REFERENCE_SEED = 5  # of the separate reference models
CHAT_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
V_CHAT = 256 + len(CHAT_SPECIALS)

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "dtype": "float32",
}
_WORD_IDS = {"vocab_size": V_WORDS, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}

_SAMPLED = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}


def _qwen3(**changes: Any) -> PreTrainedConfig:
    return Qwen3Config(**{**_SHAPE, **_WORD_IDS, "head_dim": 8, "tie_word_embeddings": True, **changes})


# The purpose of each model is next to it. All have rotary positions: GPT-2 with learned positions has a key bias
# whose gradient is zero in exact arithmetic, so a comparison would be of noise.
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "tied": lambda: _qwen3(),
    "untied": lambda: LlamaConfig(**{**_SHAPE, **_WORD_IDS, "tie_word_embeddings": False}),
    # What vLLM serves on a CPU
    "sampled": lambda: LlamaConfig(**{**_SHAPE, **_WORD_IDS, **_SAMPLED, "tie_word_embeddings": False}),
    "sampled_tied": lambda: _qwen3(**_SAMPLED, head_dim=32),
    # A head that is larger than a batch's hidden states, with rows that two ranks cannot share evenly
    "odd_vocab": lambda: LlamaConfig(**{**_SHAPE, **_WORD_IDS, "vocab_size": 501, "tie_word_embeddings": False}),
    "chat": lambda: _qwen3(vocab_size=V_CHAT, pad_token_id=256, eos_token_id=258),
    "wide_vocab": lambda: _qwen3(vocab_size=33001, num_hidden_layers=1),  # more columns than one of TRL's tiles
    "softcap": lambda: Gemma2Config(
        **{
            **_SHAPE,
            **_WORD_IDS,
            "head_dim": 8,
            "final_logit_softcapping": 2.0,  # low enough to bend every logit
            "attn_implementation": "eager",
            "sliding_window": 8,
        }
    ),
    "logits_scaling": lambda: GraniteConfig(**{**_SHAPE, **_WORD_IDS, "logits_scaling": 0.5}),
    "logit_scale": lambda: CohereConfig(**{**_SHAPE, **_WORD_IDS, "logit_scale": 0.25}),
    "head_bias": lambda: PhiConfig(**{**_SHAPE, **_WORD_IDS, "tie_word_embeddings": False}),
    "head_bias_gptj": lambda: GPTJConfig(
        **_WORD_IDS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        rotary_dim=4,
        initializer_range=0.15,
        tie_word_embeddings=False,
    ),
    "experts": lambda: Qwen3MoeConfig(
        **{
            **_SHAPE,
            **_WORD_IDS,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "router_aux_loss_coef": 0.05,
            "tie_word_embeddings": False,
        }
    ),
}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word, `w0` to `w93`, separated by whitespace."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, UNK, *(f"w{i}" for i in range(N_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, Qwen3's special tokens, and TRL's copy of its chat template."""
    from trl.chat_template_utils import qwen3_chat_template

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CHAT_SPECIALS[:3])
    tokenizer.add_tokens(CHAT_SPECIALS[3:])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    fast.chat_template = qwen3_chat_template
    return fast


class Workshop:
    """Makes checkpoints under `root`, each on first use."""

    def __init__(self, root: Path):
        self.root = Path(root)

    def model(self, name: str, seed: int = 0) -> str:
        """Return the path of a saved model with its tokenizer; another `seed` gives another reference model."""
        path = self.root / f"{name}-{seed}"
        if not path.exists():
            torch.manual_seed(1234)
            model = AutoModelForCausalLM.from_config(MODELS[name]())
            head = model.get_output_embeddings()
            if getattr(head, "bias", None) is not None:  # initialised to zero, which would hide a dropped bias
                torch.nn.init.normal_(head.bias, std=0.5)
            if name in (
                "tied",
                "chat",
                "sampled_tied",
            ):  # tied, with small updates of the embedding: predicts repeats of its input
                torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.2)
                for part, param in model.named_parameters():
                    if part.endswith(("o_proj.weight", "down_proj.weight")):
                        param.data.mul_(0.3)
            if seed:  # near the policy, as a reference is, but not equal
                torch.manual_seed(seed)
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(torch.randn_like(param), alpha=0.02)
            (chat_tokenizer() if name == "chat" else word_tokenizer()).save_pretrained(path)
            model.save_pretrained(path)
        return str(path)

    def adapter(self, name: str) -> str:
        """Return the path of a saved LoRA adapter for model `name`, with weights that are not zero."""
        path = self.root / f"{name}-adapter"
        if not path.exists():
            base = AutoModelForCausalLM.from_pretrained(self.model(name))
            torch.manual_seed(4321)
            get_peft_model(base, lora_config()).save_pretrained(path)
        return str(path)


def let_transformers_add_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers add adapters to a model with the installed PEFT. 5.24 asks for 0.22, which is not released."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", version("peft"))


def lora_config(**changes: Any) -> LoraConfig:
    """Return a LoRA config whose B is not zero, so that the policy differs from its reference from the first step."""
    return LoraConfig(
        **{
            "task_type": "CAUSAL_LM",
            "r": 4,
            "lora_alpha": 4,
            "init_lora_weights": False,
            "target_modules": "all-linear",
            **changes,
        }
    )


def _words(rng: random.Random, count: int) -> list[int]:
    """Return `count` words, a third of them repeats, which tied models predict, so that token accuracy is not zero."""
    words: list[int] = []
    for _ in range(count):
        words.append(words[-1] if words and rng.random() < 0.35 else rng.randrange(N_WORDS))
    return words


def _text(words: list[int]) -> str:
    return " ".join(f"w{word}" for word in words)


def preferences(rows: int, seed: int, conversational: bool = False) -> Dataset:
    """Return pairs with prompts of 2 to 7 and completions of 1 to 9 words. Some pairs share a prefix, some a prompt."""
    rng = random.Random(seed)
    examples = []
    prompt: list[int] = []
    for row in range(rows):
        prompt = prompt if row % 4 == 3 else _words(rng, rng.randint(2, 7))
        alike = _words(rng, rng.randint(0, 2))
        chosen = alike + _words(rng, rng.randint(1, 7))
        rejected = alike + _words(rng, rng.randint(1, 7))
        if conversational:
            examples.append(
                {
                    "prompt": [{"role": "user", "content": _text(prompt)}],
                    "chosen": [{"role": "assistant", "content": _text(chosen)}],
                    "rejected": [{"role": "assistant", "content": _text(rejected)}],
                }
            )
        else:
            examples.append({"prompt": _text(prompt), "chosen": " " + _text(chosen), "rejected": " " + _text(rejected)})
    return Dataset.from_list(examples)


def prompts(rows: int, seed: int, conversational: bool = False) -> Dataset:
    """Return different prompts of 1 to 6 words."""
    rng = random.Random(seed)
    texts = [_text([row, *_words(rng, rng.randint(0, 5))]) for row in range(rows)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": text}] if conversational else text} for text in texts]
    )


def prompt_text(prompt: str | list[dict[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _rollout(
    prompts: list[Any], trainer: Any, complete: Callable[[random.Random, Any], tuple[list[int], dict[str, list]]]
) -> dict[str, list]:
    """Return completions that depend on the prompt, the place in the group and the step, but not on the weights."""
    tokenizer = trainer.processing_class
    place: Counter[str] = Counter()
    output: dict[str, list] = {"prompt_ids": [], "completion_ids": []}
    for prompt in prompts:
        text = prompt_text(prompt)
        rng = random.Random(f"{text}|{place[text]}|{trainer.state.global_step}")
        place[text] += 1
        completion_ids, fields = complete(rng, trainer)
        output["prompt_ids"].append(tokenizer(text)["input_ids"])
        output["completion_ids"].append(completion_ids)
        for key, value in fields.items():
            output.setdefault(key, []).append(value)
    if "logprobs" not in output:
        output["logprobs"] = None
    return output


def _word_completion(rng: random.Random, trainer: Any) -> list[int]:
    longest = trainer.max_completion_length
    length = longest if rng.random() < 0.4 else rng.randint(1, longest)
    ids = [3 + word for word in _words(rng, length)]
    if length < longest:
        ids[-1] = 1  # ends with EOS; the longest ones are truncated
    return ids


def scripted_rollout(prompts: list[Any], trainer: Any) -> dict[str, list]:
    return _rollout(prompts, trainer, lambda rng, trainer: (_word_completion(rng, trainer), {}))


def masked_rollout(prompts: list[Any], trainer: Any) -> dict[str, list]:
    """Return completions with tool tokens (`env_mask` 0) in the middle and at the end."""

    def complete(rng: random.Random, trainer: Any) -> tuple[list[int], dict[str, list]]:
        ids = _word_completion(rng, trainer)
        return ids, {"env_mask": [1, *(int(rng.random() < 0.6) for _ in ids[1:])]}

    return _rollout(prompts, trainer, complete)


def masked_whole_rollout(prompts: list[Any], trainer: Any) -> dict[str, list]:
    """As `masked_rollout`, but about half of the completions have only tool tokens."""

    def complete(rng: random.Random, trainer: Any) -> tuple[list[int], dict[str, list]]:
        ids = _word_completion(rng, trainer)
        whole = rng.random() < 0.5
        return ids, {"env_mask": [int(not whole and rng.random() < 0.8) for _ in ids]}

    return _rollout(prompts, trainer, complete)


def sampler_rollout(prompts: list[Any], trainer: Any) -> dict[str, list]:
    """Return log-probs of a sampler that differs from the policy, more on some completions than on others."""

    def complete(rng: random.Random, trainer: Any) -> tuple[list[int], dict[str, list]]:
        ids = _word_completion(rng, trainer)
        level = rng.uniform(-7.0, -1.0)
        return ids, {"logprobs": [level - rng.random() for _ in ids]}

    return _rollout(prompts, trainer, complete)


@functools.cache
def _sampler(path: str) -> PreTrainedModel:
    with torch.random.fork_rng():  # loading draws random numbers, and only the first of two trainers loads it
        return AutoModelForCausalLM.from_pretrained(path).eval()


def near_sampler_rollout(prompts: list[Any], trainer: Any) -> dict[str, list]:
    """Return log-probs of the initial policy with some noise as the sampler's, so that ratios are near 1.

    One token in ten has no log-prob, as if vLLM could not score it.
    """
    model = _sampler(trainer.model.config._name_or_path)
    output = scripted_rollout(prompts, trainer)
    output["logprobs"] = []
    for prompt_ids, ids in zip(output["prompt_ids"], output["completion_ids"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1]
        log_probs = logits.div(trainer.temperature).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        rng = random.Random(str(ids))
        noisy = [x + rng.gauss(0, 0.4) for x in log_probs.tolist()]
        output["logprobs"].append([None if rng.random() < 0.1 else x for x in noisy])
    return output


def near_sampler_masked_whole_rollout(prompts: list[Any], trainer: Any) -> dict[str, list]:
    """As `near_sampler_rollout`, but about half of the completions have only tool tokens."""
    output = near_sampler_rollout(prompts, trainer)
    output["env_mask"] = [[int(sum(ids) % 2)] * len(ids) for ids in output["completion_ids"]]
    return output


def tool_call_rollout(prompts: list[Any], trainer: Any) -> dict[str, list]:
    """Return first turns of a conversation: most completions call the tool `add`, one in four answers directly."""

    def complete(rng: random.Random, trainer: Any) -> tuple[list[int], dict[str, list]]:
        if rng.random() < 0.25:
            text = f"{rng.randrange(100)}<|im_end|>"
        else:
            arguments = f'{{"a": {rng.randrange(10)}, "b": {rng.randrange(10)}}}'
            text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>'
        return trainer.processing_class(text)["input_ids"], {}

    return _rollout(prompts, trainer, complete)


ROLLOUTS: dict[str, Callable[[list[Any], Any], dict[str, list]]] = {
    "scripted": scripted_rollout,
    "masked": masked_rollout,
    "sampler": sampler_rollout,
    "near_sampler": near_sampler_rollout,
    "masked_whole": masked_whole_rollout,
    "near_sampler_masked_whole": near_sampler_masked_whole_rollout,
    "tool_call": tool_call_rollout,
}


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: first number
        b: second number

    Returns:
        The sum.
    """
    return a + b
