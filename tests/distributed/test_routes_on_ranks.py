"""Router replay on two ranks: rows take their routes to other ranks, and sharded models use each known route."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lagged_sampling import whole_weights
from launch import LaunchedRank, launch
from scripted_routes import EXPERTS, ScriptedSampler, forwards_of, make_trainer, missing_routes, saved_model
from watched_routes import watch_routes

SHARDED = ("fsdp2", "fsdp2_native", "zero3")


def trainer_on(rank: LaunchedRank, name: str, **options: Any) -> Any:
    init = {"dtype": "float32", **rank.model_arguments()}
    common = {
        **{"use_cpu": rank.engine in ("ddp", "fsdp2_native"), "dataloader_pin_memory": False},
        **{"per_device_train_batch_size": 4, "max_steps": 2, "model_init_kwargs": init, "optim": "sgd"},
        **{"learning_rate": 0.1, "router_aux_loss_coef": 0.0},
        **rank.training_arguments(),
    }
    return make_trainer("GRPO", rank.folder / name, str(rank.folder / "model"), **{**common, **options})


def use(rank: LaunchedRank, **options: Any) -> dict[str, Any]:
    """Train on scripted routes; return the rows that this rank sampled, and those of each forward that trained."""
    sampler = ScriptedSampler()
    trainer = trainer_on(rank, "use", replay_routes="sampler", rollout_func=sampler, **options)
    with watch_routes(rank_model(trainer)) as watched:
        trainer.train()
    rank.check(trainer)
    sampled = [row for rows in sampler.rows for row in rows]
    all_rows = [row for rows in trainer._ranks.gather_objects(sampled) for row in rows]
    forwards = [x for x in forwards_of(watched.calls, 2) if x[0].has_gradients or x[0].in_backward]
    trained = [[row for row in all_rows if not missing_routes(forward, [row])] for forward in forwards]
    known = [{tuple(row[: place + 1]) for row in rows for place in range(len(row) - 1)} for rows in trained]
    tokens = [forward[0].tokens for forward in forwards]
    return {"sampled": sampled, "trained": trained, "complete": [*map(len, known)] == tokens}


def rank_model(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model)


def train(rank: LaunchedRank, source: str | None, **options: Any) -> dict[str, Any]:
    trainer = trainer_on(rank, f"train-{source}", replay_routes=source, **options)
    start = {name: x.clone() for name, x in whole_weights(trainer).items()} if rank.engine != "zero3" else {}
    trainer.train()
    rank.check(trainer)
    logs = trainer.state.log_history
    return {
        "losses": [log["loss"] for log in logs if "loss" in log],
        "norms": [log["grad_norm"] for log in logs if "grad_norm" in log],
        "differing": [log["routes/differing"] for log in logs if "routes/differing" in log],
        "change": [x - start[name] for name, x in whole_weights(trainer).items()] if start else [],
    }


CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ITERATIONS = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.5}
CASES: dict[str, Any] = {
    "balanced": partial(use, gradient_accumulation_steps=2),
    "checkpointed": partial(use, **CHECKPOINTED),
    "sampler": partial(train, source="sampler"),
    "None": partial(train, source=None),
    "old_policy": partial(train, source="old_policy", **ITERATIONS),
}


@pytest.mark.parametrize("engine", ["ddp", *(pytest.param(engine, marks=pytest.mark.slow) for engine in SHARDED)])
def test_ranks_use_the_routes_of_their_rows(engine: str, tmp_path: Path) -> None:
    saved_model(tmp_path / "model", experts=EXPERTS)
    results = launch(__file__, list(CASES), engine, tmp_path)
    for name in ("balanced", "checkpointed"):
        sampled = sorted(tuple(row) for rank in results[name] for row in rank["sampled"])
        trained = sorted(tuple(row) for rank in results[name] for rows in rank["trained"] for row in rows)
        copies = 2 if name == "checkpointed" else 1  # the recompute runs the rows again
        assert all(rank["complete"] for rank in results[name])
        assert set(trained) == set(sampled)
        assert len(trained) == copies * len(sampled)
    moved = [{tuple(row) for rows in rank["trained"] for row in rows} for rank in results["balanced"]]
    own = [{tuple(row) for row in rank["sampled"]} for rank in results["balanced"]]
    assert moved != own
    for ours, plain in zip(results["sampler"], results["None"], strict=True):
        assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-6)
        assert ours["norms"] == pytest.approx(plain["norms"], abs=1e-5)
        assert max(ours["differing"]) == 0.0
        for change, plain_change in zip(ours["change"], plain["change"], strict=True):
            assert (change - plain_change).abs().max() <= 1e-6
    # The second iteration replays what the first chose with other weights
    assert results["old_policy"][0]["differing"][-1] > 0.0
    assert torch.isfinite(torch.tensor(results["old_policy"][0]["losses"])).all()
