"""Packing does not change the user's model, is as exact as padding in half precision, and compiles."""

from typing import Any

import pytest
import torch

from packing_batches import EXAMPLES, grpo_example, tokens_needed
from packing_models import FAMILIES, TrueFloat64, attach, build
from packing_runs import Seen, assert_same, see

FLOAT32 = 1e-5
# Rounding can change a choice of experts, which would hide the measured difference
DENSE = [name for name, family in FAMILIES.items() if not family.router and name not in ("deepseek_v3", "llama4")]


def some_fast(names: Any, fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


def implementations(model: Any) -> set[str]:
    """Return the attention in the config of every part of the model."""
    return {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", some_fast(FAMILIES, ("llama", "gemma2", "gpt2")))
def test_generation_and_padded_forwards_do_not_change(name: str, attention: str) -> None:
    if attention == "sdpa" and FAMILIES[name].eager_only:
        attention = "eager"
    untouched, model = build(name, attention).eval(), build(name, attention).eval()
    attach(model)
    batch = EXAMPLES["grpo"]()
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    prompts = {key: x[:, :20] for key, x in inputs.items()}
    for _ in range(2):  # before and after a packed forward
        assert implementations(model) == implementations(untouched) == {attention}
        assert torch.equal(model(**inputs).logits, untouched(**inputs).logits)
        generated = []
        for subject in (model, untouched):
            torch.manual_seed(5)
            generated.append(subject.generate(**prompts, do_sample=True, max_new_tokens=6, pad_token_id=0))
        assert torch.equal(*generated)
        see(model, batch)
        model.zero_grad()


def fail(module: Any, args: Any) -> None:
    raise ZeroDivisionError


def test_a_forward_that_fails_does_not_change_the_attention() -> None:
    model = build("llama")
    attach(model)
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        see(model, grpo_example())
    assert implementations(model) == {"sdpa"}
    hook.remove()
    other = build("llama")
    attach(other, padding_free=False)
    assert_same(see(model, grpo_example()), see(other, grpo_example()), FLOAT32)


def test_the_state_dict_does_not_change() -> None:
    untouched, model = build("llama"), build("llama")
    attach(model)
    see(model, grpo_example())
    assert list(model.state_dict()) == list(untouched.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in untouched.named_modules()]


def norm_of_error(seen: Seen, exact: Seen) -> dict[str, float]:
    """Return the error of log-probs and of all gradients as one vector, in float64."""
    log_probs = (seen.fields["log_probs"].double() - exact.fields["log_probs"].double()).norm()
    gradients = [(seen.gradients[name].double() - x.double()).norm() for name, x in exact.gradients.items()]
    return {"log_probs": float(log_probs), "gradients": float(torch.stack(gradients).norm())}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", some_fast(DENSE, ("llama", "gemma3")))
def test_half_precision_is_as_exact_as_padded(name: str, autocast: bool) -> None:
    """Compares the errors against float64 over several batches."""
    errors: dict[str, dict[str, float]] = {}
    for which, options in {"packed": {}, "padded": {"padding_free": False}}.items():
        model = build(name, dtype=torch.float32 if autocast else torch.bfloat16)
        attach(model, **options)
        exact = build(name, dtype=torch.float64)
        exact.load_state_dict(model.state_dict())
        attach(exact, padding_free=False)
        errors[which] = {"log_probs": 0.0, "gradients": 0.0}
        for batch in (EXAMPLES[kind](seed) for seed in range(3) for kind in EXAMPLES):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                seen = see(model, batch)
            assert (seen.fed < batch.input_ids.numel()) == (which == "packed")
            with TrueFloat64():
                reference = see(exact, batch)
            for field, error in norm_of_error(seen, reference).items():
                errors[which][field] += error**2
    for field, error in errors["padded"].items():
        assert 0 < errors["packed"][field] <= 1.5**2 * error, field


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns about its own internals
@pytest.mark.parametrize(("name", "backend"), [("llama", "eager"), ("llama", "aot_eager"), ("gemma3", "aot_eager")])
def test_a_compiled_model_is_packed(name: str, backend: str) -> None:
    torch._dynamo.reset()
    model, padded = build(name), build(name)
    attach(model)
    attach(padded, padding_free=False)
    compiled = torch.compile(model, backend=backend)
    for batch in (EXAMPLES["grpo"](), EXAMPLES["dpo"](), EXAMPLES["grpo"](1)):
        seen = see(model, batch, through=compiled)
        assert seen.fed == tokens_needed(batch, in_columns=FAMILIES[name].learned_positions)
        assert_same(seen, see(padded, batch), FLOAT32)
    assert implementations(model) == {"sdpa"}
    torch._dynamo.reset()
