"""In the releases of TRL whose DPO loss is known, no term reads what the loss gathers; any other loss is not known."""

from collections import defaultdict
from typing import Any

import pytest
import torch
import trl
from torch import Tensor

import trl_ext
from changed_trl import MEAN_OF_ALL_RANKS, MEAN_OF_RANK, source_changed
from tiny import Workshop, preferences
from trl_ext.compat import dpo as internals
from trl_ext.compat.reference import labels_of
from trl_ext.losses.loss_types import DPO_LOSS_TYPES


@pytest.fixture
def trainer(workshop: Workshop, tmp_path: Any) -> Any:
    args = trl_ext.DPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", label_smoothing=0.1, reference_store="off"
    )
    return trl_ext.DPOTrainer(workshop.model("tied"), args=args, train_dataset=preferences(8, seed=1))


def losses(trainer: Any, scores: Any, batch: dict[str, Tensor], reference: Tensor) -> dict[str, Tensor]:
    found = {}
    for name in DPO_LOSS_TYPES:
        with internals.loss_of_scores(trainer, [(name, 1.0)], reference, rank_metrics=defaultdict(list)):
            found[name] = trl.DPOTrainer._compute_loss(trainer, lambda **_: scores, batch, False)
    return found


def test_no_term_of_the_installed_trl_reads_what_it_gathers(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert internals.is_loss_of_one_rank(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    scores = internals.score_policy(trainer, trainer.model, batch, labels_of(batch))
    reference = scores.log_probs.detach() * 0.9
    alone = losses(trainer, scores, batch, reference)
    with source_changed(trl.DPOTrainer, "_compute_loss", MEAN_OF_RANK, MEAN_OF_ALL_RANKS):
        over_ranks = losses(trainer, scores, batch, reference)
    monkeypatch.setattr(internals._AsIfAlone, "gather", lambda _, x: 3 * x + 1)
    monkeypatch.setattr(internals._AsIfAlone, "gather_for_metrics", lambda _, x: 3 * x + 1)
    with_others = losses(trainer, scores, batch, reference)
    assert all(torch.equal(alone[name], with_others[name]) for name in alone)
    # What the test would see
    with source_changed(trl.DPOTrainer, "_compute_loss", MEAN_OF_RANK, MEAN_OF_ALL_RANKS):
        assert not torch.equal(losses(trainer, scores, batch, reference)["sft"], over_ranks["sft"])


def test_a_changed_loss_is_not_known(trainer: Any) -> None:
    with source_changed(trl.DPOTrainer, "_compute_loss", MEAN_OF_RANK, MEAN_OF_ALL_RANKS):
        assert not internals.is_loss_of_one_rank(trainer)
    with source_changed(trl.DPOTrainer, "_compute_loss", "delta_score = ", "delta_score = 1.0 * "):
        assert not internals.is_loss_of_one_rank(trainer)
    assert internals.is_loss_of_one_rank(trainer)
