"""Training steps whose memory is both estimated and measured: the arguments of a case, and its peak bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from allocations import peak_bytes
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from launch import SMALL_BUCKET
from memory_on_gpu import peaks
from tiny import word_tokenizer
from trl_ext.cli.arguments import OneLineParser, Parsed, dataclasses_of, parse
from trl_ext.cli.commands import COMMANDS
from trl_ext.cli.training import build
from trl_ext.fit.coverage import OPTIMIZERS
from trl_ext.fit.estimate import step_of
from trl_ext.fit.run import Run
from trl_ext.fit.step import memory_of_step

_SHAPE = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "max_position_embeddings": 512}
_MODELS = {
    "small": lambda: LlamaConfig(
        **_SHAPE, vocab_size=2048, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
    ),
    "wide": lambda: LlamaConfig(
        **_SHAPE, vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
    ),
    "large": lambda: LlamaConfig(
        **_SHAPE, vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4
    ),
    "tied": lambda: Qwen3Config(
        **_SHAPE,
        **{"vocab_size": 8192, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
}
LENGTH, PROMPT, COMPLETION = 192, 24, 72
_LORA = ["--use_peft", "true", "--lora_target_modules", "all-linear"]
# States and step of the optimizer dominate
_SHORT = ["--max_length", "32", "--per_device_train_batch_size", "1"]
# Steps of bitsandbytes' optimizers are not the peak, because they take more memory on a CPU than on a GPU
_OF_OPTIMIZER = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adagrad", "rmsprop"), _SHORT)
_NO_CHECKPOINTS = ["--gradient_checkpointing", "false"]
# The name of a model above stands for its folder
_TEACHER = ["--teacher_model_name_or_path", "model:small"]
_LARGE_TEACHER = ["--teacher_model_name_or_path", "model:large"]
_SHARED = ["--share_prompts", "true", "--per_device_train_batch_size", "8"]


_4_BIT = {
    "": [*_SHORT, *_NO_CHECKPOINTS],
    "-checkpointing": [],
    "-bf16": ["--dtype", "bfloat16", "--bf16", "true"],
    "-nested-nf4": [*_SHORT, "--use_bnb_nested_quant", "true", "--bnb_4bit_quant_type", "nf4"],
}

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
    "sft-full": ("sft", "small", _NO_CHECKPOINTS),
    "sft-full-checkpointing": ("sft", "small", []),
    "sft-lora": ("sft", "tied", [*_LORA, *_NO_CHECKPOINTS]),
    "sft-lora-checkpointing": ("sft", "small", _LORA),
    "kto-full": ("kto", "small", _NO_CHECKPOINTS),
    "kto-full-checkpointing": ("kto", "small", []),
    # The reference's pass is the peak, beside the gradients of the micro-batch before
    "kto-full-reference-accumulation": ("kto", "small", ["--gradient_accumulation_steps", "2"]),
    "kto-lora": ("kto", "tied", [*_LORA, *_NO_CHECKPOINTS]),
    "kto-lora-checkpointing": ("kto", "small", _LORA),
    "kto-apo-checkpointing": ("kto", "small", ["--loss_type", "apo_zero_unpaired"]),
    "rloo-full": ("rloo", "small", [*_NO_CHECKPOINTS, "--beta", "0"]),
    "rloo-full-reference-checkpointing": ("rloo", "small", ["--beta", "0.1"]),
    "rloo-lora-reference": ("rloo", "tied", [*_LORA, *_NO_CHECKPOINTS, "--beta", "0.1"]),
    "rloo-lora-checkpointing": ("rloo", "small", [*_LORA, "--beta", "0"]),
    "reward-full": ("reward", "small", _NO_CHECKPOINTS),
    "reward-full-checkpointing": ("reward", "small", []),
    "reward-lora": ("reward", "tied", [*_LORA, *_NO_CHECKPOINTS]),
    "reward-lora-checkpointing": ("reward", "small", _LORA),
    "reward-shared": ("reward", "small", [*_SHARED, *_NO_CHECKPOINTS]),
    "distillation-full": ("distillation", "small", [*_TEACHER, *_NO_CHECKPOINTS]),
    "distillation-full-checkpointing": ("distillation", "small", [*_TEACHER, "--beta", "0"]),
    "distillation-large-teacher": ("distillation", "small", [*_LARGE_TEACHER, "--dtype", "bfloat16"]),
    "distillation-lora": ("distillation", "tied", [*_LORA, *_NO_CHECKPOINTS, "--beta", "1"]),
    "distillation-lora-checkpointing": ("distillation", "small", _LORA),
    "distillation-lora-teacher": ("distillation", "small", [*_LORA, *_TEACHER, *_NO_CHECKPOINTS, "--bf16", "true"]),
    "distillation-accumulation": ("distillation", "small", [*_TEACHER, "--gradient_accumulation_steps", "2"]),
    "sft-shared-eager": ("sft", "small", [*_SHARED, *_NO_CHECKPOINTS, "--attn_implementation", "eager"]),
    "kto-shared": ("kto", "small", [*_SHARED, *_NO_CHECKPOINTS]),
    "sft-short-full": ("sft", "small", _SHORT),
    **{f"sft-{x}": ("sft", "small", [*_OF_OPTIMIZER.get(x, []), "--optim", x]) for x in OPTIMIZERS["one_process"]},
    **{f"sft-4bit{x}": ("sft", "wide", [*_LORA, "--load_in_4bit", "true", *options]) for x, options in _4_BIT.items()},
    "sft-short-momentum": ("sft", "small", [*_SHORT, "--optim", "sgd", "--optim_args", "momentum=0.9"]),
}
_OFFLOADS, _HOSTED = ("--activation_offloading", "true"), ("--reference_device", "cpu")
# A case above, and further arguments
ON_GPU: dict[str, tuple[str, tuple[str, ...]]] = {
    "sft-full": ("sft-full", ()),
    "sft-full-offloading": ("sft-full", _OFFLOADS),
    "sft-lora-offloading": ("sft-lora", _OFFLOADS),
    "dpo-lora": ("dpo-lora", ()),
    "dpo-lora-offloading": ("dpo-lora", _OFFLOADS),
    "dpo-full-checkpointing-offloading": ("dpo-full-checkpointing", _OFFLOADS),
    "dpo-full-hosted": ("dpo-full", _HOSTED),
    "dpo-full-offloading-hosted": ("dpo-full", (*_OFFLOADS, *_HOSTED)),
    "kto-full-offloading": ("kto-full", _OFFLOADS),
    "kto-full-hosted": ("kto-full", _HOSTED),
    "grpo-lora-offloading": ("grpo-lora-reference", _OFFLOADS),
    "distillation-full": ("distillation-full", ()),
    "distillation-lora": ("distillation-lora", ()),
    "grpo-full-hosted": ("grpo-full-reference", _HOSTED),
}
_SAMPLED = [
    *(f"--max_completion_length={COMPLETION}", "--per_device_train_batch_size=4", "--num_generations=4"),
    *("--steps_per_generation=1", "--generation_kwargs", '{"suppress_tokens": [1]}'),
    *("--reward_funcs", "rewards.id_reward"),
]
_GIVEN = [f"--max_length={LENGTH}", "--per_device_train_batch_size"]
_OF_METHOD = {
    "sft": [*_GIVEN, "4"],
    # A store on disk could have the log-probs of an earlier run
    "dpo": [*_GIVEN, "2", "--reference_store", "memory"],
    "kto": [*_GIVEN, "4", "--reference_store", "memory"],
    "grpo": _SAMPLED,
    "rloo": _SAMPLED,
    "reward": [*_GIVEN, "2"],
    "distillation": [
        *(f"--max_completion_length={COMPLETION}", "--per_device_train_batch_size=4"),
        *("--generation_kwargs", '{"suppress_tokens": [1]}'),
    ],
}


def estimated_and_measured(name: str, folder: Path) -> tuple[int, int]:
    """Return the peak bytes of a case's training: those of `estimate`, and those in the allocator's records."""
    bytes_of_step = estimated(name, folder)
    trainer: Any = build(CASES[name][0], parsed(name, folder))
    models = models_of(trainer)
    for parameter_name, parameter in trainer.model.named_parameters():
        if "lora_B" in parameter_name:  # a student of its own base: the divergence of equal models takes one tile less
            torch.nn.init.normal_(parameter)
    weights = [x for model in models for x in (*model.parameters(), *model.buffers())]
    held = sum(x.nbytes for x in (*weights, *[y for x in weights for y in _scales(x)]))
    return bytes_of_step, held + peak_bytes(trainer.train)


def models_of(trainer: Any) -> list[Any]:
    """Return the models of a trainer: the policy, and its reference or teacher if it is another model."""
    models = [trainer.model, getattr(trainer, "ref_model", None), getattr(trainer, "teacher_model", None)]
    return [x for x in models if x is not None]


def estimated_and_measured_on_gpu(names: list[str], folder: Path) -> dict[str, tuple[int, int]]:
    """Return for cases of `ON_GPU` the peak bytes by `estimate`, and those on the pretended GPU."""
    expected, runs = {}, {}
    for name in names:
        case, further = ON_GPU[name]
        run = run_of_case(case, folder, ("--use_cpu", *further), device="cuda")
        expected[name] = memory_of_step(step_of(run)).peak
        runs[name] = run.method, [*words(case, folder), *further]
    return {name: (expected[name], peak) for name, peak in peaks(runs, folder).items()}


def estimated(name: str, folder: Path, engine: str = "one_process", devices: int = 1) -> int:
    """Return the peak bytes of a case's step on one of `devices` CPUs, by `estimate`."""
    small, engine = engine.startswith("small_buckets"), engine.removeprefix("small_buckets_")
    step = step_of(run_of_case(name, folder, device="cpu", engine=engine, devices=devices))
    return memory_of_step(replace(step, reduce_bucket_size=SMALL_BUCKET) if small else step).peak


def _scales(weight: Any) -> list[torch.Tensor]:
    """Return the tensors beside a quantized weight."""
    state = getattr(weight, "quant_state", None)
    states = [x for x in (state, getattr(state, "state2", None)) if x is not None]
    return [x for of in states for x in (of.absmax, of.code, of.offset) if x is not None]


def parsed(name: str, folder: Path, launched: tuple[str, ...] | None = None) -> Parsed:
    """Return the arguments of a case. `launched`: further arguments for ranks, whose launch chooses the device."""
    method, arguments = CASES[name][0], [*words(name, folder), *(["--use_cpu"] if launched is None else launched)]
    return parse(OneLineParser(dataclasses_of(method)), COMMANDS[method].read(arguments), may_launch=False)


def run_of_case(name: str, folder: Path, launched: tuple[str, ...] | None = None, **values: Any) -> Run:
    """Return the run of a case, with these values of `Run`."""
    arguments = parsed(name, folder, launched)
    values = {"prompt_length": PROMPT, **values}
    return Run(method=CASES[name][0], training=arguments.training, model=arguments.model, **values)


def words(name: str, folder: Path) -> list[str]:
    """Return the arguments of a case as on a command line, without the device."""
    method, model, options = CASES[name]
    return [
        *("--model_name_or_path", saved_model(model, folder), "--dataset_name", _data(method, folder)),
        *("--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--max_steps", "2"),
        *("--output_dir", str(folder / "out"), "--share_prompts", "false", "--learning_rate", "1e-5"),
        *("--gradient_accumulation_steps", "1", "--no_dataloader_pin_memory", "--disable_tqdm", "true"),
        *_OF_METHOD[method],
        *(saved_model(x.removeprefix("model:"), folder) if x.startswith("model:") else x for x in options),
    ]


def saved_model(name: str, folder: Path) -> str:
    path = folder / name
    if not path.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(_MODELS[name]()).save_pretrained(path)
        word_tokenizer().save_pretrained(path)
    return str(path)


def _data(method: str, folder: Path) -> str:
    """Rows as long as they may be, which begin with the same token; enough for 3 steps of an epoch on two ranks."""
    path = folder / f"{method}-data"
    if not path.exists():
        path.mkdir()
        numbers = torch.randint(94, (48, 3, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
        texts = [[" ".join(f"w{y}" for y in x) for x in row] for row in numbers]
        cut = [" ".join(["w0", *prompt.split()[1:PROMPT]]) for prompt, _, _ in texts]
        rows: list[dict[str, Any]] = [{"prompt": x} for x in cut]
        for number, (row, (_, first, second)) in enumerate(zip(rows, texts, strict=True)):
            if method == "reward":  # which drops what is longer; the text gets an end
                first, second = (" ".join(x.split()[: LENGTH - PROMPT - 1]) for x in (first, second))
            if method in ("dpo", "reward"):
                row |= {"chosen": f" {first}", "rejected": f" {second}"}
            elif method in ("sft", "kto"):
                row |= {"completion": f" {first}"}
            if method == "kto":
                row["label"] = number % 2 == 0
        Dataset.from_list(rows).to_json(path / "train.jsonl")
    return str(path)
