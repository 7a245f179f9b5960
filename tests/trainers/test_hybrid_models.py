"""Models with recurrent or convolutional layers train as in stock TRL, without padding and repeated prompts."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trl

import training_comparison
import trl_ext
from case_trainers import build_trainer
from drop_in_cases import Case
from packing_models import FAMILIES, fresh
from run_losses import Trainers, train
from tiny import Workshop, word_tokenizer
from training_comparison import TOLERANCE, assert_same, distance
from trl_ext.packing.support import mixers_of

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)
# A gated delta net, Mamba 2 beside attention, Mamba 1 and a convolution
HYBRID = ("qwen3_5", "falcon_h1", "jamba", "lfm2")
ADAPTED = {
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj"],
    "falcon_h1": ["in_proj", "q_proj"],
    "jamba": ["in_proj", "x_proj", "q_proj"],
    "lfm2": ["in_proj", "q_proj"],
}
CASES = {
    "sft": Case("sft", "sft"),
    "sft-lora": Case("sft", "sft", "lora"),
    "dpo": Case("dpo", "dpo"),
    "dpo-lora": Case("dpo", "dpo", "lora"),
    "kto": Case("kto", "kto"),
    "kto-lora": Case("kto", "kto", "lora"),
    "grpo": Case("grpo", "grpo", config={"beta": 0.1}),
    "grpo-lora": Case("grpo", "grpo", "lora", config={"beta": 0.1}),
    "rloo": Case("rloo", "rloo", config={"beta": 0.0}),
    "rloo-lora": Case("rloo", "rloo", "lora", config={"beta": 0.1}),
}
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "stored": {},
    "non-reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}
# A delta net multiplies the rounding of earlier steps
SMALL_STEPS = {"qwen3_5": {"learning_rate": 1e-3}}
# Times stock's distance from itself when it pads to another width
OF_STOCKS_DISTANCE = 3
FAST = {
    ("qwen3_5", "grpo", "non-reentrant"),
    ("lfm2", "dpo-lora", "reentrant"),
    ("falcon_h1", "sft", "stored"),
    ("jamba", "kto", "stored"),
}


def make_model(name: str, workshop: Workshop) -> None:
    """Save the policy where `workshop` looks for it."""
    folder = workshop.root / f"{name}-0"
    if folder.exists():
        return
    fresh(FAMILIES[name].config()).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "run", "checkpointing"),
    [
        pytest.param(*row, marks=() if row in FAST else pytest.mark.slow)
        for row in [(name, run, how) for name in HYBRID for run in CASES for how in CHECKPOINTING]
    ],
)
def test_hybrid_models_train_as_in_stock_trl(name: str, run: str, checkpointing: str, workshop: Workshop) -> None:
    make_model(name, workshop)
    case = CASES[run]
    case = replace(
        case,
        model=name,
        config={**case.config, **CHECKPOINTING[checkpointing], **SMALL_STEPS.get(name, {})},
        lora={"target_modules": ADAPTED[name]} if case.setup == "lora" else case.lora,
    )
    ours, stock = train(case, OURS, workshop), train(case, STOCK, workshop)
    assert ours.packed
    tolerance = TOLERANCE
    if name == "qwen3_5":  # where fp32 does not allow it
        wider = train(replace(case, config={**case.config, "pad_to_multiple_of": 32}), STOCK, workshop)
        tolerance = max(TOLERANCE, OF_STOCKS_DISTANCE * distance(wider, stock))
        assert tolerance <= 1e-3
    with patch.object(training_comparison, "TOLERANCE", tolerance):
        assert_same(case, ours, stock)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRID)
def test_another_sign_of_a_mixers_output_is_noticed(name: str, workshop: Workshop) -> None:
    make_model(name, workshop)
    case = replace(CASES["dpo"], model=name, config=SMALL_STEPS.get(name, {}))

    def flip(trainer: Any) -> None:
        mixer = mixers_of(trainer.model)[0]
        mixer.register_forward_hook(lambda module, args, output: -output)

    ours, stock = train(case, OURS, workshop, prepare=flip), train(case, STOCK, workshop)
    with (
        patch.object(training_comparison, "TOLERANCE", 1e-2),
        pytest.raises(AssertionError, match="gradient of step 0"),
    ):
        assert_same(case, ours, stock)


def test_the_plan_says_what_recurrent_layers_process(workshop: Workshop, tmp_path: Path) -> None:
    make_model("lfm2", workshop)
    trainer = build_trainer(replace(CASES["dpo"], model="lfm2"), OURS, workshop, str(tmp_path), OURS.dpo_trainer)
    reason = trainer.explain()["packing"].reason
    assert reason.endswith("Recurrent layers process rows of similar lengths together, with little padding.")
