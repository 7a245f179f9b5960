"""Trains one case of `drop_in_cases.py` with one pair of trainers, and records everything that a user can see.

Run as a script, it trains the named cases with `trl_ext` and writes JSON, so that two environments can be compared:
`python run_losses.py --checkpoints DIR --out FILE CASE [CASE ...]`.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import ANY, patch

import datasets
import torch
from datasets import Dataset
from peft import PeftModel, PrefixTuningConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM, TrainerCallback

import other_drop_in_cases
from drop_in_cases import CASES, Case
from rewards import REWARDS
from tiny import REFERENCE_SEED, ROLLOUTS, Workshop, add, lora_config, preferences, prompts
from token_counts import Feed, count_feeds

ALL_CASES = CASES | other_drop_in_cases.CASES
PROMPT_LEARNING = {"prompt_tuning": PromptTuningConfig, "prefix_tuning": PrefixTuningConfig}

# Wall-clock times differ between runs of the same code, and are the only keys that are not compared.
WALL_CLOCK = (
    "step_time",
    "runtime",
    "samples_per_second",
    "steps_per_second",
    "tokens_per_second",
    "model_preparation_time",
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
    # Whether a subclass records losses and batches
    records_batches: bool = True

    @classmethod
    def of(cls, library: Any) -> "Trainers":
        names = [f"{name}{kind}" for name in ("DPO", "GRPO", "SFT", "KTO", "RLOO") for kind in ("Trainer", "Config")]
        return cls(*(getattr(library, name) for name in names))

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

        trainers = {name: x for name, x in vars(self).items() if name.endswith("_trainer")}
        return replace(self, **{name: wrong(x) for name, x in trainers.items()})


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of GRPO's loss in training."""

    advantages: torch.Tensor  # one a row
    tokens: torch.Tensor  # of each row that are in the loss
    log: int  # number of log entries before it


@dataclass
class Record:
    """What one training run shows a user, and the scales for comparing it."""

    losses: list[float] = field(default_factory=list)  # of each micro-batch, as `training_step` returns them
    batches: list[MicroBatch] = field(default_factory=list)  # GRPO's
    logs: list[dict[str, float]] = field(default_factory=list)
    logit_size: float = 0.0  # mean |logit| of a DPO batch, from the model's own forward
    gradients: list[dict[str, torch.Tensor | None]] = field(default_factory=list)  # before each optimizer step
    updates: dict[str, torch.Tensor] = field(default_factory=dict)  # final minus initial weights
    best: tuple[float | None, int | None] = (
        None,
        None,
    )  # the best metric and its step, as the trainer's state has them
    packed: bool = False  # whether a forward is one packed row, where the rows of the batch cannot be counted
    feeds: list[Feed] = field(default_factory=list)  # every forward of policy and reference model, with its tokens

    def fed(self, what: str = "tokens", **where: Any) -> int:
        """Return the sum of `what` ("tokens", "rows" or "forwards") over the forwards whose fields equal `where`."""
        return sum(
            getattr(feed, what) for feed in self.feeds if all(getattr(feed, key) == x for key, x in where.items())
        )

    @property
    def advantage(self) -> float:
        """The mean |advantage|, which is the scale of a GRPO loss; 0 for DPO."""
        return sum(batch.advantages.abs().mean().item() for batch in self.batches) / max(len(self.batches), 1)


class _Recorder(TrainerCallback):
    def __init__(self, record: Record):
        self.record = record
        self.initial: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.initial = self.initial or {name: param.detach().clone() for name, param in _trained(model)}

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


def _recording(trainers: Trainers, kind: str, record: Record) -> type:
    """Return a subclass that overrides no method that gets a batch, because ours then scores every row as TRL does."""
    trainer = getattr(trainers, f"{kind}_trainer")
    if not trainers.records_batches:
        return trainer

    class Recording(trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.micro_batch = _OfMicroBatches(record)
            self.add_callback(self.micro_batch)
            backward = self.accelerator.backward

            def recorded(loss: torch.Tensor, **options: Any) -> None:
                self.micro_batch.loss = loss.item()
                backward(loss, **options)

            self.accelerator.backward = recorded

        def compute_loss_context_manager(self) -> Any:
            inputs = sys._getframe(1).f_locals["inputs"]  # of transformers' `training_step`, which calls it
            if "advantages" in inputs and self.model.training:
                mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
                self.micro_batch.batch = MicroBatch(inputs["advantages"], mask.sum(1), len(record.logs))
            return super().compute_loss_context_manager()

    Recording.__name__ = trainer.__name__  # some log lines and the model card name the class
    return Recording


class _OfMicroBatches(TrainerCallback):
    """Records the loss of the last backward before a micro-batch ends, and its batch. Some run in several parts."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.loss = 0.0
        self.batch: MicroBatch | None = None

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.record.losses.append(self.loss)
        if self.batch is not None:
            self.record.batches.append(self.batch)
        self.loss, self.batch = 0.0, None  # of a micro-batch without a backward

    on_step_end = on_substep_end


def train(
    case: Case,
    trainers: Trainers,
    workshop: Workshop,
    rounds: int = 1,
    prepare: Callable[[Any], None] = lambda trainer: None,
) -> Record:
    """Train `case` from freshly loaded checkpoints, and return the record.

    Args:
        rounds (`int`): how often `case.calls` are made.
        prepare (`Callable`): called with the trainer once it is built.
    """
    record = Record()
    # A separate cache, because reference log-probs from another case's batch differ in the last bit
    with (
        tempfile.TemporaryDirectory() as output_dir,
        patch.object(datasets.config, "HF_DATASETS_CACHE", Path(output_dir) / "datasets"),
    ):
        trainer = build(case, trainers, workshop, output_dir, record)
        prepare(trainer)
        for call in rounds * case.calls:
            getattr(trainer, call)()
        record.best = (trainer.state.best_metric, trainer.state.best_global_step)
        if case.trainer in ("dpo", "kto"):
            batch = next(iter(trainer.get_train_dataloader()))
            with torch.no_grad():
                logits = trainer.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            record.logit_size = logits.abs().mean().item()
    return record


def build(case: Case, trainers: Trainers, workshop: Workshop, output_dir: str, record: Record) -> Any:
    """Build the trainer of `case`, which records in `record` what a user can see."""
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
    built = {"dpo": _dpo, "grpo": _grpo, "sft": _sft, "kto": _kto, "rloo": _rloo}[case.trainer]
    trainer = built(case, config, trainers, workshop, record)
    trainer.add_callback(_Recorder(record))
    record.packed = hasattr(trainer, "explain") and trainer.explain()["packing"].action == "run"
    count_feeds(trainer, record.feeds, log=lambda: len(record.logs))
    return trainer


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
    train_dataset = preferences(case.rows, seed=1, conversational=conversational)
    if case.streaming:
        train_dataset = train_dataset.to_iterable_dataset()
    ref_model = None
    if case.setup.endswith("ref_model"):
        ref_model = AutoModelForCausalLM.from_pretrained(workshop.model(case.model, seed=REFERENCE_SEED))
    return _recording(trainers, "dpo", record)(
        ref_model=ref_model,
        args=trainers.dpo_config(**{"per_device_train_batch_size": 4, **config, **trainers.only_ours(case)}),
        train_dataset=train_dataset,
        eval_dataset=_eval_sets(case, config, lambda seed: preferences(5, seed, conversational=conversational)),
        **_policy(case, workshop),
    )


def _grpo(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, record: Record) -> Any:
    conversational = case.model == "chat"
    train_dataset = prompts(case.prompts, seed=1, conversational=conversational)
    if case.streaming:
        train_dataset = train_dataset.to_iterable_dataset()
    if case.setup == "ref_model":
        # TRL's GRPO takes no reference model: if beta > 0, it loads one from the policy's checkpoint.
        config = {"beta": 0.1, **config}
    base = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "temperature": 0.9}
    trainer = _recording(trainers, "grpo", record)(
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


def _sft(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, record: Record) -> Any:
    config = dict(config)
    form = config.pop("form", "completion")

    def rows(count: int, seed: int) -> Dataset:
        pairs = preferences(count, seed, conversational=case.model == "chat")
        if form == "text":
            return Dataset.from_list([{"text": x["prompt"] + x["chosen"]} for x in pairs])
        return pairs.rename_column("chosen", "completion").remove_columns("rejected")

    train_dataset = rows(case.rows, seed=1)
    return _recording(trainers, "sft", record)(
        args=trainers.sft_config(**{"per_device_train_batch_size": 4, **config, **trainers.only_ours(case)}),
        train_dataset=train_dataset.to_iterable_dataset() if case.streaming else train_dataset,
        eval_dataset=_eval_sets(case, config, lambda seed: rows(5, seed)),
        **_policy(case, workshop),
    )


def _kto(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, record: Record) -> Any:
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
    return _recording(trainers, "kto", record)(
        ref_model=ref_model,
        args=trainers.kto_config(**{**base, **config, **trainers.only_ours(case)}),
        train_dataset=rows(case.rows, seed=1),
        eval_dataset=_eval_sets(case, config, lambda seed: rows(5, seed)),
        **_policy(case, workshop),
    )


def _rloo(case: Case, config: dict[str, Any], trainers: Trainers, workshop: Workshop, record: Record) -> Any:
    base = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, "temperature": 0.9}
    return _recording(trainers, "rloo", record)(
        reward_funcs=[REWARDS[name] for name in case.rewards],
        args=trainers.rloo_config(**{**base, **config, **trainers.only_ours(case)}),
        train_dataset=prompts(case.prompts, seed=1, conversational=case.model == "chat"),
        eval_dataset=_eval_sets(case, config, lambda seed: prompts(4, seed, conversational=case.model == "chat")),
        **_policy(case, workshop),
    )


def _eval_sets(case: Case, config: dict[str, Any], make: Callable[[int], Dataset]) -> Any:
    """Return one data set, one for each name, or `None`; `make` makes one from a seed."""
    if case.eval_sets:
        return {name: make(seed) for seed, name in enumerate(case.eval_sets, 2)}
    evaluates = config.get("eval_strategy", "no") != "no" or "evaluate" in case.calls
    return make(2) if evaluates else None


def _digest(tensors: dict[str, torch.Tensor | None]) -> dict[str, list[float] | None]:
    """Return the norm of each tensor and its projections on three fixed random directions, as JSON values."""
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
    """Return `record` as JSON values: losses and metrics unchanged, gradients and updates as digests."""
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
    cases = {name: summary(train(ALL_CASES[name], trainers, workshop)) for name in arguments.cases}
    versions = {package: version(package) for package in ("trl", "transformers", "torch")}
    arguments.out.write_text(json.dumps({"versions": versions, "cases": cases}))


if __name__ == "__main__":
    main()
