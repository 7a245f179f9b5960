"""Training steps whose memory is both estimated and measured: the arguments of a case, and its peak bytes."""

from pathlib import Path
from typing import Any

import torch
from allocations import peak_bytes
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tiny import word_tokenizer
from trl_ext.cli.arguments import OneLineParser, Parsed, dataclasses_of, parse
from trl_ext.cli.estimate import EstimateArguments, step_of
from trl_ext.cli.line import read
from trl_ext.cli.training import build
from trl_ext.memory.step import memory_of_step

_SHAPE = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "max_position_embeddings": 512}
_MODELS = {
    "small": lambda: LlamaConfig(
        **_SHAPE, vocab_size=2048, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
    ),
    "tied": lambda: Qwen3Config(
        **_SHAPE,
        **{"vocab_size": 8192, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
}
LENGTH, PROMPT, COMPLETION = 192, 24, 72
_LORA = ["--use_peft", "true", "--lora_target_modules", "all-linear"]
_NO_CHECKPOINTS = ["--gradient_checkpointing", "false"]

CASES: dict[str, tuple[str, str, list[str]]] = {
    "dpo-full": ("dpo", "small", _NO_CHECKPOINTS),
    "dpo-full-checkpointing": ("dpo", "small", []),
    "dpo-lora": ("dpo", "small", [*_LORA, *_NO_CHECKPOINTS]),
    "dpo-lora-checkpointing": ("dpo", "tied", _LORA),
    "dpo-lora-bf16": ("dpo", "small", [*_LORA, *_NO_CHECKPOINTS, "--bf16", "true"]),
    "dpo-full-accumulation": ("dpo", "tied", [*_NO_CHECKPOINTS, "--gradient_accumulation_steps", "2"]),
    "dpo-bf16-weights": ("dpo", "tied", [*_NO_CHECKPOINTS, "--dtype", "bfloat16"]),
    "dpo-eager-sgd": ("dpo", "small", [*_NO_CHECKPOINTS, "--attn_implementation", "eager", "--optim", "sgd"]),
    "grpo-full": ("grpo", "small", _NO_CHECKPOINTS),
    "grpo-lora-reference": ("grpo", "tied", [*_LORA, *_NO_CHECKPOINTS, "--beta", "0.1"]),
    "grpo-full-reference": ("grpo", "small", ["--beta", "0.1"]),
}
_OF_METHOD = {
    "dpo": [f"--max_length={LENGTH}", "--per_device_train_batch_size=2"],
    "grpo": [
        *(f"--max_completion_length={COMPLETION}", "--per_device_train_batch_size=4", "--num_generations=4"),
        *("--steps_per_generation=1", "--generation_kwargs", '{"suppress_tokens": [1]}'),
        *("--reward_funcs", "rewards.id_reward"),
    ],
}


def estimated_and_measured(name: str, folder: Path) -> tuple[int, int]:
    """Return the peak bytes of a case's training: those of `estimate`, and those in the allocator's records."""
    bytes_of_step = estimated(name, folder)
    trainer: Any = build(CASES[name][0], parsed(name, folder))
    models = [trainer.model, *([] if trainer.ref_model is None else [trainer.ref_model])]
    held = sum(x.nbytes for model in models for x in (*model.parameters(), *model.buffers()))
    return bytes_of_step, held + peak_bytes(trainer.train)


def estimated(name: str, folder: Path, engine: str = "one_process", devices: int = 1) -> int:
    """Return the peak bytes of a case's step on one of `devices` CPUs, by `estimate`."""
    asked = EstimateArguments(device="cpu", prompt_length=PROMPT, engine=engine, num_devices=devices)
    return memory_of_step(step_of(CASES[name][0], parsed(name, folder), asked)).peak


def parsed(name: str, folder: Path, launched: tuple[str, ...] | None = None) -> Parsed:
    """Return the arguments of a case. `launched`: further arguments for ranks, whose launch chooses the device."""
    method, model, options = CASES[name]
    arguments = [
        *("--model_name_or_path", saved_model(model, folder), "--dataset_name", _data(method, folder)),
        *("--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--max_steps", "2"),
        *("--output_dir", str(folder / "out"), "--share_prompts", "false", "--learning_rate", "1e-5"),
        *("--gradient_accumulation_steps", "1", "--no_dataloader_pin_memory", "--disable_tqdm", "true"),
        *_OF_METHOD[method],
        *options,
        *(["--use_cpu"] if launched is None else launched),
    ]
    return Parsed(*parse(OneLineParser(dataclasses_of(method)), read(method, arguments), may_launch=False))


def saved_model(name: str, folder: Path) -> str:
    path = folder / name
    if not path.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(_MODELS[name]()).save_pretrained(path)
        word_tokenizer().save_pretrained(path)
    return str(path)


def _data(method: str, folder: Path) -> str:
    """Rows that are as long as they may be, and begin differently."""
    path = folder / f"{method}-data"
    if not path.exists():
        path.mkdir()
        numbers = torch.randint(94, (16, 3, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
        texts = [[" ".join(f"w{x}" for x in words) for words in row] for row in numbers]
        cut = [" ".join(prompt.split()[:PROMPT]) for prompt, _, _ in texts]
        rows = [{"prompt": x} for x in cut]
        if method == "dpo":
            rows = [
                {"prompt": x, "chosen": f" {a}", "rejected": f" {b}"} for x, (_, a, b) in zip(cut, texts, strict=True)
            ]
        Dataset.from_list(rows).to_json(path / "train.jsonl")
    return str(path)
