"""Trainings of stock TRL and of ours on made-up data, for the benchmarks of whole steps: model, data and trainer.

Completions come from a script instead of a sampler, and depend on nothing but their prompt, their place in the batch
and the step: stock and ours train on the same tokens.
"""

import os
import zlib
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # TRL's own switch: `rollout_func` warns without it

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

GROUP = 8
PROMPTS = 64


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
    ragged: bool = False  # completions of 1/8, 2/8, ... of `completion` tokens, as many of each


@dataclass(frozen=True)
class Case:
    """A training that TRL's users run, measured under the name `benchmark`."""

    benchmark: str
    trainer: Literal["grpo", "dpo"]
    shape: Shape
    config: dict[str, Any] = field(default_factory=dict)  # of both subjects
    ours: dict[str, Any] = field(default_factory=dict)  # of our config alone
    lora: bool = False
    epochs: int = 1  # of DPO, over which the steps are spread evenly
    dead_share: float = 0.0  # of GRPO's groups, whose rewards are all equal
    sampler: bool = False  # completions come with their sampler's log-probs, as from vLLM, and are corrected for

    @property
    def rows(self) -> int:
        """Completions, or pairs, of an optimizer step."""
        return self.config["per_device_train_batch_size"] * self.config.get("gradient_accumulation_steps", 1)


@cache
def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    # Special tokens are found inside of words too: theirs must not begin another
    special = ["<pad>", "</s>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(len(special), vocabulary))])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def policy(shape: Shape, frozen: bool = False) -> Qwen3ForCausalLM:
    """A model with random weights, always the same: in fp32 to be trained, in bf16 on a GPU where it is frozen."""
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
        model = Qwen3ForCausalLM(config)
    return model.bfloat16() if frozen and torch.cuda.is_available() else model


def words(seed: int, count: int, vocabulary: int) -> list[int]:
    """`count` token ids that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()


def completion(seed: int, place: int, shape: Shape) -> list[int]:
    """Tokens that depend on the seed, as many as the place asks for: with place 0 the most."""
    eighths = 8 - place % 8 if shape.ragged else 8
    return [*words(seed, max(1, eighths * shape.completion // 8) - 1, shape.vocabulary), 1]


def number_of(key: str) -> int:
    """The same in every process, as Python's `hash` is not."""
    return zlib.crc32(key.encode())


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def reward(prompts: list[str], completion_ids: list[list[int]], dead: list[bool], **_: Any) -> list[float]:
    return [0.5 if is_dead else sum(ids) % 101 / 101 for is_dead, ids in zip(dead, completion_ids, strict=True)]


def trainer_of(library: Any, case: Case, folder: str) -> Any:
    """The trainer of `library` for this case."""
    config = {**common(case.shape), "output_dir": folder, **case.config}
    if library is not trl:
        config |= case.ours
        if case.trainer == "dpo":
            config["reference_store_dir"] = folder  # nothing is read that another run has stored
    return (grpo if case.trainer == "grpo" else dpo)(library, case, config)


def grpo(library: Any, case: Case, config: dict[str, Any]) -> Any:
    shape = case.shape

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        ids = [completion(number_of(f"{prompt} {i} {step}"), i, shape) for i, prompt in enumerate(prompts)]
        return {
            "prompt_ids": trainer.processing_class(list(prompts))["input_ids"],
            "completion_ids": ids,
            "logprobs": [[-8.0] * len(x) for x in ids] if case.sampler else None,
        }

    # Prompts keep their order, so that every step has its share of dead groups
    dead = [int((i + 1) * case.dead_share) > int(i * case.dead_share) for i in range(PROMPTS)]
    rows = [{"prompt": text(words(i, shape.prompt, shape.vocabulary)), "dead": dead[i]} for i in range(PROMPTS)]
    trainer = library.GRPOTrainer(
        policy(shape, case.lora),
        reward_funcs=reward,
        rollout_func=rollout,
        args=library.GRPOConfig(
            **{"num_generations": GROUP, "max_completion_length": shape.completion, "shuffle_dataset": False, **config}
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(shape.vocabulary),
        peft_config=adapter(case),
    )
    if case.sampler:  # as vLLM's trainer does it, with its weights in step
        trainer.use_vllm = True
        type(trainer)._last_loaded_step = property(lambda self: self.state.global_step, lambda self, step: None)
    return trainer


def dpo(library: Any, case: Case, config: dict[str, Any]) -> Any:
    """Its reference is a model of its own, and with LoRA the policy without its adapter."""
    shape = case.shape
    rows = [
        {
            "prompt": text(words(i, shape.prompt, shape.vocabulary)),
            "chosen": " " + text(completion(number_of(f"chosen {i}"), i, shape)[:-1]),
            "rejected": " " + text(completion(number_of(f"rejected {i}"), i + 4, shape)[:-1]),
        }
        for i in range(case.rows * shape.steps // case.epochs)
    ]
    return library.DPOTrainer(
        policy(shape, case.lora),
        ref_model=None if case.lora else policy(shape),
        args=library.DPOConfig(**{"max_length": None, **config}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(shape.vocabulary),
        peft_config=adapter(case),
    )


def adapter(case: Case) -> LoraConfig | None:
    return LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0) if case.lora else None


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
