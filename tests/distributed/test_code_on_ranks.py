"""Code of the user on two ranks, or on one of them, trains as in stock TRL: callbacks, overrides, changes, noise.

All rows of rank 1 have zero advantage, so that only the plan makes the ranks run the same collectives.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import TrainerCallback

import trl_ext
from drop_in_cases import Case
from ranks import Rank, run_on_ranks
from rewards import REWARDS, dead_on_rank_1
from run_losses import Record, Trainers, build
from tiny import Workshop
from trained_weights import far

REWARDS["dead_on_rank_1"] = dead_on_rank_1(prompts_of_a_rank=2)
TOLERANCE = 1e-5
Change = Callable[[Any, list[Any]], None]  # of a trainer, with the readings of its code
# An optimizer step takes a generation batch, or half of one
ALIGNED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
MISALIGNED = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
ITERATIONS = {"num_iterations": 2}


def case(trainer: str = "grpo", setup: str = "full", **config: Any) -> Case:
    if trainer in ("grpo", "rloo"):
        config = {"beta": 0.0, "shuffle_dataset": False, **config}
    return Case(
        "ranks", trainer, setup, "tied", config, ours={}, rewards=("dead_on_rank_1",), steps=4, learning_rate=0.02
    )


def mean_of(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: mean_of(value) for name, value in sorted(x.items())}
    return x.detach().double().mean().item() if isinstance(x, torch.Tensor) else x


class ReadsBuffer(TrainerCallback):
    def __init__(self, trainer: Any, seen: list[Any]) -> None:
        self.trainer = trainer
        self.seen = seen

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        batches = self.trainer._buffered_inputs
        self.seen.append([mean_of(batch) for batch in batches])


def with_reader(trainer: Any, seen: list[Any]) -> None:
    trainer.add_callback(ReadsBuffer(trainer, seen))


class AddsReader(TrainerCallback):
    """Adds a reader after the second step."""

    def __init__(self, trainer: Any, seen: list[Any]) -> None:
        self.trainer = trainer
        self.add = partial(with_reader, trainer, seen)

    def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.add()


def with_late_reader(trainer: Any, seen: list[Any]) -> None:
    trainer.add_callback(AddsReader(trainer, seen))


def wrapped(name: str) -> Change:
    """Put a function around a method, as a profiler does."""

    def change(trainer: Any, seen: list[Any]) -> None:
        method = getattr(trainer, name)

        def recorded(*positional: Any, **keywords: Any) -> Any:
            result = method(*positional, **keywords)
            seen.append(mean_of(result))
            return result

        setattr(trainer, name, recorded)

    return change


def with_loss_that_reads(trainer: Any, seen: list[Any]) -> None:
    method = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *positional: Any, **keywords: Any) -> Any:
        loss = method(model, inputs, *positional, **keywords)
        old = inputs.get("old_per_token_logps", inputs.get("old_logps"))
        seen.append(mean_of(old))
        return loss if old is None else loss * (1 - old.mean() / 20)

    trainer.compute_loss = compute_loss


def with_repeated_rows(trainer: Any, seen: list[Any]) -> None:
    method = trainer._prepare_inputs

    def prepare(batch: Any) -> Any:
        batch = method(batch)
        rows = batch["completion_mask"].sum(1).topk(len(batch["advantages"]) // 2).indices.repeat(2)
        return {name: x[rows] if getattr(x, "ndim", 0) else x for name, x in batch.items()}

    trainer._prepare_inputs = prepare


def noisy(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 0.1 * torch.randn_like(output) if module.training else output


def with_noise(trainer: Any, seen: list[Any]) -> None:
    trainer.model.get_input_embeddings().register_forward_hook(noisy)


class Sets(TrainerCallback):
    """Sets attributes of the trainer after the second step."""

    def __init__(self, trainer: Any, values: dict[str, Any]) -> None:
        self.trainer = trainer
        self.values = values

    def on_step_end(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            vars(self.trainer).update(self.values)


def sets(**values: Any) -> Change:
    return lambda trainer, seen: trainer.add_callback(Sets(trainer, values))


def nothing(trainer: Any, seen: list[Any]) -> None:
    pass


BOTH, FIRST = (0, 1), (0,)
# Name -> case, change, the ranks that make it
TABLE: dict[str, tuple[Case, Change, tuple[int, ...]]] = {
    "reader-on-main": (case(**ALIGNED), with_reader, FIRST),
    "reader-on-main-misaligned": (case(**MISALIGNED, **ITERATIONS), with_reader, FIRST),
    "late-reader-on-main": (case(**ALIGNED), with_late_reader, FIRST),
    "rloo-reader-on-main": (case("rloo", **ALIGNED), with_reader, FIRST),
    "wrapped-generation-on-main": (case(**ALIGNED), wrapped("_generate_and_score_completions"), FIRST),
    "wrapped-loss-on-main": (case(**ALIGNED, **ITERATIONS), wrapped("compute_loss"), FIRST),
    "dpo-wrapped-step-on-main": (case("dpo", gradient_accumulation_steps=2), wrapped("training_step"), FIRST),
    "noise-on-main": (case(**ALIGNED), with_noise, FIRST),
    "dpo-noise-on-main": (case("dpo", "lora"), with_noise, FIRST),
    "loss-reads": (case(**ITERATIONS), with_loss_that_reads, BOTH),
    "loss-reads-misaligned": (case(**MISALIGNED), with_loss_that_reads, BOTH),
    "rloo-loss-reads": (case("rloo"), with_loss_that_reads, BOTH),
    "repeated-rows": (case(**MISALIGNED), with_repeated_rows, BOTH),
    "reader": (case(**MISALIGNED, **ITERATIONS), with_reader, BOTH),
    "loss-type": (case(**ALIGNED), sets(loss_type="bnpo"), BOTH),
    "more-iterations": (case(), sets(num_iterations=2), BOTH),
    "kl": (case(setup="lora"), sets(beta=0.1), BOTH),
    "rloo-neftune": (case("rloo", neftune_noise_alpha=5.0), nothing, BOTH),
    "neftune": (case(**ITERATIONS, neftune_noise_alpha=5.0), nothing, BOTH),
    "dpo-noise": (case("dpo", "lora"), with_noise, BOTH),
}
FAST = ("reader-on-main", "dpo-noise")


def trained(rank: Rank, name: str, library: Any) -> dict[str, Any]:
    of, change, on_ranks = TABLE[name]
    record, seen = Record(), []
    workshop, folder = Workshop(Path(os.environ["TINY_ROOT"])), str(rank.folder / f"{name}-{library.__name__}")
    of = replace(of, config={**of.config, "use_cpu": False, "ddp_timeout": 30})
    trainer = build(of, Trainers.of(library), workshop, folder, record)
    if rank.index in on_ranks:
        change(trainer, seen)
    trainer.train()
    rank.check(trainer)
    return {"updates": record.updates, "seen": seen, "losses": [x["loss"] for x in record.logs if "loss" in x]}


CASES = {
    f"{library.__name__}: {name}": partial(trained, name=name, library=library)
    for name in TABLE
    for library in (trl, trl_ext)
}


# Name -> case, a change that only the first rank makes, the error
REFUSED: dict[str, tuple[Case, Change, str]] = {
    "loss-type": (case(**ALIGNED), sets(loss_type="bnpo"), "`loss_type` is 'bnpo' on rank 0 and 'dapo' on rank 1"),
    "iterations": (case(), sets(num_iterations=2), "`num_iterations` is 2 on rank 0 and 1 on rank 1"),
    "kl": (case(setup="lora"), sets(beta=0.1), "`beta` is 0.1 on rank 0 and 0.0 on rank 1"),
    "rloo-kl": (case("rloo", "lora"), sets(beta=0.1), "`beta` is 0.1 on rank 0 and 0.0 on rank 1"),
    "noise-in-parts": (case(max_tokens_per_micro_batch=64), with_noise, "`max_tokens_per_micro_batch=64` is not"),
    "dpo-losses": (case("dpo"), sets(loss_types=["hinge"]), "`loss_types` is ('hinge',) on rank 0"),
}


def refused(rank: Rank, name: str) -> str:
    TABLE[name] = (*REFUSED[name][:2], FIRST)
    try:
        trained(rank, name, trl_ext)
    except ValueError as error:
        rank.checked = True
        return str(error)
    raise AssertionError("The ranks trained with different values.")


CASES |= {f"refused: {name}": partial(refused, name=name) for name in REFUSED}


def assert_same_readings(ours: Any, stock: Any) -> None:
    if isinstance(stock, list):
        assert len(ours) == len(stock)
        for mine, theirs in zip(ours, stock, strict=True):
            assert_same_readings(mine, theirs)
    elif isinstance(stock, dict):
        assert ours.keys() == stock.keys()
        for key in stock:
            assert_same_readings(ours[key], stock[key])
    else:
        assert ours == (None if stock is None else pytest.approx(stock, rel=1e-4, abs=1e-4))


def assert_as_trl(names: list[str], workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.model("tied")
    monkeypatch.setenv("TINY_ROOT", str(workshop.root))
    cases = [f"{library}: {name}" for name in names for library in ("trl", "trl_ext")]
    found = run_on_ranks(__file__, cases, "ddp", tmp_path, timeout=540)
    wrong = {}
    for name in names:
        for rank, (ours, stock) in enumerate(zip(found[f"trl_ext: {name}"], found[f"trl: {name}"], strict=True)):
            distance = far(ours["updates"], stock["updates"])
            if not distance <= TOLERANCE or ours["losses"] != pytest.approx(stock["losses"], rel=1e-4, abs=1e-5):
                wrong[name, rank] = distance, ours["losses"], stock["losses"]
            assert_same_readings(ours["seen"], stock["seen"])
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


@pytest.mark.parametrize(
    "names", [FAST, pytest.param([x for x in TABLE if x not in FAST], marks=pytest.mark.slow, id="others")]
)
def test_code_on_ranks_trains_as_in_trl(
    names: list[str], workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_as_trl(list(names), workshop, tmp_path, monkeypatch)


@pytest.mark.slow
def test_ranks_that_change_apart_stop_with_one_error(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.model("tied")
    monkeypatch.setenv("TINY_ROOT", str(workshop.root))
    found = run_on_ranks(__file__, [f"refused: {name}" for name in REFUSED], "ddp", tmp_path)
    for name, (_, _, error) in REFUSED.items():
        first, second = found[f"refused: {name}"]
        assert first == second
        assert error in first
