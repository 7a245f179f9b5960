"""Trains one case of the table with one pair of trainers, writes down everything a user could see, and compares.

Run as a script it trains the named cases with `trl_ext` and writes JSON, so that two environments can be compared:
`python run_losses.py --checkpoints DIR --out FILE CASE [CASE ...]`.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import torch
from peft import PeftModel, PrefixTuningConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from drop_in_cases import CASES, Case
from tiny import REFERENCE_SEED, REWARDS, ROLLOUTS, Workshop, add, lora_config, preferences, prompts

TOLERANCE = 1e-5

PROMPT_LEARNING = {"prompt_tuning": PromptTuningConfig, "prefix_tuning": PrefixTuningConfig}

# Wall-clock figures, the only keys not compared: they differ between two runs of the same code.
WALL_CLOCK = (
    "step_time",
    "runtime",
    "samples_per_second",
    "steps_per_second",
    "model_preparation_time",
)

# Logged by ours alone: what was not run
SKIPPED = ("skipped/", "eval_skipped/")


@dataclass(frozen=True)
class Trainers:
    """The classes of one library, stock or ours."""

    dpo_trainer: type
    dpo_config: type
    grpo_trainer: type
    grpo_config: type

    @classmethod
    def of(cls, library: Any) -> "Trainers":
        return cls(library.DPOTrainer, library.DPOConfig, library.GRPOTrainer, library.GRPOConfig)

    def with_loss_times(self, factor: float) -> "Trainers":
        """The same trainers with a wrong loss, which a comparison worth its name must notice."""

        def wrong(trainer: type) -> type:
            def compute_loss(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
                return factor * super(subclass, self).compute_loss(*args, **kwargs)

            subclass = type(trainer.__name__, (trainer,), {"compute_loss": compute_loss})
            return subclass

        return replace(self, dpo_trainer=wrong(self.dpo_trainer), grpo_trainer=wrong(self.grpo_trainer))


@dataclass
class Record:
    """What one training run showed a user, and the scales to judge it by."""

    losses: list[float] = field(default_factory=list)  # of each micro-batch, as `training_step` returns them
    advantages: list[float] = field(default_factory=list)  # mean |advantage| of each GRPO micro-batch
    logs: list[dict[str, float]] = field(default_factory=list)
    logit_size: float = 0.0  # mean |logit| of a DPO batch, from the model's own forward
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)  # before each optimizer step
    updates: dict[str, torch.Tensor] = field(default_factory=dict)  # final minus initial weights

    @property
    def advantage(self) -> float:
        """Mean |advantage|, the scale of a GRPO loss; 0 for DPO."""
        return sum(self.advantages) / len(self.advantages) if self.advantages else 0.0


class _Recorder(TrainerCallback):
    def __init__(self, record: Record):
        self.record = record
        self.initial: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.initial = {name: param.detach().clone() for name, param in _trained(model)}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.record.gradients.append(
            {name: None if param.grad is None else param.grad.detach().clone() for name, param in _trained(model)}
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.record.logs.append({key: value for key, value in logs.items() if not key.endswith(WALL_CLOCK)})

    def on_train_end(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.record.updates = {name: param.detach() - self.initial[name] for name, param in _trained(model)}


def _trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, param) for name, param in model.named_parameters() if param.requires_grad)


def _recording(trainer: type, record: Record) -> type:
    class Recording(trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            if "advantages" in inputs and self.model.training:
                record.advantages.append(inputs["advantages"].abs().mean().item())
            return super().compute_loss(model, inputs, *args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            record.losses.append(loss.item())
            return loss

    Recording.__name__ = trainer.__name__  # some log lines and the model card name the class
    return Recording


def train(case: Case, trainers: Trainers, workshop: Workshop) -> Record:
    """Train `case` from freshly loaded checkpoints and return what was seen."""
    record = Record()
    # A cache of its own: a reference log-prob from another case's batch differs in its last bit
    with (
        tempfile.TemporaryDirectory() as output_dir,
        patch.object(datasets.config, "HF_DATASETS_CACHE", Path(output_dir) / "datasets"),
    ):
        config = {
            "output_dir": output_dir,
            "seed": 7,
            "bf16": False,
            "use_cpu": True,
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
        build = _dpo if case.trainer == "dpo" else _grpo
        trainer = build(case, config, trainers, workshop, record)
        trainer.add_callback(_Recorder(record))
        trainer.train()
        if case.trainer == "dpo":
            batch = next(iter(trainer.get_train_dataloader()))
            with torch.no_grad():
                logits = trainer.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            record.logit_size = logits.abs().mean().item()
    return record


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


def _dpo(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, record: Record) -> Any:
    conversational = case.model == "chat"
    train_dataset = preferences(12, seed=1, conversational=conversational)
    if case.streaming:
        train_dataset = train_dataset.to_iterable_dataset()
    ref_model = None
    if case.setup.endswith("ref_model"):
        ref_model = AutoModelForCausalLM.from_pretrained(workshop.model(case.model, seed=REFERENCE_SEED))
    return _recording(trainers.dpo_trainer, record)(
        ref_model=ref_model,
        args=trainers.dpo_config(**{"per_device_train_batch_size": 4, **config}),
        train_dataset=train_dataset,
        eval_dataset=preferences(5, seed=2, conversational=conversational) if _evaluates(config) else None,
        **_policy(case, workshop),
    )


def _grpo(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, record: Record) -> Any:
    conversational = case.model == "chat"
    train_dataset = prompts(12, seed=1, conversational=conversational)
    if case.streaming:
        train_dataset = train_dataset.to_iterable_dataset()
    if case.setup == "ref_model":
        # TRL takes no reference model in GRPO: it loads one from the policy's own checkpoint wherever beta > 0.
        config = {"beta": 0.1, **config}
    base = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "temperature": 0.9}
    return _recording(trainers.grpo_trainer, record)(
        reward_funcs=[REWARDS[name] for name in case.rewards],
        args=trainers.grpo_config(**{**base, **config}),
        train_dataset=train_dataset,
        eval_dataset=prompts(3, seed=2, conversational=conversational) if _evaluates(config) else None,
        rollout_func=None if case.rollout == "generate" else ROLLOUTS[case.rollout],
        tools=[add] if case.rollout == "tool_call" else None,
        **_policy(case, workshop),
    )


def _evaluates(config: dict[str, Any]) -> bool:
    return config.get("eval_strategy", "no") != "no"


def assert_same(case: Case, ours: Record, stock: Record) -> None:
    """Raise AssertionError, naming everything that differs, unless `ours` shows what `stock` shows to `TOLERANCE`."""
    wrong: list[str] = []

    def close(what: str, got: float | None, want: float | None, scale: float) -> None:
        if got is None or want is None or math.isnan(want):
            same = got == want or (want is not None and got is not None and math.isnan(got) and math.isnan(want))
        else:
            same = abs(got - want) <= TOLERANCE * max(abs(want), scale)  # false for a NaN
        if not same:
            wrong.append(f"{what}: ours {got!r}, stock {want!r}, scale {scale:.3g}")

    assert len(ours.losses) == len(stock.losses) > 0, (len(ours.losses), len(stock.losses))
    for i, (got, want) in enumerate(zip(ours.losses, stock.losses, strict=True)):
        close(f"loss of micro-batch {i}", got, want, stock.advantage)

    assert len(ours.logs) == len(stock.logs) > 0, (len(ours.logs), len(stock.logs))
    for i, (got_log, want_log) in enumerate(zip(ours.logs, stock.logs, strict=True)):
        only_ours = {key for key in got_log.keys() - want_log.keys() if not key.startswith(SKIPPED)}
        only_stock = {key for key in want_log.keys() - got_log.keys() if not _not_computed(case, key)}
        if only_ours or only_stock:
            wrong.append(f"log {i}: only ours {sorted(only_ours)}, only stock {sorted(only_stock)}")
        for key in want_log.keys() & got_log.keys():
            if case.accuracy_is_noise_at_first and i == 0 and key == "rewards/accuracies":
                continue
            close(
                f"log {i} {key}",
                got_log[key],
                want_log[key],
                metric_scale(case, key, want_log, stock.advantage, stock.logit_size),
            )

    assert len(ours.gradients) == len(stock.gradients) > 0, (len(ours.gradients), len(stock.gradients))
    for i, (got_grads, want_grads) in enumerate(zip(ours.gradients, stock.gradients, strict=True)):
        wrong += _tensors_differ(f"gradient of step {i}", got_grads, want_grads)
    wrong += _tensors_differ("weight update", ours.updates, stock.updates)

    # Nothing compares equal to nothing, and NaN to NaN: such a case would prove little.
    assert all(math.isfinite(loss) for loss in stock.losses), f"{case.name}: stock's losses are {stock.losses}"
    assert any(_norm(gradients) > 0 for gradients in stock.gradients), f"{case.name}: stock has no gradient at all"
    assert not wrong, f"{case.name}: {len(wrong)} differences\n" + "\n".join(wrong[:40])


def _not_computed(case: Case, key: str) -> bool:
    """Whether ours leaves out a metric that the loss does not read: DPO's rewards, where the loss is SFT's alone."""
    return case.config.get("loss_type") == "sft" and key.removeprefix("eval_").startswith("rewards/")


def metric_scale(case: Case, key: str, log: dict[str, float], advantage: float, logit_size: float) -> float:
    """The size of what a logged value is a difference or a signed mean of, where that is not its own size."""
    prefix = "eval_" if key.startswith("eval_") else ""
    key = key.removeprefix("eval_")
    if case.trainer == "dpo" and key.startswith("rewards/"):
        logps = [abs(log[f"{prefix}logps/{which}"]) for which in ("chosen", "rejected")]
        return sum(logps) / 2 * case.config.get("beta", 0.1)
    if case.trainer == "dpo" and key.startswith("logits/"):
        return logit_size
    if case.trainer == "grpo" and key in ("loss", "train_loss", "policy_loss"):
        return advantage
    return 0.0


def _norm(tensors: dict[str, torch.Tensor | None]) -> float:
    return math.sqrt(sum(tensor.double().pow(2).sum().item() for tensor in tensors.values() if tensor is not None))


def _tensors_differ(
    what: str, ours: dict[str, torch.Tensor | None], stock: dict[str, torch.Tensor | None]
) -> list[str]:
    """Each tensor's difference against the norm of all: a vector comparison, as sums of absolute values are blind."""
    if ours.keys() != stock.keys():
        return [f"{what}: other names: {sorted(ours.keys() ^ stock.keys())[:6]}"]
    wrong = []
    total = _norm(stock)
    for name, want in stock.items():
        got = ours[name]
        if (got is None) != (want is None):
            wrong.append(f"{what} {name}: ours {'None' if got is None else 'set'}, stock the other")
        elif want is not None:
            difference = (got.double() - want.double()).norm().item()
            if not difference <= TOLERANCE * total:
                wrong.append(f"{what} {name}: |ours - stock| {difference:.3g}, all of stock {total:.3g}")
    return wrong


def _digest(tensors: dict[str, torch.Tensor | None]) -> dict[str, list[float] | None]:
    """Norm of each tensor and its projections on three fixed random directions: JSON enough to tell two apart."""
    digest: dict[str, list[float] | None] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            digest[name] = None
            continue
        directions = torch.randn(3, tensor.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        flat = tensor.double().flatten()
        digest[name] = [flat.norm().item(), *(directions @ flat).tolist()]
    return digest


def summary(record: Record) -> dict[str, Any]:
    """`record` as JSON values: losses and metrics as they are, gradients and updates as digests."""
    return {
        "losses": record.losses,
        "advantage": record.advantage,
        "logit_size": record.logit_size,
        "logs": record.logs,
        "gradients": [_digest(gradients) for gradients in record.gradients],
        "updates": _digest(record.updates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the tiny models, shared by the runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("cases", nargs="+", help="names of the table's cases")
    arguments = parser.parse_args()
    import trl_ext

    torch.set_num_threads(1)
    workshop = Workshop(arguments.checkpoints)
    trainers = Trainers.of(trl_ext)
    cases = {name: summary(train(CASES[name], trainers, workshop)) for name in arguments.cases}
    versions = {package: version(package) for package in ("trl", "transformers", "torch")}
    arguments.out.write_text(json.dumps({"versions": versions, "cases": cases}))


if __name__ == "__main__":
    main()
