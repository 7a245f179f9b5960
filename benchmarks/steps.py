"""Model, data and trainers (stock TRL's and ours) for the benchmarks of whole steps.

Completions come from a script instead of a sampler. They depend only on the prompt, the place in the batch and the
step, so stock and ours train on the same tokens.
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
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3VLConfig,
)

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
    family: Literal["qwen3", "qwen3_5", "qwen3_vl"] = "qwen3"
    ragged: bool = False  # completions of 1/8, 2/8, ..., 8/8 of `completion` tokens, equally many of each


@dataclass(frozen=True)
class Case:
    """A training run to measure, under the name `benchmark`."""

    benchmark: str
    trainer: Literal["grpo", "dpo", "distillation", "reward"]
    shape: Shape
    config: dict[str, Any] = field(default_factory=dict)  # for both subjects
    ours: dict[str, Any] = field(default_factory=dict)  # only for ours
    lora: bool = False
    epochs: int = 1  # in DPO; the steps are spread evenly over them
    dead_share: float = 0.0  # in GRPO, the share of groups whose rewards are all equal
    sampler: bool = False  # whether completions come with a sampler's log-probs, as from vLLM, and are corrected

    @property
    def rows(self) -> int:
        """The number of completions, or pairs, in an optimizer step."""
        return self.config["per_device_train_batch_size"] * self.config.get("gradient_accumulation_steps", 1)


@cache
def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    # Special tokens are also found inside words, so no word may contain one
    special = ["<pad>", "</s>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(len(special), vocabulary))])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def policy(shape: Shape, frozen: bool = False) -> Any:
    """Return a model with fixed random weights: in bf16 if it is frozen and on a GPU, else in fp32."""
    torch.manual_seed(0)
    auto_class: Any = AutoModelForImageTextToText if shape.family == "qwen3_vl" else AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = auto_class.from_config(_config(shape), dtype=torch.float32)
    return model.bfloat16() if frozen and torch.cuda.is_available() else model


def _config(shape: Shape) -> PreTrainedConfig:
    head_size = shape.head_size or shape.hidden // shape.heads
    special = {"pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}
    text = {
        "hidden_size": shape.hidden,
        "intermediate_size": 3 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": head_size,
        "vocab_size": shape.vocabulary,
        **special,
    }
    if shape.family == "qwen3":
        return Qwen3Config(**text)
    if shape.family == "qwen3_5":  # as in the released models, each fourth layer has attention
        heads = {"linear_num_key_heads": shape.kv_heads, "linear_num_value_heads": shape.heads}
        sizes = {"linear_key_head_dim": head_size, "linear_value_head_dim": head_size}
        return Qwen3_5TextConfig(**text, **heads, **sizes)
    rotation = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": _three_parts(head_size // 2)}
    tower = {
        "depth": 2,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_heads": shape.heads,
        "out_hidden_size": shape.hidden,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(text_config={**text, "rope_parameters": rotation}, vision_config=tower, **special)


def _three_parts(count: int) -> list[int]:
    return [count - 2 * (count // 3), count // 3, count // 3]


def words(seed: int, count: int, vocabulary: int) -> list[int]:
    """Return `count` token ids that depend only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=generator).tolist()


def completion(seed: int, place: int, shape: Shape) -> list[int]:
    """Return token ids that depend on the seed, and whose number depends on the place; place 0 has the most."""
    eighths = 8 - place % 8 if shape.ragged else 8
    return [*words(seed, max(1, eighths * shape.completion // 8) - 1, shape.vocabulary), 1]


def number_of(key: str) -> int:
    """Return a hash of `key` that is the same in every process, unlike Python's `hash`."""
    return zlib.crc32(key.encode())


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def reward(prompts: list[str], completion_ids: list[list[int]], dead: list[bool], **_: Any) -> list[float]:
    return [0.5 if is_dead else sum(ids) % 101 / 101 for is_dead, ids in zip(dead, completion_ids, strict=True)]


def trainer_of(library: Any, case: Case, folder: str) -> Any:
    """Build the trainer of `library` for this case."""
    config = {**common(case.shape), "output_dir": folder, **case.config}
    if library is not trl:
        config |= case.ours
        if case.trainer == "dpo":
            config["reference_store_dir"] = folder  # do not read the store of another run
    builders = {"grpo": grpo, "dpo": dpo, "distillation": distillation, "reward": reward_model}
    return builders[case.trainer](library, case, config)


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

    # Prompts are not shuffled, so every step has the same share of dead groups
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
    if case.sampler:  # as with vLLM, whose weights are always in sync here
        trainer.use_vllm = True
        type(trainer)._last_loaded_step = property(lambda self: self.state.global_step, lambda self, step: None)
    return trainer


def dpo(library: Any, case: Case, config: dict[str, Any]) -> Any:
    """Build a DPO trainer. Its reference is a separate model, or with LoRA the policy without its adapter."""
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


def distillation(library: Any, case: Case, config: dict[str, Any]) -> Any:
    """Build a distillation trainer. The teacher has other weights, or with LoRA those of the student's base."""
    shape = case.shape

    class Scripted(library.DistillationTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
            step = self.state.global_step
            return [completion(number_of(f"{ids} {step}"), i, shape) for i, ids in enumerate(prompt_ids)]

    rows = [{"prompt": text(words(i, 1 + i * shape.prompt // PROMPTS, shape.vocabulary))} for i in range(PROMPTS)]
    trainer = Scripted(
        policy(shape, case.lora),
        teacher_model=policy(shape),
        args=library.DistillationConfig(**{"max_completion_length": shape.completion, **config}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(shape.vocabulary),
        peft_config=adapter(case),
    )
    if not case.lora:
        with torch.no_grad():
            for weight in trainer.teacher_model.parameters():
                weight += 0.02 * torch.randn_like(weight)
    return trainer


def reward_model(library: Any, case: Case, config: dict[str, Any]) -> Any:
    """Build a reward trainer, on pairs whose prompts have up to `prompt` tokens."""
    shape = case.shape
    rows = []
    for i in range(case.rows * shape.steps):
        prompt = text(words(i, shape.prompt * (1 + i % 8) // 8, shape.vocabulary))
        chosen, rejected = (text(completion(number_of(f"{side} {i}"), i + side, shape)[:-1]) for side in (0, 3))
        rows.append({"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"})
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model_config = _config(shape)
        model_config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(model_config, dtype=torch.float32)
    return library.RewardTrainer(
        model,
        args=library.RewardConfig(**{"max_length": None, **config}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(shape.vocabulary),
        peft_config=adapter(case),
    )


def adapter(case: Case) -> LoraConfig | None:
    if not case.lora:
        return None
    task = "SEQ_CLS" if case.trainer == "reward" else None
    return LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0, task_type=task)


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
