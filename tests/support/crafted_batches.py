"""A GRPO batch with made-up log-probs in each row, and the loss and gradients that a trainer computes from it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch
import trl

import trl_ext
from drop_in_cases import Case
from run_losses import Record, Trainers, build
from tiny import Workshop

STOCK = Trainers.of(trl)
OURS = Trainers.of(trl_ext)
FAR = -200.0  # exp(200) overflows in fp32

LIVE, DEAD, WITH_TOOL, MASKED = range(4)


@contextmanager
def built(trainers: Trainers, workshop: Workshop, setup: str = "full", **config: Any) -> Iterator[Any]:
    case = Case("crafted", "grpo", setup, config={"per_device_train_batch_size": 4, **config}, learning_rate=0.02)
    with TemporaryDirectory() as output_dir:
        trainer = build(case, trainers, workshop, output_dir, Record())
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1  # set by `train()`
        yield trainer


def crafted(trainer: Any, *, dead: float = FAR, advantages: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Return 4 rows: live, zero-advantage, with tool tokens, fully masked. Unused tokens have the log-prob `dead`."""
    rng = torch.Generator().manual_seed(0)
    prompt_ids = torch.randint(3, 97, (4, 3), generator=rng)
    completion_ids = torch.randint(3, 97, (4, 6), generator=rng)
    completion_mask = torch.ones(4, 6, dtype=torch.long)
    completion_mask[LIVE, 4:] = 0
    completion_mask[MASKED] = 0
    tool_mask = torch.ones(4, 6, dtype=torch.long)
    tool_mask[WITH_TOOL, 2:4] = 0
    with torch.no_grad():
        logits = trainer.model(torch.cat([prompt_ids, completion_ids], dim=1)).logits[:, 2:-1] / trainer.temperature
    log_probs = logits.log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0]
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([1.0, 0.0, -0.7, 0.5]) if advantages is None else advantages,
        "num_items_in_batch": (completion_mask * tool_mask).sum(),
    }
    far = torch.zeros(4, 6, dtype=torch.bool)
    far[DEAD] = far[MASKED] = True
    far[WITH_TOOL, 2:4] = True
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
        near = log_probs + 0.05 * torch.randn(4, 6, generator=rng)
        inputs[name] = torch.where(far, dead, near)
    if trainer.beta == 0.0:
        del inputs["ref_per_token_logps"]
    return inputs


def loss_and_gradients(trainer: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: x.grad.clone() for name, x in trainer.model.named_parameters() if x.grad is not None}


def logged(trainer: Any) -> dict[str, list[float]]:
    return {name: list(values) for name, values in trainer._metrics["train"].items()}


def is_finite(trainer: Any, loss: float, gradients: dict[str, torch.Tensor]) -> bool:
    # The share of clipped tokens of a row without any token is 0 / 0 in TRL, which leaves it out of minimum and maximum
    values = [value for values in logged(trainer).values() for value in values]
    return (
        math.isfinite(loss) and all(x.isfinite().all() for x in gradients.values()) and all(map(math.isfinite, values))
    )
