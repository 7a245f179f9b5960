"""Policies with adapters of many kinds, separate models that define their references, and runs of both trainers.

The model that defines a reference has the adapter merged, so TRL's trainers score it without an adapter.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
from peft import IA3Config, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback

from rewards import REWARDS
from tiny import Workshop, lora_config, preferences, prompts, scripted_rollout

COMMON = {
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "gradient_checkpointing": False,
    "max_steps": 4,
    "seed": 7,
}
OF_DPO = {"per_device_train_batch_size": 4, "learning_rate": 0.3, "beta": 0.3}
OF_GRPO = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "beta": 0.3,
    "learning_rate": 0.3,
}


def base(workshop: Workshop, model: str = "untied") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(workshop.model(model))


def drawn(model: PreTrainedModel, config: Any, seed: int, name: str = "default") -> PeftModel:
    """Return `model` with an adapter `name` that has random weights."""
    torch.manual_seed(seed)
    policy = get_peft_model(model, config, adapter_name=name)
    with torch.no_grad():
        for param in policy.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.05)
    return policy


def loaded(workshop: Workshop, folder: Any, *names: str, trainable: bool = True, **lora: Any) -> PeftModel:
    """Load a base model and one adapter for each name, with different weights. The first is active."""
    policy = None
    for seed, name in enumerate(names):
        path = folder / f"adapter-{seed}"
        if not path.exists():
            drawn(base(workshop), lora_config(**lora), seed).save_pretrained(path)
        if policy is None:
            policy = PeftModel.from_pretrained(base(workshop), path, adapter_name=name, is_trainable=trainable)
        else:
            policy.load_adapter(path, adapter_name=name)
    return policy


def merged(workshop: Workshop, folder: Any, seed: int) -> PreTrainedModel:
    """Return the base model with the adapter of this seed merged."""
    return PeftModel.from_pretrained(base(workshop), folder / f"adapter-{seed}").merge_and_unload()


@dataclass
class Run:
    """The results of a run."""

    trainer: Any
    losses: list[float] = field(default_factory=list)
    updates: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def logs(self) -> list[dict[str, float]]:
        return [log for log in self.trainer.state.log_history if "loss" in log]


class _Recorder(TrainerCallback):
    def __init__(self, run: Run):
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.initial = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.run.losses.append(logs["loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        params = dict(model.named_parameters())
        self.run.updates = {name: params[name].detach() - was for name, was in self.initial.items()}


class MovesDefinition(TrainerCallback):
    """TR-DPO on a separate reference model, which is built like the policy: a base model with an adapter."""

    def __init__(self, reference: Any):
        self.reference = reference

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            theirs = dict(model.get_base_model().named_parameters())
            for name, param in self.reference.named_parameters():
                param.data.lerp_(theirs[name].data, args.ref_model_mixup_alpha)


def build(
    kind: str, library: Any, workshop: Workshop, folder: Any, policy: Any, reference: Any = None, **config: Any
) -> Any:
    """Build a DPO or GRPO trainer of `library`. If given, `reference` replaces the trainer's own reference."""
    options = {name: config.pop(name) for name in ("peft_config", "callbacks", "eval_dataset") if name in config}
    torch.manual_seed(0)
    path = workshop.model(config.pop("model", "untied"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    if policy is None:
        policy = path
    if kind == "dpo":
        return library.DPOTrainer(
            policy,
            args=library.DPOConfig(str(folder / "run"), **{**COMMON, **OF_DPO, **config}),
            train_dataset=preferences(16, 1),
            processing_class=tokenizer,
            **({} if reference is None else {"ref_model": reference}),
            **options,
        )
    trainer = library.GRPOTrainer(
        policy,
        [REWARDS["id"]],
        library.GRPOConfig(str(folder / "run"), **{**COMMON, **OF_GRPO, **config}),
        train_dataset=prompts(16, 1),
        processing_class=tokenizer,
        rollout_func=scripted_rollout,
        **options,
    )
    if reference is not None:
        trl.trainer.utils.add_fused_lm_head(reference, temperature=trainer.temperature)
        trainer.ref_model = reference
    return trainer


def run(*positional: Any, **config: Any) -> Run:
    """Build a trainer, train, and return what the run shows."""
    trainer = build(*positional, **config)
    shown = Run(trainer)
    trainer.add_callback(_Recorder(shown))
    trainer.train()
    return shown


def assert_alike(
    ours: Run, definition: Run, rename: Callable[[str], str] = lambda name: name, times: float = 1.0
) -> None:
    """Check that losses, metrics and the update of each weight agree within about 1e-5 of their size, times `times`."""
    assert len(ours.losses) == len(definition.losses) == 4
    assert max(map(abs, ours.losses)) > 0
    torch.testing.assert_close(ours.losses, definition.losses, rtol=1e-5 * times, atol=2e-6 * times)
    for got, want in zip(ours.logs, definition.logs, strict=True):
        for key in want.keys() & got.keys():
            if key.startswith(("rewards/chosen", "rewards/rejected", "rewards/margins", "kl", "logps/")):
                assert abs(got[key] - want[key]) <= 2e-5 * times * max(1.0, abs(want[key])), (key, got[key], want[key])
    # In PEFT the virtual tokens of TRL's "ref" stay trainable, but they get no gradient
    got_updates = {rename(name): update for name, update in ours.updates.items() if ".ref." not in name}
    assert all((update == 0).all() for name, update in definition.updates.items() if ".ref." in name)
    updates = {name: update for name, update in definition.updates.items() if ".ref." not in name}
    assert got_updates.keys() == updates.keys()
    total = sum(update.double().pow(2).sum() for update in updates.values()).sqrt()
    assert total > 1e-3
    for name, want in updates.items():
        assert (got_updates[name].double() - want.double()).norm() <= 2e-5 * times * total, name


def copy_of(model: Any) -> Any:
    """Return a frozen copy that shares no memory."""
    return copy.deepcopy(model).requires_grad_(False)


def ia3_config() -> IA3Config:
    return IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
