"""Data with images train as in stock TRL, without padding, repeated prompts and repeated images."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import trl

import trl_ext
from drop_in_cases import Case
from image_models import CONFIGS, image_data, processor
from packing_models import fresh
from run_losses import Record, Trainers, train
from tiny import Workshop
from training_comparison import assert_same

ROWS = 8
LORA = {"target_modules": ["q_proj", "v_proj"]}
SAMPLED: dict[str, Any] = {"rollout": "generate", "learning_rate": 0.01}
CASES = {
    "dpo": Case("dpo", "dpo"),
    "dpo-lora": Case("dpo", "dpo", "lora", lora=LORA),
    "dpo-checkpointing": Case("dpo", "dpo", config={"gradient_checkpointing": True}),
    "grpo": Case("grpo", "grpo", config={"beta": 0.1}, **SAMPLED),
    "grpo-off-policy": Case("grpo", "grpo", config={"num_iterations": 2, "per_device_train_batch_size": 4}, **SAMPLED),
    "grpo-lora": Case("grpo", "grpo", "lora", config={"beta": 0.1}, lora=LORA, **SAMPLED),
    "sft": Case("sft", "sft"),
    "kto": Case("kto", "kto"),
    "rloo": Case("rloo", "rloo", config={"beta": 0.1}, **SAMPLED),
}
FAST = {("qwen3_vl", "dpo"), ("qwen3_vl", "grpo")}


# How many rows of a batch have the same prompt
COPIES = {"dpo": 2, "dpo-checkpointing": 2, "grpo": 4, "rloo": 4}


def with_images(trainers: Trainers) -> Trainers:
    """Return trainers that get data with images and a processor."""

    def takes_images(kind: str, trainer_class: Any) -> Any:
        class WithImages(trainer_class):  # type: ignore[misc]
            def __init__(self, *positional: Any, **keywords: Any) -> None:
                keywords |= {"train_dataset": image_data(kind, ROWS), "processing_class": processor()}
                super().__init__(*positional, **keywords)

        return WithImages

    names = [field.name for field in fields(trainers) if field.name.endswith("_trainer")]
    kinds = [(name, name.removesuffix("_trainer")) for name in names]
    return replace(trainers, **{name: takes_images(kind, getattr(trainers, name)) for name, kind in kinds})


def run(library: Any, name: str, case: Case, workshop: Workshop) -> tuple[Record, int]:
    """Train `case`. Return the record, and the patches that entered the tower in forwards with a gradient."""
    folder = workshop.root / f"{name}-with-images-0"
    if not folder.exists():
        fresh(CONFIGS[name]()).save_pretrained(folder)
        processor().save_pretrained(folder)
    patches: list[int] = []

    def count_patches(trainer: Any) -> None:
        (tower,) = (module for path, module in trainer.model.named_modules() if path.endswith(".visual"))

        def count(module: Any, args: Any) -> None:
            if torch.is_grad_enabled():
                patches.append(len(args[0]))

        tower.register_forward_pre_hook(count)

    # A recurrence multiplies rounding errors
    precise = {"model_init_kwargs": {"dtype": torch.float64}} if name == "qwen3_5" else {}
    case = replace(case, model=f"{name}-with-images", config={**case.config, **precise})
    record = train(case, with_images(Trainers.of(library)), workshop, prepare=count_patches)
    return record, sum(patches)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if (name, case) in FAST else pytest.mark.slow)
        for name in ("qwen3_vl", "qwen3_5")
        for case in CASES
    ],
)
def test_data_with_images_train_as_in_stock_trl(name: str, case: str, workshop: Workshop) -> None:
    (ours, our_patches), (stock, patches) = (run(library, name, CASES[case], workshop) for library in (trl_ext, trl))
    assert_same(CASES[case], ours, stock)
    print(case, our_patches, patches, ours.fed(grad=True), stock.fed(grad=True))
    assert 0 < our_patches * COPIES.get(case, 1) <= patches
    assert ours.fed(grad=True) < stock.fed(grad=True)
