"""What TRL's generation gets from outside, a sampler's completions and the user's rewards: recorded and replayed.

`UserFunctions.run` calls a `rollout_func` or vLLM's server, and reward functions, with what TRL passes, and records
what they return and log. `replayed` makes TRL's own generation get the record, so that padding, gathers, advantages and
metrics stay TRL's. A sampler in this process (`LocalTurn`) samples before, on the main thread.
"""

import asyncio
import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from .replaced import replaced
from .sampled import checked_reward, checked_rollout

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


@dataclass
class Record:
    """What the user's functions returned for the generation batch of one rank. JSON values only.

    Args:
        batch (`int`): the number of the generation batch since training began.
        sampled_at_step (`int`): the optimizer step whose weights sampled.
        sampler (`str`): where the completions come from, for users.
        prompts (`list`): those that were sampled for.
        rollout (`dict`): what `rollout_func` returned.
        response (`dict`): what vLLM's server returned to the first process, for the prompts of all.
        turn (`dict`): completions of this rank from vLLM or the model, and log-probs unless they are in `response`.
        rewards (`list`): for each reward function its rewards; `None` if it runs in the replay.
        logs (`list`): for each reward function its calls of `log_extra` and `log_metric`, in order.
        seconds (`float`): the time that all of it took.
    """

    batch: int
    sampled_at_step: int
    sampler: str
    prompts: list[Any]
    rollout: dict[str, Any] = field(default_factory=dict)
    response: dict[str, Any] = field(default_factory=dict)
    turn: dict[str, Any] = field(default_factory=dict)
    rewards: list[list[float | None] | None] = field(default_factory=list)
    logs: list[list[tuple[str, str, Any]]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def completion_ids(self) -> list[list[int]]:
        completion_ids: list[list[int]] = (self.rollout or self.turn)["completion_ids"]
        return completion_ids


class Messages(Protocol):
    """From a thread of the first process to those of the other ranks."""

    def send(self, values: list[Any]) -> None: ...

    def send_error(self, error: str) -> None: ...

    def receive(self) -> Any: ...


class Turn(Protocol):
    """Completions of a sampler that TRL calls."""

    @property
    def prompt_ids(self) -> list[list[int]]:
        """The prompts of this rank."""

    def run(self, record: Record) -> None:
        """Put the completions into `record`."""

    def sample(self, tokens: int) -> tuple[list[int], list[int], list[float]] | None:
        """Return a prompt, a completion of at most `tokens`, and its log-probs; `None` except in the first process."""


@dataclass(frozen=True)
class LocalTurn:
    """What `generate`, continuous batching or vLLM in this process has sampled."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    log_probs: list[list[float]] | None
    is_main_process: bool

    @classmethod
    def of(cls, trainer: Any, prompts: list[Any], run_turn: Callable[..., Any]) -> "LocalTurn":
        """Sample for `prompts`. Every rank calls it.

        Args:
            run_turn (`Callable`): calls its first argument, TRL's `_generate_single_turn`, with the others.
        """
        prompt_ids, images, fields = trainer._tokenize_prompts(copy.deepcopy(prompts))
        single_turn = trainer._generate_single_turn
        completion_ids, log_probs = run_turn(single_turn, prompt_ids, images, fields, trainer.num_generations)
        return cls(prompt_ids, completion_ids, log_probs, trainer.accelerator.is_main_process)

    def run(self, record: Record) -> None:
        record.turn = {"completion_ids": self.completion_ids, "logprobs": self.log_probs}

    def sample(self, tokens: int) -> tuple[list[int], list[int], list[float]] | None:
        if not self.is_main_process or self.log_probs is None:
            return None
        return self.prompt_ids[0], self.completion_ids[0][:tokens], self.log_probs[0][:tokens]


@dataclass(frozen=True)
class ServerRequest:
    """A request to vLLM's server, which the first process can send in a thread.

    Args:
        generate (`Callable`, *optional*): that of TRL's client; `None` except in the first process.
        keywords (`dict`): what TRL passes to its `generate`.
        messages (`Messages`): to the threads of the other ranks.
    """

    prompt_ids: list[list[int]]
    generate: Callable[..., Any] | None
    keywords: dict[str, Any]
    messages: Messages

    @classmethod
    def of(cls, trainer: Any, prompts: list[Any], messages: Messages) -> "ServerRequest":
        """Return what TRL would send for `prompts`. Every rank calls it, because TRL gathers the prompts."""
        generation = trainer.vllm_generation
        client = generation.vllm_client if trainer.accelerator.is_main_process else None
        # Taken here, because `replayed` replaces it on the main thread
        generate = None if client is None else client.generate
        keywords: dict[str, Any] = {}

        def keep(**request: Any) -> dict[str, Any]:
            keywords.update(request)
            count = len(request["prompts"]) * trainer.num_generations
            # TRL broadcasts this empty response, and it is dropped
            return {"prompt_ids": request["prompts"], "completion_ids": [[0]] * count, "logprobs": [[[0.0]]] * count}

        prompt_ids, images, _ = trainer._tokenize_prompts(copy.deepcopy(prompts))
        with nullcontext() if client is None else replaced(client, generate=keep):
            generation.generate(prompts=prompt_ids, images=images, num_generations=trainer.num_generations)
        return cls(prompt_ids, generate, keywords, messages)

    def sample(self, tokens: int) -> tuple[list[int], list[int], list[float]] | None:
        if self.generate is None:
            return None
        request = {**self.keywords, "prompts": self.keywords["prompts"][:1], "n": 1, "max_tokens": tokens}
        response = self.generate(**request)
        log_probs = [of_token[0] for of_token in response["logprobs"][0]]
        return request["prompts"][0], response["completion_ids"][0], log_probs

    def run(self, record: Record) -> None:
        if self.generate is None:
            record.turn = {"completion_ids": self.messages.receive()}
            return
        try:
            record.response = dict(self.generate(**self.keywords))
            rows = len(self.prompt_ids)
            completion_ids = record.response["completion_ids"]
            of_ranks = [completion_ids[first : first + rows] for first in range(0, len(completion_ids), rows)]
            record.turn = {"completion_ids": of_ranks[0]}
            self.messages.send(of_ranks)
        except Exception as error:
            self.messages.send_error(f"The first process got no completions from vLLM's server: {error}")
            raise


@dataclass(frozen=True)
class UserFunctions:
    """The functions of one trainer, and what TRL passes to them.

    Args:
        turn (`Turn`, *optional*): in place of a `rollout_func`.
        trl_generate (`Callable`): TRL's `_generate`.
        view (`Any`): what they see of the trainer.
        tokenizer (`Any`): a copy of the processing class, for this thread.
        event_loop (`Any`): TRL's loop for coroutines.
    """

    rollout_func: Callable[..., Any] | None
    turn: Turn | None
    trl_generate: Callable[..., Any]
    reward_funcs: list[Any]
    view: Any
    tokenizer: Any
    inner_tokenizer: Any
    eos_token_ids: list[int]
    event_loop: Any

    @classmethod
    def of(cls, trainer: Any, view: Any, tokenizer: Any, turn: Turn | None, gave_nan: set[str]) -> "UserFunctions":
        """Return the functions of `trainer`.

        Args:
            gave_nan (`set[str]`): the names of reward functions that a warning on NaN has named.
        """
        return cls(
            rollout_func=trainer.rollout_func,
            turn=turn,
            trl_generate=inspect.unwrap(trainer._trl_trainer._generate),
            reward_funcs=[checked_reward(x, gave_nan) for x in trainer.reward_funcs],
            view=view,
            tokenizer=tokenizer,
            inner_tokenizer=getattr(tokenizer, "tokenizer", tokenizer),
            eos_token_ids=list(trainer.eos_token_ids),
            event_loop=getattr(trainer, "async_loop", None),
        )

    def run(self, record: Record, inputs: list[dict[str, Any]]) -> None:
        """Sample and reward `inputs`, the rows of the data, and put what the functions return into `record`."""
        prompts = [row["prompt"] for row in inputs]
        if self.turn is not None:
            self.turn.run(record)
        completions, extra_columns = self._sample(prompts, record)
        for name, values in extra_columns.items():
            for i, row in enumerate(inputs):
                if not isinstance(values, list):
                    row[name] = values
                elif i < len(values):
                    row[name] = values[i]
        columns = {name: [row[name] for row in inputs] for name in inputs[0] if name not in _NOT_COLUMNS}
        self._reward(record, columns | {"prompts": prompts, "completions": completions})

    def _sample(self, prompts: list[Any], record: Record) -> tuple[list[Any], dict[str, Any]]:
        """Run TRL's `_generate` on a stand-in for the trainer: its decoding, without its collectives and metrics."""

        def rollout(prompts: list[Any], _: Any) -> Any:
            assert self.rollout_func is not None
            output = checked_rollout(self.rollout_func)(prompts, self.view)
            record.rollout = copy.deepcopy(dict(output))  # the function may use its lists again
            return output

        def tokenize(prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
            assert self.turn is not None
            return self.turn.prompt_ids, None, {}

        def single_turn(*_: Any) -> tuple[list[list[int]], None]:
            return record.completion_ids, None

        trainer = SimpleNamespace(
            accelerator=SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x),
            model=SimpleNamespace(training=True),
            state=SimpleNamespace(num_input_tokens_seen=0),
            _metrics={"train": defaultdict(list)},
            rollout_func=None if self.rollout_func is None else rollout,
            _tokenize_prompts=tokenize,
            _generate_single_turn=single_turn,
            num_generations=0,  # the stand-in for the turn does not read it
            use_vllm=False,
            tools=None,
            environment_factories=None,
            processing_class=self.tokenizer,
            _tokenizer=self.inner_tokenizer,
            eos_token_ids=self.eos_token_ids,
        )
        _, _, _, completions, _, extra_columns, _, _ = self.trl_generate(trainer, prompts)
        return completions, extra_columns

    def _reward(self, record: Record, columns: dict[str, Any]) -> None:
        from trl.trainer.utils import is_async_callable

        record.logs = [[] for _ in self.reward_funcs]
        record.rewards = [None] * len(self.reward_funcs)
        coroutines = {}
        for place, (reward, log) in enumerate(zip(self.reward_funcs, record.logs, strict=True)):
            if isinstance(reward, torch.nn.Module):  # it runs on the trainer's device, in the replay
                continue
            call = partial(
                reward,
                completion_ids=copy.deepcopy(record.completion_ids),  # a reward function may change it
                trainer_state=self.view.state,
                log_extra=lambda name, values, log=log: log.append(("extra", name, list(values))),
                log_metric=lambda name, value, log=log: log.append(("metric", name, float(value))),
                **columns,
            )
            if is_async_callable(reward):
                coroutines[place] = call
            else:
                record.rewards[place] = _numbers(call())
        if not coroutines:
            return

        async def gathered() -> list[Any]:
            return await asyncio.gather(*(call() for call in coroutines.values()))

        results = asyncio.run_coroutine_threadsafe(gathered(), self.event_loop).result()
        for place, rewards in zip(coroutines, results, strict=True):
            record.rewards[place] = _numbers(rewards)


def _as_lists(ids: Any) -> list[list[int]]:
    """Return token ids as lists: a `rollout_func` may return tensors."""
    return [x.tolist() if hasattr(x, "tolist") else list(x) for x in ids]


def _numbers(rewards: Any) -> list[float | None]:
    return [None if x is None else float(x) for x in rewards]


@contextmanager
def replayed(trainer: Any, record: Record) -> Iterator[None]:
    """Make TRL's generation get what sampler and functions returned, in the `with` block."""

    def rollout(prompts: list[Any], _: Any) -> dict[str, Any]:
        return copy.deepcopy(record.rollout)  # TRL takes keys out of it

    def respond(**_: Any) -> dict[str, Any]:
        return record.response

    rewards = [_replayed_reward(record, place, reward) for place, reward in enumerate(trainer.reward_funcs)]
    with ExitStack() as stack:
        stack.enter_context(replaced(trainer, reward_funcs=rewards))
        if trainer.rollout_func is not None:
            stack.enter_context(replaced(trainer, rollout_func=rollout))
        elif record.response:
            stack.enter_context(replaced(trainer.vllm_generation.vllm_client, generate=respond))
        yield


def _replayed_reward(record: Record, place: int, reward: Any) -> Any:
    rewards = record.rewards[place]
    if rewards is None:
        return reward

    def replay(
        completion_ids: list[list[int]],
        log_extra: Callable[..., None],
        log_metric: Callable[..., None],
        **_: Any,
    ) -> list[float | None]:
        if _as_lists(completion_ids) != _as_lists(record.completion_ids):
            raise RuntimeError("Completions that were sampled ahead have changed between sampling and rewards.")
        for kind, name, value in record.logs[place]:
            log = log_extra if kind == "extra" else log_metric
            log(name, value)
        return list(rewards)

    replay.__name__ = getattr(reward, "__name__", type(reward).__name__)
    return replay
