"""A sampler whose routes are known, trainings that use them, and the count of known routes that routers used.

The route of a token is random and depends on the tokens up to it, so that rows which share a prefix agree on it, and
another prefix has another route.

Dimensions: S tokens of a row, L routers, k experts of a token.
"""

import random
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import trl_ext
from mixture_models import WITH_TOPK
from tiny import EOS, V_WORDS, prompts, word_tokenizer
from watched_routes import RouterCall

EXPERTS = 16
_SHORT = {
    "max_steps": 1,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 10,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "seed": 3,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "show_plan": False,
}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards of which no two in a group are likely to be equal."""
    return [sum(ids) % 101 / 100 for ids in completion_ids]


def saved_model(folder: Path, family: str = "qwen3_moe", **options: Any) -> str:
    WITH_TOPK[family](V_WORDS, **options).save_pretrained(folder)
    return str(folder)


def make_trainer(kind: str, folder: Path, model: str, **options: Any) -> Any:
    """Return a trainer. `options` are of the config or of the trainer."""
    config_class = getattr(trl_ext, f"{kind}Config")
    fields = config_class.__dataclass_fields__
    config = {**_SHORT, "output_dir": str(folder), **{name: x for name, x in options.items() if name in fields}}
    of_trainer = {name: x for name, x in options.items() if name not in fields}
    arguments = {
        "model": model,
        "reward_funcs": reward,
        "train_dataset": prompts(8, seed=1),
        "processing_class": word_tokenizer(),
        **of_trainer,
    }
    trainer_class = arguments.pop("trainer_class", getattr(trl_ext, f"{kind}Trainer"))
    return trainer_class(args=config_class(**config), **arguments)


def route_of(prefix: Iterable[int], routers: int, top_k: int = 2) -> tuple[tuple[int, ...], ...]:
    """Return the experts `(L, k)` of the last token of `prefix`."""
    rng = random.Random(zlib.crc32(repr(tuple(prefix)).encode()))
    return tuple(tuple(rng.sample(range(EXPERTS), top_k)) for _ in range(routers))


def routes_of(ids: list[int], routers: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return the route of each token of a row, `(S, L, k)`."""
    return [route_of(ids[: place + 1], routers) for place in range(len(ids))]


class ScriptedSampler:
    """A `rollout_func` that draws words and returns their routes, but not that of the last token of a row.

    Args:
        log_probs (`float`, *optional*): of each token; None: the sampler gives none.
    """

    def __init__(self, routers: int = 2, log_probs: float | None = None) -> None:
        self.routers = routers
        self.log_probs = log_probs
        self.rows: list[list[list[int]]] = []  # of each call

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        rng = random.Random(f"{prompts[0]} {trainer.state.global_step}")
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        completion_ids = [[rng.randrange(3, V_WORDS) for _ in range(rng.randint(2, 9))] for _ in prompts]
        end = trainer.processing_class.convert_tokens_to_ids(EOS)
        completion_ids = [[*ids, end] for ids in completion_ids]
        rows = [prompt + completion for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
        self.rows.append(rows)
        log_probs = None if self.log_probs is None else [[self.log_probs] * len(ids) for ids in completion_ids]
        routes = [torch.tensor(routes_of(ids, self.routers)[:-1]) for ids in rows]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": log_probs,
            "routed_experts": routes,
        }


def forwards_of(calls: list[RouterCall], routers: int) -> list[list[RouterCall]]:
    """Return calls by forward, each with one of each router. Layers of a recompute come in the order of backward."""
    waiting: list[list[RouterCall]] = [[] for _ in range(routers)]
    for call in calls:
        waiting[call.layer].append(call)
    return [list(of_forward) for of_forward in zip(*waiting, strict=True)]


def missing_routes(forward: list[RouterCall], rows: list[list[int]]) -> int:
    """Return how many of the known routes of `rows` the routers did not use in a forward over them.

    A packed row has each prefix once, a padded batch as often as rows have it.
    """
    missing = 0
    for call in forward:
        prefixes = [tuple(ids[: place + 1]) for ids in rows for place in range(len(ids) - 1)]
        is_padded = call.tokens >= sum(map(len, rows))
        expected = Counter(
            route_of(prefix, len(forward))[call.layer]
            for prefix in (prefixes if is_padded else dict.fromkeys(prefixes))
        )
        used = Counter(map(tuple, call.routes_Nk.tolist()))
        missing += (expected - used).total()
    return missing


def weights_of(trainer: Any) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in trainer.model.parameters()])
