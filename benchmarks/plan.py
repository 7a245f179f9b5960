"""Whether `trl-ext plan` orders options as their measured times do, on the CPU.

    python benchmarks/plan.py           # all options of three methods; 15 minutes
    python benchmarks/plan.py --smoke   # small shapes and few rounds: a check that it runs; its times mean nothing

Options of one run differ in checkpointing, `per_device_train_batch_size` and `max_tokens_per_micro_batch`, and keep the
batch of an optimizer step. Completions of GRPO come from a script (steps.py). The trainers take turns, each for one
call of `train`, after one for warm-up; a time is that from the beginning of the first micro-batch to the end of the
optimizer step, without generation. Lines that it writes to benchmarks/results/:

- `plan_option`: an option's median milliseconds, and its time predicted by the plan's model for this CPU, over that of
  the option predicted to be fastest.
- `plan_order`: of the pairs of options whose medians differ by over 20 %, how many are in the predicted order: `agree`
  of `pairs`. The plan promises 80 % over all methods.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import results
import torch
from datasets import Dataset
from steps import GROUP, Shape, adapter, common, completion, number_of, policy, text, tokenizer, words
from steps import Case as Run
from transformers import PrinterCallback, TrainerCallback

import trl_ext
from trl_ext.fit.lengths import Lengths
from trl_ext.fit.options import Option, Setting, Space
from trl_ext.fit.speed import CPU, Model, seconds
from trl_ext.planning.cost import CostModel

ROWS, APART, STEPS = 64, 1.2, 2
METHODS = ("sft", "dpo", "grpo")
CONFIGS = {"sft": trl_ext.SFTConfig, "dpo": trl_ext.DPOConfig, "grpo": trl_ext.GRPOConfig}
TRAINERS = {"sft": trl_ext.SFTTrainer, "dpo": trl_ext.DPOTrainer, "grpo": trl_ext.GRPOTrainer}
Line = dict[str, Any]


class Timed(TrainerCallback):
    """Measures from the first micro-batch to the end of the optimizer step."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self.began: float | None = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.began is not None
        self.milliseconds.append(1e3 * (time.process_time() - self.began))
        self.began = None


def lengths_of(method: str, shape: Shape) -> Lengths:
    """Return the lengths of the rows of `rows_of`: completions of 1/8 to all of the longest."""
    eighths = [max(1, (8 - i % 8) * shape.completion // 8) for i in range(ROWS)]
    completions = {"sft": [eighths], "dpo": [eighths, eighths[4:] + eighths[:4]]}.get(
        method, [[shape.completion] * ROWS]
    )
    shares = method != "sft"
    return Lengths(
        np.full(ROWS, shape.prompt), np.array(completions).T, group=GROUP if method == "grpo" else 1, shares=shares
    )


def rows_of(method: str, shape: Shape) -> Dataset:
    def row(i: int) -> dict[str, str]:
        found = {"prompt": text(words(i, shape.prompt, shape.vocabulary))}
        if method == "grpo":
            return found
        names = {"chosen": 0, "rejected": 4} if method == "dpo" else {"completion": 0}
        for name, place in names.items():
            ids = completion(number_of(f"{name} {i}"), i + place, shape)[:-1]
            found[name] = f" {text(ids)}"
        return found

    return Dataset.from_list([row(i) for i in range(ROWS)])


def space_of(method: str, lengths: Lengths) -> Space:
    settings = tuple(Setting("one_process", checkpointing=x) for x in (False, True))
    given = Option(setting=settings[0], batch=8, accumulation=2)
    given = replace(given, generation=2) if method == "grpo" else given
    return Space(
        given_option=given,
        lengths=lengths,
        settings=settings,
        changes_batch=method == "sft",
        changes_budget=method != "sft",
        joined_batches=1 if method == "sft" else 2,
        most_rows=1024,
    )


def options_of(space: Space, checkpointing_only: bool) -> list[Option]:
    """Return options of all sizes, from one unit in a pass to the whole step."""
    options: list[Option] = []
    for ladder in space.ladders():
        count = 2 if checkpointing_only else 4
        options += [ladder[round(i * (len(ladder) - 1) / (count - 1))] for i in range(count)]
    return list(dict.fromkeys(options))


def trainer_of(method: str, shape: Shape, option: Option, lora: bool, folder: str) -> tuple[Any, Timed]:
    run = Run("plan", "grpo", shape, lora=lora)
    config = {
        **common(replace(shape, steps=STEPS)),
        **{"output_dir": folder, "show_plan": False, "per_device_train_batch_size": option.batch},
        **{"gradient_accumulation_steps": option.accumulation, "gradient_checkpointing": option.setting.checkpointing},
    }
    further: dict[str, Any] = {}
    if option.budget is not None:
        config["max_tokens_per_micro_batch"] = option.budget
    if method == "grpo":
        config |= {"steps_per_generation": option.generation, "num_generations": GROUP}
        config |= {"max_completion_length": shape.completion}

        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            seeds = [number_of(f"{prompt} {i} {trainer.state.global_step}") for i, prompt in enumerate(prompts)]
            ids = [[*words(seed, shape.completion - 1, shape.vocabulary), 1] for seed in seeds]
            return {
                "prompt_ids": trainer.processing_class(list(prompts))["input_ids"],
                "completion_ids": ids,
                "logprobs": None,
            }

        further["reward_funcs"] = lambda completion_ids, **_: [sum(ids) % 101 / 101 for ids in completion_ids]
        further["rollout_func"] = rollout
    else:
        config["max_length"] = None
    if method == "dpo":
        config["reference_store"] = "memory"
        further["ref_model"] = None if lora else policy(shape)
    timed = Timed()

    class Begun(TRAINERS[method]):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if timed.began is None:
                timed.began = time.process_time()
            return super().compute_loss(*args, **kwargs)

    trainer = Begun(
        policy(shape, lora),
        args=CONFIGS[method](**config),
        train_dataset=rows_of(method, shape),
        processing_class=tokenizer(shape.vocabulary),
        peft_config=adapter(run),
        callbacks=[timed],
        **further,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, timed


def predicted(model: torch.nn.Module, space: Space, options: list[Option]) -> list[float]:
    """Return the predicted time of each option, over the shortest."""
    config = model.config.get_text_config()
    sizes = [sum(x.nbytes for x in model.parameters() if x.requires_grad or not trains) for trains in (False, True)]
    of_model = Model(CostModel.of(config), config.num_hidden_layers, *sizes)
    # DPO's reference scores each sequence once, in the warm-up or never again
    times = [seconds(space.work(x, 1, 0.0), of_model, CPU) for x in options]
    return [x / min(times) for x in times]


def measured(method: str, shape: Shape, lora: bool, few: bool) -> Iterator[Line]:
    space = space_of(method, lengths_of(method, shape))
    options = options_of(space, few)
    with tempfile.TemporaryDirectory() as folder:
        subjects = [trainer_of(method, shape, x, lora, folder) for x in options]
        order = list(range(len(options)))
        for _ in range(1 + shape.rounds):
            for i in order:
                subjects[i][0].train()
            order = order[1:] + order[:1]
    medians = [statistics.median(islice(timed.milliseconds, STEPS, None)) for _, timed in subjects]
    times = predicted(subjects[0][0].model, space, options)
    shared = {"method": method, "lora": lora, "shape": {"hidden": shape.hidden, "layers": shape.layers}}
    for option, milliseconds, relative in zip(options, medians, times, strict=True):
        arguments = {name: x for name, x in vars(option).items() if name != "setting"} | asdict(option.setting)
        line = {"benchmark": "plan_option", **shared, "option": arguments, "milliseconds": milliseconds}
        yield line | {"predicted": relative, "rounds": shape.rounds}
    pairs = [
        (a < b) == (times[i] < times[j])
        for (i, a), (j, b) in combinations(enumerate(medians), 2)
        if max(a, b) > APART * min(a, b)
    ]
    yield {"benchmark": "plan_order", **shared, "pairs": len(pairs), "agree": sum(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small shapes and few rounds")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder to write to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(hidden=192, layers=6, vocabulary=2048, prompt=64, completion=128, steps=STEPS, rounds=5, ragged=True)
    if arguments.smoke:
        shape = Shape(hidden=32, layers=2, vocabulary=97, prompt=8, completion=16, steps=STEPS, rounds=1, ragged=True)
    lines: list[Line] = []
    for method in METHODS:
        for lora in (False,) if arguments.smoke else (False, True):
            lines += measured(method, shape, lora, arguments.smoke)
            print(lines[-1], flush=True)
    orders = [x for x in lines if x["benchmark"] == "plan_order"]
    agree, pairs = (sum(x[name] for x in orders) for name in ("agree", "pairs"))
    print(f"{agree} of {pairs} pairs that differ by over 20 % are in the predicted order")
    run = {"run": results.new_run()}
    print(results.add([{**x, **run, **results.origin("cpu")} for x in lines], arguments.results))


if __name__ == "__main__":
    main()
