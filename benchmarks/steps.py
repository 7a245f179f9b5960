"""Steps of GRPO and DPO training on made-up data, timed and counted: what the benchmarks of whole steps share.

Completions come from a script instead of a sampler, and depend on nothing but their prompt and the step: stock and ours
train on the same tokens.
"""

import json
import logging
import os
import platform
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # TRL's own switch: `rollout_func` warns without it

import datasets
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

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
    heads: int = 4
    kv_heads: int = 2
    head_size: int | None = None  # None: hidden / heads
    ragged: bool = False  # completions of 1 to `completion` tokens, each length as likely


class StepTimes(TrainerCallback):
    """Milliseconds of each optimizer step after the first ones, what entered the model in them, and the most memory
    that was allocated in them."""

    def __init__(self, warm_up_steps: int = WARM_UP_STEPS) -> None:
        self.warm_up_steps = warm_up_steps
        self.milliseconds: list[float] = []
        self.training_milliseconds: list[float] = []  # without what prepares a batch: generation, rewards, old policy
        self.counts: Counter[str] = Counter()
        self.peak_mib: float | None = None
        self.warm = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.warm and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.warm = state.global_step >= self.warm_up_steps
        self._preparing = 0.0
        self._start = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        took = now() - self._start
        if self.warm:
            self.milliseconds.append(1e3 * took)
            self.training_milliseconds.append(1e3 * (took - self._preparing))
            if torch.cuda.is_available():
                self.peak_mib = torch.cuda.max_memory_allocated() / 2**20

    def watch(self, trainer: Any) -> None:
        """Count what enters the models of `trainer`, and time what prepares its batches."""

        def enter(module: Any, args: Any, output: Any) -> None:
            if self.warm:
                self.counts["tokens"] += args[0].numel()
                self.counts["no_grad_forwards"] += not torch.is_grad_enabled()

        prepare = trainer._prepare_inputs

        def timed(inputs: Any) -> Any:
            start = now()
            prepared = prepare(inputs)
            self._preparing += now() - start
            return prepared

        trainer._prepare_inputs = timed
        for model in filter(None, (trainer.model, trainer.ref_model)):
            model.get_input_embeddings().register_forward_hook(enter)
        trainer.add_callback(self)


def now() -> float:
    """Seconds. With one thread on the CPU they are the process's own: what else runs on the machine counts less."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    # Special tokens are found inside of words too: theirs must not begin another
    special = ["<pad>", "</s>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(len(special), vocabulary))])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def policy(shape: Shape) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size or shape.hidden // shape.heads,
        vocab_size=shape.vocabulary,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return Qwen3ForCausalLM(config)


def words(seed: int, count: int, vocabulary: int) -> list[int]:
    """`count` token ids that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()


def completion(seed: int, shape: Shape) -> list[int]:
    length = 1 + seed % shape.completion if shape.ragged else shape.completion
    return [*words(seed, length - 1, shape.vocabulary), 1]


def number_of(key: str) -> int:
    """The same in every process, as Python's `hash` is not."""
    return zlib.crc32(key.encode())


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 101 / 101 for ids in completion_ids]


def grpo(
    library: Any,
    shape: Shape,
    folder: str,
    config: dict[str, Any],
    *,
    model: Any,
    reward: Callable[..., list[float]] = reward,
    sampler_log_prob: float | None = None,
    **options: Any,
) -> Any:
    """A GRPO trainer of `library`, whose completions come with the log-prob `sampler_log_prob` if it is given."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seeds = [number_of(f"{prompt} {i} {trainer.state.global_step}") for i, prompt in enumerate(prompts)]
        ids = [completion(seed, shape) for seed in seeds]
        return {
            "prompt_ids": trainer.processing_class(list(prompts))["input_ids"],
            "completion_ids": ids,
            "logprobs": None if sampler_log_prob is None else [[sampler_log_prob] * len(x) for x in ids],
        }

    rows = [{"prompt": text(words(i, shape.prompt, shape.vocabulary))} for i in range(64)]
    return library.GRPOTrainer(
        model,
        reward_funcs=reward,
        rollout_func=rollout,
        args=library.GRPOConfig(
            folder,
            **{**common(shape), "num_generations": GROUP, "max_completion_length": shape.completion, **config},
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(shape.vocabulary),
        **options,
    )


def dpo(library: Any, shape: Shape, folder: str, config: dict[str, Any], *, pairs: int) -> Any:
    """A DPO trainer of `library` with a reference model of its own, on that many pairs."""
    rows = [
        {
            "prompt": text(words(i, shape.prompt, shape.vocabulary)),
            "chosen": " " + text(completion(number_of(f"chosen {i}"), shape)[:-1]),
            "rejected": " " + text(completion(number_of(f"rejected {i}"), shape)[:-1]),
        }
        for i in range(pairs)
    ]
    return library.DPOTrainer(
        policy(shape),
        ref_model=policy(shape),
        args=library.DPOConfig(folder, **{**common(shape), "max_length": None, **config}),
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


def quiet() -> None:
    """No progress bars and plans on the table's way."""
    logging.getLogger("trl_ext").setLevel(logging.WARNING)
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore", FutureWarning)  # of the libraries', on names of their own


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def write(name: str, results: list[dict[str, Any]], folder: Path) -> None:
    """A line of JSON for each result, with device, threads and versions: the whole file, or none."""
    about = {"device": device_name(), "threads": torch.get_num_threads()}
    about |= {package: version(package) for package in ("torch", "transformers", "trl")}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{device_name().replace(' ', '-')}.jsonl"
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps({**about, **result}) + "\n" for result in results))
    partial.replace(path)
