"""Runs of GRPO with transformers' `generate` and a truncated distribution, and what the sampler could choose."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList

import trl_ext
from tiny import lora_config, prompts

# The log-probs (V,) of the sampler by context, -inf where it could not choose a token
Contexts = dict[tuple[int, ...], Tensor]


@contextmanager
def sampler_noted() -> Iterator[Contexts]:
    """Note the log-probs of the sampler for each context of the `with` block."""
    contexts: Contexts = {}
    processors = GenerationMixin._get_logits_processor

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        for row, of_row in zip(ids, scores.log_softmax(-1), strict=True):
            contexts.setdefault(tuple(row[int((row != 0).int().argmax()) :].tolist()), of_row)
        return scores

    def noted(*positional: Any, **keywords: Any) -> LogitsProcessorList:
        return LogitsProcessorList([*processors(*positional, **keywords), note])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "_get_logits_processor", noted)
        yield contexts


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) + 0.01 * sum(ids) for ids in completion_ids]


def made(trainer: Any, model: str, folder: Path, lora: bool = False, **config: Any) -> Any:
    config = {
        **{"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 3},
        **{
            "learning_rate": 0.05,
            "optim": "sgd",
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "logging_steps": 1,
            "seed": 3,
        },
        **{"save_strategy": "no", "temperature": 0.8, "beta": 0.1},
        **config,
    }
    config_class = trl_ext.GRPOConfig if issubclass(trainer, trl_ext.GRPOTrainer) else trl.GRPOConfig
    return trainer(
        model,
        reward_funcs=reward,
        args=config_class(str(folder), **config),
        train_dataset=prompts(32, seed=1),
        peft_config=lora_config() if lora else None,
    )


def ratios(trainer: Any, contexts: Contexts) -> Tensor:
    """Return the ratio of the old policy to the sampler for each token of the buffer."""
    found = []
    for inputs in trainer._buffered_inputs:
        scored = inputs.get("old_policy_scored", inputs["completion_mask"]).bool()
        old_BC = inputs["old_policy_log_probs" if "old_policy_scored" in inputs else "old_per_token_logps"]
        for row, step in scored.nonzero().tolist():
            prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
            ids = inputs["completion_ids"][row].tolist()
            sampler = contexts[tuple(prompt + ids[:step])][ids[step]]
            found.append((old_BC[row, step] - sampler).exp())
    return torch.stack(found)
