"""The tables of loss types: each loss type of the installed TRL, and each of ours, has a row."""

from collections.abc import Mapping

import pytest
import trl

from trl_ext.compat.choices import compared_values
from trl_ext.losses.loss_types import (
    DPO_LOSS_TYPES,
    GRPO_LOSS_TYPES,
    KTO_LOSS_TYPES,
    SFT_LOSS_TYPES,
    LossType,
    dpo_loss_type,
    grpo_loss_type,
    kto_loss_type,
    sft_loss_type,
)
from trl_ext.losses.preference import PREFERENCE_LOSSES, READ_LABEL_SMOOTHING, READ_REWARDS, REFUSE_LABEL_SMOOTHING

OF_TRAINERS = {
    trl.SFTTrainer: SFT_LOSS_TYPES,
    trl.DPOTrainer: DPO_LOSS_TYPES,
    trl.KTOTrainer: KTO_LOSS_TYPES,
    trl.GRPOTrainer: GRPO_LOSS_TYPES,
}


@pytest.mark.parametrize("trainer", OF_TRAINERS, ids=lambda trainer: trainer.__name__)
def test_each_loss_type_of_trl_has_a_row(trainer: type) -> None:
    rows: Mapping[str, LossType] = OF_TRAINERS[trainer]
    assert compared_values(trainer, "loss_type") == rows.keys()


def test_each_loss_type_of_ours_has_a_row() -> None:
    assert all(dpo_loss_type(name).is_known for name in PREFERENCE_LOSSES)
    for names in (READ_REWARDS, READ_LABEL_SMOOTHING, REFUSE_LABEL_SMOOTHING):
        assert names <= PREFERENCE_LOSSES.keys()
    assert DPO_LOSS_TYPES.keys().isdisjoint(PREFERENCE_LOSSES)


@pytest.mark.parametrize("row_of", [sft_loss_type, dpo_loss_type, kto_loss_type, grpo_loss_type])
def test_a_loss_type_without_a_row_may_depend_on_the_whole_micro_batch(row_of) -> None:
    row = row_of("new")
    assert not row.is_known
    assert row.of_whole_batch is not None
