"""Two gloo ranks train as stock TRL does on two, under DDP and FSDP2, and the launcher notices failures."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

import trl_ext
from ranks import Rank, run_on_ranks
from run_losses import Trainers
from tiny import Workshop, lora_config, preferences
from trained_weights import far, trained


def dpo(rank: Rank, trainers: Trainers, lora: bool, **config: Any) -> dict[str, torch.Tensor]:
    """Train two steps of DPO; return the change of the trained weights, gathered."""
    torch.manual_seed(0)
    trainer = trainers.dpo_trainer(
        model=os.environ["TINY_MODEL"],
        args=trainers.dpo_config(
            output_dir=str(rank.folder / "dpo"),
            per_device_train_batch_size=2,
            max_steps=2,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **config,
        ),
        train_dataset=preferences(12, seed=1),
        peft_config=lora_config() if lora else None,
    )
    initial = trained(trainer.model)
    trainer.train()
    rank.check(trainer)
    return {name: weight - initial[name] for name, weight in trained(trainer.model).items()}


def refused_under_fsdp2(rank: Rank) -> None:
    with pytest.raises(ValueError, match=r"reference_device='cpu'.* FSDP"):
        dpo(rank, Trainers.of(trl_ext), lora=False, reference_device="cpu")
    dpo(rank, Trainers.of(trl_ext), lora=False)  # which checks the engine


def fail_on_rank_1(rank: Rank) -> None:
    if rank.index == 1:
        raise ValueError("this rank cannot")
    time.sleep(600)


def hang_on_rank_1(rank: Rank) -> None:
    torch.distributed.init_process_group("gloo")
    if rank.index == 1:
        time.sleep(600)
    torch.distributed.barrier()


CASES = {
    "dpo-lora-ours": partial(dpo, trainers=Trainers.of(trl_ext), lora=True),
    "dpo-lora-stock": partial(dpo, trainers=Trainers.of(trl), lora=True),
    "dpo-lora-wrong": partial(dpo, trainers=Trainers.of(trl_ext).with_loss_times(1.001), lora=True),
    "dpo-hosted-ours": partial(dpo, trainers=Trainers.of(trl_ext), lora=False, reference_device="cpu"),
    "dpo-full-stock": partial(dpo, trainers=Trainers.of(trl), lora=False),
    "hosted-refused": refused_under_fsdp2,
    "fail": fail_on_rank_1,
    "hang": hang_on_rank_1,
    "unchecked": lambda rank: None,
}


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_ranks_end_with_stock_trls_weights(
    engine: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    cases = ["dpo-lora-ours", "dpo-lora-stock", "dpo-lora-wrong"]
    cases += ["dpo-hosted-ours", "dpo-full-stock"] if engine == "ddp" else ["hosted-refused"]
    results = run_on_ranks(__file__, cases, engine, tmp_path)
    ours, stock, wrong = (results[case] for case in cases[:3])
    assert far(ours[1], ours[0]) == far(stock[1], stock[0]) == 0
    assert far(ours[0], stock[0]) <= 1e-5
    assert far(wrong[0], stock[0]) > 1e-4
    if engine == "ddp":
        hosted, full = results["dpo-hosted-ours"], results["dpo-full-stock"]
        assert far(hosted[1], hosted[0]) == 0
        assert far(hosted[0], full[0]) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("fail", r"(?s)rank1 failed first.*fail_on_rank_1.*ValueError: this rank cannot"),
        ("hang", r"(?s)The ranks hang.*stack of rank 0.*barrier.*stack of rank 1.*hang_on_rank_1"),
        ("unchecked", "did not show its trainer"),
    ],
)
def test_the_launcher_names_the_failure(case: str, words: str, tmp_path: Path):
    with pytest.raises(AssertionError, match=words):
        run_on_ranks(__file__, [case], "ddp", tmp_path, timeout=40)
