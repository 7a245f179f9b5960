"""Our trainers equal stock TRL's in each case of drop_in_cases.py, and the comparison notices a wrong loss."""

import functools
from dataclasses import replace

import pytest
import trl

import trl_ext
from drop_in_cases import CASES, DPO_LOSSES, GRPO_LEVELS, GRPO_LOSSES, SETUPS, Case
from run_losses import Record, Trainers, train
from tiny import Workshop
from training_comparison import assert_same

STOCK = Trainers.of(trl)
OURS = Trainers.of(trl_ext)

# Cases in which a loss of the wrong sign, or one percent too large, must be noticed.
WATCHED = (
    "dpo-sigmoid-full",
    "dpo-nca_pair-full",
    "dpo-hinge-lora",
    "dpo-sft-lora",
    "grpo-grpo-token-full",
    "grpo-bnpo-token-lora",
    "grpo-dapo-sequence-lora",
    "grpo-vespo-token-ref_model",
)


@functools.cache
def _stock(name: str, workshop: Workshop) -> Record:
    return train(CASES[name], STOCK, workshop)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.fast else pytest.mark.slow) for case in CASES.values()],
)
def test_training_equals_stock_trl(case: Case, workshop: Workshop) -> None:
    assert_same(case, train(case, OURS, workshop), _stock(case.name, workshop))


FAST_WATCHED = {
    ("dpo-sigmoid-full", 1.01),
    ("dpo-hinge-lora", -1.0),
    ("grpo-grpo-token-full", 1.01),
    ("grpo-bnpo-token-lora", -1.0),
    ("grpo-vespo-token-ref_model", 1.01),
}


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        pytest.param(name, factor, marks=() if (name, factor) in FAST_WATCHED else pytest.mark.slow)
        for name in WATCHED
        for factor in (-1.0, 1.01)
    ],
)
def test_the_comparison_notices_a_wrong_loss(name: str, factor: float, workshop: Workshop) -> None:
    wrong = train(CASES[name], OURS.with_loss_times(factor), workshop)
    with pytest.raises(AssertionError, match=f"{name}: [0-9]+ differences"):
        assert_same(CASES[name], wrong, _stock(name, workshop))


@pytest.mark.parametrize("name", ["dpo-sigmoid-full", "grpo-grpo-token-full"])
def test_our_trainer_takes_trls_own_config(name: str, workshop: Workshop) -> None:
    mixed = replace(OURS, dpo_config=STOCK.dpo_config, grpo_config=STOCK.grpo_config)
    assert_same(CASES[name], train(CASES[name], mixed, workshop), _stock(name, workshop))


def test_the_table_names_every_loss_type_with_every_setup() -> None:
    dpo = {f"dpo-{loss_type}-{setup}" for loss_type in DPO_LOSSES for setup in SETUPS}
    grpo = {
        f"grpo-{loss_type}-{level}-{setup}" for loss_type in GRPO_LOSSES for level in GRPO_LEVELS for setup in SETUPS
    }
    assert len(dpo) == 15 * 4
    assert len(grpo) == 8 * 2 * 4
    assert dpo | grpo <= CASES.keys()
    fast = {(case.trainer, str(case.config.get("loss_type"))) for case in CASES.values() if case.fast}
    assert {("dpo", loss_type) for loss_type in DPO_LOSSES} <= fast
    assert {("grpo", loss_type) for loss_type in GRPO_LOSSES} <= fast
