"""Batches of text train multimodal models as in stock TRL, without padding and repeated prompts."""

from dataclasses import fields, replace
from typing import Any

import pytest
import trl

import trl_ext
from drop_in_cases import Case
from packing_models import FAMILIES, fresh
from run_losses import Trainers, train
from tiny import Workshop, word_tokenizer
from training_comparison import assert_same


def with_tokenizer(trainers: Trainers) -> Trainers:
    """Return trainers that get a tokenizer, in place of the processor of text and images that TRL would load."""

    def takes_tokenizer(trainer_class: Any) -> Any:
        class WithTokenizer(trainer_class):  # type: ignore[misc]
            def __init__(self, *positional: Any, **keywords: Any) -> None:
                super().__init__(*positional, processing_class=word_tokenizer(), **keywords)

        return WithTokenizer

    names = [field.name for field in fields(trainers) if field.name.endswith("_trainer")]
    return replace(trainers, **{name: takes_tokenizer(getattr(trainers, name)) for name in names})


STOCK, OURS = with_tokenizer(Trainers.of(trl)), with_tokenizer(Trainers.of(trl_ext))
LORA = {"target_modules": ["q_proj", "v_proj"]}
MULTIMODAL = ("gemma3-with-vision", "mistral3-with-vision", "qwen3_vl")
CASES = {
    "sft": Case("sft", "sft"),
    "sft-lora": Case("sft", "sft", "lora", lora=LORA),
    "dpo": Case("dpo", "dpo", "lora", lora=LORA),
    "dpo-model": Case("dpo", "dpo"),
    "kto": Case("kto", "kto"),
    "grpo": Case("grpo", "grpo", "lora", config={"beta": 0.1}, lora=LORA),
    "rloo": Case("rloo", "rloo", config={"beta": 0.0}, rollout="generate"),
}
FAST = {("qwen3_vl", "dpo"), ("qwen3_vl", "grpo"), ("gemma3-with-vision", "sft"), ("mistral3-with-vision", "rloo")}


def make_model(name: str, workshop: Workshop) -> None:
    """Save the policy where `workshop` looks for it."""
    folder = workshop.root / f"{name}-0"
    if folder.exists():
        return
    fresh(FAMILIES[name].config()).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        pytest.param(name, run, marks=() if (name, run) in FAST else pytest.mark.slow)
        for name in MULTIMODAL
        for run in CASES
    ],
)
def test_text_trains_as_in_stock_trl(name: str, run: str, workshop: Workshop) -> None:
    make_model(name, workshop)
    case = Case(**{**vars(CASES[run]), "model": name})
    ours, stock = train(case, OURS, workshop), train(case, STOCK, workshop)
    assert ours.packed
    assert_same(case, ours, stock)
