"""Adapters on the LM head: values and gradients are those of PEFT's own modules, and no logits of a batch are held."""

import tempfile
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adapters_on_head import CASES, LOW_RANK, MODULE, Case, build, lora
from definition import ALL, FROZEN, floats_apart
from test_scoring_forward import batch
from trl_ext.heads import tiles
from trl_ext.scoring import ScoringOptions, attach_scoring_forward, module_head

pytestmark = pytest.mark.filterwarnings(
    "ignore:Model (with|has) `tie_word_embeddings=True`", "ignore:`lora_bias=True` was passed", "ignore:.*Unmerge"
)


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch):
    monkeypatch.setitem(tiles._ELEMENTS, "cpu", 1)
    monkeypatch.setattr(tiles, "_FEWEST_COLUMNS", 40)
    monkeypatch.setitem(module_head._ELEMENTS, "cpu", 5 * 97)


def full_batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Without padding: of a row that begins with it Gemma 2's eager attention makes NaN in float64."""
    inputs, labels = batch()
    return {"input_ids": inputs["input_ids"]}, labels


def loss_of(log_p: torch.Tensor, entropy: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    weights = torch.arange(1, log_p.shape[1] + 1, dtype=log_p.dtype)
    loss = (log_p * weights).sum() + (entropy * weights.flip(0)).sum()
    return loss if mean is None else loss - 2 * (mean * weights).sum()


def watch(base: Any, kept: dict[str, torch.Tensor]) -> None:
    """Keep what the backbone of `base` gives the head, with its gradient."""

    def keep(module: Any, args: Any, output: Any) -> None:
        hidden = output.last_hidden_state
        if not hidden.requires_grad:  # nothing below the head is trained
            hidden.requires_grad_()
        hidden.retain_grad()
        kept["hidden states"] = hidden

    base.base_model.register_forward_hook(keep)


def by_modules(model: Any, mean: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Values and gradients from the logits that the model itself gives, in float64."""
    model = model.double()
    inputs, labels = full_batch()
    kept = {}
    base = model.get_base_model()
    watch(base, kept)
    logits = model(**inputs).logits[:, :-1] / 0.7
    log_p = logits.log_softmax(-1)
    mask = labels[:, 1:] != -100
    values = {
        "log_probs": log_p.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * mask,
        "entropy": -(log_p.exp() * log_p).sum(-1) * mask,
        "mean_log_probs": log_p.mean(-1) * mask,
        "mean_logits": logits.mean(-1) * mask,
    }
    loss_of(values["log_probs"], values["entropy"], values["mean_log_probs"] if mean else None).backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.requires_grad}
    return values, gradients | {"hidden states": kept["hidden states"].grad}


def by_the_head(model: Any, mean: bool, head: str = "tiled") -> tuple[Any, dict[str, torch.Tensor], str]:
    outputs = ALL if mean else FROZEN
    options = ScoringOptions(0.7, outputs=outputs, entropy_requires_grad=True, head=head, padding_free=False)
    base = model.get_base_model()
    scoring = attach_scoring_forward(base, options)
    kept = {}
    watch(base, kept)
    inputs, labels = full_batch()
    out = model(**inputs, labels=labels, fused_lm_head=True)
    loss_of(out.log_probs, out.entropy, out.mean_log_probs if mean else None).backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.requires_grad}
    return out, gradients | {"hidden states": kept["hidden states"].grad}, scoring.head_rows


@pytest.mark.parametrize(("head", "mean"), [("tiled", False), ("tiled", True), ("dense", True)])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_modules(workshop, name, head, mean):
    case = CASES[name]
    values, expected = by_modules(build(case, workshop), mean)
    out, gradients, reason = by_the_head(build(case, workshop), mean, head)
    assert case.way in reason
    for field, value in values.items():
        if field != "mean_log_probs" or mean:
            assert floats_apart(getattr(out, field), value) < 1e-5, field
    assert gradients.keys() == expected.keys()
    for parameter, exact in expected.items():
        found = gradients[parameter]
        if exact is None:
            assert found is None or not found.any(), parameter
            continue
        assert floats_apart(found, exact) <= 1e-5 * max(float(exact.abs().max()), 1.0), parameter
