"""`generate` on fewer rows returns what plain `generate` returns, and leaves the generator in the same state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList

from model_classes import MODEL_TYPES, NOT_RUN, build_class
from model_families import build
from tiny import chat_tokenizer
from trl_ext.compat.generate import GenerateRows, UnprovenError
from trl_ext.compat.generate_turns import EarlierTurn

PAD, EOS, V = 0, (1, 2), 97
# Classes whose samples are equal, of one for each kind of cache and of positions
FAST = (
    *("LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "BloomForCausalLM", "MistralForCausalLM"),
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3nForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM"),
    *("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Qwen3NextForCausalLM"),
    *("Qwen3_5ForCausalLM", "Lfm2ForCausalLM", "FalconH1ForCausalLM", "BambaForCausalLM", "JambaForCausalLM"),
    *("GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "Zamba2ForCausalLM", "Mamba2ForCausalLM"),
    *("MiniMaxForCausalLM", "RecurrentGemmaForCausalLM", "DeepseekV4ForCausalLM"),
)
CLASSES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted({*MODEL_TYPES, *FAST} - NOT_RUN.keys())
]
REFUSED_CLASSES = {
    "MiniMaxForCausalLM": "MiniMaxCache",
    "RecurrentGemmaForCausalLM": "outside the cache",
    "MptForCausalLM": "`use_cache=False`",
    "OpenAIGPTLMHeadModel": "its forward uses no cache",
    "RwkvForCausalLM": "its cache is a `NoneType`",
    "XLMWithLMHeadModel": "`langs`",
    "XLNetLMHeadModel": "its cache is a `NoneType`",
}
OWN_DRAWS = ("BigBirdForCausalLM",)  # attends to blocks that it draws
OWN_TOKENS = ("CpmAntForCausalLM",)  # runs the whole row in each step, after tokens of its own
CHOOSES_BLOCKS = ("MiniMaxM3VLForCausalLM",)  # rounding may change which blocks a row attends to


def batch(lengths: tuple[int, ...], group: int, vocabulary: int = V) -> dict[str, Tensor]:
    """Return prompts of these lengths, each `group` times, padded on the left as TRL pads them."""
    generator = torch.Generator().manual_seed(5)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(10, vocabulary, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids.repeat_interleave(group, 0), "attention_mask": mask.repeat_interleave(group, 0)}


@contextmanager
def embedded(model: Any) -> Iterator[list[int]]:
    """Collect the tokens of each call of the input embedding."""
    tokens: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, args, __: tokens.append(args[0].numel()))
    try:
        yield tokens
    finally:
        handle.remove()


class Samples:
    """What a `generate` returned, the generator's state after it, and the scores of each step."""

    def __init__(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        *,
        fewer: bool,
        seed: int = 1,
        earlier_turn: EarlierTurn | None = None,
        **options: Any,
    ) -> None:
        scores: list[Tensor] = []

        def note(_: Tensor, scores_BV: Tensor) -> Tensor:
            scores.append(scores_BV.clone())
            return scores_BV

        options = {
            **{"max_new_tokens": 24, "do_sample": True, "pad_token_id": PAD, "eos_token_id": list(EOS)},
            **{"top_k": 0, "logits_processor": LogitsProcessorList([note]), **options},
        }
        self.rows = GenerateRows(model, looks_for_state=True, earlier_turn=earlier_turn)
        torch.manual_seed(seed)
        with torch.no_grad(), embedded(model) as tokens:
            if fewer:
                with self.rows.running():
                    self.ids = model.generate(**inputs, **options)
            else:
                self.ids = model.generate(**inputs, **options)
        self.width = inputs["input_ids"].size(1)
        self.random_state = torch.get_rng_state()
        self.scores = scores
        self.tokens = sum(tokens)

    @property
    def lengths(self) -> Tensor:
        """The tokens of each completion, up to its end."""
        completions = self.ids[:, self.width :]
        ends = torch.isin(completions, torch.tensor(EOS))
        return torch.where(ends.any(1), ends.int().argmax(1) + 1, completions.size(1))

    def equals(self, other: "Samples") -> bool:
        same_ids = self.ids.shape == other.ids.shape and torch.equal(self.ids, other.ids)
        return same_ids and torch.equal(self.random_state, other.random_state)

    def difference(self, other: "Samples") -> float:
        """Return the largest difference of the scores of unfinished rows, relative to the largest score."""
        largest = 0.0
        for step, (a_BV, b_BV) in enumerate(zip(self.scores, other.scores, strict=True)):
            live = self.lengths > step
            a, b = a_BV[live], b_BV[live]
            finite = a.isfinite()
            if live.any():
                largest = max(largest, float((a - b)[finite].abs().max() / a[finite].abs().max().clamp(min=1)))
        return largest


def unfinished_tokens(samples: Samples, distinct: int) -> int:
    """Return the tokens that must run: distinct padded prompts, then one token of each row that goes on."""
    return distinct * samples.width + int((samples.lengths - 1).sum())


@pytest.mark.parametrize("model_class", CLASSES)
def test_a_class_samples_the_same_or_is_refused(model_class: str) -> None:
    model = build_class(model_class, torch.float32).eval()
    inputs = batch((9, 17, 13, 30), 8, model.config.get_text_config().vocab_size)
    try:
        stock = Samples(model, inputs, fewer=False)
    except Exception as error:
        pytest.skip(f"its own `generate` fails: {error}")
    assert stock.equals(Samples(model, inputs, fewer=False)) == (model_class not in OWN_DRAWS)
    if model_class in OWN_DRAWS:
        return
    if model_class in REFUSED_CLASSES:
        with pytest.raises(UnprovenError, match=REFUSED_CLASSES[model_class]):
            Samples(model, inputs, fewer=True)
        return
    ours = Samples(model, inputs, fewer=True)
    assert ours.equals(stock)
    assert not ours.equals(Samples(model, inputs, fewer=False, seed=2))
    difference = ours.difference(stock)
    print(f"{model_class}: {difference:.1e}")
    assert difference < (0.05 if model_class in CHOOSES_BLOCKS else 5e-6)
    if model_class not in OWN_TOKENS:
        assert ours.rows.tokens == unfinished_tokens(stock, distinct=4)
        assert (ours.tokens, stock.tokens) == (ours.rows.tokens, ours.rows.trl_tokens)


OPTIONS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7, "temperature": 0.8},
    "min-p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "a minimum of tokens": {"min_new_tokens": 6},
    "no end": {"eos_token_id": None},
    "greedy": {"do_sample": False},
    "a prefill in chunks": {"prefill_chunk_size": 7},
    "one token": {"max_new_tokens": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_samples_the_same(name: str) -> None:
    model = build("mixtral" if name == "top-k" else "tied")
    inputs = batch((4, 11, 7), 4)
    stock = Samples(model, inputs, fewer=False, **OPTIONS[name])
    ours = Samples(model, inputs, fewer=True, **OPTIONS[name])
    assert ours.equals(stock)
    if name == "no end":  # rows go on after an end token, and are not padded
        assert ours.tokens == 3 * 11 + 12 * 23
    else:
        assert ours.tokens == unfinished_tokens(stock, distinct=3)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    group=st.integers(1, 16),
    ends=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_any_batch_samples_the_same(lengths: list[int], group: int, ends: int, seed: int) -> None:
    model = build("tied")
    options = {"seed": seed, "eos_token_id": list(range(1, 2 + ends))}
    inputs = batch(tuple(lengths), group)
    stock = Samples(model, inputs, fewer=False, **options)
    ours = Samples(model, inputs, fewer=True, **options)
    assert ours.equals(stock)


def test_stop_strings_sample_the_same() -> None:
    model = build("chat")
    inputs = batch((4, 11, 7), 4)
    options = {"stop_strings": ["a", "Q", "7"], "tokenizer": chat_tokenizer()}
    stock = Samples(model, inputs, fewer=False, **options)
    assert Samples(model, inputs, fewer=True, **options).equals(stock)


def test_prompts_that_are_equal_but_for_padding_are_not_shared() -> None:
    model = build("tied")
    inputs = batch((6, 6), 2)
    inputs["input_ids"][2:] = inputs["input_ids"][:2]
    inputs["attention_mask"][2:, :3] = 0
    ours = Samples(model, inputs, fewer=True)
    assert ours.equals(Samples(model, inputs, fewer=False))
    assert ours.tokens == unfinished_tokens(ours, distinct=2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beam search": ({"num_beams": 2}, "it uses beam_sample"),
    "no cache": ({"use_cache": False}, "it has no cache"),
    "a static cache": ({"cache_implementation": "static"}, "its cache is a `StaticCache`"),
    "guidance": ({"guidance_scale": 2.0}, "`guidance_scale` runs the model twice"),
    "several sequences": ({"num_return_sequences": 2}, "`num_return_sequences` repeats its rows"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "it returns more than tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proven_is_refused(name: str) -> None:
    options, reason = REFUSED[name]
    with pytest.raises(UnprovenError, match=reason):
        Samples(build("tied"), batch((4, 11), 2), fewer=True, **options)


def test_a_model_is_as_before_after_an_error() -> None:
    model = build("tied")
    before = dict(vars(model))
    with pytest.raises(UnprovenError):
        Samples(model, batch((4, 11), 2), fewer=True, use_cache=False)
    assert dict(vars(model)) == before
