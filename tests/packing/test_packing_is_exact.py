"""The packed forward equals the padded one: log-probs, entropy, router loss and all gradients, on every family."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packing_batches import EXAMPLES, Batch, any_batches, dpo_batches, grpo_batches, tokens_needed
from packing_models import FAMILIES, TrueFloat64, attach, build
from packing_runs import Seen, assert_same, see

FLOAT32, FLOAT64 = 1e-5, 1e-12
ROUTED = [name for name, family in FAMILIES.items() if family.router]
SHARING = {"shared": True, "padding_free": False}  # name -> share_prompts


def some_fast(names: Any, fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


def both(name: str, batch: Batch, *, share: bool = True, router: bool = False, **how: Any) -> tuple[Seen, Seen]:
    """Return the results of a packed and a padded forward of equal models, after a check that one was packed."""
    call = {"output_router_logits": True} if router else {}
    packed = run(name, batch, call, share_prompts=share, **how)
    padded = run(name, batch, call, padding_free=False, **how)
    assert padded.fed == batch.input_ids.numel()
    assert packed.fed == needed(name, batch, share, router)
    return packed, padded


def needed(name: str, batch: Batch, share: bool = True, router: bool = False) -> int:
    return tokens_needed(batch, share, in_columns=FAMILIES[name].learned_positions, router=router)


def float32(name: str) -> float:
    return FLOAT32 * FAMILIES[name].rounding


def run(
    name: str,
    batch: Batch,
    call: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    lora: bool = False,
    adapter_off: bool = False,
    checkpointing: str | None = None,
    **options: Any,
) -> Seen:
    model = build(name, attention, dtype, lora)
    scoring = attach(model, **options)
    assert options.get("padding_free") is False or scoring.packing.padded_reason is None
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    if adapter_off:
        with model.disable_adapter(), torch.no_grad():
            return see(model, batch, grad=False, **(call or {}))
    return see(model, batch, **(call or {}))


@pytest.mark.parametrize("sharing", some_fast(SHARING, ("shared",)))
@pytest.mark.parametrize("example", some_fast(EXAMPLES, ("grpo",)))
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_padded_in_float64(name: str, example: str, sharing: str) -> None:
    with TrueFloat64():
        packed, padded = both(
            name, EXAMPLES[example](), share=SHARING[sharing], dtype=torch.float64, entropy_requires_grad=True
        )
    assert_same(packed, padded, FLOAT64)


@pytest.mark.parametrize("sharing", some_fast(SHARING, ("shared",)))
@pytest.mark.parametrize("example", some_fast(EXAMPLES, ("dpo",)))
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_padded_in_float32(name: str, example: str, sharing: str) -> None:
    packed, padded = both(name, EXAMPLES[example](), share=SHARING[sharing])
    assert_same(packed, padded, float32(name))


@pytest.mark.parametrize("adapter_off", [False, True])
@pytest.mark.parametrize("name", some_fast(FAMILIES, ("llama", "gpt2", "deepseek_v3")))
def test_packed_equals_padded_with_lora(name: str, adapter_off: bool) -> None:
    for example in EXAMPLES.values():
        packed, padded = both(name, example(), lora=True, adapter_off=adapter_off)
        assert_same(packed, padded, float32(name))
        assert bool(packed.gradients) != adapter_off


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", some_fast(FAMILIES, ("gemma2",)))
def test_packed_equals_padded_with_gradient_checkpointing(name: str, checkpointing: str, lora: bool) -> None:
    packed, padded = both(name, EXAMPLES["grpo"](), checkpointing=checkpointing, lora=lora)
    assert_same(packed, padded, float32(name))


@pytest.mark.parametrize("sharing", some_fast(SHARING, ("shared",)))
@pytest.mark.parametrize("example", some_fast(EXAMPLES, ("grpo",)))
@pytest.mark.parametrize("name", ROUTED)
def test_packed_equals_padded_with_router_loss(name: str, example: str, sharing: str) -> None:
    """A shared prompt counts in it as often as in the padded batch."""
    batch, share = EXAMPLES[example](), SHARING[sharing]
    with TrueFloat64():
        packed, padded = both(name, batch, share=share, router=True, dtype=torch.float64)
    assert padded.aux_loss is not None
    assert_same(packed, padded, FLOAT64)
    assert_same(*both(name, batch, share=share, router=True, checkpointing="non-reentrant"), float32(name))


@pytest.mark.parametrize("name", some_fast(FAMILIES, ("llama", "mistral-window")))
def test_packed_equals_padded_with_the_default_attention(name: str) -> None:
    """Both eager attention, which adds its mask, and sdpa, which applies it."""
    batch = EXAMPLES["grpo"]()
    with TrueFloat64():
        packed, padded = both(name, batch, attention="eager", dtype=torch.float64)
    assert_same(packed, padded, FLOAT64)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_packed_equals_padded_without_a_gradient(mode: Any) -> None:
    batch = EXAMPLES["dpo"]()
    for name in ("llama", "gemma3"):
        models = build(name).eval(), build(name).eval()
        attach(models[0])
        attach(models[1], padding_free=False)
        with mode():
            packed, padded = (see(model, batch, grad=False) for model in models)
        assert packed.fed == needed(name, batch)
        assert_same(packed, padded, FLOAT32)


def test_one_model_scores_several_batches() -> None:
    """No layout, mask or cache of one batch affects another."""
    packed, padded = build("gemma3"), build("gemma3")
    attach(packed)
    attach(padded, padding_free=False)
    for batch in (EXAMPLES["grpo"](), EXAMPLES["dpo"](), EXAMPLES["grpo"](1), EXAMPLES["grpo"]()):
        assert_same(see(packed, batch), see(padded, batch), FLOAT32)


def test_two_models_score_in_turn_before_either_backward() -> None:
    batches = EXAMPLES["grpo"](), EXAMPLES["dpo"]()
    seen = []
    for options in ({}, {"padding_free": False}):
        models = build("llama"), build("mistral-window")
        for model in models:
            attach(model, **options)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses = [
            model(**batch.inputs, fused_lm_head=True).log_probs.sum()
            for model, batch in zip(models * 2, (*batches, *reversed(batches)), strict=True)
        ]
        for loss in losses:
            loss.backward()
        seen.append([p.grad for model in models for p in model.parameters()])
    scale = max(float(x.abs().max()) for x in seen[1])
    for a, b in zip(*seen, strict=True):
        assert float((a - b).abs().max()) <= FLOAT32 * scale


BATCHES = {"grpo": grpo_batches(), "dpo": dpo_batches(), "any": any_batches()}
DRAWN = ("llama", "mistral-window", "gpt2", "gemma3")
_SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def check_drawn(name: str, batch: Batch, share: bool, router: bool) -> None:
    with TrueFloat64():
        packed, padded = both(name, batch, share=share, router=router, dtype=torch.float64)
    assert_same(packed, padded, FLOAT64)


@pytest.mark.parametrize("kind", BATCHES)
def test_packed_equals_padded_for_a_few_drawn_batches(kind: str) -> None:
    @settings(max_examples=8, **_SETTINGS)
    @given(batch=BATCHES[kind], name=st.sampled_from(DRAWN), share=st.booleans())
    def check(batch: Batch, name: str, share: bool) -> None:
        check_drawn(name, batch, share, router=False)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", [*DRAWN, *ROUTED])
def test_packed_equals_padded_for_many_drawn_batches(name: str, kind: str) -> None:
    @settings(max_examples=40, **_SETTINGS)
    @given(batch=BATCHES[kind], share=st.sampled_from([True, True, False]))
    def check(batch: Batch, share: bool) -> None:
        check_drawn(name, batch, share, router=name in ROUTED)

    check()
