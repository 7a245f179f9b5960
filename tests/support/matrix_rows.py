"""The rows of the launch matrix. Each is one training run of DPO or GRPO, for one process or any engine."""

import os
import random
import warnings
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BambaConfig,
    LlamaConfig,
    ModernBertDecoderConfig,
    Qwen3Config,
    Qwen3VLConfig,
    TrainerCallback,
)

import trl_ext
from rewards import id_reward
from run_losses import Trainers
from tiny import V_WORDS, lora_config, preferences, prompts, word_tokenizer

STEPS, ACCUMULATION = 5, 2
MICRO_BATCH = 12  # rows, or pairs, of all ranks together
GENERATIONS = 8  # so that each of 2 or 4 ranks has a part of a group
_SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,  # tensor parallelism splits heads: over 2, 3 or 4 ranks
    "num_key_value_heads": 12,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "dtype": "float32",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
# If moving tokens costs less than moving the weight, each rank scores with its rows; with few rows it is the reverse
MODELS = {
    "untied": LlamaConfig(**_SHAPE, vocab_size=1000, tie_word_embeddings=False),
    "tied": Qwen3Config(**_SHAPE, vocab_size=1000, tie_word_embeddings=True),
    "odd": LlamaConfig(**_SHAPE, vocab_size=1009, tie_word_embeddings=False),
    "few": LlamaConfig(**_SHAPE, vocab_size=V_WORDS, tie_word_embeddings=False),  # 97, odd too
    # The model's own code computes its logits
    "layers": ModernBertDecoderConfig(
        **{name: x for name, x in _SHAPE.items() if name not in ("num_key_value_heads", "bos_token_id")},
        vocab_size=V_WORDS,
        cls_token_id=1,
        sep_token_id=1,
    ),
    # Ranks differ in how often they call its recurrent layers
    "hybrid": BambaConfig(
        **_SHAPE,
        vocab_size=V_WORDS,
        tie_word_embeddings=False,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=12,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=16,
    ),
    # Gets text alone
    "vision": Qwen3VLConfig(
        text_config={
            **_SHAPE,
            "vocab_size": V_WORDS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 4,
            "out_hidden_size": 48,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=V_WORDS - 1,
        video_token_id=V_WORDS - 2,
        vision_start_token_id=V_WORDS - 3,
        vision_end_token_id=V_WORDS - 4,
    ),
}
TRAINERS, MODES = ("dpo", "grpo"), ("full", "lora")
ROWS = [(trainer, mode, model) for trainer in TRAINERS for mode in MODES for model in ("untied", "tied", "odd")]
ROWS += [(trainer, "lora", "few") for trainer in TRAINERS]  # a trained weight of few rows moves as one of many does
OTHER_ROWS = [
    (trainer, mode, model)
    for trainer in ("sft", "kto", "rloo", "reward")
    for mode, model in (("full", "untied"), ("lora", "tied"))
]
# "smoothed": full fine-tuning with smoothed labels; "base": a LoRA student of its own base model
OTHER_ROWS += [("sft", "smoothed", "odd")]
OTHER_ROWS += [
    ("distillation", mode, model) for mode, model in (("full", "untied"), ("lora", "tied"), ("base", "tied"))
]
FAMILY_ROWS = [("dpo", "full", "hybrid"), ("grpo", "lora", "hybrid"), ("dpo", "full", "vision")]
OWN_CODE_ROWS = [("dpo", "full", "layers"), ("grpo", "lora", "layers")]


def save_models(folder: Path) -> None:
    """Save the checkpoints that the rows start from, each with an adapter whose weights are not zero."""
    for name, config in MODELS.items():
        torch.manual_seed(1234)
        auto_class: Any = AutoModelForImageTextToText if name == "vision" else AutoModelForCausalLM
        model = auto_class.from_config(config)
        model.save_pretrained(folder / name)
        word_tokenizer().save_pretrained(folder / name)
        # Only column-wise linear layers, because PEFT supports no others under tensor parallelism
        adapter = lora_config(target_modules=["q_proj", "v_proj", "up_proj"])
        get_peft_model(model, adapter).save_pretrained(folder / name / "adapter")
        if name in ("untied", "tied"):
            classifier_config = deepcopy(config)
            classifier_config.num_labels = 1
            classifier = AutoModelForSequenceClassification.from_config(classifier_config)
            classifier.save_pretrained(folder / name / "classifier")
            word_tokenizer().save_pretrained(folder / name / "classifier")
            adapter = lora_config(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj", "up_proj"])
            get_peft_model(classifier, adapter).save_pretrained(folder / name / "classifier" / "adapter")


class Engine(Protocol):
    """What a run reads of its engine; `launch.LaunchedRank` implements it."""

    folder: Path
    index: int
    processes: int
    replicates_tokens: bool

    def training_arguments(self) -> dict[str, Any]: ...
    def model_arguments(self) -> dict[str, Any]: ...
    def whole(self, params: dict[str, Any]) -> dict[str, Any]: ...
    def check(self, trainer: Any) -> None: ...
    def without_gradient_sync(self, trainer: Any) -> None: ...


@dataclass
class OneProcess:
    """Training without an engine, which all engines are compared with."""

    folder: Path
    index: int = 0
    processes: int = 1
    replicates_tokens: bool = False

    def training_arguments(self) -> dict[str, Any]:
        return {"use_cpu": True}

    def model_arguments(self) -> dict[str, Any]:
        return {}

    def whole(self, params: dict[str, Any]) -> dict[str, Any]:
        return {name: param.detach().clone() for name, param in params.items()}

    def check(self, trainer: Any) -> None:
        assert trainer.accelerator.num_processes == 1


@dataclass
class Seen:
    """The record of a run: values of each optimizer step, and of all of them.

    Attributes:
        losses, grad_norms (`list[float]`): as logged.
        start, change (`dict[str, Tensor]`): the initial trained weights, and their change.
        head (`str`): which rows of the head's weight the last pass was scored with; empty for stock TRL.
    """

    losses: list[float]
    grad_norms: list[float]
    start: dict[str, torch.Tensor]
    change: dict[str, torch.Tensor]
    head: str


class _Watch(TrainerCallback):
    def __init__(self, engine: Engine, trainer: Any, synced: bool):
        self.engine, self.trainer, self.synced = engine, trainer, synced

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = self.engine.whole(trained(self.trainer))
        if not self.synced:
            self.engine.without_gradient_sync(self.trainer)


def trained(trainer: Any) -> dict[str, torch.nn.Parameter]:
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def train(engine: Engine, trainer: str, mode: str, model: str, synced: bool = True, library: Any = trl_ext) -> Seen:
    """Train one row, from the checkpoint `model` and, with LoRA, the adapter saved beside it."""
    per_device = MICRO_BATCH // (1 if engine.replicates_tokens else engine.processes)
    trainers = Trainers.of(library)
    builders = {
        "dpo": _dpo,
        "grpo": _grpo,
        "sft": _sft,
        "kto": _kto,
        "rloo": _rloo,
        "reward": _reward,
        "distillation": _distillation,
    }
    build = builders[trainer]
    row = build(engine, trainers, mode, Path(os.environ["MATRIX_MODELS"]) / model, per_device)
    watch = _Watch(engine, row, synced)
    row.add_callback(watch)
    row.train()
    engine.check(row)
    end = engine.whole(trained(row))
    logs = [log for log in row.state.log_history if "loss" in log]
    assert len(logs) == STEPS
    return Seen(
        losses=[log["loss"] for log in logs],
        grad_norms=[float(log["grad_norm"]) for log in logs],
        start=watch.start,
        change={name: weight - watch.start[name] for name, weight in end.items()},
        head=row.explain()["head"].reason if library is trl_ext else "",
    )


def _config(engine: Engine, per_device: int) -> dict[str, Any]:
    return {
        "output_dir": str(engine.folder / "run"),
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        # With SGD the change of the weights is the sum of the gradients. Adam ignores their scale, so a
        # doubled gradient would pass, and turns rounding errors into steps where a gradient is 0
        "optim": "sgd",
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,  # logs the norm but never clips, which would hide a factor
        "seed": 7,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **engine.training_arguments(),
    }


def _policy(engine: Engine, mode: str, path: Path) -> Any:
    """Load the model after the config exists, so that ZeRO-3 partitions the weights while they are loaded."""
    if mode in ("full", "smoothed"):
        return str(path)
    base = AutoModelForCausalLM.from_pretrained(path, dtype="float32", **engine.model_arguments())
    return PeftModel.from_pretrained(base, path / "adapter", is_trainable=True)


def _dpo(engine: Engine, trainers: Trainers, mode: str, path: Path, per_device: int) -> Any:
    arguments = {"dtype": "float32", **engine.model_arguments()} if mode == "full" else None
    config = trainers.dpo_config(**_config(engine, per_device), model_init_kwargs=arguments)
    return trainers.dpo_trainer(
        _policy(engine, mode, path),
        args=config,
        train_dataset=preferences(STEPS * ACCUMULATION * MICRO_BATCH, seed=1),
        processing_class=AutoTokenizer.from_pretrained(path),  # "vision" has no processor of images
    )


def _grpo(engine: Engine, trainers: Trainers, mode: str, path: Path, per_device: int) -> Any:
    arguments = {"dtype": "float32", **engine.model_arguments()} if mode == "full" else None
    config = trainers.grpo_config(
        **_config(engine, per_device),
        model_init_kwargs=arguments,
        num_generations=GENERATIONS,
        max_completion_length=16,
        beta=0.1,
    )
    return trainers.grpo_trainer(
        _policy(engine, mode, path),
        reward_funcs=id_reward,
        args=config,
        train_dataset=prompts(24, seed=1),
        rollout_func=partial(_rollout, engine),
    )


def _rollout(engine: Engine, texts: list[str], trainer: Any) -> dict[str, Any]:
    """Return completions that depend only on the prompt and the index of the sample."""
    tokenizer = trainer.processing_class
    first = 0 if engine.replicates_tokens else engine.index * len(texts)
    completions = []
    for row, text in enumerate(texts):
        rng = random.Random(f"{text}|{(first + row) % GENERATIONS}")
        completions.append([*(rng.randrange(3, 97) for _ in range(rng.randint(5, 15))), tokenizer.eos_token_id])
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def _sft(engine: Engine, trainers: Trainers, mode: str, path: Path, per_device: int) -> Any:
    arguments = None if mode == "lora" else {"dtype": "float32", **engine.model_arguments()}
    config = trainers.sft_config(
        **_config(engine, per_device),
        model_init_kwargs=arguments,
        label_smoothing_factor=0.3 if mode == "smoothed" else 0.0,
    )
    pairs = preferences(STEPS * ACCUMULATION * MICRO_BATCH, seed=1)
    rows = pairs.rename_column("chosen", "completion").remove_columns("rejected")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`label_smoothing_factor` is deprecated", FutureWarning)  # TRL's
        return trainers.sft_trainer(_policy(engine, mode, path), args=config, train_dataset=rows)


def _kto(engine: Engine, trainers: Trainers, mode: str, path: Path, per_device: int) -> Any:
    """Without the KL term, whose completions depend on the rows of a device in TRL too."""
    arguments = {"dtype": "float32", **engine.model_arguments()} if mode == "full" else None
    config = trainers.kto_config(
        **_config(engine, per_device), model_init_kwargs=arguments, loss_type="apo_zero_unpaired"
    )
    pairs = preferences(STEPS * ACCUMULATION * MICRO_BATCH // 2, seed=1)
    return trainers.kto_trainer(_policy(engine, mode, path), args=config, train_dataset=pairs)


def _rloo(engine: Engine, trainers: Trainers, mode: str, path: Path, per_device: int) -> Any:
    arguments = {"dtype": "float32", **engine.model_arguments()} if mode == "full" else None
    config = trainers.rloo_config(
        **_config(engine, per_device),
        model_init_kwargs=arguments,
        num_generations=GENERATIONS,
        num_iterations=2,  # on-policy losses are sums of advantages: 0
        max_completion_length=16,
        beta=0.1,
    )

    class Scripted(trainers.rloo_trainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
            texts = self.processing_class.batch_decode(prompt_ids)
            return _rollout(engine, texts, self)["completion_ids"]

    Scripted.__name__ = trainers.rloo_trainer.__name__
    return Scripted(_policy(engine, mode, path), reward_funcs=id_reward, args=config, train_dataset=prompts(24, seed=1))


def _distillation(engine: Engine, trainers: Trainers, mode: str, path: Path, per_device: int) -> Any:
    arguments = {"dtype": "float32", **engine.model_arguments()}
    config = trainers.distillation_config(
        **_config(engine, per_device),
        model_init_kwargs=arguments if mode == "full" else None,
        teacher_model_init_kwargs=arguments,
        max_completion_length=16,
        beta=0.3,
    )
    teacher: Path | None = path.parent / {"untied": "tied", "tied": "untied"}[path.name]
    if mode == "base":
        teacher = None if trainers.has_base_as_teacher else path

    class Scripted(trainers.distillation_trainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
            texts = self.processing_class.batch_decode(prompt_ids)
            return _rollout(engine, texts, self)["completion_ids"]

    Scripted.__name__ = trainers.distillation_trainer.__name__
    return Scripted(
        _policy(engine, mode, path),
        teacher_model=None if teacher is None else str(teacher),
        args=config,
        train_dataset=prompts(STEPS * ACCUMULATION * MICRO_BATCH, seed=1),
    )


def _reward(engine: Engine, trainers: Trainers, mode: str, path: Path, per_device: int) -> Any:
    path = path / "classifier"
    arguments = {"dtype": "float32", **engine.model_arguments()} if mode == "full" else None
    config = trainers.reward_config(**_config(engine, per_device), model_init_kwargs=arguments)
    policy: Any = str(path)
    if mode == "lora":
        base = AutoModelForSequenceClassification.from_pretrained(path, dtype="float32", **engine.model_arguments())
        policy = PeftModel.from_pretrained(base, path / "adapter", is_trainable=True)
    return trainers.reward_trainer(
        policy,
        args=config,
        train_dataset=preferences(STEPS * ACCUMULATION * MICRO_BATCH, seed=1),
        processing_class=AutoTokenizer.from_pretrained(path),
    )


def _case(rank: Any, row: tuple[str, str, str], synced: bool) -> Seen:
    return train(rank, *row, synced=synced)


LAUNCHED_ROWS = (*ROWS, *OTHER_ROWS, *OWN_CODE_ROWS, *FAMILY_ROWS)
CASES = {"-".join(row): partial(_case, row=row, synced=True) for row in LAUNCHED_ROWS}
CONTROLS = {f"{'-'.join(row)}-unsynced": partial(_case, row=row, synced=False) for row in LAUNCHED_ROWS}
CASES |= CONTROLS
