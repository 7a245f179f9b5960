"""The packed forward of a sequence classifier returns what the model's own forward returns, or lets that run."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
)

from tiny import V_WORDS
from token_counts import counted, total
from trl_ext.scoring.classifier import attach_classifier_forward, pooled_columns, unknown_reason

V, PAD = V_WORDS, 7
SHAPE = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": PAD,
    "num_labels": 1,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "gemma2": lambda: Gemma2Config(**SHAPE, head_dim=8, sliding_window=4),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1),
    "three labels": lambda: LlamaConfig(**{**SHAPE, "num_labels": 3}),
}


def classifier(name: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    return AutoModelForSequenceClassification.from_config(config).train()


def attached(model: Any) -> Any:
    return attach_classifier_forward(model, padding_free=True, share_prompts=True)


def batch(kind: str) -> dict[str, torch.Tensor]:
    """Return a batch of 6 rows that begin alike in pairs, and have `PAD` as a token of their own too."""
    draws = torch.Generator().manual_seed(1)
    lengths = [9, 4, 12, 12, 1, 2]
    rows = [torch.randint(V, (length,), generator=draws) for length in lengths]
    rows[1][:3], rows[3][:6] = rows[0][:3], rows[2][:6]
    rows[0][-1] = rows[2][-2:] = PAD  # ends
    if kind != "left":  # there transformers pools padding of a row that has nothing else
        rows[4][:] = rows[5][:] = PAD
    rows[3][5] = PAD
    width = max(lengths) + (4 if kind == "multiple" else 0)
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        first = width - len(row) if kind == "left" else 0
        ids[i, first : first + len(row)] = row
        mask[i, first : first + len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["right", "left", "multiple"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_the_models_own_forward(name: str, kind: str) -> None:
    inputs = batch(kind)
    expected_model, model = classifier(name), classifier(name)
    forward = attached(model)
    expected, got = expected_model(**inputs, use_cache=False), model(**inputs, use_cache=False)
    assert got.keys() == expected.keys() == {"logits"}
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-6)
    for output in (expected, got):
        (output.logits.square().sum() + output.logits.sum()).backward()
    for (what, want), param in zip(expected_model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param.grad, want.grad, rtol=1e-4, atol=5e-5, msg=lambda text, what=what: what + text)
    assert forward.packing.padded_reason is None
    assert forward.agrees_with_model
    assert forward.counts.with_gradient < inputs["attention_mask"].sum()


def test_pooled_columns_are_the_last_tokens_other_than_padding() -> None:
    ids = torch.tensor([[1, 2, PAD, PAD], [PAD, PAD, 3, 4], [PAD, 5, PAD, PAD], [PAD] * 4, [1, PAD, 2, PAD]])
    assert pooled_columns(ids, PAD).tolist() == [1, 3, 1, 0, 2]


def test_a_pair_is_processed_without_its_padding_and_its_prompt_once() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, PAD, PAD]])
    model = classifier()
    forward = attached(model)
    forward.packing.checked = forward.is_compared = True
    with counted() as counts:
        model(input_ids=ids, attention_mask=(ids != PAD).long())
    assert total(counts.with_gradient) == 7
    assert (forward.counts.with_gradient, forward.counts.head, forward.packing.skipped_tokens) == (7, 2, 5)


OTHER_CALLS: dict[str, dict[str, Any]] = {
    "labels": {"labels": torch.zeros(6)},
    "hidden states": {"output_hidden_states": True},
    "a tuple": {"return_dict": False},
    "positions": {"position_ids": torch.arange(12).expand(6, 12)},
}


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_another_call_runs_the_models_own_forward(call: str, caplog: pytest.LogCaptureFixture) -> None:
    inputs = {**batch("right"), **OTHER_CALLS[call]}
    model = classifier()
    expected = model(**inputs)
    attached(model)
    got = model(**inputs)
    assert type(got) is type(expected)
    values = got if isinstance(got, tuple) else [got[name] for name in expected]
    wanted = expected if isinstance(got, tuple) else [expected[name] for name in expected]
    for value, want in zip(values, wanted, strict=True):
        if isinstance(want, torch.Tensor):
            assert torch.equal(value, want)


def test_a_call_without_mask_or_padding_token() -> None:
    ids = batch("right")["input_ids"]
    model, one = classifier(), classifier(pad_token_id=None)
    expected = [model(ids).logits, model(input_ids=ids).logits, one(input_ids=ids[:1]).logits]
    attached(model)
    attached(one)
    got = [model(ids).logits, model(input_ids=ids).logits, one(input_ids=ids[:1]).logits]
    torch.testing.assert_close(got, expected)


class Pooled(nn.Module):
    """A score head of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(hidden - hidden.mean(dim=-2, keepdim=True))


def with_head(head: nn.Module) -> Any:
    model = classifier()
    model.score = head
    return model


def patched() -> Any:
    model = classifier()
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    return model


SMALL = {"vocab_size": V, "pad_token_id": PAD, "num_labels": 1}
UNKNOWN: dict[str, Any] = {
    "GPT-2": lambda: AutoModelForSequenceClassification.from_config(
        GPT2Config(**SMALL, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    ),
    "BERT": lambda: AutoModelForSequenceClassification.from_config(
        BertConfig(**SMALL, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ),
    "a user's score head": lambda: with_head(Pooled()),
    "batch norm": lambda: with_head(nn.Sequential(nn.Linear(16, 1), nn.Flatten(0, 1), nn.BatchNorm1d(1))),
    "a replaced forward": patched,
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_model_that_may_pool_otherwise_keeps_its_own_forward(kind: str) -> None:
    torch.manual_seed(0)
    model = UNKNOWN[kind]()
    assert unknown_reason(model) is not None
    assert attached(model).packing.padded_reason is not None
    if kind != "batch norm":
        inputs = batch("right")
        own = copy.deepcopy(model)
        vars(own).pop("forward", None)
        assert torch.equal(model.eval()(**inputs).logits, own.eval()(**inputs).logits)


def test_a_head_that_mixes_tokens_is_found_in_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Softmax(dim=-2), nn.Linear(16, 1))
    expected_model, model = with_head(head), with_head(head)
    forward = attached(model)
    inputs = batch("right")
    expected = expected_model(**inputs).logits
    with caplog.at_level(logging.WARNING, "trl_ext"):
        assert torch.equal(model(**inputs).logits, expected)
    assert "differ from those of `LlamaForSequenceClassification`" in str(forward.packing.padded_reason)
    assert "stay padded" in caplog.text


def test_a_known_head_of_several_layers_is_packed() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    expected_model, model = with_head(head), with_head(head)
    forward = attached(model)
    inputs = batch("right")
    torch.testing.assert_close(model(**inputs).logits, expected_model(**inputs).logits, rtol=1e-5, atol=1e-6)
    assert forward.packing.padded_reason is None


def test_a_copy_of_the_model_has_its_own_forward_and_a_second_trainer_replaces_the_first() -> None:
    model = classifier()
    first = attached(model)
    second = attached(model)
    assert second.packing.padded_reason is None
    model(**batch("right"))
    assert (first.was_called, second.was_called) == (False, True)


def test_a_head_on_weights_that_are_not_finite_is_not_blamed() -> None:
    model = classifier()
    with torch.no_grad():
        model.score.weight.fill_(torch.nan)
    forward = attached(model)
    assert model(**batch("right")).logits.isnan().all()
    assert forward.packing.padded_reason is None


def test_a_pooled_token_of_padding_runs_as_in_transformers() -> None:
    inputs = batch("left")
    inputs["input_ids"][4] = PAD
    model, expected = classifier(), classifier()(**inputs).logits
    forward = attached(model)
    assert torch.equal(model(**inputs).logits, expected)
    assert forward.packing.padded_reason is None  # of this batch alone
