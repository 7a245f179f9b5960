"""With a copied reference, two ranks under DDP and FSDP2 train and resume as one process does."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_ext
from adapter_cases import COMMON, base, drawn
from ranks import Rank, run_on_ranks
from tiny import Workshop, lora_config, preferences
from trained_weights import trained

ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "moving": (
        {"model": "untied", "of_user": True},
        {"sync_ref_model": True, "ref_model_mixup_alpha": 0.6, "optim": "adamw_torch", "learning_rate": 5e-3},
    ),
    # PyTorch cannot load the empty state of SGD under FSDP2. Adam would update weights with a zero gradient.
    "bias": ({"model": "head_bias", "bias": "all"}, {"learning_rate": 0.3}),
}

SHARED = {"ref_model_sync_steps": 1, "reference_store": "memory"}


def train(rank: Rank | None, row: str, checkpoints: Path, folder: Path, rows: int) -> dict[str, Any]:
    """Train four steps of DPO, then the last two again from a checkpoint, with an evaluation in between."""
    how, config = ROWS[row]
    workshop = Workshop(checkpoints)

    def built() -> Any:
        # An adapter of the user that is drawn differently on each rank: DDP takes the first rank's
        seed = 0 if rank is None or rank.engine != "ddp" else rank.index
        lora = lora_config(bias=how.get("bias", "none"))
        model, options = base(workshop, how["model"]), {"peft_config": lora}
        if how.get("of_user"):
            model, options = drawn(model, lora, seed), {}
        args = {**COMMON, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
        if rank is not None:
            del args["use_cpu"]
        return trl_ext.DPOTrainer(
            model,
            args=trl_ext.DPOConfig(
                str(folder / row),
                **{**args, "per_device_train_batch_size": rows, "beta": 0.3, **SHARED, **config},
            ),
            train_dataset=preferences(16, 1),
            eval_dataset=preferences(4, 2),
            **options,
        )

    found = {}
    for name, checkpoint in (("through", None), ("resumed", str(folder / row / "checkpoint-2"))):
        if checkpoint is not None and row == "bias" and rank is not None and rank.engine == "fsdp2":
            continue
        trainer = built()
        trainer.train(resume_from_checkpoint=checkpoint)
        if rank is not None:
            rank.check(trainer)
        assert trainer._reference_weights.policy_reference.copies
        logs = trainer.state.log_history
        found[name] = {
            "weights": trained(trainer.model),
            "losses": [log["loss"] for log in logs if "loss" in log],
            "eval_losses": [log["eval_loss"] for log in logs if "eval_loss" in log],
        }
    return found


def on_ranks(rank: Rank, row: str) -> dict[str, Any]:
    return train(rank, row, rank.folder.parent / "tiny", rank.folder, rows=2)


CASES = {row: partial(on_ranks, row=row) for row in ROWS}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one_process(engine, tmp_path):
    workshop = Workshop(tmp_path / "tiny")
    for how, _ in ROWS.values():
        workshop.model(how["model"])
    (tmp_path / engine).mkdir()
    ranks = run_on_ranks(Path(__file__), list(CASES), engine, tmp_path / engine)
    for row in ROWS:
        alone = train(None, row, tmp_path / "tiny", tmp_path / "alone", rows=4)
        torch.testing.assert_close(alone["resumed"]["weights"], alone["through"]["weights"], rtol=0, atol=1e-6)
        for of_rank in ranks[row]:
            for name in of_rank:
                for key, want in alone["through"].items():
                    torch.testing.assert_close(
                        of_rank[name][key], want, rtol=1e-4, atol=2e-5, msg=f"{row} {name} {key}"
                    )
