"""A sampler with weights of its own, as a server has, and sampling with older weights on stock TRL."""

import copy
import json
import time
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import trl
from datasets import Dataset
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

MOST_TOKENS = 10


def rows(count: int = 64) -> Dataset:
    return Dataset.from_list([{"prompt": f"w{i % 7} w{i % 11} w{i}", "answer": i % 5} for i in range(count)])


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the policy's weights, whole, also if ranks hold shards. All ranks call it."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if not any(isinstance(x, DTensor) for x in policy.parameters()):
        return dict(policy.state_dict())
    return dict(get_model_state_dict(trainer.model_wrapped, options=StateDictOptions(full_state_dict=True)))


class OwnSampler:
    """A `rollout_func` whose draws depend only on its weights and on the prompts.

    Args:
        model: its weights at first.
        seconds (`float`): how long a call takes at least.
    """

    def __init__(self, model: Any, seconds: float = 0.0) -> None:
        self.model = model.eval()
        self.seconds = seconds
        self.steps: list[int] = []  # of the trainer's state, at each call

    def sync_weights(self, trainer: Any) -> None:
        self.model.load_state_dict(whole_weights(trainer))

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.steps.append(trainer.state.global_step)
        time.sleep(self.seconds)
        prompt_ids = [trainer.processing_class(x)["input_ids"] for x in prompts]
        generator = torch.Generator().manual_seed(zlib.crc32(json.dumps(prompts).encode()))
        sampled = [self._sample(ids, generator) for ids in prompt_ids]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [[token for token, _ in completion] for completion in sampled],
            "logprobs": [[log_prob for _, log_prob in completion] for completion in sampled],
            "place": list(range(len(prompts))),
        }

    def _sample(self, prompt_ids: list[int], generator: torch.Generator) -> list[tuple[int, float]]:
        completion: list[tuple[int, float]] = []
        while len(completion) < MOST_TOKENS and not (completion and completion[-1][0] == 1):
            ids = [*prompt_ids, *(token for token, _ in completion)]
            log_probs = self.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
            completion.append((token, float(log_probs[token])))
        return completion


class Delayed:
    """A `rollout_func` for stock TRL, which samples with the weights of the call before.

    Args:
        lag (`int`): 1; or 0, with the current weights.
    """

    def __init__(self, sampler: OwnSampler, lag: int) -> None:
        self.sampler = sampler
        self.lag = lag
        self._weights: dict[str, torch.Tensor] | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        if self.lag == 0 or self._weights is None:
            self.sampler.sync_weights(trainer)
        else:
            self.sampler.model.load_state_dict(self._weights)
        self._weights = copy.deepcopy(whole_weights(trainer))
        return self.sampler(prompts, trainer)


def delayed_trainer(sampler: OwnSampler, *, lag: int = 1, **arguments: Any) -> Any:
    """Return stock TRL's trainer with `Delayed`, and with its own correction for the sampler."""
    trainer = trl.GRPOTrainer(rollout_func=Delayed(sampler, lag), **arguments)
    if arguments["args"].vllm_importance_sampling_correction:
        trainer.use_vllm = True  # after construction, which would look for vLLM
        trainer._last_loaded_step = -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return trainer


class DelayedTurns:
    """TRL's `_generate_single_turn` of stock TRL, which samples for the next prompts before it returns.

    Args:
        prompts (`list`): those of each generation batch, in order.
    """

    def __init__(self, trainer: Any, prompts: list[list[str]]) -> None:
        self._single_turn = trainer._generate_single_turn
        self._tokenize = trainer._tokenize_prompts
        self._count = trainer.num_generations
        self._prompts = prompts
        self._next = 0
        self._sampled: Any = None

    def __call__(self, prompt_ids: list[list[int]], *_: Any) -> Any:
        due = self._sample() if self._sampled is None else self._sampled
        if self._next < len(self._prompts):
            self._sampled = self._sample()
        return due

    def _sample(self) -> Any:
        prompt_ids, images, fields = self._tokenize(self._prompts[self._next])
        self._next += 1
        return self._single_turn(prompt_ids, images, fields, self._count)


def even_tokens(
    completion_ids: list[list[int]],
    place: list[int],
    log_metric: Callable[..., None],
    log_extra: Callable[..., None],
    **_: Any,
) -> list[float]:
    """The share of even token ids. `place` comes from the rollout function."""
    log_metric("mean_tokens", sum(map(len, completion_ids)) / len(completion_ids))
    log_extra("place", place)
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


async def short_text(completions: list[str], answer: list[int], **_: Any) -> list[float | None]:
    """Applies only where the answer is not 0."""
    return [right * 0.01 - 0.05 * len(text) if right else None for text, right in zip(completions, answer, strict=True)]


class Logs(TrainerCallback):
    """What is logged at each step."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in (logs or {}):
            self.logs.append(dict(logs))
