"""`SFTTrainer`, `KTOTrainer` and `RLOOTrainer` equal stock TRL's, and the comparison notices a wrong loss."""

import functools

import pytest
import trl

import trl_ext
from drop_in_cases import Case
from other_drop_in_cases import CASES, KTO_LOSSES, SFT_LOSSES
from run_losses import Record, Trainers, train
from tiny import Workshop
from training_comparison import assert_same

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)
WATCHED = ("sft-nll-full", "sft-dft-lora", "kto-kto-full", "kto-apo_zero_unpaired-ref_model", "rloo-defaults-full")


@functools.cache
def _stock(name: str, workshop: Workshop) -> Record:
    return train(CASES[name], STOCK, workshop)


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")  # TRL's, of its argument
@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT's, when it generates
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.fast else pytest.mark.slow) for case in CASES.values()],
)
def test_training_equals_stock_trl(case: Case, workshop: Workshop) -> None:
    assert_same(case, train(case, OURS, workshop), _stock(case.name, workshop))


@pytest.mark.parametrize("factor", [-1.0, pytest.param(1.01, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WATCHED)
def test_the_comparison_notices_a_wrong_loss(name: str, factor: float, workshop: Workshop) -> None:
    wrong = train(CASES[name], OURS.with_loss_times(factor), workshop)
    with pytest.raises(AssertionError, match=f"{name}: [0-9]+ differences"):
        assert_same(CASES[name], wrong, _stock(name, workshop))


def test_the_table_names_every_loss_type() -> None:
    names = {f"sft-{loss}-{setup}" for loss in SFT_LOSSES for setup in ("full", "lora")}
    assert names | {f"kto-{loss}-{setup}" for loss in KTO_LOSSES for setup in ("full", "lora")} <= CASES.keys()
