"""`generation_lag=1` on two ranks: each samples its own rows, and training is that of stock TRL on the same samples."""

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import trl_ext
from lagged_sampling import Logs, OwnSampler, delayed_trainer, even_tokens, rows, short_text, whole_weights
from launch import LaunchedRank, launch
from tiny import Workshop
from trl_ext.distributed.ranks import Ranks
from trl_ext.distributed.thread_messages import ThreadMessages


class DrawsOnOneRank(OwnSampler):
    """Draws from a global generator on the second rank."""

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        if trainer.accelerator.process_index == 1:
            random.random()
        return super().__call__(prompts, trainer)


def train(
    rank: LaunchedRank, subject: str, sampler: type[OwnSampler] = OwnSampler, lag: int = 1, **options: Any
) -> dict[str, Any]:
    """Train; return the losses and the weights.

    Args:
        subject (`str`): "ours", "stock", or "undelayed", which is stock TRL with the current weights.
        lag (`int`): of ours.
    """
    config = {
        "output_dir": str(rank.folder / subject),
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 10,
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam's step is nearly a sign, which turns rounding into a full update
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "seed": 5,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": rank.engine in ("ddp", "fsdp2_native"),
        "model_init_kwargs": {"dtype": "float32", **rank.model_arguments()},
        **rank.training_arguments(),
        **options,
    }
    path = str(rank.folder / "model")
    samples = sampler(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    logs = Logs()
    common = {
        "model": path,
        "reward_funcs": [even_tokens, short_text],
        "train_dataset": rows(),
        "callbacks": [logs],
    }
    if subject == "ours":
        args = trl_ext.GRPOConfig(generation_lag=lag, sample_ahead=None if lag else True, **config)
        trainer = trl_ext.GRPOTrainer(rollout_func=samples, args=args, **common)
    else:
        trainer = delayed_trainer(samples, lag=int(subject == "stock"), args=trl.GRPOConfig(**config), **common)
    start = {name: x.clone() for name, x in whole_weights(trainer).items()}
    trainer.train()
    rank.check(trainer)
    changes = {name: x - start[name] for name, x in whole_weights(trainer).items()}
    return {"losses": [log["loss"] for log in logs.logs], "change": torch.cat([x.flatten() for x in changes.values()])}


def refused(rank: LaunchedRank) -> str:
    with pytest.raises(ValueError, match="not supported here") as caught:
        train(rank, "ours", sampler=DrawsOnOneRank)
    rank.checked = True  # the other cases check the engine
    return str(caught.value)


def send(rank: LaunchedRank) -> tuple[int, str]:
    """Send more than a store of torch's takes at once, then an error; return what has arrived."""
    rank.checked = True
    ranks = Ranks()
    ranks.accelerator = Accelerator(cpu=True)
    messages = ThreadMessages(ranks)
    if rank.index == 0:
        messages.send([[], [list(range(3_000_000))]])
        messages.send_error("the server is gone")
        messages.close()
        return 0, ""
    (ids,) = messages.receive()
    with pytest.raises(RuntimeError) as caught:
        messages.receive()
    with pytest.raises(RuntimeError, match="The first process has ended"):
        messages.receive()
    return sum(ids), str(caught.value)


CASES: dict[str, Any] = {
    f"{subject}-{name}": partial(train, subject=subject, **options)
    for name, options in {"plain": {}, "iterations": {"num_iterations": 2, "steps_per_generation": 4}}.items()
    for subject in ("ours", "stock", "undelayed")
}
SHARED_STEPS = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 2}
EQUAL_CASES = tuple(CASES)
CASES |= {
    "refused": refused,
    "in turn": partial(train, subject="ours", sampler=DrawsOnOneRank, lag=0, **SHARED_STEPS),
    "send": send,
}


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_ranks_train_as_stock_trl_does_on_older_samples(engine: str, workshop: Workshop, tmp_path: Path) -> None:
    shutil.copytree(workshop.model("untied"), tmp_path / "model")
    results = launch(__file__, EQUAL_CASES, engine, tmp_path)
    for name in ("plain", "iterations"):
        for ours, stock in zip(results[f"ours-{name}"], results[f"stock-{name}"], strict=True):
            assert ours["losses"] == pytest.approx(stock["losses"], abs=1e-5)
            assert len(ours["losses"]) == 5
            assert (ours["change"] - stock["change"]).abs().max() < 1e-4 * stock["change"].abs().max()
    control = results["undelayed-plain"][0]["change"]
    assert (results["ours-plain"][0]["change"] - control).abs().max() > 0.1 * control.abs().max()


def test_ranks_agree_not_to_sample_ahead(workshop: Workshop, tmp_path: Path) -> None:
    shutil.copytree(workshop.model("untied"), tmp_path / "model")
    results = launch(__file__, ["refused", "in turn", "send"], "ddp", tmp_path)
    for message in results["refused"]:
        assert "draws from the module `random`" in message
    for run in results["in turn"]:
        assert len(run["losses"]) == 2
    assert results["send"][1] == (sum(range(3_000_000)), "the server is gone")
