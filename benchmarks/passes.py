"""Measure GRPO and DPO steps beside stock TRL's, with the passes, rows and tokens that each of them runs.

    python benchmarks/passes.py           # a small model on the CPU or on one GPU, a few minutes, no network
    python benchmarks/passes.py --smoke   # a tiny one: that it runs; its times say nothing

Completions come from a script instead of a sampler, so a step is its log-prob passes, its backward and its optimizer.
Stock and ours take turns, on the same model, data and seed; the first optimizer steps of each run are left out. Every
line it writes to benchmarks/results/passes-<date>-<device>.jsonl is one case:

- step_ms: median time of an optimizer step, of each subject; ratio: stock's over ours, more is better.
- tokens: tokens that entered the model (padding included) in those steps, by a hook on the input embedding.
- no_grad_forwards: forwards without a gradient (old policy and reference) in those steps.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # TRL's own switch: `rollout_func` warns without it

import datasets
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

import trl_ext

GROUP = 8
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of model and data."""

    hidden: int
    layers: int
    vocabulary: int
    prompt: int
    completion: int
    steps: int
    rounds: int


SHAPE = Shape(hidden=256, layers=4, vocabulary=4096, prompt=64, completion=64, steps=8, rounds=3)
SMOKE = Shape(hidden=32, layers=1, vocabulary=64, prompt=4, completion=4, steps=4, rounds=1)


@dataclass(frozen=True)
class Case:
    """A training that TRL's users run, and what of it changes no gradient."""

    name: str
    trainer: str
    config: dict[str, Any] = field(default_factory=dict)
    dead_share: float = 0.0  # of the groups
    sampler: bool = False  # completions come with their sampler's log-probs, as from vLLM, and are corrected for


CASES = (
    Case("grpo", "grpo"),
    Case("grpo, half of the groups dead", "grpo", dead_share=0.5),
    Case("grpo, num_iterations=2", "grpo", {"num_iterations": 2}),
    Case("grpo, steps_per_generation = 2 x accumulation", "grpo", {"steps_per_generation": 2}),
    Case("grpo, sampler corrected for", "grpo", sampler=True),
    Case("grpo, sampler corrected for, half of the groups dead", "grpo", dead_share=0.5, sampler=True),
    Case("dpo, second epoch", "dpo"),
)


class StepTimes(TrainerCallback):
    """Milliseconds of each optimizer step, and what entered the model in it."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self.counts: Counter[str] = Counter()
        self.warm = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.warm = state.global_step >= first_counted_step(args)
        _wait()
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        _wait()
        if self.warm:
            self.milliseconds.append(1e3 * (time.perf_counter() - self._start))

    def watch(self, model: torch.nn.Module) -> None:
        """Count what enters `model`."""

        def enter(module: Any, args: Any, output: Any) -> None:
            if self.warm:
                self.counts["tokens"] += args[0].numel()
                self.counts["no_grad_forwards"] += not torch.is_grad_enabled()

        model.get_input_embeddings().register_forward_hook(enter)  # type: ignore[operator]


def first_counted_step(args: Any) -> int:
    """DPO's first epoch fills the store of reference log-probs: the steps after it are measured."""
    return args.max_steps // 2 if isinstance(args, trl.DPOConfig) else WARM_UP_STEPS


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(vocabulary)}
    tokens = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="w0", eos_token="w1", unk_token="w2")


def policy(shape: Shape) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=shape.hidden // 4,
        vocab_size=shape.vocabulary,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def words(seed: int, count: int, vocabulary: int) -> list[int]:
    """`count` token ids that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()


def number_of(key: str) -> int:
    """The same in every process, as Python's `hash` is not."""
    return zlib.crc32(key.encode())


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def grpo(library: Any, case: Case, shape: Shape, folder: str) -> Any:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seeds = [number_of(f"{prompt} {i} {trainer.state.global_step}") for i, prompt in enumerate(prompts)]
        ids = [[*words(seed, shape.completion - 1, shape.vocabulary), 1] for seed in seeds]
        return {
            "prompt_ids": trainer.processing_class(list(prompts))["input_ids"],
            "completion_ids": ids,
            "logprobs": [[-8.0] * shape.completion for _ in ids] if case.sampler else None,
        }

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        dead = [number_of(prompt) % 100 < 100 * case.dead_share for prompt in prompts]
        return [0.5 if is_dead else sum(ids) % 101 / 101 for is_dead, ids in zip(dead, completion_ids, strict=True)]

    rows = [{"prompt": text(words(i, shape.prompt, shape.vocabulary))} for i in range(64)]
    config = {"num_generations": GROUP, "per_device_train_batch_size": 4 * GROUP, **case.config}
    trainer = library.GRPOTrainer(
        policy(shape),
        reward_funcs=reward,
        rollout_func=rollout,
        args=library.GRPOConfig(folder, max_completion_length=shape.completion, **config, **common(shape)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(shape.vocabulary),
    )
    if case.sampler:  # as vLLM's trainer does it, with its weights in step
        trainer.use_vllm = True
        type(trainer)._last_loaded_step = property(lambda self: self.state.global_step, lambda self, step: None)
    return trainer


def dpo(library: Any, case: Case, shape: Shape, folder: str) -> Any:
    size = 8
    rows = [
        {
            "prompt": text(words(i, shape.prompt, shape.vocabulary)),
            "chosen": " " + text(words(1000 + i, shape.completion, shape.vocabulary)),
            "rejected": " " + text(words(2000 + i, shape.completion, shape.vocabulary)),
        }
        for i in range(size * shape.steps // 2)
    ]
    config = dict(common(shape), per_device_train_batch_size=size)
    if library is trl_ext:
        config["reference_store"] = "memory"
    return library.DPOTrainer(
        policy(shape),
        ref_model=policy(shape),
        args=library.DPOConfig(folder, **config),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(shape.vocabulary),
    )


def common(shape: Shape) -> dict[str, Any]:
    return {
        "max_steps": shape.steps,
        "seed": 0,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1000,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }


def run(library: Any, case: Case, shape: Shape) -> StepTimes:
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = (grpo if case.trainer == "grpo" else dpo)(library, case, shape, folder)
        for model in filter(None, (trainer.model, trainer.ref_model)):
            times.watch(model)
        trainer.add_callback(times)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return times


def measure(case: Case, shape: Shape) -> dict[str, Any]:
    subjects = {"trl": trl, "trl_ext": trl_ext}
    runs: dict[str, list[StepTimes]] = {name: [] for name in subjects}
    for _ in range(shape.rounds):
        for name, library in subjects.items():
            runs[name].append(run(library, case, shape))
    step_ms = {name: statistics.median(t for times in runs[name] for t in times.milliseconds) for name in subjects}
    return {
        "case": case.name,
        "step_ms": {name: round(value, 2) for name, value in step_ms.items()},
        "ratio": round(step_ms["trl"] / step_ms["trl_ext"], 3),
        **{what: {name: runs[name][-1].counts[what] for name in subjects} for what in ("tokens", "no_grad_forwards")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model: that it runs")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to")
    arguments = parser.parse_args()
    logging.getLogger("trl_ext").setLevel(logging.WARNING)
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore", FutureWarning)  # of the libraries', on names of their own
    shape = SMOKE if arguments.smoke else SHAPE
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    versions = {name: version(name) for name in ("torch", "transformers", "trl")}
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / f"passes-{datetime.now(UTC):%Y%m%d-%H%M%S}-{device.replace(' ', '-')}.jsonl"
    lines = []
    print(f"{'case':<56}{'TRL ms':>9}{'ours ms':>9}{'ratio':>7}{'tokens fed, ours / TRL':>24}")
    for case in CASES:
        result = measure(case, shape)
        fed = result["tokens"]["trl_ext"] / result["tokens"]["trl"]
        ours, stock = result["step_ms"]["trl_ext"], result["step_ms"]["trl"]
        print(f"{case.name:<56}{stock:>9.1f}{ours:>9.1f}{result['ratio']:>7.2f}{fed:>24.2f}", flush=True)
        lines.append(json.dumps({"device": device, "threads": torch.get_num_threads(), **versions, **result}))
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    main()
