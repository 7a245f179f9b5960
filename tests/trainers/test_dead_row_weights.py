"""GRPO without dead rows changes the weights as stock TRL does: all loss types, both levels, SGD and AdamW.

dW is the change of all weights after five optimizer steps in fp32 without dropout.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import trl

import trl_ext
from drop_in_cases import GRPO_LEVELS, GRPO_LOSSES, Case
from run_losses import Record, Trainers, train
from tiny import Workshop

STOCK = Trainers.of(trl)
OURS = Trainers.of(trl_ext).padded()
TOLERANCE = 1e-4

SCHEDULES: dict[str, dict[str, Any]] = {
    "on_policy": {},
    "iterations": {"num_iterations": 2},
    "misaligned": {"gradient_accumulation_steps": 3, "steps_per_generation": 4, "per_device_train_batch_size": 4},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optim": "sgd", "learning_rate": 0.02},
    "adamw": {"optim": "adamw_torch", "learning_rate": 1e-3},
}
MODELS = ("tied", "untied")  # rotary positions, no key bias

# One of 20,000 weights has a gradient as small as the rounding of the others (7e-9). With its default epsilon of 1e-8,
# AdamW turns it into a full step: two heads that score every row also differ by 7e-4 there
NEAR_ZERO_GRADIENT = ("misaligned", "adamw", "tied")


def case_of(loss_type: str, level: str, schedule: str, optimizer: str, model: str, **changes: Any) -> Case:
    config = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        **GRPO_LOSSES[loss_type],
        **SCHEDULES[schedule],
        **OPTIMIZERS[optimizer],
        **({"adam_epsilon": 1e-5} if (schedule, optimizer, model) == NEAR_ZERO_GRADIENT else {}),
    }
    name = f"{loss_type}-{level}-{schedule}-{optimizer}-{model}"
    return Case(name, "grpo", model=model, config=config, **{"steps": 5, "rewards": ("half_dead",), **changes})


def norm(updates: dict[str, torch.Tensor]) -> float:
    return sum(update.double().pow(2).sum().item() for update in updates.values()) ** 0.5


def distance(ours: Record, stock: Record) -> float:
    """||dW ours - dW stock|| / ||dW stock||."""
    assert ours.updates.keys() == stock.updates.keys()
    difference = {name: ours.updates[name] - update for name, update in stock.updates.items()}
    return norm(difference) / norm(stock.updates)


def assert_moves_as_stock(case: Case, workshop: Workshop) -> None:
    stock, ours = train(case, STOCK, workshop), train(case, OURS, workshop)
    rows = [record.fed("rows", model="policy", grad=True) for record in (ours, stock)]
    assert 0 < rows[0] < 0.8 * rows[1]
    assert distance(ours, stock) <= TOLERANCE


# The fast tier has every loss type at one level, and each schedule, optimizer and model several times
FAST = {
    (loss, GRPO_LEVELS[i // 2 % 2], list(SCHEDULES)[i % 3], list(OPTIMIZERS)[i % 2], MODELS[i // 4 % 2])
    for i, loss in enumerate(GRPO_LOSSES)
}
TABLE = [
    pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow)
    for cell in itertools.product(GRPO_LOSSES, GRPO_LEVELS, SCHEDULES, OPTIMIZERS, MODELS)
]


@pytest.mark.parametrize(("loss_type", "level", "schedule", "optimizer", "model"), TABLE)
def test_the_weights_move_as_with_every_row(
    loss_type: str, level: str, schedule: str, optimizer: str, model: str, workshop: Workshop
) -> None:
    assert_moves_as_stock(case_of(loss_type, level, schedule, optimizer, model), workshop)


OTHERS: dict[str, dict[str, Any]] = {
    "masked_whole": {"rollout": "masked_whole", "rewards": ("id",)},
    "tool_tokens": {"rollout": "masked"},
    "lora": {"setup": "lora"},
    "off_policy_mask": {"config": {"off_policy_mask_threshold": 0.01}},
    "delta": {"config": {"delta": 1.05}},
    "scale_rewards-none": {"config": {"scale_rewards": "none"}},
    "checkpointing": {"config": {"gradient_checkpointing": True}},
    "clipped": {"config": {"max_grad_norm": 0.1}},
    "weight_decay": {"config": {"weight_decay": 0.1}},
    "logits_scaling": {"model": "logits_scaling"},
}


FAST_OTHERS = {("masked_whole", "adamw"), ("tool_tokens", "sgd"), ("lora", "sgd"), ("off_policy_mask", "adamw")}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param(*cell, marks=() if cell in FAST_OTHERS else pytest.mark.slow)
        for cell in itertools.product(OTHERS, OPTIMIZERS)
    ],
)
def test_with_every_option_the_weights_move_as_with_every_row(name: str, optimizer: str, workshop: Workshop) -> None:
    changes = dict(OTHERS[name])
    config, model = changes.pop("config", {}), changes.pop("model", "tied")
    case = case_of("dapo", "token", "iterations", optimizer, model, **changes)
    assert_moves_as_stock(replace(case, config={**case.config, **config}), workshop)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_measure_notices_weights_that_do_not_move(optimizer: str, workshop: Workshop) -> None:
    case = case_of("grpo", "token", "iterations", optimizer, "tied")
    still = replace(case, config={**case.config, "learning_rate": 0.0})
    stock, ours = train(case, STOCK, workshop), train(still, OURS, workshop)
    assert norm(stock.updates) > 0
    assert distance(ours, stock) == pytest.approx(1.0)


def test_the_measure_notices_a_mean_over_the_live_rows_only(workshop: Workshop) -> None:
    """A mean over the live half of the rows gives about twice the gradient."""

    class OwnMean(trl_ext.GRPOTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            live = (inputs["advantages"] != 0).float().mean()
            return super().compute_loss(model, inputs, *args, **kwargs) / live.clamp(min=0.1)

    case = case_of("grpo", "token", "misaligned", "adamw", "tied")
    stock = train(case, STOCK, workshop)
    ours = train(case, replace(OURS, grpo_trainer=OwnMean), workshop)
    assert distance(ours, stock) > 10 * TOLERANCE
