"""Measure what feeding no padding, and no prompt twice, saves of training steps, beside stock TRL's.

    python benchmarks/packing.py           # small models on the CPU, about 10 minutes; a 0.6 B shape on one GPU
    python benchmarks/packing.py --smoke   # tiny ones: that it runs; its times say nothing

Every line it writes to benchmarks/results/packing-<date>-<device>.jsonl has a ratio, of which more is better, and the
`goal` that it is held to, where it has one. On the CPU it takes one thread, and times by the process's own time. Kinds:

- `step`: optimizer steps of stock TRL and of ours, which take turns, on the same model, data and seed; the first steps
  of each run are left out. `training_ms` is the median of a step without what prepares its batch (rollout, rewards, old
  policy), `step_ms` with it; `ratio` is stock's training_ms over ours. `tokens` entered the models (padding included),
  by a hook on the input embedding. `peak_mib`: the most memory allocated, on CUDA. On the CPU stock's head scores every
  position of the batch and ours those with a label, which flatters us where the head weighs much: beside it stands
- `backbone`: forward and backward of the model without its head, on one micro-batch, padded and as one row.
- `nothing to share`: ours with `padding_free=False` and with True, on full rows that have nothing in common: what the
  packing costs where it has nothing to save. Forward and backward with the head, for 8 successive lengths; the two take
  turns.
"""

import argparse
import dataclasses
import gc
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from peft import LoraConfig
from steps import GROUP, Shape, StepTimes, dpo, grpo, now, policy, quiet, write
from torch import Tensor
from transformers import PrinterCallback

import trl_ext
from trl_ext.scoring import ScoringOptions, attach_scoring_forward

GRPO = Shape(hidden=256, layers=4, vocabulary=1024, prompt=512, completion=64, steps=4, rounds=2, ragged=True)
DPO = dataclasses.replace(GRPO, prompt=384, completion=128, steps=5)
SMOKE = Shape(hidden=32, layers=1, vocabulary=64, prompt=8, completion=4, steps=3, rounds=1, ragged=True)
# Qwen3-0.6B's
GPU = Shape(
    hidden=1024,
    layers=28,
    vocabulary=151936,
    prompt=1024,
    completion=1024,
    steps=4,
    rounds=2,
    heads=16,
    kv_heads=8,
    head_size=128,
    ragged=True,
)
# That each subject is fed in a comparison of calls; and how many calls that is at least and at most
TOKENS, FEWEST, MOST = 50_000, 3, 40
# (rows, tokens of a row)
FULL_ROWS = ((1, 576), (4, 576), (8, 576), (1, 64), (8, 64))
SMOKE_ROWS = ((1, 8), (2, 8))


@dataclass(frozen=True)
class Case:
    """A training that TRL's users run."""

    name: str
    trainer: str
    shape: Shape
    config: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)  # of our config alone
    lora: bool = False
    goal: float | None = None


FOUR_GROUPS = {"per_device_train_batch_size": GROUP, "gradient_accumulation_steps": 4}
ONE_GROUP = {"per_device_train_batch_size": GROUP}
CPU_CASES = (
    Case("grpo, 4 groups, rows shuffled as by TRL", "grpo", GRPO, FOUR_GROUPS, {"keep_groups_together": False}),
    # True: the benchmark's clock stands in `_prepare_inputs`, and only reads
    Case("grpo, 4 groups, groups kept together", "grpo", GRPO, FOUR_GROUPS, {"keep_groups_together": True}, goal=3.0),
    Case("grpo, 1 group, no accumulation", "grpo", GRPO, ONE_GROUP, goal=3.0),
    Case("dpo", "dpo", DPO, {"per_device_train_batch_size": 4}, {"reference_store": "off"}, goal=1.5),
)
LORA_CONFIG = {**ONE_GROUP, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
GPU_CASES = (Case("grpo, 0.6 B, bf16, LoRA, checkpointing", "grpo", GPU, LORA_CONFIG, lora=True, goal=2.5),)


def trainer_of(library: Any, case: Case, folder: str) -> Any:
    config = case.config | (case.ours if library is trl_ext else {})
    if case.trainer == "dpo":
        pairs = config["per_device_train_batch_size"] * case.shape.steps
        return dpo(library, case.shape, folder, config, pairs=pairs)
    model, options = policy(case.shape), {}
    if case.lora:
        model = model.bfloat16()
        options["peft_config"] = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)
    return grpo(library, case.shape, folder, config, model=model, **options)


def run(library: Any, case: Case) -> StepTimes:
    gc.collect()  # the trainer before this one is no part of its peak
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(library, case, folder)
        times.watch(trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return times


def steps(case: Case) -> dict[str, Any]:
    """A line of kind `step`."""
    subjects = {"trl": trl, "trl_ext": trl_ext}
    runs: dict[str, list[StepTimes]] = {name: [] for name in subjects}
    for _ in range(case.shape.rounds):
        for name, library in subjects.items():
            runs[name].append(run(library, case))

    def median(times: Callable[[StepTimes], list[float]]) -> dict[str, float]:
        return {name: statistics.median(x for run in runs[name] for x in times(run)) for name in subjects}

    training_ms = median(lambda run: run.training_milliseconds)
    return {
        "kind": "step",
        "case": case.name,
        "ratio": training_ms["trl"] / training_ms["trl_ext"],
        "goal": case.goal,
        "training_ms": training_ms,
        "step_ms": median(lambda run: run.milliseconds),
        "tokens": {name: runs[name][-1].counts["tokens"] for name in subjects},
        "peak_mib": {name: runs[name][-1].peak_mib for name in subjects},
        "shape": dataclasses.asdict(case.shape),
    }


def grpo_batch(shape: Shape, prompts: list[int], seed: int) -> dict[str, Tensor]:
    """Rows with these prompts and completions of 1 token to the longest, as TRL's GRPO trainer feeds them."""
    generator = torch.Generator().manual_seed(seed)
    rows, P, C = len(prompts), shape.prompt, shape.completion
    prompt_ids = torch.randint(3, shape.vocabulary, (max(prompts) + 1, P), generator=generator)[prompts]
    lengths = torch.randint(1, C + 1, (rows, 1), generator=generator)
    real = torch.arange(C) < lengths
    completion_ids = torch.randint(3, shape.vocabulary, (rows, C), generator=generator) * real
    mask = torch.cat([torch.ones(rows, P, dtype=torch.bool), real], dim=1)
    scored = torch.cat([torch.zeros(rows, P, dtype=torch.bool), real], dim=1)
    ids = torch.cat([prompt_ids, completion_ids], dim=1)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~scored, -100)}


def backbone(shape: Shape, name: str, prompts: list[int]) -> dict[str, Any]:
    """A line of kind `backbone`."""
    model = policy(shape).train()
    packing = attach_scoring_forward(model, ScoringOptions()).packing
    packing.checked = True
    batch = grpo_batch(shape, prompts, seed=1)
    predicts_BS = torch.nn.functional.pad(batch.pop("labels")[:, 1:] != -100, (0, 1))
    batch = {**batch, "use_cache": False}  # type: ignore[dict-item]

    def padded() -> Tensor:
        return model.base_model(**batch).last_hidden_state[predicts_BS]

    def packed() -> Tensor:
        layout = packing.layout(model, (), batch, predicts_BS, share=True)
        assert layout is not None
        return packing.run(model, layout, batch).last_hidden_state[0, layout.at_BS[predicts_BS]]

    def step(hidden_of: Callable[[], Tensor]) -> None:
        model.zero_grad(set_to_none=True)
        hidden_of().square().mean().backward()

    subjects = {"padded": partial(step, padded), "packed": partial(step, packed)}
    ratio, medians, tokens = compared(model, subjects, 2 if shape is SMOKE else 12)
    return {"kind": "backbone", "case": name, "ratio": ratio, "goal": None, "ms": medians, "tokens": tokens}


def nothing_to_share(shape: Shape, rows: int, length: int) -> dict[str, Any]:
    """A line of kind `nothing to share`."""
    model = policy(shape).train()
    if torch.cuda.is_available():
        model = model.bfloat16()
    device = model.device
    attached = {
        name: attach_scoring_forward(model, ScoringOptions(padding_free=padding_free))
        for name, padding_free in (("padded", False), ("packed", True))
    }
    batches = []
    # Attention on the CPU takes half as long again for 63 tokens as for 64, so that one length says little
    for S in range(max(2, length - 4), length + 4):
        ids = torch.randint(3, shape.vocabulary, (rows, S), generator=torch.Generator().manual_seed(S)).to(device)
        ids[:, 0] = torch.arange(rows, device=device)  # another first token, so that nothing is shared
        labels = ids.clone()
        labels[:, : S // 2] = -100
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})

    def step(scoring: Any) -> None:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            scoring(model, **batch).loss.backward()

    subjects = {name: partial(step, scoring) for name, scoring in attached.items()}
    attached["packed"].packing.checked = True
    ratio, medians, tokens = compared(
        model, subjects, 2 if shape is SMOKE else min(MOST, max(FEWEST, TOKENS // (rows * length)))
    )
    line = {"kind": "nothing to share", "case": f"{rows} rows of about {length}", "ratio": ratio, "goal": 0.97}
    return {**line, "ms": medians, "tokens": tokens}


def compared(
    model: Any, subjects: dict[str, Callable[[], None]], calls: int
) -> tuple[float, dict[str, float], dict[str, int]]:
    """Two subjects that take turns: the first one's time over the second's, each one's median, and its tokens fed.

    The ratio is the median of the ratios of neighbouring calls, which a slow spell of the machine hits alike.
    """
    tokens: dict[str, int] = {}
    counted: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, args, output: counted.append(args[0].numel()))
    for name, step in subjects.items():
        step()
        counted.clear()
        step()
        tokens[name] = sum(counted)
    hook.remove()
    times: dict[str, list[float]] = {name: [] for name in subjects}
    order = list(subjects)
    for _ in range(calls):
        for name in order:
            start = now()
            subjects[name]()
            times[name].append(1e3 * (now() - start))
        order.reverse()
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    return ratio, {name: statistics.median(x) for name, x in times.items()}, tokens


def measurements(smoke: bool) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    on_gpu = torch.cuda.is_available() and not smoke
    cases = GPU_CASES if on_gpu else CPU_CASES
    if smoke:
        cases = tuple(dataclasses.replace(case, shape=SMOKE) for case in CPU_CASES + GPU_CASES)
    shape = SMOKE if smoke else GRPO
    found = [(case.name, partial(steps, case)) for case in cases]
    if not on_gpu:
        shuffled = [3, 0, 2, 2, 1, 0, 1, 3]
        for name, prompts in (("1 group", [0] * GROUP), ("8 rows of 4 groups", shuffled)):
            found.append((name, partial(backbone, shape, name, prompts)))
    for rows, length in SMOKE_ROWS if smoke else FULL_ROWS:
        found.append((f"{rows} rows of about {length}", partial(nothing_to_share, shape, rows, length)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny models: that it runs")
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    arguments = parser.parse_args()
    quiet()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    results = []
    print(f"{'kind':<18}{'case':<42}{'before ms':>11}{'after ms':>10}{'ratio':>8}{'goal':>6}  tokens fed, MiB at most")
    for name, measure in measurements(arguments.smoke):
        if arguments.only not in name:
            continue
        result = measure()
        before, after = result.get("training_ms", result.get("ms", {})).values()
        fed = " -> ".join(str(x) for x in result["tokens"].values())
        peaks = " -> ".join(f"{x:.0f}" for x in result.get("peak_mib", {}).values() if x is not None)
        goal = "-" if result["goal"] is None else result["goal"]
        line = f"{result['kind']:<18}{result['case']:<42}{before:>11.1f}{after:>10.1f}{result['ratio']:>8.3f}{goal:>6}"
        print(f"{line}  {fed}  {peaks}".rstrip(), flush=True)
        results.append(result)
    write("packing", results, arguments.results)


if __name__ == "__main__":
    main()
