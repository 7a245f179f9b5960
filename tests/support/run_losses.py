"""Trains one case of `drop_in_cases.py` with one pair of trainers, and records everything that a user can see.

Run as a script, it trains the named cases with `trl_ext` and writes JSON, so that two environments can be compared:
`python run_losses.py --checkpoints DIR --out FILE CASE [CASE ...]`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import torch
from transformers import TrainerCallback

import other_drop_in_cases
from case_trainers import WALL_CLOCK, Trainers, build_trainer
from drop_in_cases import CASES, Case
from tiny import Workshop
from token_counts import Feed, count_feeds

ALL_CASES = CASES | other_drop_in_cases.CASES


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
    trainer = build_trainer(case, trainers, workshop, output_dir, _recording(trainers, case.trainer, record))
    trainer.add_callback(_Recorder(record))
    decisions = trainer.explain().decisions if hasattr(trainer, "explain") else ()
    record.packed = ("packing", "run") in [(x.name, x.action) for x in decisions]
    count_feeds(trainer, record.feeds, log=lambda: len(record.logs))
    return trainer


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
