"""Routes of continuous batching: those that a router chooses for each token of a row, whichever forward ran it.

Dimensions: N tokens of a forward, S tokens of a sequence, L routers, k experts of a token.
"""

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching import input_outputs
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState

from mixture_models import MIXTURES
from trl_ext.compat import continuous
from trl_ext.compat.continuous import TokenRuns, complete, recorded_runs, routes_of_requests
from watched_routes import RouterCall, own_routes, watch_routes

UNKNOWN = 255
V = 64
LIMITS = {"use_cuda_graph": False, "num_blocks": 24, "max_batch_tokens": 64, "page_size": 8, "seed": 0}


def prompt(length: int, *, first: int = 2) -> list[int]:
    return [2 + (first + 7 * place + place * place) % (V - 2) for place in range(length)]


@dataclass
class Sampled:
    """What a call of `complete` returned, with what was recorded in it."""

    outputs: dict[str, Any]
    token_runs: TokenRuns
    forwards: list[Tensor]

    def routes(self) -> list[Tensor]:
        return routes_of_requests(self.outputs, self.token_runs, self.forwards, UNKNOWN)

    def inherited(self) -> dict[str, int]:
        """Return for each request how many of its first tokens another request has run."""
        owners: dict[int, str] = {}
        for name, runs in self.token_runs.request_runs.items():  # a parent comes before its children
            for run in runs:
                owners.setdefault(run, name)
        return {name: sum(owners[run] != name for run in runs) for name, runs in self.token_runs.request_runs.items()}


@pytest.fixture(scope="module")
def model() -> Any:
    # In fp64, so that rounding changes no choice
    model = MIXTURES["qwen3_moe"](V, dtype=torch.float64).requires_grad_(False)
    model.set_experts_implementation("eager")  # which takes fp64
    return model


def sample(model: Any, prompt_ids: list[list[int]], new_tokens: int = 6, **options: Any) -> Sampled:
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=True, eos_token_id=1, pad_token_id=0, top_k=0)
    batching = ContinuousBatchingConfig(**{**LIMITS, **options})
    with watch_routes(model) as watched, recorded_runs() as runs:
        outputs, _ = complete(model.generate_batch, prompt_ids, config, batching)
    assert [output.prompt_ids for output in outputs.values()] == prompt_ids
    return Sampled(outputs, runs, forwards_of(watched.calls))


def forwards_of(calls: list[RouterCall]) -> list[Tensor]:
    """Return the routes `(N, L, k)` of each forward."""
    of_layers = [[call.routes_Nk for call in calls if call.layer == layer] for layer in range(2)]
    return [torch.stack(routes, dim=1).to(torch.uint8) for routes in zip(*of_layers, strict=True)]


def check_routes(model: Any, sampled: Sampled) -> None:
    """Check that the routes are those of a forward of the whole row, and unknown for its last token alone."""
    for output, routes_SLk in zip(sampled.outputs.values(), sampled.routes(), strict=True):
        ids = torch.tensor([output.prompt_ids + output.generated_tokens])
        expected_SLk = own_routes(model, ids, torch.ones_like(ids))[0].to(torch.uint8)
        expected_SLk[-1] = UNKNOWN
        assert torch.equal(routes_SLk, expected_SLk)
    assert len({tuple(routes_SLk[-2].flatten().tolist()) for routes_SLk in sampled.routes()}) > 1


def test_distinct_prompts(model: Any) -> None:
    sampled = sample(model, [prompt(length, first=length) for length in (3, 9, 1, 17, 8)])
    check_routes(model, sampled)
    assert set(sampled.inherited().values()) == {0}
    assert sampled.token_runs.token_counts[0] == 3 + 9 + 1 + 17 + 8


def test_completions_of_a_prompt_have_the_routes_of_the_forked_request(model: Any) -> None:
    prompts = [prompt(length, first=length) for length in (5, 8, 18)]
    sampled = sample(model, [prompts[place] for place in (0, 1, 0, 2, 1, 2, 0, 1, 2)])
    check_routes(model, sampled)
    # Each completion runs the last token of the prompt
    assert sorted(sampled.inherited().values()) == [0] * 3 + [4] * 2 + [7] * 2 + [17] * 2


def test_uneven_groups_are_several_requests(model: Any) -> None:
    prompts = [prompt(12), prompt(11, first=3)]
    sampled = sample(model, [prompts[place] for place in (0, 0, 0, 1, 1, 0)])
    check_routes(model, sampled)
    assert len(sampled.outputs) == 6
    for name, runs in sampled.token_runs.request_runs.items():  # not those of the other request with the same prompt
        parent, _, child = name.partition("__child#")
        assert not child or runs[:10] == sampled.token_runs.request_runs[parent][:10]


@pytest.mark.parametrize("copies", [1, 2])
def test_prompts_that_share_blocks_have_the_routes_of_the_first(copies: int, model: Any) -> None:
    beginnings = [prompt(18, first=3), prompt(20)]
    prompts = [ids + prompt(length, first=length) for ids in beginnings for length in (2, 4, 9, 3)]
    # One request at a time, so that the next finds its blocks
    sampled = sample(model, [ids for ids in prompts for _ in range(copies)], max_batch_tokens=24)
    check_routes(model, sampled)
    parents = [count for name, count in sampled.inherited().items() if "child" not in name]
    assert parents == [0, 16, 16, 16] * 2


def test_prompts_longer_than_a_forward_run_in_chunks(model: Any) -> None:
    prompts = [prompt(length, first=length) for length in (30, 5, 41, 23)]
    sampled = sample(model, [ids for ids in prompts for _ in range(2)], max_batch_tokens=10)
    check_routes(model, sampled)
    assert max(sampled.token_runs.token_counts) == 10
    assert len(sampled.token_runs.token_counts) > 12


@pytest.mark.parametrize("sharing", [True, False], ids=["sharing", "no_sharing"])
@pytest.mark.parametrize("offload", [0.0, 0.001], ids=["restarted", "offloaded"])
def test_a_request_that_loses_its_blocks_has_the_routes_of_its_last_run(
    offload: float, sharing: bool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = TokenRuns()
    first_runs: dict[str, int] = {}  # request -> the next run when it last lost its blocks
    offload_requests = OffloadingManager.offload_requests

    def noted(manager: Any) -> bool:
        before = set(manager.scheduler.active_requests)
        answer = offload_requests(manager)
        lost = before - manager.scheduler.active_requests.keys()
        first_runs.update(dict.fromkeys(lost, sum(recorded.token_counts)))
        return answer

    monkeypatch.setattr(continuous, "TokenRuns", lambda: recorded)
    monkeypatch.setattr(OffloadingManager, "offload_requests", noted)
    # Memory can be pinned for a GPU only
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, empty=torch.empty, **x: empty(*sizes, **x))
    prompts = [prompt(length, first=length) for length in (11, 14, 9)]
    rows = [ids for ids in prompts for _ in range(3)]
    options = {"num_blocks": 14, "allow_block_sharing": sharing, "cpu_offload_space": offload}
    sampled = sample(model, rows, new_tokens=40, **options)
    check_routes(model, sampled)
    assert len(first_runs) > 2
    if not offload and not sharing:
        assert all(min(recorded.request_runs[name]) >= first_run for name, first_run in first_runs.items())


def test_of_a_padded_forward_the_first_tokens_count(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers pads the forwards of CUDA graphs and of compiled models."""
    build = ModelRunner.__init__

    def padding(runner: Any, *positional: Any, **options: Any) -> None:
        build(runner, *positional, **options)
        runner.pad_inputs = True

    monkeypatch.setattr(ModelRunner, "__init__", padding)
    prompts = [prompt(length, first=length) for length in (3, 9, 5, 17)]
    sampled = sample(model, prompts, q_padding_interval_size=16, kv_padding_interval_size=16)
    check_routes(model, sampled)
    ran = [len(routes_NLk) for routes_NLk in sampled.forwards]
    assert ran != sampled.token_runs.token_counts
    assert all(tokens % 16 == 0 for tokens in ran)


def test_other_forwards_than_those_prepared_are_an_error(model: Any) -> None:
    sampled = sample(model, [prompt(5), prompt(7)])
    counts = sampled.token_runs.token_counts
    for forwards, message in (
        (sampled.forwards[:-1], f"prepared {len(counts)} forwards .* in {len(counts) - 1} forwards"),
        ([*sampled.forwards, sampled.forwards[0]], f"prepared {len(counts)} forwards .* in {len(counts) + 1} forwards"),
        ([sampled.forwards[0][1:], *sampled.forwards[1:]], f"of {sum(counts)} tokens.* of {sum(counts) - 1} tokens"),
    ):
        with pytest.raises(RuntimeError, match=message):
            routes_of_requests(sampled.outputs, sampled.token_runs, forwards, UNKNOWN)


def record(token_runs: TokenRuns, name: str, ids: list[int], first: int, count: int, prompt_tokens: int = 3) -> None:
    """Record a forward of `count` tokens of a request, from position `first`."""
    state = SimpleNamespace(
        request_id=name,
        position_offset=first,
        initial_tokens=ids[:prompt_tokens],
        generated_tokens=ids[prompt_tokens:],
    )
    token_runs.record_forward([SimpleNamespace(state=state, query_length=count)])


def test_a_shared_prefix_has_the_runs_of_the_first_request_that_ran_its_tokens() -> None:
    token_runs = TokenRuns()
    record(token_runs, "another", [5, 6, 9, 8], 0, 4)
    record(token_runs, "began", [5, 6, 7, 8], 0, 2)
    record(token_runs, "first", [5, 6, 7, 8, 9], 0, 5)
    record(token_runs, "second", [5, 6, 7, 8], 0, 4)
    record(token_runs, "shares", [5, 6, 7, 8, 3], 4, 1, prompt_tokens=5)
    assert token_runs.request_runs["shares"] == [6, 7, 8, 9, 15]


def test_a_prefix_that_no_recorded_forward_ran_is_unknown() -> None:
    token_runs = TokenRuns()
    record(token_runs, "a", [5, 6, 7], 2, 1)
    outputs = {"a": SimpleNamespace(prompt_ids=[5, 6, 7], generated_tokens=[8])}
    (routes_SLk,) = routes_of_requests(outputs, token_runs, [torch.tensor([[[3, 4]]], dtype=torch.uint8)], UNKNOWN)
    assert routes_SLk.tolist() == [[[255, 255]], [[255, 255]], [[3, 4]], [[255, 255]]]


def test_nothing_is_recorded_after_the_context(model: Any) -> None:
    with recorded_runs() as runs:
        pass
    assert "recorded" not in f"{ContinuousBatchingIOs.prepare_batch_tensors}{RequestState.fork}"
    assert routes_of_requests({}, runs, [], UNKNOWN) == []


def test_each_class_that_prepares_batches_does_it_with_the_recorded_one() -> None:
    """Another class would run forwards that are not recorded, or record them twice."""
    classes = [cls for cls in vars(input_outputs).values() if "prepare_batch_tensors" in getattr(cls, "__dict__", {})]
    assert classes == [ContinuousBatchingIOs, ContinuousBatchingAsyncIOs]
    prepared: list[Any] = []
    host_ios = SimpleNamespace(prepare_batch_tensors=lambda *x: prepared.append(x), carry_over_ids=torch.zeros(1))
    ios = SimpleNamespace(
        current_pair=0, io_pairs=[SimpleNamespace(host_io=host_ios)], infer_carry_over_ids=lambda: torch.zeros(1)
    )
    ContinuousBatchingAsyncIOs.prepare_batch_tensors(ios, [], None, False, 1, 1, False)
    assert len(prepared) == 1
    pair = inspect.getsource(input_outputs.HostDeviceIOPair)
    assert "self.host_io = ContinuousBatchingIOs(" in pair
