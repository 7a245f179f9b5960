"""Train in bf16 with TRL's head, in bf16 with the exact head, and in fp32, from the same seeds.

    python benchmarks/curves.py           # all 504 runs, in two processes: under an hour on two cores
    python benchmarks/curves.py --smoke   # a few steps of each kind of run, in a minute

It goes on where it stopped: a run whose line is in the results folder is left out. Each line has the curves of one run,
the accuracy on held-out problems, and the recipe. `report_curves.py` makes the tables of RESULTS.md from them.

- Arms: `trl_fp32` is the truth, and `ours_fp32` shows how far fp32 rounding alone carries a training. `trl_bf16` and
  `ours_bf16` have the same weights in fp32 and the same bf16 autocast; only their heads differ.
- `on_policy` lines: GRPO trains twice on each batch. The first time, the weights are those that sampled it, so a ratio
  of new to old policy that is not 1 is rounding.
- `head` lines: the distance of log-probs from those of a float64 head on the same hidden states.
"""

import argparse
import gc
import itertools
import json
import logging
import multiprocessing
import sys
import tempfile
import time
import warnings
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import results
import torch
import trl
from curve_tasks import Task, arithmetic, reversal
from datasets import Dataset
from peft import LoraConfig
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

import trl_ext

FOLDER = results.FOLDER / "curves"
ARMS = {
    "trl_fp32": (trl, False),
    "ours_fp32": (trl_ext, False),
    "trl_bf16": (trl, True),
    "ours_bf16": (trl_ext, True),
}
CURVES = {
    "dpo": ("loss", "grad_norm", "rewards/margins"),
    "grpo": ("loss", "grad_norm", "kl", "clip_ratio/region_mean", "reward"),
    "gspo": ("loss", "grad_norm", "kl", "clip_ratio/region_mean", "reward"),
}
# The clip ranges of GRPO, for tokens, and of GSPO (https://huggingface.co/papers/2507.18071), for whole completions
CLIP_RANGES = {"tokens": 0.2, "completions": 3e-4}
GSPO = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4}
SEEDS, WORDS, MANY_WORDS = 10, 1024, 32768


@dataclass(frozen=True)
class Recipe:
    """How a run trains. `rows` are pairs or completions of an optimizer step."""

    steps: int = 40
    rows: int = 64
    learning_rate: float = 1e-3
    beta: float = 0.02
    problems: int = 500  # held-out


@dataclass(frozen=True)
class Job:
    """One run."""

    benchmark: str
    task: str
    method: str
    tuning: str
    arm: str
    seed: int
    recipe: Recipe


NAMES = ("benchmark", "task", "method", "tuning", "arm", "seed")
RECIPES = {
    ("dpo", "lora"): Recipe(rows=32, learning_rate=3e-4, beta=0.5),
    ("dpo", "full"): Recipe(rows=32, learning_rate=1e-4, beta=0.5),
    ("grpo", "lora"): Recipe(learning_rate=1e-3),
    ("grpo", "full"): Recipe(learning_rate=3e-4),
    ("gspo", "lora"): Recipe(learning_rate=1e-3),
    ("gspo", "full"): Recipe(learning_rate=3e-4),
}
SHORT, SMOKE = Recipe(steps=12), Recipe(steps=4, rows=8, problems=10)
# On learning rates: a vocabulary of words has larger gradients than one of digits
OF_REVERSAL = 0.3
# How the base model of the reversal task is trained
BASES = {WORDS: {"steps": 1000, "rows_of_step": 128}, MANY_WORDS: {"steps": 700, "rows_of_step": 48}}


def jobs(seeds: int, smoke: bool) -> list[Job]:
    """Return all runs, in an order in which every arm has the same seeds at any time."""
    words, many = (64, 128) if smoke else (WORDS, MANY_WORDS)
    tasks = ("arithmetic", f"reversal-{words}")
    short, rest = SMOKE if smoke else SHORT, {} if not smoke else dict.fromkeys(RECIPES, SMOKE)
    of_head = [
        Job(benchmark, task, "grpo", "lora", arm, 0, short)
        for benchmark, task, arm in itertools.product(("head", "on_policy"), (*tasks, f"reversal-{many}"), ARMS)
    ]
    of_training = [
        Job("curves", task, *how, arm, seed, rest.get(how, recipe))
        for seed, task, (how, recipe), arm in itertools.product(range(seeds), tasks, RECIPES.items(), ARMS)
    ]
    return [of_task(job) for job in (*of_head, *of_training)]


def of_task(job: Job) -> Job:
    rate = job.recipe.learning_rate * (1.0 if job.task == "arithmetic" else OF_REVERSAL)
    return replace(job, recipe=replace(job.recipe, learning_rate=rate))


def task_of(name: str, folder: Path) -> Task:
    if name == "arithmetic":
        return arithmetic()
    words = int(name.removeprefix("reversal-"))
    return reversal(words, folder, **BASES.get(words, {"steps": 20, "rows_of_step": 16}))


def trainer_of(job: Job, task: Task, folder: str, **options: Any) -> Any:
    """Build the trainer of a job, with `options` of the config in addition."""
    (library, is_bf16), recipe = ARMS[job.arm], job.recipe
    config = {
        "output_dir": folder,
        "max_steps": recipe.steps,
        "per_device_train_batch_size": recipe.rows,
        "learning_rate": recipe.learning_rate,
        "beta": recipe.beta,
        "seed": job.seed,
        "bf16": is_bf16,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options,
    }
    rows = Dataset.from_list(task.pairs if job.method == "dpo" else task.prompts).shuffle(job.seed)
    common = {
        "processing_class": AutoTokenizer.from_pretrained(task.model),
        "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if job.tuning == "lora" else None,
    }
    if job.method == "dpo":
        rows = rows.select(range(min(len(rows), recipe.steps * recipe.rows)))
        config |= {"max_length": 64} | ({} if library is trl else {"reference_store": "off"})
        return library.DPOTrainer(task.model, args=library.DPOConfig(**config), train_dataset=rows, **common)
    config |= {"num_generations": 8, "max_completion_length": task.longest, "num_iterations": 2}
    config |= GSPO if job.method == "gspo" else {}
    args = library.GRPOConfig(**config)
    return library.GRPOTrainer(task.model, reward_funcs=task.reward, args=args, train_dataset=rows, **common)


class Accuracy(TrainerCallback):
    """Measures the accuracy on held-out problems, after half of the steps and at the end."""

    def __init__(self, trainer: Any, task: Task, problems: int) -> None:
        self.trainer, self.task, self.problems = trainer, task, problems
        self.found: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (state.max_steps // 2, state.max_steps):
            random = torch.get_rng_state()
            with tempfile.TemporaryDirectory() as folder:
                self.trainer.model.save_pretrained(folder)
                self.found[state.global_step] = self.task.accuracy(folder, self.problems)
            torch.set_rng_state(random)


def curves_of(job: Job, task: Task, folder: str) -> dict[str, Any]:
    trainer = trainer_of(job, task, folder)
    accuracy = Accuracy(trainer, task, job.recipe.problems)
    trainer.add_callback(accuracy)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    curves = {name: [rounded(log[name]) for log in logs if name in log] for name in CURVES[job.method]}
    return {"curves": curves, "accuracy": accuracy.found}


class Ratios(TorchFunctionMode):
    """Records the log-ratios of new to old policy in TRL's loss: what `_compute_loss` passes to `torch.exp`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []  # log-ratios and mask, `(B, C)`, of each loss

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        if func is torch.exp and frame.f_code.co_name == "_compute_loss":
            self.found.append((args[0].detach(), frame.f_locals["mask"].bool()))
        return func(*args, **(kwargs or {}))


def on_policy_of(job: Job, task: Task, folder: str) -> dict[str, Any]:
    """Return how far ratios are from 1 in the first of two iterations. Without a KL term, each loss has one `exp`."""
    trainer = trainer_of(job, task, folder, beta=0.0)
    trainer.remove_callback(PrinterCallback)
    with Ratios() as ratios:
        trainer.train()
    assert len(ratios.found) == job.recipe.steps
    return outside(ratios.found[::2])


def head_of(job: Job, task: Task, folder: str) -> dict[str, Any]:
    """Return the errors of a head's log-probs of right and wrong answers. Rows stay padded, as in stock TRL."""
    options = {} if ARMS[job.arm][0] is trl else {"padding_free": False, "share_prompts": False}
    trainer = trainer_of(job, task, folder, **options)
    rows = task.pairs[: 8 * job.recipe.rows]
    texts = [(row["prompt"], row[name]) for row in rows for name in ("chosen", "rejected")]
    tokenizer, hidden = trainer.processing_class, []
    ids = [[tokenizer(text)["input_ids"] for text in pair] for pair in texts]
    sides = [[torch.tensor(pair[side]) for pair in ids] for side in (0, 1)]
    padded = [pad_sequence(x, True, padding_side=side) for x, side in zip(sides, ("left", "right"), strict=True)]
    prompt_BP, completion_BC = padded
    ids_BS = torch.cat(padded, dim=1)
    model = trainer.model
    hook = model.get_base_model().model.register_forward_hook(lambda *_: hidden.append(_[-1].last_hidden_state))
    dtype = torch.bfloat16 if ARMS[job.arm][1] else torch.float32
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found_BC = trainer._get_per_token_logps_and_entropies(
            model, ids_BS, (ids_BS != 0).long(), completion_BC.shape[1], compute_entropy=False
        )[0]
    hook.remove()
    hidden_BCH = torch.cat(hidden)[:, prompt_BP.shape[1] - 1 : -1].to(dtype).double()
    weight_VH = model.get_output_embeddings().weight.detach().to(dtype).double()
    exact_BC = (hidden_BCH @ weight_VH.T).log_softmax(-1).gather(-1, completion_BC.unsqueeze(-1)).squeeze(-1)
    return outside([((found_BC - exact_BC).float(), completion_BC != 0)])


def outside(log_ratios: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """Return the largest log-ratio, and the shares of tokens and completions whose ratio is outside the clip range."""
    of_tokens = torch.cat([x[mask] for x, mask in log_ratios]).double()
    of_rows = torch.cat([(x * mask).sum(1) / mask.sum(1) for x, mask in log_ratios]).double()
    shares = {
        name: rounded(((x.exp() - 1).abs() > CLIP_RANGES[name]).double().mean().item())
        for name, x in (("tokens", of_tokens), ("completions", of_rows))
    }
    counts = {"tokens": len(of_tokens), "completions": len(of_rows)}
    return {"largest": rounded(of_tokens.abs().max().item()), "outside": shares, "counts": counts}


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


MEASURES = {"curves": curves_of, "on_policy": on_policy_of, "head": head_of}


def line_of(job: Job, models: Path) -> dict[str, Any]:
    """Run a job on one thread, and return its line."""
    quiet()
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        measured = MEASURES[job.benchmark](job, task_of(job.task, models), folder)
    gc.collect()  # trainers are in cycles, and one process runs hundreds
    took = {"cpu_seconds": round(time.process_time() - begun, 1)}
    return {**asdict(job), **measured, **took, **results.origin("cpu")}


def quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("trl_ext").setLevel(logging.WARNING)
    datasets.disable_progress_bars()
    disable_progress_bar()
    warnings.simplefilter("ignore")  # of libraries; the tests show them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps of one seed, to check that it runs")
    parser.add_argument("--only", default="", help="only runs whose key contains this, such as dpo or reversal")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of each arm")
    parser.add_argument("--budget", type=float, default=3600, help="seconds; runs that would start later are left out")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder to write to, and to go on from")
    parser.add_argument("--models", type=Path, default=Path("runs/curves"), help="folder of the base models")
    chosen = parser.parse_args()
    quiet()
    done = {key_of(line) for line in lines_in(chosen.results)}
    every = [
        job for job in jobs(1 if chosen.smoke else chosen.seeds, chosen.smoke) if chosen.only in key_of(asdict(job))
    ]
    waiting = [job for job in every if key_of(asdict(job)) not in done]
    print(f"{len(every) - len(waiting)} of {len(every)} runs are in {chosen.results}", flush=True)
    end = time.monotonic() + chosen.budget
    for name in dict.fromkeys(job.task for job in waiting):
        task_of(name, chosen.models)  # trains the base models, before two processes need them
    # A fresh interpreter: threads of torch do not survive a fork
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        running: set[Future[dict[str, Any]]] = set()
        while waiting or running:
            if time.monotonic() > end and waiting:
                print(f"left out: {len(waiting)} runs, past the budget of {chosen.budget:g} s; run it again to go on")
                waiting.clear()
            while waiting and len(running) < 2:
                running.add(pool.submit(line_of, waiting.pop(0), chosen.models))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for line in (future.result() for future in finished):
                results.add([line], chosen.results)
                print(*(line[name] for name in NAMES), f"{line['cpu_seconds']} s", flush=True)


def key_of(line: dict[str, Any]) -> str:
    """Return the key of a job or its line: two lines with one key would repeat a run."""
    return json.dumps([line[name] for name in (*NAMES, "recipe")], sort_keys=True)


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for path in sorted(folder.glob("*.jsonl")) for text in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
