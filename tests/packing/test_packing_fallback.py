"""A model or batch that cannot be packed runs padded, with the padded results and a reason."""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers as t
from peft import PromptTuningConfig, get_peft_model
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaModel

from packing_batches import EXAMPLES, Batch, dpo_example, grpo, grpo_example, tokens_needed, words
from packing_models import FAMILIES, attach, build, fresh
from packing_runs import Seen, assert_same, see
from tiny import lora_config
from token_counts import as_of_a_library
from trl_ext.packing import first_batch
from trl_ext.scoring.forward import ScoringForward, ScoringOptions, attach_scoring_forward

SHAPE = {
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def of(config: type, **changes: Any) -> Callable[[], t.PreTrainedConfig]:
    return lambda: config(**{**SHAPE, **changes})


# Models that the class or the config rules out, with a word of the reason
KNOWN: dict[str, tuple[Callable[[], t.PreTrainedConfig], str]] = {
    "rwkv": (lambda: t.RwkvConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2), "state"),
    "minimax": (
        of(t.MiniMaxConfig, **EXPERTS, layer_types=["linear_attention", "full_attention"], block_size=8),
        "linear_attention",
    ),
    "bloom": (lambda: t.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), "interface"),
    "bidirectional": (of(t.Gemma3TextConfig, use_bidirectional_attention=True, sliding_window=8), "causal"),
}
EAGER_ONLY = dict.fromkeys(("rwkv", "bloom"), "eager")


# Models that only the check of the first batch rules out


class DeafAttention(LlamaAttention):
    """Does not pass on arguments that it does not know."""

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, position_embeddings, attention_mask)


class OwnPositions(LlamaModel):
    """Uses column numbers as positions."""

    def forward(self, input_ids: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **kwargs)


class Neighbours(LlamaDecoderLayer):
    """Adds the previous column to each column, whatever its row."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        before = torch.nn.functional.pad(hidden_states[:, :-1], (0, 0, 1, 0))
        return super().forward(hidden_states + 0.3 * before, **kwargs)


class NamedPositions(LlamaDecoderLayer):
    """Adds a vector to each column that depends on the position."""

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        assert position_ids is not None
        return super().forward(hidden_states + position_ids[..., None].mul(0.7).sin(), **kwargs)


def deaf(config: t.PreTrainedConfig) -> Any:
    model = fresh(config)
    model.model.layers[1].self_attn.__class__ = DeafAttention
    return model


def own_positions(config: t.PreTrainedConfig) -> Any:
    model = fresh(config)
    model.model.__class__ = OwnPositions
    return model


def neighbours(config: t.PreTrainedConfig) -> Any:
    model = fresh(config)
    model.model.layers[1].__class__ = Neighbours
    return model


# Models of transformers: positions counted from the mask, keywords or a window that are not passed on
FOUND: dict[str, Callable[[], Any]] = {
    "deaf attention": lambda: deaf(of(t.LlamaConfig)()),
    "neighbours": lambda: neighbours(of(t.LlamaConfig)()),
    "opt": lambda: fresh(of(t.OPTConfig, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)()),
    "nemotron": lambda: fresh(of(t.NemotronConfig)()),
    "phimoe": lambda: fresh(
        of(t.PhimoeConfig, **EXPERTS, sliding_window=7, input_jitter_noise=0.0, router_jitter_noise=0.0)()
    ),
}


def checked(model: Any, **options: Any) -> ScoringForward:
    """Return the scoring forward, which packing checks on the first batch, in training mode."""
    model.train()
    scoring = attach_scoring_forward(model, ScoringOptions(outputs=("log_probs", "entropy"), **options))
    scoring.is_compared = True  # the check of the logits runs a few more tokens
    return scoring


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.getMessage() for x in caplog.records if x.name == "trl_ext" and x.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", KNOWN)
def test_models_that_are_known_to_need_padding_stay_padded(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config, word = KNOWN[name]

    ours, padded = (fresh(config(), attention=EAGER_ONLY.get(name, "sdpa")) for _ in range(2))
    scoring = checked(ours)
    checked(padded, padding_free=False)
    assert scoring.packing.padded_reason is not None
    assert word in scoring.packing.padded_reason
    for example in EXAMPLES.values():
        batch = example()
        seen = see(ours, batch)
        assert seen.fed == batch.input_ids.numel()
        assert_same(seen, see(padded, batch), 0.0)


def test_a_batch_that_is_longer_than_a_chunk_stays_padded(caplog: pytest.LogCaptureFixture) -> None:
    ours, padded = (build("llama4", attention_chunk_size=20) for _ in range(2))
    scoring = checked(ours)
    checked(padded, padding_free=False)
    long, short = dpo_example(), dpo_example().rows([1, 3])
    short = Batch(*(x[:, -20:] for x in (short.input_ids, short.attention_mask, short.labels)))
    for batch, is_packed in ((long, False), (short, True), (long, False)):
        seen = see(ours, batch)
        assert (seen.fed < batch.input_ids.numel()) == is_packed
        assert_same(seen, see(padded, batch), 1e-5 if is_packed else 0.0)
    assert scoring.packing.padded_reason is None
    assert warned(caplog) == ["A batch is not packed: it is longer than an attention chunk of 20 tokens."]


def test_a_row_in_which_llama_4_would_scale_queries_by_their_column_stays_padded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = dpo_example()
    tokens = tokens_needed(batch, in_columns=True)
    ours, padded = (build("llama4", floor_scale=tokens, attn_temperature_tuning=True) for _ in range(2))
    assert tokens > batch.input_ids.shape[1]
    attach(ours)
    attach(padded, padding_free=False)
    seen = see(ours, batch)
    assert seen.fed == batch.input_ids.numel()
    assert_same(seen, see(padded, batch), 0.0)
    said = f"A batch is not packed: beyond {tokens - 1} tokens, the model scales queries by their column."
    assert warned(caplog) == [said]
    fits = build("llama4", floor_scale=tokens + 1, attn_temperature_tuning=True)
    attach(fits)
    assert see(fits, batch).fed == tokens


def test_a_batch_with_an_image_stays_padded_and_one_of_text_is_packed(caplog: pytest.LogCaptureFixture) -> None:
    """In either order, and the first batch is checked on text, as on ranks that have no image."""
    placeholder = FAMILIES["gemma3-with-vision"].config().image_token_index
    text = dpo_example()
    text = replace(text, input_ids=text.input_ids.where(text.input_ids < placeholder - 2, 5))
    row = (text.attention_mask[0] != 0).nonzero()[:4, 0]
    ids = text.input_ids.clone()
    ids[0, row] = placeholder
    image = {
        "pixel_values": torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0)),
        "token_type_ids": torch.zeros_like(ids).index_put_((torch.zeros_like(row), row), torch.tensor(1)),
    }
    with_image = replace(text, input_ids=ids)
    no_image = {"token_type_ids": torch.zeros_like(ids)}
    ours, padded = build("gemma3-with-vision"), build("gemma3-with-vision")
    scoring = checked(ours)
    checked(padded, padding_free=False)
    for batch, inputs in ((with_image, image), (text, no_image), (with_image, image), (text, {})):
        seen, in_padding = see(ours, batch, **inputs), see(padded, batch, **{**no_image, **inputs})
        is_text = batch is text
        assert scoring.packing.checked
        assert seen.fed == (tokens_needed(text) if is_text else ids.numel())
        assert_same(seen, in_padding, 1e-5 if is_text else 0.0)
    assert warned(caplog) == ["A batch is not packed: its image tokens see each other in both directions."]


@pytest.mark.parametrize("first", ["grpo", pytest.param("dpo", marks=pytest.mark.slow), "one row"])
@pytest.mark.parametrize("name", FOUND)
def test_models_that_fail_the_check_of_the_first_batch_stay_padded(
    name: str, first: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, padded = FOUND[name](), FOUND[name]()
    scoring = checked(ours)
    checked(padded, padding_free=False)
    assert scoring.packing.padded_reason is None
    batches = [grpo_example(), dpo_example(), grpo_example(1)]
    batches.insert(0, grpo_example().rows([3]) if first == "one row" else EXAMPLES[first]())
    for batch in batches:
        assert_same(see(ours, batch), see(padded, batch), 0.0)
    assert scoring.packing.padded_reason
    (warning,) = warned(caplog)
    assert scoring.packing.padded_reason in warning
    assert see(ours, batches[1]).fed == batches[1].input_ids.numel()


# Faults that show in other columns than the first, or only in long rows
FAR: dict[str, Callable[[], Any]] = {
    **{
        f"a window of {tokens}": partial(
            lambda tokens: fresh(
                of(t.PhimoeConfig, **EXPERTS, sliding_window=tokens, input_jitter_noise=0.0, router_jitter_noise=0.0)()
            ),
            tokens,
        )
        for tokens in (20, 60, 100)
    },
    **{f"{columns} columns before": partial(lambda columns: columns_before(columns), columns) for columns in (12, 50)},
}


class Far(LlamaDecoderLayer):
    """Adds a column that is far before each column, whatever its row."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        before = torch.nn.functional.pad(hidden_states, (0, 0, self.columns, 0))[:, : hidden_states.shape[1]]
        return super().forward(hidden_states + 0.3 * before, **kwargs)


def columns_before(columns: int) -> Any:
    model = fresh(of(t.LlamaConfig)())
    model.model.layers[1].__class__ = Far
    model.model.layers[1].columns = columns
    return model


def long_rows() -> dict[str, Batch]:
    """Return batches whose rows are several times longer than what the check of libraries' models runs."""
    rng = random.Random(0)
    group = grpo([(words(rng, 150), [words(rng, count) for count in (90, 60, 90)])])
    other = grpo([(words(rng, 80), [words(rng, 170)]), (words(rng, 200), [words(rng, 40)])])
    return {"grpo": group, "several prompts": other, "one row": group.rows([2])}


# In bf16, a tenth of the tokens may differ by rounding, so a fault in the first token of each row does not show
SHOWN = [
    (name, dtype)
    for name in (*FOUND, *FAR)
    for dtype in (torch.float32, torch.bfloat16)
    if (name, dtype) != ("neighbours", torch.bfloat16)
]


@pytest.mark.parametrize("first", ["grpo", *(pytest.param(x, marks=pytest.mark.slow) for x in [*long_rows()][1:])])
@pytest.mark.parametrize(("name", "dtype"), SHOWN)
def test_faults_show_in_the_few_tokens_that_run_for_models_of_libraries(
    name: str, first: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_batch, "is_of_libraries", lambda _: True)
    batch = long_rows()[first]
    model = {**FOUND, **FAR}[name]().to(dtype)
    scoring = checked(model)
    see(model, batch, grad=False)
    assert scoring.packing.padded_reason is not None
    assert scoring.packing.checked_completely == (first != "one row")  # whose length is that of its copy


# Tokens of the longest row that the check runs, of 240
CHECKED: dict[str, tuple[Callable[[], Any], int]] = {
    "a library's": (lambda: build("llama"), 64),
    "a library's, with an adapter": (lambda: build("llama", lora=True).get_base_model(), 64),
    "a short window": (lambda: fresh(of(t.MistralConfig, sliding_window=20)()), 64),
    "a window": (lambda: fresh(of(t.MistralConfig, sliding_window=60)()), 120),
    "a window that no check reaches": (lambda: fresh(of(t.MistralConfig, sliding_window=2000)()), 64),
    "a layer of a user": (lambda: columns_before(12), 240),
    "few positions": (lambda: fresh(of(t.LlamaConfig, max_position_embeddings=50)()), 47),
}


@pytest.mark.parametrize("name", CHECKED)
def test_the_check_runs_no_more_tokens_than_show_a_fault(name: str) -> None:
    make, longest = CHECKED[name]
    model = make()
    scoring = checked(model)
    shapes: list[tuple[int, ...]] = []
    count = as_of_a_library(lambda _, args, __: shapes.append(tuple(args[0].shape)))
    model.get_input_embeddings().register_forward_hook(count)
    see(model, long_rows()["grpo"], grad=False)
    assert shapes[0] == (4, longest + 3)
    # Padded, with shared tokens and without, then the pass
    assert len(shapes) == 4
    assert scoring.packing.checked_completely == (longest < 240)
    processed = sum(rows * columns for rows, columns in shapes)
    counts = scoring.take_counts()
    assert counts.with_gradient == shapes[-1][0] * shapes[-1][1]
    assert counts.with_gradient + counts.checks == processed


def named_positions(config: t.PreTrainedConfig) -> Any:
    model = fresh(config)
    model.model.layers[0].__class__ = NamedPositions
    return model


# Runs without padding and is exact, with or without shared tokens
POSITIONED: dict[str, Callable[[], Any]] = {
    "own positions": lambda: own_positions(of(t.LlamaConfig)()),
    "named positions": lambda: named_positions(of(t.LlamaConfig)()),
    "a norm after the rotation": lambda: fresh(of(t.HunYuanDenseV1Config)()),
    "queries that grow with the position": lambda: fresh(of(t.Ministral3Config)()),
}


@pytest.mark.parametrize("first", ["grpo", pytest.param("dpo", marks=pytest.mark.slow), "one row"])
@pytest.mark.parametrize("name", POSITIONED)
def test_rows_keep_their_columns_if_positions_matter(name: str, first: str) -> None:
    ours, padded = POSITIONED[name](), POSITIONED[name]()
    scoring = checked(ours)
    checked(padded, padding_free=False)
    batches = [grpo_example(), dpo_example(), grpo_example(2)]
    batches.insert(0, grpo_example().rows([3]) if first == "one row" else EXAMPLES[first]())
    for batch in batches:
        assert_same(see(ours, batch), see(padded, batch), 1e-5)
        assert see(ours, batch).fed <= tokens_needed(batch, share=False)
    assert scoring.packing.padded_reason is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [16, 64], ids=["within the batch", "beyond it"])
def test_rotary_embeddings_that_depend_on_the_length_of_a_batch(kind: str, length: int) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": length}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    changes = {"rope_parameters": rope, "max_position_embeddings": length if kind == "dynamic" else 4 * length}
    ours, padded = (fresh(of(t.LlamaConfig, **changes)()) for _ in range(2))
    checked(ours)
    checked(padded, padding_free=False)
    for example in (grpo_example, dpo_example, grpo_example):
        batch = example()
        assert_same(see(ours, batch), see(padded, batch), 1e-5)


def seen_as_padded(inputs: dict[str, Any], model: str = "llama") -> tuple[int, Any, Any]:
    """Return tokens of a call that packing does not support, and outputs of packed and padded forwards."""
    outputs, fed = [], []
    for options in ({}, {"padding_free": False}):
        built = build(model)
        attach(built, **options)
        hook = lambda module, args, kwargs: fed.append(kwargs.get("input_ids"))  # noqa: E731
        built.base_model.register_forward_pre_hook(as_of_a_library(hook), with_kwargs=True)
        outputs.append(built(**inputs, fused_lm_head=True))
    return fed[0], *outputs


def with_positions(batch: Batch) -> dict[str, Any]:
    positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
    return {**batch.inputs, "position_ids": positions}


def with_embeddings(batch: Batch) -> dict[str, Any]:
    inputs = dict(batch.inputs)
    ids = inputs.pop("input_ids")
    return {**inputs, "inputs_embeds": build("llama").get_input_embeddings()(ids).detach()}


def with_shifted_labels(batch: Batch) -> dict[str, Any]:
    inputs = dict(batch.inputs)
    return {**inputs, "shift_labels": torch.nn.functional.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)}


def with_a_hole(batch: Batch) -> dict[str, Any]:
    mask, labels = batch.attention_mask.clone(), batch.labels.clone()
    row = int((labels != -100).sum(1).argmax())
    hole = int((labels[row] != -100).nonzero()[2])
    mask[row, hole], labels[row, hole] = 0, -100
    labels[row, hole + 1] = -100
    return {**batch.inputs, "attention_mask": mask, "labels": labels}


def predicted_from_padding(batch: Batch) -> dict[str, Any]:
    labels = batch.labels.clone()
    row = int(batch.attention_mask[:, 0].argmin())
    first = int(batch.attention_mask[row].argmax())
    assert first > 0
    labels[row, first] = batch.input_ids[row, first]
    return {**batch.inputs, "labels": labels}


@pytest.mark.parametrize(
    "change", [with_positions, with_embeddings, with_shifted_labels, with_a_hole, predicted_from_padding]
)
def test_batches_that_need_padding_stay_padded(change: Any) -> None:
    batch = grpo_example()
    inputs = change(batch)
    fed, packed, padded = seen_as_padded(inputs)
    assert fed is None or torch.equal(fed, batch.input_ids)
    assert torch.equal(packed.log_probs, padded.log_probs)
    assert torch.equal(packed.label_mask, padded.label_mask)
    assert torch.equal(packed.loss, padded.loss)


def test_a_batch_without_a_mask_has_no_padding() -> None:
    batch = grpo([([5, 6, 7], [[8, 9, 10], [11, 12, 13]])])
    inputs = dict(batch.inputs)
    del inputs["attention_mask"]
    fed, packed, padded = seen_as_padded(inputs)
    assert fed.shape == (1, tokens_needed(batch))
    assert float((packed.log_probs - padded.log_probs).detach().abs().max()) < 1e-5


def test_one_padded_batch_does_not_turn_packing_off() -> None:
    model = build("llama")
    scoring = attach(model)
    batch = grpo_example()
    model(**with_positions(batch), fused_lm_head=True)
    assert scoring.packing.padded_reason is None
    assert see(model, batch).fed == tokens_needed(batch)


def with_prompt_tuning(**options: Any) -> Any:
    model = build("llama")
    attach(model, **options)
    torch.manual_seed(0)
    return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def test_prompt_tuning_stays_padded() -> None:
    for example in EXAMPLES.values():
        seen: list[Seen] = [see(with_prompt_tuning(**options), example()) for options in ({}, {"padding_free": False})]
        assert_same(*seen, 0.0)
        assert seen[0].gradients


def dropping(lora: float = 0.0, attention: float = 0.0, **options: Any) -> tuple[Any, ScoringForward]:
    model = build("llama", attention_dropout=attention)
    scoring = attach(model, **options)
    if lora:
        model = get_peft_model(model, lora_config(lora_dropout=lora))
    return model, scoring


@pytest.mark.parametrize("rates", [{"lora": 0.5}, {"attention": 0.5}])
def test_active_dropout_turns_prompt_sharing_off(rates: dict[str, float]) -> None:
    """A shared prompt would have the same dropout mask for all of its completions."""
    batch = grpo([([5, 6, 7, 8, 9, 10, 11], [[12, 13, 14, 15], [16, 17, 18]])], more=(2, 1))
    model, scoring = dropping(**rates)
    model.train()
    assert see(model, batch).fed in (tokens_needed(batch, share=False), batch.input_ids.numel())
    # Two equal rows have different masks
    twins = batch.rows([0, 0])
    seen = see(model, twins)
    assert seen.fed in (tokens_needed(twins, share=False), twins.input_ids.numel())
    assert not torch.equal(*seen.fields["log_probs"])
    model.eval()
    seen = see(model, batch)
    assert scoring.packing.padded_reason is not None or seen.fed == tokens_needed(batch)
    padded, _ = dropping(**rates, padding_free=False)
    padded.load_state_dict(model.state_dict())
    assert_same(seen, see(padded.eval(), batch), 1e-5)


@pytest.mark.slow
def test_dropout_of_lora_is_drawn_for_each_token() -> None:
    """Its mean over many draws equals that of the padded forward."""
    batch = grpo([([5, 6, 7, 8], [[9, 10, 11], [12, 13, 14]])], more=(2, 1))
    means = []
    for options in ({}, {"padding_free": False}):
        torch.manual_seed(3)
        model, _ = dropping(lora=0.2, **options)
        torch.manual_seed(4)
        with torch.no_grad():
            draws = torch.stack([see(model, batch, grad=False).fields["log_probs"] for _ in range(300)])
        means.append((draws.mean(0), draws.std(0) / 300**0.5))
    (ours, error), (padded, other) = means
    assert float(((ours - padded).abs() / (error**2 + other**2).sqrt().clamp(min=1e-6)).max()) < 5


def test_a_decoder_with_batch_statistics_stays_padded() -> None:
    """Padding is part of the statistics."""
    model = build("llama")
    model.model.layers[0].mlp.norm = torch.nn.BatchNorm1d(4)
    assert attach(model).packing.padded_reason == "the model normalises over the tokens of a batch, padding included"
