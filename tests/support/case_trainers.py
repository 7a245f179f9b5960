"""Builds the trainer of a case with the classes of TRL or of this package.

It knows only the public API, so that it also builds the trainers of an earlier release: `same_bits.py` does.
"""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import ANY

import torch
from datasets import Dataset
from peft import PeftModel, PrefixTuningConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from drop_in_cases import Case
from rewards import REWARDS
from tiny import REFERENCE_SEED, ROLLOUTS, Workshop, add, lora_config, preferences, prompts

_PREFIXES = ("DPO", "GRPO", "SFT", "KTO", "RLOO", "Distillation", "Reward")

PROMPT_LEARNING = {"prompt_tuning": PromptTuningConfig, "prefix_tuning": PrefixTuningConfig}

# Student -> a teacher of another size, with the same vocabulary
TEACHERS = {"tied": "untied"}

# Wall-clock times differ between runs of the same code, and are the only metrics that are not compared.
WALL_CLOCK = (
    "step_time",
    "runtime",
    "samples_per_second",
    "steps_per_second",
    "tokens_per_second",
    "model_preparation_time",
    *(f"seconds/{phase}" for phase in ("generation", "rewards", "passes", "training")),
)


@dataclass(frozen=True)
class Trainers:
    """The classes of one library: TRL's or ours."""

    dpo_trainer: type
    dpo_config: type
    grpo_trainer: type
    grpo_config: type
    sft_trainer: type | None = None
    sft_config: type | None = None
    kto_trainer: type | None = None
    kto_config: type | None = None
    rloo_trainer: type | None = None
    rloo_config: type | None = None
    distillation_trainer: type | None = None
    distillation_config: type | None = None
    reward_trainer: type | None = None
    reward_config: type | None = None
    has_base_as_teacher: bool = False  # in distillation with LoRA
    # Whether a subclass records losses and batches
    records_batches: bool = True

    @classmethod
    def of(cls, library: Any) -> "Trainers":
        names = [f"{name}{kind}" for name in _PREFIXES for kind in ("Trainer", "Config")]
        # An earlier release may lack a trainer
        return cls(*(getattr(library, name, None) for name in names), has_base_as_teacher=library.__name__ == "trl_ext")

    def only_ours(self, case: Case) -> dict[str, Any]:
        """Return the arguments of `case` that only our config has, if this is ours."""
        config = getattr(self, f"{case.trainer}_config")
        config = getattr(config, "func", config)  # a test may have bound arguments
        known = {field.name for field in dataclasses.fields(config)}
        return {name: value for name, value in case.ours.items() if name in known}

    def padded(self) -> "Trainers":
        """Return our trainers without packing, so that rows and padding of each forward can be counted."""
        names = ("dpo_config", "grpo_config", "rloo_config")
        configs = {name: partial(getattr(self, name), padding_free=False) for name in names}
        return replace(self, **configs)

    def with_loss_times(self, factor: float) -> "Trainers":
        """Return the same trainers with their loss multiplied by `factor`, which the comparison must notice."""

        def wrong(trainer: type) -> type:
            def compute_loss(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
                return factor * super(subclass, self).compute_loss(*args, **kwargs)

            subclass = type(trainer.__name__, (trainer,), {"compute_loss": compute_loss})
            return subclass

        trainers = {name: x for name, x in vars(self).items() if name.endswith("_trainer") and x is not None}
        return replace(self, **{name: wrong(x) for name, x in trainers.items()})


def build_trainer(case: Case, trainers: Trainers, workshop: Workshop, output_dir: str, trainer_class: type) -> Any:
    """Build the trainer of `case`: `trainer_class` with the config of `trainers`."""
    config = {
        "output_dir": output_dir,
        "seed": 7,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "optim": "sgd",  # Adam's first step is a sign: it would turn rounding into a full update
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,  # TRL clips to 1.0, which hides a factor on the loss
        "gradient_checkpointing": False,  # TRL's default is True
        "max_steps": case.steps,
        "learning_rate": case.learning_rate,
        **case.config,
    }
    builders = {
        "dpo": _dpo,
        "grpo": _grpo,
        "sft": _sft,
        "kto": _kto,
        "rloo": _rloo,
        "reward": _reward,
        "distillation": _distillation,
    }
    build = builders[case.trainer]
    return build(case, config, trainers, workshop, trainer_class)


def _policy(case: Case, workshop: Workshop) -> dict[str, Any]:
    path = workshop.model(case.model)
    if case.setup == "ref_adapter":
        base = AutoModelForCausalLM.from_pretrained(path)
        return {"model": PeftModel.from_pretrained(base, workshop.adapter(case.model), is_trainable=True)}
    if case.setup in PROMPT_LEARNING:
        peft_config = PROMPT_LEARNING[case.setup](task_type="CAUSAL_LM", num_virtual_tokens=3)
        return {"model": path, "peft_config": peft_config}
    if case.setup.startswith("lora"):
        return {"model": path, "peft_config": lora_config(**case.lora)}
    return {"model": path}


def _dpo(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, trainer_class: type) -> Any:
    def rows(count: int, seed: int) -> Dataset:
        pairs = preferences(count, seed, conversational=case.model == "chat")
        if not case.reward_columns:
            return pairs
        rng = random.Random(seed)
        pairs = pairs.add_column("chosen_reward", [rng.random() for _ in range(count)])
        return pairs.add_column("rejected_reward", [-rng.random() for _ in range(count)])

    train_dataset = rows(case.rows, seed=1)
    if case.streaming:
        train_dataset = train_dataset.to_iterable_dataset()
    ref_model = None
    if case.setup.endswith("ref_model"):
        ref_model = AutoModelForCausalLM.from_pretrained(workshop.model(case.model, seed=REFERENCE_SEED))
    return trainer_class(
        ref_model=ref_model,
        args=trainers.dpo_config(**{"per_device_train_batch_size": 4, **config, **trainers.only_ours(case)}),
        train_dataset=train_dataset,
        eval_dataset=_eval_sets(case, config, lambda seed: rows(5, seed)),
        **_policy(case, workshop),
    )


def _grpo(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, trainer_class: type) -> Any:
    conversational = case.model == "chat"
    train_dataset = prompts(case.prompts, seed=1, conversational=conversational)
    if case.streaming:
        train_dataset = train_dataset.to_iterable_dataset()
    if case.setup == "ref_model":
        # TRL's GRPO takes no reference model: if beta > 0, it loads one from the policy's checkpoint.
        config = {"beta": 0.1, **config}
    base = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "temperature": 0.9}
    trainer = trainer_class(
        reward_funcs=[REWARDS[name] for name in case.rewards],
        args=trainers.grpo_config(**{**base, **config, **trainers.only_ours(case)}),
        train_dataset=train_dataset,
        eval_dataset=_eval_sets(case, config, lambda seed: prompts(3, seed, conversational=conversational)),
        rollout_func=None if case.rollout == "generate" else ROLLOUTS[case.rollout],
        tools=[add] if case.rollout == "tool_call" else None,
        **_policy(case, workshop),
    )
    trainer.use_vllm = case.vllm
    # TRL syncs the weights to vLLM if this is not the global step; without vLLM nothing must be synced
    trainer._last_loaded_step = ANY
    return trainer


def _sft(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, trainer_class: type) -> Any:
    config = dict(config)
    form = config.pop("form", "completion")

    def rows(count: int, seed: int) -> Dataset:
        pairs = preferences(count, seed, conversational=case.model == "chat")
        if form == "text":
            return Dataset.from_list([{"text": x["prompt"] + x["chosen"]} for x in pairs])
        return pairs.rename_column("chosen", "completion").remove_columns("rejected")

    train_dataset = rows(case.rows, seed=1)
    return trainer_class(
        args=trainers.sft_config(**{"per_device_train_batch_size": 4, **config, **trainers.only_ours(case)}),
        train_dataset=train_dataset.to_iterable_dataset() if case.streaming else train_dataset,
        eval_dataset=_eval_sets(case, config, lambda seed: rows(5, seed)),
        **_policy(case, workshop),
    )


def _kto(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, trainer_class: type) -> Any:
    def rows(count: int, seed: int) -> Dataset:
        pairs = preferences(count, seed, conversational=case.model == "chat")
        sides = [("rejected", "chosen")[min(row % 3, 1)] for row in range(count)]
        return Dataset.from_list(
            [
                {"prompt": x["prompt"], "completion": x[side], "label": side == "chosen"}
                for x, side in zip(pairs, sides, strict=True)
            ]
        )

    ref_model = None
    if case.setup.endswith("ref_model"):
        ref_model = AutoModelForCausalLM.from_pretrained(workshop.model(case.model, seed=REFERENCE_SEED))
    # TRL warns about weights that do not balance these rows, and advises these
    base = {"per_device_train_batch_size": 4, "desirable_weight": 0.6}
    return trainer_class(
        ref_model=ref_model,
        args=trainers.kto_config(**{**base, **config, **trainers.only_ours(case)}),
        train_dataset=rows(case.rows, seed=1),
        eval_dataset=_eval_sets(case, config, lambda seed: rows(5, seed)),
        **_policy(case, workshop),
    )


def _rloo(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, trainer_class: type) -> Any:
    base = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "temperature": 0.9}
    return trainer_class(
        reward_funcs=[REWARDS[name] for name in case.rewards],
        args=trainers.rloo_config(**{**base, **config, **trainers.only_ours(case)}),
        train_dataset=prompts(case.prompts, seed=1, conversational=case.model == "chat"),
        eval_dataset=_eval_sets(case, config, lambda seed: prompts(4, seed, conversational=case.model == "chat")),
        **_policy(case, workshop),
    )


def _distillation(
    case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, trainer_class: type
) -> Any:
    conversational = case.model == "chat"
    base = {"per_device_train_batch_size": 4, "max_completion_length": 8, "temperature": 0.9}
    train_dataset = prompts(case.prompts, seed=1, conversational=conversational)
    if case.setup == "lora_of_base":
        teacher = None if trainers.has_base_as_teacher else workshop.model(case.model)
    else:
        teacher = workshop.model(TEACHERS.get(case.model, case.model), seed=REFERENCE_SEED)
    return trainer_class(
        teacher_model=teacher,
        args=trainers.distillation_config(**{**base, **config, **trainers.only_ours(case)}),
        train_dataset=train_dataset.to_iterable_dataset() if case.streaming else train_dataset,
        eval_dataset=_eval_sets(case, config, lambda seed: prompts(4, seed, conversational=conversational)),
        tools=[add] if case.rollout == "tool_call" else None,
        **_policy(case, workshop),
    )


def _reward(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, trainer_class: type) -> Any:
    config = dict(config)
    has_margins = config.pop("margins", False)
    pad_token = config.pop("padding", None)
    path = workshop.model(case.model)

    def rows(count: int, seed: int) -> Dataset:
        pairs = preferences(count, seed, conversational=case.model == "chat")
        rng = random.Random(seed)
        return pairs.add_column("margin", [rng.random() for _ in range(count)]) if has_margins else pairs

    train_dataset = rows(case.rows, seed=1)
    policy: dict[str, Any] = {"model": path}
    if case.setup in PROMPT_LEARNING:
        policy["peft_config"] = PROMPT_LEARNING[case.setup](task_type="SEQ_CLS", num_virtual_tokens=3)
    elif case.setup.startswith("lora"):
        policy["peft_config"] = lora_config(**{"task_type": "SEQ_CLS", **case.lora})
    tokenizer = AutoTokenizer.from_pretrained(path)
    if pad_token is not None:
        tokenizer.pad_token = pad_token
    return trainer_class(
        args=trainers.reward_config(**{"per_device_train_batch_size": 4, **config, **trainers.only_ours(case)}),
        train_dataset=train_dataset.to_iterable_dataset() if case.streaming else train_dataset,
        eval_dataset=_eval_sets(case, config, lambda seed: rows(5, seed)),
        processing_class=tokenizer,
        **policy,
    )


def _eval_sets(case: Case, config: dict[str, Any], make: Callable[[int], Dataset]) -> Any:
    """Return one data set, one for each name, or `None`; `make` makes one from a seed."""
    if case.eval_sets:
        return {name: make(seed) for seed, name in enumerate(case.eval_sets, 2)}
    evaluates = config.get("eval_strategy", "no") != "no" or "evaluate" in case.calls
    return make(2) if evaluates else None
