"""Balance of ranks: by simulation, and measured on two gloo ranks.

    python benchmarks/balance.py            # both; 5 minutes
    python benchmarks/balance.py --smoke    # few ranks and rounds: a check that it runs; its times mean nothing

Lines that it writes to benchmarks/results/:

- `balance_simulated`: no model runs. Completions have log-normal lengths (median 400, sigma 0.8, at most 2048
  tokens), 8 for a prompt (median 128, sigma 0.5). `max_over_mean` is the tokens of the rank with the most over
  the mean, in TRL's order and in ours, prompts counted once in each micro-batch; `tokens` is the sum of all
  ranks, ours over TRL's. `planner_ms` is the median time of `row_order`, on one thread. `predicted_step` is the time
  of an optimizer step, ours over TRL's, by the cost model for Qwen3-8B: a prediction, not a measurement. "waits": ranks
  wait for the slowest in each micro-batch (FSDP2, ZeRO); "accumulates": once for each step (DDP).
- `balance_measured`: GRPO on two ranks, of which one samples completions twice as long as the other. Milliseconds from
  the end of the rollout to the end of the optimizer step, at the slower rank; both trainers take turns. `ratio` is
  the median with `balance` over that without: lower is better.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import numpy as np
import results
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from datasets import Dataset
from steps import Shape, common, number_of, policy, text, tokenizer, words
from transformers import PrinterCallback, Qwen3Config, TrainerCallback

import trl_ext
from trl_ext.planning.cost import CostModel
from trl_ext.planning.micro_batches import DEAD, RowTokens, StepRows, _Rows, max_over_mean, row_order

GROUP, REPEATS = 8, 5
# Rows of a micro-batch, and micro-batches of an optimizer step
STEPS = ((64, 1), (8, 8), (8, 1))
RANKS = (2, 4, 8, 16, 32, 64)
QWEN3_8B = Qwen3Config(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)


def drawn(rows: int, ranks: int, dead_share: float, seed: int) -> RowTokens:
    """Return rows as TRL orders them: each rank has whole groups, in random order."""
    draw = np.random.default_rng(seed)
    own = np.minimum(draw.lognormal(np.log(400), 0.8, rows), 2048).astype(int) + 1
    prompts = np.repeat(draw.lognormal(np.log(128), 0.5, rows // GROUP).astype(int) + 1, GROUP)
    numbers = np.repeat(np.where(draw.random(rows // GROUP) < dead_share, DEAD, np.arange(rows // GROUP)), GROUP)
    of_rank = rows // ranks
    order = np.concatenate([draw.permutation(of_rank) + rank * of_rank for rank in range(ranks)])
    return RowTokens(*(x[order].tolist() for x in (numbers, prompts, own, own)))


def predicted(costs: RowTokens, order: list[int], ranks: int, rows: int) -> dict[str, float]:
    """Return the cost of an optimizer step, in the cost model's unit."""
    cost_RM = _Rows.of(costs).of_slices(np.array(order).reshape(-1, rows)).reshape(ranks, -1)
    return {"waits": float(cost_RM.max(axis=0).sum()), "accumulates": float(cost_RM.sum(axis=1).max())}


def simulated(ranks: int, rows: int, together: int, dead_share: float) -> dict[str, Any]:
    step = StepRows(rows, together)
    model, found, times = CostModel.of(QWEN3_8B), [], []
    for seed in range(REPEATS):
        fed = drawn(ranks * rows * together, ranks, dead_share, seed)
        costs, theirs = model.costs(fed), list(range(ranks * rows * together))
        began = time.process_time()
        order = row_order(costs, step, ranks=ranks)
        times.append(1000 * (time.process_time() - began))
        every = _Rows.of(fed)
        tokens = [int(every.of_slices(np.array(x).reshape(-1, rows)).sum()) for x in (theirs, order)]
        steps = [predicted(costs, x, ranks, rows) for x in (theirs, order)]
        found.append(
            (
                *(max_over_mean(fed, x, step, ranks=ranks) for x in (theirs, order)),
                tokens[1] / tokens[0],
                *(steps[1][name] / steps[0][name] for name in ("waits", "accumulates")),
            )
        )
    before, after, tokens_ratio, waits, accumulates = (statistics.median(x) for x in zip(*found, strict=True))
    return {
        "benchmark": "balance_simulated",
        "ranks": ranks,
        "rows": rows,
        "micro_batches": together,
        "dead_share": dead_share,
        "max_over_mean": {"trl": before, "trl_ext": after},
        "tokens": tokens_ratio,
        "predicted_step": {"waits": waits, "accumulates": accumulates},
        "planner_ms": statistics.median(times),
    }


class Timed(TrainerCallback):
    """Measures from the end of the rollout to the end of the optimizer step."""

    began = 0.0

    def __init__(self) -> None:
        self.milliseconds: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()
        self.milliseconds.append(1000 * (time.perf_counter() - self.began))


def trainer_of(shape: Shape, folder: str, balance: bool) -> tuple[Any, Timed]:
    timed, rank = Timed(), int(os.environ["RANK"])

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        step, ids = trainer.state.global_step, []
        for i, prompt in enumerate(prompts):
            seed = number_of(f"{prompt} {i} {step}")
            longest = shape.completion // (2 - rank)  # the second rank's are twice as long
            ids.append([*words(seed, longest // 2 + seed % (longest // 2), shape.vocabulary), 1])
        prompt_ids = trainer.processing_class(list(prompts))["input_ids"]
        dist.barrier()
        timed.began = time.perf_counter()
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    texts = [text(words(number_of(f"prompt {i}"), shape.prompt, shape.vocabulary)) for i in range(64)]
    config = {**common(shape), "per_device_train_batch_size": 8, "num_generations": 8, "beta": 0.0, "max_steps": 1}
    trainer = trl_ext.GRPOTrainer(
        policy(shape),
        reward_funcs=lambda completion_ids, **_: [sum(ids) % 101 / 101 for ids in completion_ids],
        args=trl_ext.GRPOConfig(
            **{**config, "output_dir": folder, "use_cpu": True, "balance": balance, "show_plan": False}
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer(shape.vocabulary),
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(timed)
    return trainer, timed


def _rank(rank: int, ranks: int, port: int, folder: str, shape: Shape) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    # Otherwise accelerate gives each rank a thread on every core
    os.environ.update(MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    subjects = {name: trainer_of(shape, folder, name) for name in (True, False)}
    for _ in range(shape.rounds):
        for trainer, _ in subjects.values():
            trainer.train()
    times = {str(name): timed.milliseconds for name, (_, timed) in subjects.items()}
    ratio = [(log["balance/max_over_mean_before"], log["balance/max_over_mean"]) for log in _logs(subjects[True][0])]
    torch.save((times, ratio[-1]), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _logs(trainer: Any) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "balance/max_over_mean" in log]


def measured(shape: Shape, port: int, warm_up: int) -> dict[str, Any]:
    set_forkserver_preload(["trl_ext"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (2, port, folder, shape), nprocs=2, start_method="forkserver")
        (times, ratio), _ = (torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(2))
    medians = {name: statistics.median(x[warm_up:]) for name, x in times.items()}
    return {
        "benchmark": "balance_measured",
        "ranks": 2,
        "max_over_mean": {"trl": ratio[0], "trl_ext": ratio[1]},
        "milliseconds": {"balance": medians["True"], "without": medians["False"]},
        "rounds": len(times["True"]) - warm_up,
        "ratio": medians["True"] / medians["False"],
    }


def newest(folder: Path = results.FOLDER) -> list[dict[str, Any]]:
    """Return the simulated lines of the newest run."""
    lines = [json.loads(x) for path in sorted(folder.glob("*.jsonl")) for x in path.read_text().splitlines()]
    lines = [x for x in lines if x["benchmark"] == "balance_simulated"]
    return [x for x in lines if x["run"] == lines[-1]["run"]]


def tables(lines: list[dict[str, Any]]) -> str:
    """Return the simulated lines as the two tables of balance.md."""
    ranks = sorted({x["ranks"] for x in lines} - {4, 16})
    of_step: dict[str, list[dict[str, Any]]] = {}
    for x in lines:
        if x["ranks"] in ranks:
            name = f"{x['micro_batches']} x {x['rows']} rows" + (", half zero-advantage" if x["dead_share"] else "")
            of_step.setdefault(name, []).append(x)
    found = []
    for title, entry, first, second in (
        ("Simulated: tokens of the largest rank over the mean, TRL / trl_ext", "max_over_mean", "trl", "trl_ext"),
        ("Predicted: step time over TRL's, FSDP2 / DDP", "predicted_step", "waits", "accumulates"),
    ):
        rows = {
            name: [f"{x[entry][first]:.2f} / {x[entry][second]:.2f}" for x in same] for name, same in of_step.items()
        }
        heads = f"| ranks | {' | '.join(map(str, ranks))} |\n{'|---' * (1 + len(ranks))}|"
        found.append(f"**{title}**\n\n" + "\n".join([heads, *(f"| {x} | {' | '.join(y)} |" for x, y in rows.items())]))
    return "\n\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few ranks and rounds")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder to write to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = RANKS[:2] if arguments.smoke else RANKS
    lines = [simulated(n, *step, dead) for dead in (0.0, 0.5) for step in STEPS for n in ranks]
    print(tables(lines))
    shape = Shape(256, 4, 4096, prompt=32, completion=512, steps=1, rounds=12)
    if arguments.smoke:
        shape = Shape(32, 1, 97, prompt=4, completion=16, steps=1, rounds=2)
    line = measured(shape, 29500 + os.getpid() % 1000, warm_up=1 if arguments.smoke else 2)
    print(line)
    run = {"run": results.new_run()}
    print(results.add([{**x, **run, **results.origin("cpu")} for x in (*lines, line)], arguments.results))


if __name__ == "__main__":
    main()
