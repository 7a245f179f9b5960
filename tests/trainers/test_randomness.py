"""Runs in which two passes of the same weights differ equal stock TRL's: the same draws, in the same passes."""

import functools
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from transformers import TrainerCallback

import trl_ext
from drop_in_cases import Case
from run_losses import Record, Trainers, build
from tiny import Workshop
from training_comparison import tensors_differ

STOCK, OURS = Trainers.of(trl), Trainers.of(trl_ext)

NEFTUNE = {"neftune_noise_alpha": 5.0}
WITHOUT_KL = {"beta": 0.0}


def by_hook(trainer: Any) -> None:
    """Add noise in training, from the global random state."""

    def noisy(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.3 * torch.randn_like(output) if module.training else output

    trainer.model.get_input_embeddings().register_forward_hook(noisy)


def by_hook_with_its_generator(trainer: Any) -> None:
    """Add noise always, from a generator that the hook keeps."""
    generator = torch.Generator().manual_seed(0)
    layer = next(module for name, module in trainer.model.named_modules() if name.endswith("layers.0.mlp"))

    def noisy(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.05 * torch.zeros_like(output).normal_(generator=generator)

    layer.register_forward_hook(noisy)


class Noise:
    """A hook with a state, whose draws are in a helper."""

    def __init__(self) -> None:
        self.size = 0.3

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return self.size * torch.rand(x.shape)

    def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + self.of(output)


def by_callable(trainer: Any) -> None:
    trainer.model.get_input_embeddings().register_forward_hook(Noise())


class NoisyLayer(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.layer(x), 0.3, self.training)


def by_layer(trainer: Any) -> None:
    for module in trainer.model.modules():
        if hasattr(module, "mlp"):
            module.mlp = NoisyLayer(module.mlp)


def by_forward(trainer: Any) -> None:
    layer = next(module for name, module in trainer.model.named_modules() if name.endswith("layers.0.mlp"))
    own = layer.forward
    layer.forward = lambda x: own(x) * (1 + 0.3 * torch.rand(x.shape[0], 1, 1))


def by_record_of_gradients(trainer: Any) -> None:
    """Scale where gradients are recorded: the same in each call, but another value in TRL's pass of the old policy."""
    trainer.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: 1.1 * output if torch.is_grad_enabled() else output
    )


def by_list(trainer: Any) -> None:
    """Take the next of some values that were drawn before."""
    calls: list[int] = []

    def next_scale(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return output * (1.0, 1.2, 0.9)[len(calls) % 3]

    trainer.model.get_input_embeddings().register_forward_hook(next_scale)


def by_count(trainer: Any) -> None:
    """Scale by the number of the call, which forwards that TRL does not run would change."""
    calls: list[int] = []

    def scale(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return output * (1 + 0.05 * len(calls))

    trainer.model.get_input_embeddings().register_forward_hook(scale)


def by_other_generators(trainer: Any) -> None:
    """Draw from Python's and numpy's random states."""
    trainer.model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: output * (1 + 0.2 * random.random() + 0.2 * np.random.rand())
    )


def first_layer(trainer: Any) -> torch.nn.Module:
    return next(module for name, module in trainer.model.named_modules() if name.endswith("layers.0"))


def in_place(trainer: Any) -> None:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output)[:, -3:] = 0

    first_layer(trainer).register_forward_hook(hook)


def by_row_clip(trainer: Any) -> None:
    def clip(module: Any, grad_input: Any, grad_output: Any) -> Any:
        return tuple(x if x is None else x / (1 + x.norm(dim=(1, 2), keepdim=True)) for x in grad_input)

    norm = next(module for name, module in trainer.model.named_modules() if name.endswith("model.norm"))
    norm.register_full_backward_hook(clip)


def by_gradient_of_output(trainer: Any) -> None:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: 0.1 * grad / (1e-2 + grad.norm(dim=(1, 2), keepdim=True)))

    first_layer(trainer).register_forward_hook(hook)


def scale_by_shape(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + 5 / (output.shape[1] * output.shape[2]) ** 0.5)


class _WithinSteps(TrainerCallback):
    """A hook that is there from the second micro-batch of a step to its end."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.handle = self.trainer.model.get_input_embeddings().register_forward_hook(scale_by_shape)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.handle.remove()


def within_steps(trainer: Any) -> None:
    trainer.add_callback(_WithinSteps(trainer))


def within_losses(trainer: Any) -> None:
    """Add a hook for the time of `compute_loss`."""

    class Hooked(type(trainer)):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            handle = self.model.get_input_embeddings().register_forward_hook(scale_by_shape)
            try:
                return super().compute_loss(*args, **kwargs)
            finally:
                handle.remove()

    trainer.__class__ = Hooked


def nothing(trainer: Any) -> None:
    """The config has the noise."""


SOURCES: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "neftune": (nothing, NEFTUNE),
    "hook": (by_hook, {}),
    "generator": (by_hook_with_its_generator, {}),
    "callable": (by_callable, {}),
    "layer": (by_layer, {}),
    "forward": (by_forward, {}),
    "gradients": (by_record_of_gradients, {}),
    "list": (by_list, {}),
    "count": (by_count, {}),
    "other generators": (by_other_generators, {}),
    "in place": (in_place, {}),
    "row clip": (by_row_clip, {}),
    "gradient of output": (by_gradient_of_output, {}),
    "within steps": (within_steps, {"gradient_accumulation_steps": 2}),
    "within losses": (within_losses, {}),
}
# TRL has scored the old policy before the hook came; ours warns that it has not
NOT_EQUAL = [("within steps", run) for run in ("rloo", "rloo-dead", "grpo", "grpo-dead")]
RUNS: dict[str, Case] = {
    "rloo": Case("rloo", "rloo", config=WITHOUT_KL),
    "rloo-kl": Case("rloo", "rloo", "lora"),
    "rloo-dead": Case("rloo", "rloo", config=WITHOUT_KL, rewards=("half_dead",)),
    "grpo": Case("grpo", "grpo", config={"num_iterations": 2}),
    "grpo-kl": Case("grpo", "grpo", "lora", config={"beta": 0.1, "steps_per_generation": 2}, steps=3),
    "grpo-dead": Case("grpo", "grpo", config={}, rewards=("half_dead",)),
    "dpo": Case("dpo", "dpo", "lora"),
    "dpo-model": Case("dpo", "dpo", "ref_model"),
    "dpo-sft": Case("dpo", "dpo", "lora", config={"loss_type": "sft"}),  # the reference draws, too
    "dpo-sft-precompute": Case("dpo", "dpo", "lora", config={"loss_type": "sft", "precompute_ref_log_probs": True}),
    "kto": Case("kto", "kto", "lora"),
    "kto-model": Case("kto", "kto", "ref_model"),
    "sft": Case("sft", "sft"),
}
FAST = [
    *(("neftune", run) for run in ("rloo", "grpo", "grpo-kl", "dpo", "dpo-sft", "kto")),
    *(("hook", run) for run in ("rloo", "dpo", "sft")),
    *(("generator", run) for run in ("rloo", "grpo-dead")),
    *(("callable", "rloo"), ("layer", "rloo"), ("layer", "kto"), ("forward", "rloo"), ("forward", "grpo")),
    *(("gradients", "rloo"), ("gradients", "grpo"), ("list", "rloo")),
    *(("count", "sft"), ("other generators", "sft"), ("in place", "grpo"), ("row clip", "dpo"), ("row clip", "rloo")),
    *(("gradient of output", "sft"), ("within steps", "sft"), ("within losses", "dpo"), ("within losses", "kto")),
    ("within losses", "rloo-dead"),
]


def trained(case: Case, trainers: Trainers, workshop: Workshop, prepare: Callable[[Any], None]) -> tuple[Any, Record]:
    record = Record()
    random.seed(0)
    np.random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(replace(case, learning_rate=0.01), trainers, workshop, folder, record)
        prepare(trainer)
        trainer.train()
    return trainer, record


@functools.cache
def _stock(source: str, run: str, workshop: Workshop) -> Record:
    prepare, config = SOURCES[source]
    case = replace(RUNS[run], config={**RUNS[run].config, **config})
    return trained(case, STOCK, workshop, prepare)[1]


def differences(ours: Record, stock: Record) -> list[str]:
    names = ("loss", "rewards/margins", "kl", "entropy", "clip_ratio/region_mean", "clip_ratio/high_mean")
    found = [
        f"{name}: {mine.get(name)} for {log.get(name)}"
        for mine, log in zip(ours.logs, stock.logs, strict=True)
        for name in names
        if name in log and abs(mine.get(name, torch.nan) - log[name]) > 1e-4 * max(1.0, abs(log[name]))
    ]
    found += [
        f"{a} for {b}" for a, b in zip(ours.losses, stock.losses, strict=True) if abs(a - b) > 1e-5 * max(1.0, abs(b))
    ]
    return [*found, *tensors_differ("weight update", ours.updates, stock.updates)]


@pytest.mark.parametrize(
    ("source", "run"),
    [
        pytest.param(source, run, marks=() if (source, run) in FAST else pytest.mark.slow, id=f"{source}-{run}")
        for source in SOURCES
        for run in RUNS
        if (source, run) not in NOT_EQUAL
    ],
)
def test_a_run_with_noise_equals_stock_trls(source: str, run: str, workshop: Workshop) -> None:
    prepare, config = SOURCES[source]
    case = replace(RUNS[run], config={**RUNS[run].config, **config})
    _, ours = trained(case, OURS, workshop, prepare)
    stock = _stock(source, run, workshop)
    if run == "dpo-sft-precompute" or (source, run) == ("within steps", "dpo-sft"):
        for log in stock.logs:  # no reference runs, or none before the hook comes, so rewards are absent
            log.pop("rewards/margins", None)
    trains = any(log.get("grad_norm", 0.0) > 0.1 for log in stock.logs)  # without noise, a loss of RLOO is 0
    assert trains or any(abs(loss) > 1e-4 for loss in stock.losses)
    assert not differences(ours, stock)


@pytest.mark.parametrize("run", ["rloo", "grpo"])
def test_a_hook_that_comes_after_generation_is_warned_of(
    run: str, workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    prepare, config = SOURCES["within steps"]
    case = replace(RUNS[run], config={**RUNS[run].config, **config})
    trained(case, OURS, workshop, prepare)
    message = "A hook was added after this batch was generated: a forward hook of `model.embed_tokens`"
    assert any(message in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("trainer", ["dpo", "grpo"])
def test_a_micro_batch_with_noise_is_not_split(trainer: str, workshop: Workshop, tmp_path: Path) -> None:
    ours = {"max_tokens_per_micro_batch": 30}
    case = Case("noise", trainer, "ref_model", config=NEFTUNE, ours=ours)
    with pytest.raises(
        ValueError, match="`max_tokens_per_micro_batch=30` is not supported here: `neftune_noise_alpha`"
    ):
        build(case, OURS, workshop, str(tmp_path), Record()).train()
