"""While their weights are equal, GRPO's reference and policy give equal bits, so without advantages no weight moves.

The KL term's gradient is then exactly 0 in stock TRL. With a gradient of one rounding error, AdamW would take steps of
the full learning rate.
"""

from dataclasses import replace
from typing import Any

import pytest
import trl

import trl_ext
from drop_in_cases import Case
from run_losses import Trainers, train
from tiny import Workshop

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "beta": 0.1}
FRESH = {"init_lora_weights": True}  # adds nothing before it is trained

# Rows, lengths and schedules, which determine the forwards of a generation batch
SHAPES: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "one group": {"per_device_train_batch_size": 4},
    "long completions": {"max_completion_length": 40, "per_device_train_batch_size": 12, "num_generations": 6},
    "slices": {"per_device_train_batch_size": 4, "steps_per_generation": 4},
    "pairs": {"per_device_train_batch_size": 2, "steps_per_generation": 6, "num_generations": 2},
    "window": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "misaligned": {"per_device_train_batch_size": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 3},
    "iterations": {"num_iterations": 3, "per_device_train_batch_size": 4, "steps_per_generation": 2},
    "sequences": {"importance_sampling_level": "sequence", "loss_type": "dapo", "num_generations": 8},
}


def case_of(name: str, setup: str = "full", model: str = "tied", **config: Any) -> Case:
    rollout = config.pop("rollout", "scripted")
    config = {**ADAMW, **config}
    lora = FRESH if setup == "lora" else {}
    return Case(name, "grpo", setup, model, config, lora=lora, steps=5, rewards=("dead",), rollout=rollout, ours={})


def assert_stays(case: Case, workshop: Workshop, ours: Trainers = OURS) -> None:
    stock = train(case, STOCK, workshop)
    assert all(not update.any() for update in stock.updates.values()), "stock moves: the case proves nothing"
    for name, update in train(case, ours, workshop).updates.items():
        assert not update.any(), f"{name} moved by {update.abs().max():.2g}"


# Shapes for which a micro-batch is not the whole generation batch
FAST = {("slices", "full"), ("slices", "lora"), ("misaligned", "full")}
TABLE = [
    pytest.param(shape, setup, marks=() if (shape, setup) in FAST else pytest.mark.slow)
    for shape in SHAPES
    for setup in ("full", "lora")
]


@pytest.mark.parametrize(("shape", "setup"), TABLE)
def test_weights_do_not_move_if_stocks_do_not(shape: str, setup: str, workshop: Workshop) -> None:
    assert_stays(case_of(shape, setup, **SHAPES[shape]), workshop)


MODELS = ["untied", "softcap", "logits_scaling", "head_bias", "chat", "wide_vocab"]


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["full", "lora"])
@pytest.mark.parametrize("model", MODELS)
def test_weights_of_no_family_move(model: str, setup: str, workshop: Workshop) -> None:
    assert_stays(case_of(model, setup, model, **SHAPES["slices"]), workshop)


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True, "bf16": True},
    "tool tokens": {"rollout": "masked"},
    "masked whole": {"rollout": "masked_whole"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
    "quantile": {"top_entropy_quantile": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["full", "lora", "ref_adapter"])
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_do_not_move_with_any_option(name: str, setup: str, workshop: Workshop) -> None:
    assert_stays(case_of(name, setup, **SHAPES["slices"], **OPTIONS[name]), workshop)


OURS_ALONE: list[dict[str, Any]] = [
    {"max_tokens_per_micro_batch": 10},
    {"max_tokens_per_micro_batch": 40},
    {"padding_free": False},
    {"share_prompts": False},
    {"head": "dense"},
    {"head_chunk_size": 3},
]


@pytest.mark.parametrize(
    "ours", [pytest.param(x, id=str(x), marks=() if x == OURS_ALONE[1] else pytest.mark.slow) for x in OURS_ALONE]
)
def test_weights_do_not_move_with_options_that_change_the_layout(ours: dict[str, Any], workshop: Workshop) -> None:
    assert_stays(replace(case_of("layout", **SHAPES["slices"]), ours=ours), workshop)
