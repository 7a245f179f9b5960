"""The store of a teacher's hidden states on two ranks: no teacher pass in later epochs and runs, and equal losses."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import trl_ext
from launch import LaunchedRank, launch
from matrix_rows import MODELS, save_models
from tiny import preferences, word_tokenizer
from token_counts import counted, total


def train(rank: LaunchedRank, store: str) -> dict[str, Any]:
    init = {"dtype": "float32", **rank.model_arguments()}
    data = preferences(16, seed=2).rename_column("chosen", "answer").remove_columns("rejected")
    config = trl_ext.DistillationConfig(
        output_dir=str(rank.folder / f"run-{store}"),
        **{
            "model_init_kwargs": init,
            "teacher_model_init_kwargs": init,
            "per_device_train_batch_size": 4,
            "max_completion_length": 8,
            "max_steps": 4,
            "logging_steps": 1,
            "optim": "sgd",
            "learning_rate": 0.1,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **rank.training_arguments(),
        },
        completion_column="answer",
        teacher_store="off" if store == "off" else "disk",
        teacher_store_dir=None if store == "off" else str(rank.folder / "store"),
    )
    trainer = trl_ext.DistillationTrainer(
        str(rank.folder / "few"), teacher_model=str(rank.folder / "teacher"), args=config, train_dataset=data
    )
    for forward in trainer.scoring_forwards:
        forward.packing.checked = forward.is_compared = True
    with counted() as counts:
        trainer.train()
    rank.check(trainer)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {"losses": losses, "tokens": total(counts.without), "loaded": trainer.teacher_model is not None}


CASES = {store: partial(train, store=store) for store in ("off", "first", "later")}


@pytest.mark.parametrize(
    "engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("zero3", marks=pytest.mark.slow)]
)
def test_ranks_read_what_other_ranks_have_stored(engine: str, tmp_path: Path) -> None:
    save_models(tmp_path)
    torch.manual_seed(99)
    AutoModelForCausalLM.from_config(MODELS["few"]).save_pretrained(tmp_path / "teacher")
    word_tokenizer().save_pretrained(tmp_path / "teacher")
    results = launch(__file__, list(CASES), engine, tmp_path)
    off, first, later = (results[store] for store in CASES)
    tokens = [sum(rank["tokens"] for rank in ranks) for ranks in (off, first, later)]
    assert 0 < tokens[1] <= tokens[0] / 2
    assert tokens[2] == 0
    assert not any(rank["loaded"] for rank in later)
    assert first[0]["losses"] == later[0]["losses"]
    assert first[0]["losses"] == pytest.approx(off[0]["losses"], rel=1e-5)
