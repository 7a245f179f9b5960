"""GRPO on two ranks, one of them with dead groups only, does not hang and equals one process and stock TRL."""

import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import TrainerCallback

import trl_ext
from drop_in_cases import GRPO_LOSSES
from ranks import Rank, run_on_ranks
from rewards import dead_on_rank_1
from tiny import Workshop, prompts, scripted_rollout
from trained_weights import far, trained

GENERATIONS = 4
STEPS = 5
LIBRARIES = {"ours": trl_ext, "stock": trl}
OPTIMIZERS = {"sgd": 1e-2, "adamw_torch": 1e-3}  # and their learning rates
TOLERANCE = 1e-4


class TokenCounts(TrainerCallback):
    """Counts the rows at the input embedding in each training forward."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, output: self.rows.append(len(args[0])) if torch.is_grad_enabled() else None
        )


def grpo(
    folder: Path, library: str, loss_type: str, optimizer: str, accumulation: int, processes: int = 2, **config: Any
) -> tuple[Any, dict[str, torch.Tensor], list[int]]:
    """Train on the same rollouts on any number of processes; return trainer, change of weights, and rows processed."""
    trainers = LIBRARIES[library]
    trainer = trainers.GRPOTrainer(
        model=os.environ["TINY_MODEL"],
        reward_funcs=dead_on_rank_1(prompts_of_a_rank=accumulation),
        rollout_func=scripted_rollout,
        args=trainers.GRPOConfig(
            output_dir=str(folder / "grpo"),
            # So that a forward shows its rows, and dead rows stay on their rank
            **({"padding_free": False, "balance": False} if trainers is trl_ext else {}),
            loss_type=loss_type,
            num_generations=GENERATIONS,
            per_device_train_batch_size=2 * GENERATIONS // processes,
            gradient_accumulation_steps=accumulation,
            max_completion_length=8,
            shuffle_dataset=False,
            max_steps=STEPS,
            optim=optimizer,
            learning_rate=OPTIMIZERS[optimizer],
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **{**GRPO_LOSSES[loss_type], **config},
        ),
        train_dataset=prompts(2 * STEPS * accumulation, seed=1),
    )
    fed = TokenCounts()
    trainer.add_callback(fed)
    initial = trained(trainer.model)
    trainer.train()
    return trainer, {name: weight - initial[name] for name, weight in trained(trainer.model).items()}, fed.rows


def on_rank(rank: Rank, library: str, loss_type: str, optimizer: str, accumulation: int) -> dict[str, Any]:
    trainer, change, rows = grpo(rank.folder, library, loss_type, optimizer, accumulation)
    rank.check(trainer)
    return {"change": change, "rows": rows}


# Loss type, optimizer, micro-batches in a step
FAST = [("grpo", "sgd", 1), ("grpo", "adamw_torch", 2), ("dapo", "sgd", 2), ("dapo", "adamw_torch", 1)]
REST = [(loss, name, 1 + i % 2) for i, (loss, name) in enumerate(product(list(GRPO_LOSSES)[1:], OPTIMIZERS))]
CASES = {
    "-".join(map(str, (library, *run))): partial(
        on_rank, library=library, loss_type=run[0], optimizer=run[1], accumulation=run[2]
    )
    for library in LIBRARIES
    for run in (*FAST, *REST)
}


@pytest.mark.parametrize(
    ("engine", "runs"),
    [
        pytest.param("ddp", FAST, marks=pytest.mark.slow),
        pytest.param("ddp", [run for run in REST if run not in FAST], marks=pytest.mark.slow),
        pytest.param("fsdp2", FAST, marks=pytest.mark.slow),
    ],
    ids=["ddp", "ddp-rest", "fsdp2"],
)
def test_weights_are_stock_trls_and_those_of_one_process(
    engine: str,
    runs: list[tuple[str, str, int]],
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    names = {run: "-".join(map(str, run)) for run in runs}
    results = run_on_ranks(
        __file__, [f"{library}-{name}" for name in names.values() for library in LIBRARIES], engine, tmp_path
    )
    wrong = {}
    for run, name in names.items():
        ours, stock = results[f"ours-{name}"], results[f"stock-{name}"]
        micro_batches = STEPS * run[2]
        assert [of_rank["rows"] for of_rank in stock] == [[GENERATIONS] * micro_batches] * 2
        assert [of_rank["rows"] for of_rank in ours] == [[GENERATIONS] * micro_batches, [1] * micro_batches]
        distances = {
            "ranks": far(ours[1]["change"], ours[0]["change"]),
            "stock": far(ours[0]["change"], stock[0]["change"]),
        }
        if run[0] != "bnpo":  # which divides by each rank's own number of tokens
            _, alone, rows = grpo(tmp_path, "stock", *run, processes=1, use_cpu=True)
            assert rows == [2 * GENERATIONS] * micro_batches
            distances["one process"] = far(ours[0]["change"], alone)
        wrong[name] = {what: distance for what, distance in distances.items() if not distance <= TOLERANCE}
    assert not any(wrong.values()), wrong
