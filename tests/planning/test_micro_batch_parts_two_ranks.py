"""Micro-batches in parts on two real ranks: as many forwards on each, one exchange of gradients, the same weights.

The second rank has no live row: alone it would run one forward where the first runs several.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

import trl_ext
from drop_in_cases import GRPO_LOSSES
from metric_table import counts_work
from ranks import Rank, run_on_ranks
from rewards import dead_on_rank_1
from tiny import Workshop, prompts, scripted_rollout
from token_counts import as_of_a_library
from trained_weights import far, trained

STEPS = 3
BUDGET = 20
GENERATIONS = 4


class Watch(TrainerCallback):
    """Counts the training forwards, with their tokens, and what DDP exchanges: the elements of each bucket."""

    def __init__(self) -> None:
        self.forwards: list[int] = []
        self.scored_before: list[int] = []
        self.exchanged: list[int] = []
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        def fed(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            (self.forwards if torch.is_grad_enabled() else self.scored_before).append(inputs[0].numel())

        def exchange(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            self.exchanged.append(bucket.buffer().numel())
            return allreduce_hook(group, bucket)

        model.get_input_embeddings().register_forward_hook(as_of_a_library(fed))
        if isinstance(self.trainer.model_wrapped, DistributedDataParallel):
            self.trainer.model_wrapped.register_comm_hook(None, exchange)


class Scattered(TorchDispatchMode):
    """Counts what FSDP2 exchanges of gradients."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in func.name()
        return func(*args, **(kwargs or {}))


def on_rank(
    rank: Rank, budget: int | None, loss_type: str, accumulation: int, generation: int, **config: Any
) -> dict[str, Any]:
    trainer = trl_ext.GRPOTrainer(
        model=os.environ["TINY_MODEL"],
        reward_funcs=dead_on_rank_1(prompts_of_a_rank=2 * generation),
        rollout_func=scripted_rollout,
        args=trl_ext.GRPOConfig(
            output_dir=str(rank.folder / "grpo"),
            loss_type=loss_type,
            num_generations=GENERATIONS,
            per_device_train_batch_size=2 * GENERATIONS,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=generation,
            max_completion_length=8,
            shuffle_dataset=False,
            max_steps=STEPS,
            optim="sgd",
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            max_tokens_per_micro_batch=budget,
            balance=False,  # otherwise the second rank gets live rows
            **{**GRPO_LOSSES[loss_type], **config},
        ),
        train_dataset=prompts(4 * STEPS * generation, seed=1),
    )
    for scoring in trainer.scoring_forwards:
        scoring.packing.checked = True
        scoring.is_compared = True
    watch = Watch()
    watch.trainer = trainer
    trainer.add_callback(watch)
    initial = trained(trainer.model)
    with Scattered() as scattered:
        trainer.train()
    rank.check(trainer)
    return {
        "change": {name: weight - initial[name] for name, weight in trained(trainer.model).items()},
        "forwards": watch.forwards,
        "scored before": watch.scored_before,
        "exchanged": watch.exchanged,
        "scattered": scattered.count,
        "logs": [{k: v for k, v in log.items() if "time" not in k} for log in trainer.state.log_history[:-1]],
    }


RUNS: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo", "accumulation": 2, "generation": 2},
    "grpo": {"loss_type": "grpo", "accumulation": 1, "generation": 2, "num_iterations": 2},
}
CASES = {
    f"{name}-{what}": partial(on_rank, budget=budget, **run)
    for name, run in RUNS.items()
    for what, budget in (("parts", BUDGET), ("whole", None))
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_ranks_run_as_many_parts_and_exchange_gradients_once(
    engine: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINY_MODEL", workshop.model("untied"))
    results = run_on_ranks(__file__, list(CASES), engine, tmp_path)
    for name in RUNS:
        parts, whole = results[f"{name}-parts"], results[f"{name}-whole"]
        for what in ("forwards", "scored before"):
            assert len(parts[0][what]) == len(parts[1][what]), what
            assert all(tokens <= BUDGET for of_rank in parts for tokens in of_rank[what])
        assert len(parts[0]["forwards"]) > len(whole[0]["forwards"])
        assert max(whole[0]["forwards"]) > BUDGET
        assert set(parts[1]["forwards"]) == {1}  # all its rows are dead
        assert [of_rank["exchanged"] for of_rank in parts] == [of_rank["exchanged"] for of_rank in whole]
        assert bool(whole[0]["exchanged"]) == (engine == "ddp")
        assert [of_rank["scattered"] for of_rank in parts] == [of_rank["scattered"] for of_rank in whole]
        assert bool(whole[0]["scattered"]) == (engine == "fsdp2")
        assert far(parts[1]["change"], parts[0]["change"]) == 0
        assert far(parts[0]["change"], whole[0]["change"]) <= 1e-5
        for got, want in zip(parts[0]["logs"], whole[0]["logs"], strict=True):
            assert got.keys() == want.keys()
            for metric, value in want.items():
                if not counts_work(metric) and not metric.startswith("seconds/"):
                    assert got[metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
