"""A DPO loss of a later TRL that reads the rows of all ranks trains as in that TRL, with the same metrics."""

import os
from pathlib import Path
from typing import Any

import pytest
import trl

import trl_ext
from changed_trl import MEAN_OF_ALL_RANKS, MEAN_OF_RANK, source_changed
from preference_runs import run
from ranks import Rank, run_on_ranks
from tiny import REFERENCE_SEED, Workshop, preferences
from trained_weights import far

NOT_COMPARED = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"}


def trained(library: Any, rank: Rank, folder: str, **config: Any) -> dict[str, Any]:
    workshop = Workshop(Path(os.environ["TINY_ROOT"]))
    seen = run(library, workshop, rank.folder / folder, train_dataset=preferences(16, seed=1), **config)
    rank.check(seen.trainer)
    weights = {name: x.detach().clone() for name, x in seen.trainer.model.named_parameters()}
    return {"weights": weights, "logs": seen.logs}


def case(library: Any, name: str, *, over_ranks: bool = True) -> Any:
    def of_rank(rank: Rank) -> Any:
        new = MEAN_OF_ALL_RANKS if over_ranks else MEAN_OF_RANK
        with source_changed(trl.DPOTrainer, "_compute_loss", MEAN_OF_RANK, new):
            return trained(library, rank, name, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5])

    return of_rank


CASES = {
    "ours": case(trl_ext, "ours"),
    "stock": case(trl, "stock"),
    "of-a-rank": case(trl, "of-a-rank", over_ranks=False),
}


def test_a_loss_over_the_tokens_of_all_ranks_is_that_of_trl(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    workshop.model("tied"), workshop.model("tied", REFERENCE_SEED)
    monkeypatch.setenv("TINY_ROOT", str(workshop.root))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "of_ranks"))
    found = run_on_ranks(__file__, list(CASES), "ddp", tmp_path, 2)
    for ours, stock, of_a_rank in zip(found["ours"], found["stock"], found["of-a-rank"], strict=True):
        assert far(ours["weights"], stock["weights"]) <= 1e-5
        assert far(of_a_rank["weights"], stock["weights"]) > 1e-5  # the ranks have different numbers of tokens
        for mine, theirs in zip(ours["logs"], stock["logs"], strict=True):
            assert mine.keys() >= theirs.keys() - NOT_COMPARED
            for name in theirs.keys() - NOT_COMPARED:
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
