"""Adapters on the LM head: values and gradients equal those of PEFT's modules, and no batch's logits are stored."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import trl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import trl_ext
import trl_ext.scoring.forward as scoring_forward
from drop_in_cases import Case as Run
from head_adapter_cases import CASES, CRASHES, LOW_RANK, MODULE, REFUSES, ROWS, TOKENS, WHOLE, build, lora
from head_adapter_cases import Case as Kind
from head_definition import ALL, FROZEN, defined, floats_apart
from model_families import batch
from run_losses import Trainers, train
from token_counts import as_of_a_library
from training_comparison import tensors_differ
from trl_ext.heads import tiled
from trl_ext.heads.adapters import ReplacedRows
from trl_ext.heads.logits import LogitTransform
from trl_ext.scoring import head as module_head
from trl_ext.scoring.forward import ScoringOptions, attach_scoring_forward
from trl_ext.scoring.head import HeadAdapter, OpaqueHead, score_by_module

pytestmark = pytest.mark.filterwarnings(
    "ignore:Model (with|has) `tie_word_embeddings=True`", "ignore:`lora_bias=True` was passed", "ignore:.*Unmerge"
)


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch):
    monkeypatch.setitem(tiled._ELEMENTS, "cpu", 1)
    monkeypatch.setattr(tiled, "_COLUMNS", 40)
    monkeypatch.setitem(module_head._ELEMENTS, "cpu", 5 * 97)


def full_batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Make a batch without padding, with which Gemma 2's eager attention gives NaN in float64."""
    inputs, labels = batch()
    return {"input_ids": inputs["input_ids"]}, labels


def loss_of(log_p: torch.Tensor, entropy: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    weights = torch.arange(1, log_p.shape[1] + 1, dtype=log_p.dtype)
    loss = (log_p * weights).sum() + (entropy * weights.flip(0)).sum()
    return loss if mean is None else loss - 2 * (mean * weights).sum()


def watch(base: Any, kept: dict[str, torch.Tensor]) -> None:
    """Record the hidden states that the backbone of `base` returns, with their gradient."""

    def keep(module: Any, args: Any, output: Any) -> None:
        hidden = output.last_hidden_state
        if not hidden.requires_grad:  # no parameter below the head is trained
            hidden.requires_grad_()
        hidden.retain_grad()
        kept["hidden states"] = hidden

    base.base_model.register_forward_hook(as_of_a_library(keep))


def by_modules(model: Any, mean: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return values and gradients from the model's own logits, in float64."""
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


@pytest.mark.parametrize(
    ("head", "mean"),
    [
        ("tiled", True),
        pytest.param("tiled", False, marks=pytest.mark.slow),
        pytest.param("dense", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_those_of_the_modules(workshop, name, head, mean):
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


def of_each_way(names: Iterable[str]) -> list[Any]:
    """Return all cases, most of them as slow tests."""
    fast = (
        "LoRA",
        "two LoRAs",
        "LoRA with its own bias",
        "DoRA",
        "tokens, tied",
        "tokens alone, tied",
        "IA3",
        "OFT",
    )
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


class SeesLogits(TorchDispatchMode):
    """Records every tensor with the size of the logits of all scored tokens, or of all positions."""

    def __init__(self, positions: set[int], vocabulary: int) -> None:
        super().__init__()
        self.positions, self.vocabulary, self.seen = positions, vocabulary, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and self.vocabulary in x.shape:
                others = x.numel() // self.vocabulary if x.numel() else 0
                if others in self.positions:
                    self.seen.append(f"{func} {tuple(x.shape)}")
        return out


@pytest.mark.parametrize("name", of_each_way(CASES))
def test_no_tensor_has_the_size_of_the_logits(workshop, name):
    model = build(CASES[name], workshop).train()
    attach_scoring_forward(model.get_base_model(), ScoringOptions(outputs=ALL))
    inputs, labels = full_batch()
    scored = int((labels[:, 1:] != -100).sum())
    positions = {scored, labels.numel(), labels[:, 1:].numel()}
    assert scored > 10
    sees = SeesLogits(positions, 97)
    with sees:
        out = model(**inputs, labels=labels, fused_lm_head=True)
        if out.log_probs.requires_grad:
            out.log_probs.sum().backward()
    assert not sees.seen
    with sees:
        model(**inputs)
    assert sees.seen


@pytest.mark.parametrize("name", of_each_way(CASES))
def test_a_batch_without_labels_gives_every_parameter_a_zero_gradient(workshop, name):
    """As on a DDP rank with only masked rows: DDP waits for a gradient of each parameter."""
    model = build(CASES[name], workshop).train()
    attach_scoring_forward(model.get_base_model(), ScoringOptions(outputs=ALL))
    inputs, labels = full_batch()
    out = model(**inputs, labels=torch.full_like(labels, -100), fused_lm_head=True)
    parameters = {key: x for key, x in model.named_parameters() if x.requires_grad}
    reached = by_modules(build(CASES[name], workshop), False)[1]
    if any(reached[key] is not None for key in parameters):
        out.loss.backward()
    for key, x in parameters.items():
        assert reached[key] is None or (x.grad is not None and not x.grad.any()), key


def test_with_the_adapter_disabled_the_base_is_scored(workshop):
    for name in ("LoRA", "LoRA, all biases trained", "DoRA", "tokens, tied", "IA3", "LoRA and head in modules_to_save"):
        case = CASES[name]
        model = build(case, workshop)
        base = AutoModelForCausalLM.from_pretrained(workshop.model(case.model)).eval()
        inputs, labels = full_batch()
        scored = []
        for each in (model.get_base_model(), base):
            attach_scoring_forward(each, ScoringOptions())
        with torch.no_grad():
            with model.disable_adapter():
                scored.append(model(**inputs, labels=labels, fused_lm_head=True).log_probs)
            scored.append(base(**inputs, labels=labels, fused_lm_head=True).log_probs)
            assert floats_apart(*scored) < 1e-6, name
            scored.append(model(**inputs, labels=labels, fused_lm_head=True).log_probs)
        assert floats_apart(*scored[1:]) > 1e-3, name


def test_the_backward_repeats_the_dropout_of_an_adapter(workshop):
    model = build(CASES["LoRA"], workshop)
    head = model.get_base_model().lm_head
    head.lora_dropout["default"] = torch.nn.Dropout(0.5)
    head.train()
    torch.manual_seed(0)
    hidden, targets = torch.randn(5, 32), torch.randint(97, (5,))
    options = {"transform": LogitTransform(), "outputs": FROZEN, "vocabulary": 97, "entropy_requires_grad": False}
    results = []
    for way in ("tiled", "dense"):
        head.zero_grad()
        torch.manual_seed(3)
        h = hidden.clone().requires_grad_()
        scored = score_by_module(head, h, targets, head=way, chunk_size=None, **options)
        torch.rand(7)
        scored.log_probs.sum().backward()
        of_head = [x.grad for x in head.parameters() if x.requires_grad]
        results.append([scored.log_probs.detach(), h.grad, *of_head])
    for a, b in zip(*results, strict=True):
        assert floats_apart(a, b) < 1e-5
    reasons = []
    for training in (True, False):
        reasons.append(scoring_forward.resolve_head(head.train(training)))
    assert isinstance(reasons[0], OpaqueHead)
    assert "dropout" in reasons[0].reason
    assert not isinstance(reasons[1], OpaqueHead)


def test_a_half_precision_base_with_an_fp32_adapter_is_not_rounded_in_between(workshop):
    for autocast in (False, True):
        model = build(CASES["LoRA"], workshop).get_base_model()
        head = model.lm_head
        head.base_layer.bfloat16()
        attach_scoring_forward(model, ScoringOptions(outputs=ALL, padding_free=False))
        hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        model.model.register_forward_hook(lambda *a, x=hidden: a[-1].__setitem__("last_hidden_state", x[None]) or a[-1])
        ids = torch.arange(3, 12)[None]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = model(input_ids=ids, labels=ids, fused_lm_head=True)
        first, second = head.lora_A["default"].weight, head.lora_B["default"].weight
        if autocast:
            first, second = first.bfloat16(), second.bfloat16()
        weight = head.base_layer.weight.double() + 1.5 * second.double() @ first.double()
        exact = defined(hidden[:-1], weight, ids[0, 1:])
        for field in ("log_probs", "entropy", "mean_log_probs"):
            assert floats_apart(getattr(found, field)[0], getattr(exact, field)) < 1e-5, (autocast, field)


FAST_RUNS = [("LoRA", "dpo"), ("LoRA", "grpo"), ("tokens, tied", "dpo"), ("DoRA", "grpo")]
RUNS = {
    "LoRA": ({}, LOW_RANK, REFUSES),
    "two options of LoRA": ({"use_rslora": True, "lora_bias": True}, LOW_RANK, REFUSES),
    "DoRA": ({"use_dora": True}, MODULE, REFUSES),
    "LoRA with dropout that is turned off": ({"lora_dropout": 0.3}, LOW_RANK, REFUSES),
    "tokens, tied": ({"target_modules": ["q_proj"], "trainable_token_indices": TOKENS}, ROWS, CRASHES),
    "modules_to_save": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, WHOLE, None),
    "tied LoRA": (
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True, "init_lora_weights": True},
        LOW_RANK,
        REFUSES,
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in FAST_RUNS else pytest.mark.slow)
        for name in RUNS
        for kind in ("dpo", "grpo")
    ],
)
def test_training_equals_training_with_the_modules_logits(workshop, monkeypatch, kind, name):
    changes, way, stock = RUNS[name]
    options = {"target_modules": ["lm_head", "q_proj"], **changes}
    config = {"disable_dropout": True, **({"beta": 0.1} if kind == "grpo" else {})}
    model = "tied" if "tied" in name else "head_bias" if "options" in name else "untied"
    run = Run(name, kind, model=model, setup="lora", lora=options, config=config)
    monkeypatch.undo()  # tiles of their usual size
    reasons = []

    def explained(trainers: Trainers) -> Trainers:
        def wrapped(trainer: type) -> type:
            def train(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = super(subclass, self).train(*args, **kwargs)
                reasons.append(str(self.explain()["head"]))
                return result

            subclass = type(trainer.__name__, (trainer,), {"train": train})
            return subclass

        return replace(trainers, dpo_trainer=wrapped(trainers.dpo_trainer), grpo_trainer=wrapped(trainers.grpo_trainer))

    ours = train(run, explained(Trainers.of(trl_ext)), workshop)
    assert way in reasons[0]
    with patch.object(scoring_forward, "resolve_head", lambda lm_head: OpaqueHead(lm_head, "this is the definition")):
        dense = replace(run, config={**config, "head": "dense"})
        expected = train(dense, Trainers.of(trl_ext), workshop)
    assert ours.losses == pytest.approx(expected.losses, abs=1e-5)
    assert len(ours.gradients) == len(expected.gradients) > 0
    for got, want in zip(ours.gradients, expected.gradients, strict=True):
        assert any(x is not None and x.any() for key, x in want.items() if "lm_head" in key or "tokens" in key)
        assert not tensors_differ("gradient", got, want)
    assert not tensors_differ("weights", ours.updates, expected.updates)
    if stock is not None:
        with pytest.raises((ValueError, AttributeError), match=stock):
            train(run, Trainers.of(trl), workshop)


def test_a_head_that_grpo_casts_to_fp32_is_an_error_as_in_trl(workshop):
    run = Run("cast", "grpo", model="untied", setup="lora", lora={"target_modules": ["lm_head"]})
    with pytest.raises(ValueError, match=REFUSES):
        train(replace(run, config={"cast_lm_head_to_fp32": True}), Trainers.of(trl_ext), workshop)
    tokens = replace(run, lora={"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": TOKENS}})
    with pytest.raises(ValueError, match="is not supported with an adapter on the LM head"):
        train(replace(tokens, config={"cast_lm_head_to_fp32": True}), Trainers.of(trl_ext), workshop)


def test_vllm_is_an_error_as_in_trl(workshop):
    run = Run("vllm", "grpo", model="tied", setup="lora", lora={"target_modules": ["lm_head"]})
    with pytest.raises(ValueError, match=REFUSES):
        train(replace(run, config={"use_vllm": True}), Trainers.of(trl_ext), workshop)


def another_scaling(self: Any, hidden: torch.Tensor, weight: torch.Tensor, *accumulate: Any) -> Any:
    term = RIGHT_LOW_RANK(self, hidden, weight, *accumulate)
    return term._replace(down=term.down * 1.2)


def other_classes(self: Any) -> Any:
    return ReplacedRows.of(tuple(x - 1 for x in self.classes), self.rows.device)


RIGHT_LOW_RANK = HeadAdapter.low_rank


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize(
    ("name", "what", "wrong"),
    [("LoRA", "low_rank", another_scaling), ("tokens of the head", "replaced", other_classes)],
)
def test_an_adapter_that_is_misread_stops_training(workshop, monkeypatch, name, what, wrong, start):
    """This also holds at the start of LoRA, when it adds nothing yet, because its gradient differs."""
    case = CASES[name]
    if start and name == "LoRA":
        case = CASES["LoRA, B zero"]
    monkeypatch.setattr(HeadAdapter, what, wrong)
    model = build(case, workshop)
    attach_scoring_forward(model.get_base_model(), ScoringOptions())
    inputs, labels = full_batch()
    with pytest.raises(RuntimeError, match="adapter on the LM head was misread"):
        model(**inputs, labels=labels, fused_lm_head=True)


def test_the_check_of_the_first_batch_detects_a_wrong_gradient_of_an_adapter(workshop, monkeypatch):
    right = tiled.Coefficients.add_target_grad_
    monkeypatch.setattr(tiled.Coefficients, "add_target_grad_", lambda self, *args: right(self, *args).mul_(1.5))
    model = build(CASES["LoRA"], workshop)
    attach_scoring_forward(model.get_base_model(), ScoringOptions())
    inputs, labels = full_batch()
    with pytest.raises(RuntimeError, match="first batch: gradient of the second factor of adapter 0"):
        model(**inputs, labels=labels, fused_lm_head=True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["LoRA", "two LoRAs", "LoRA with its own bias", "tokens, tied"])
def test_the_checks_pass_in_half_precision(workshop, name, autocast):
    model = build(CASES[name], workshop)
    if not autocast:
        model.bfloat16()
    attach_scoring_forward(model.get_base_model(), ScoringOptions(outputs=ALL, entropy_requires_grad=True))
    inputs, labels = full_batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**inputs, labels=labels, fused_lm_head=True).log_probs.sum().backward()


def test_alora_is_scored_padded_and_is_an_error_on_the_head(workshop):
    """PEFT counts the start of the adapter from the end of each row."""
    inputs, labels = batch()
    tokens = inputs["input_ids"][0, 3:5].tolist()
    alora = Kind(lora(alora_invocation_tokens=tokens, target_modules=["q_proj"]), WHOLE)
    values, expected = by_modules(build(alora, workshop), False)
    model = build(alora, workshop)
    scoring = attach_scoring_forward(model.get_base_model(), ScoringOptions(0.7))
    out = model(**full_batch()[0], labels=labels, fused_lm_head=True)
    assert floats_apart(out.log_probs, values["log_probs"]) < 1e-5
    assert "aLoRA" in scoring.packing.padded_reason
    assert any(x is not None and x.any() for name, x in expected.items() if "lora_B" in name)
    with_head = build(replace(alora, config=lora(alora_invocation_tokens=tokens)), workshop)
    attach_scoring_forward(with_head.get_base_model(), ScoringOptions())
    with pytest.raises(NotImplementedError, match='"default" is an aLoRA adapter on the LM head'):
        with_head(**inputs, labels=labels, fused_lm_head=True)
