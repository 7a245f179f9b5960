"""The routers of a mixture are found, record what they choose, and use the routes of their pass, also if it runs again.

What they really choose is seen by `watch_routes`, which shares nothing with the code that is tested.

Dimensions: B rows, S columns, N tokens of a forward (B x S), L routers, E experts, k experts of a token.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from mixture_models import WITH_TOPK, WITHOUT_TOPK
from trl_ext.routing.routers import Differences, Routers, UnknownRoutersError, by_forward
from trl_ext.routing.top_k import TopKCalls
from watched_routes import RouterCall, own_routes, routers_of, watch_routes

B, S, VOCABULARY = 3, 8, 64
N = B * S
IDS_BS = torch.randint(3, VOCABULARY, (B, S), generator=torch.Generator().manual_seed(0))
LOSS_WEIGHTS_BSV = torch.randn(B, S, VOCABULARY, generator=torch.Generator().manual_seed(1))

all_families = pytest.mark.parametrize("family", WITH_TOPK)


def _wrap_layers(model: Any, implementation: CheckpointImpl) -> None:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer, checkpoint_impl=implementation)


# How a model checkpoints its activations -> what makes it do so
CHECKPOINTING: dict[str, Callable[[Any], None]] = {
    "none": lambda model: None,
    "non_reentrant": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
    "reentrant": lambda model: model.gradient_checkpointing_enable({"use_reentrant": True}),
    "wrapper": partial(_wrap_layers, implementation=CheckpointImpl.NO_REENTRANT),
    "reentrant_wrapper": partial(_wrap_layers, implementation=CheckpointImpl.REENTRANT),
}
all_checkpointing = pytest.mark.parametrize("checkpointing", CHECKPOINTING)
recomputing = pytest.mark.parametrize("checkpointing", [x for x in CHECKPOINTING if x != "none"])


def build(family: str, checkpointing: str = "none", **size: Any) -> tuple[Any, Routers]:
    """Return a model in training mode, and its routers. No family has active dropout."""
    model = WITH_TOPK[family](VOCABULARY, **size)
    routers = Routers.of(model, lambda: run(model))
    CHECKPOINTING[checkpointing](model.train())
    return model, routers


def run(model: Any) -> Tensor:
    return model(input_ids=IDS_BS, use_cache=False).logits


def replay(model: Any, routers: Routers, routes_NLk: Tensor) -> Tensor:
    """Return the logits of a pass with these routes. As in a trainer, the backward comes after the `with` block."""
    with routers.replaying(model, routes_NLk):
        return run(model)


def run_backward(logits_BSV: Tensor) -> None:
    (logits_BSV.log_softmax(-1) * LOSS_WEIGHTS_BSV.to(logits_BSV.dtype)).sum().backward()


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by the names that parameters have without `CheckpointWrapper`, and remove them."""
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return gradients


def gradients_of(model: nn.Module, logits_BSV: Tensor) -> dict[str, Tensor]:
    run_backward(logits_BSV)
    return take_gradients(model)


def equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def draw_routes(routers: Routers, seed: int = 0) -> Tensor:
    """Return random routes `(N, L, k)`."""
    scores = torch.rand(N, len(routers.routers), routers.experts, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(-1)[..., : routers.chosen].to(routers.dtype)


def forget_some(routes_NLk: Tensor, routers: Routers, seed: int = 0) -> Tensor:
    """Return a mask of tokens, after the routes of these were made unknown: a row, half of one, and single ones."""
    is_unknown_BS = torch.rand(B, S, generator=torch.Generator().manual_seed(seed)) < 0.3
    is_unknown_BS[0] = True
    is_unknown_BS[1] = torch.arange(S) < S // 2
    is_unknown_N = is_unknown_BS.flatten()
    routes_NLk[is_unknown_N] = routers.unknown
    return is_unknown_N


def plain_routes(model: nn.Module) -> Tensor:
    """Return the routes `(N, L, k)` that the model chooses itself."""
    return own_routes(model, IDS_BS, torch.ones_like(IDS_BS)).flatten(0, 1)


def stacked(calls: list[RouterCall]) -> Tensor:
    """Return the routes `(N, L, k)` of one call of each router, in any order of calls."""
    calls = sorted(calls, key=lambda call: call.layer)
    assert len({call.layer for call in calls}) == len(calls)
    return torch.stack([call.routes_Nk for call in calls], dim=1)


# Finding


@all_families
def test_routers_are_found_with_their_experts(family: str) -> None:
    model, routers = build(family, experts=12, top_k=3, layers=4)
    assert [router.modules for router in routers.routers] == [(module,) for module in routers_of(model).values()]
    assert {(router.experts, router.chosen) for router in routers.routers} == {(12, 3)}
    assert (routers.experts, routers.chosen) == (12, 3)
    # DeepSeek's takes a `topk` of its groups before that of the experts
    assert {router.call for router in routers.routers} == {3 if family == "deepseek_v3" else 1}


@pytest.mark.parametrize(
    ("experts", "dtype", "unknown"), [(255, torch.uint8, 255), (256, torch.int16, -1), (300, torch.int16, -1)]
)
def test_routes_of_many_experts_have_a_larger_dtype(experts: int, dtype: torch.dtype, unknown: int) -> None:
    model, routers = build("mixtral", experts=experts)
    assert (routers.dtype, routers.unknown) == (dtype, unknown)
    routes_NLk = draw_routes(routers)
    routes_NLk[:, :, 0] = experts - 1  # the largest index is the one that a wrong dtype spoils
    routes_NLk[:, :, 1] %= experts - 1
    is_unknown_N = forget_some(routes_NLk, routers)
    with watch_routes(model) as watched:
        replay(model, routers, routes_NLk)
    used_NLk = stacked(watched.take_calls())
    assert torch.equal(used_NLk[~is_unknown_N], routes_NLk[~is_unknown_N].long())
    assert torch.equal(used_NLk[:S], plain_routes(model)[:S])
    with routers.recording() as calls:
        replay(model, routers, routes_NLk)
        run(model)
    assert {x.dtype for x in by_forward(calls)} == {dtype}


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("phimoe", "the experts that its `PhimoeTopKRouter` returns are not those of a `topk`"),
        ("llama4", "its `Llama4Router` does not return logits, scores and the indices of experts"),
    ],
)
def test_routers_that_choose_in_another_way_are_refused(family: str, message: str) -> None:
    model = WITHOUT_TOPK[family](VOCABULARY)
    with pytest.raises(UnknownRoutersError, match=message):
        Routers.of(model, lambda: run(model))


class RenamedRouter(MixtralTopKRouter):
    """It returns other indices than those of its `topk`, so that answering this call would not be enough."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE, scores_Nk, indices_Nk = super().forward(hidden)
        return logits_NE, scores_Nk, self.num_experts - 1 - indices_Nk


def test_a_router_that_changes_the_indices_is_refused() -> None:
    model = WITH_TOPK["mixtral"](VOCABULARY)
    for router in routers_of(model).values():
        router.__class__ = RenamedRouter
    with pytest.raises(UnknownRoutersError, match="`RenamedRouter` returns are not those of a `topk`"):
        Routers.of(model, lambda: run(model))


def test_a_dense_model_is_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY))
    with pytest.raises(UnknownRoutersError, match="no module returns logits, scores, and the indices of a `topk`"):
        Routers.of(model, lambda: run(model))


def test_layers_that_choose_different_numbers_of_experts_are_refused() -> None:
    model = WITH_TOPK["mixtral"](VOCABULARY)
    (*_, last_router) = routers_of(model).values()
    last_router.top_k = 3
    with pytest.raises(UnknownRoutersError, match=r"its layers choose different numbers of experts \(\[2, 3\]\)"):
        Routers.of(model, lambda: run(model))


# Recording


@all_families
def test_each_forward_is_recorded_without_gradients(family: str) -> None:
    model, routers = build(family)
    plain_NLk = plain_routes(model)
    with torch.no_grad(), routers.recording() as calls:
        logits_BSV = run(model)
        model(input_ids=IDS_BS[:1, :5], use_cache=False)
    whole_NLk, part_NLk = by_forward(calls)
    assert whole_NLk.dtype == torch.uint8
    assert torch.equal(whole_NLk.long(), plain_NLk)
    assert torch.equal(part_NLk.long(), plain_NLk[:5])  # a token's route does not depend on those after it
    # Recording changed no logit, and ends with its `with` block
    with torch.no_grad():
        assert torch.equal(run(model), logits_BSV)
    assert len(by_forward(calls)) == 2


@all_families
@pytest.mark.parametrize("checkpointing", ["non_reentrant", "reentrant"])
def test_a_recompute_is_not_recorded(family: str, checkpointing: str) -> None:
    plain_model, _ = build(family)
    plain_gradients = gradients_of(plain_model, run(plain_model))
    model, routers = build(family, checkpointing)
    with watch_routes(model) as watched:
        with routers.recording() as calls:
            logits_BSV = run(model)
        first_calls = watched.take_calls()
        gradients = gradients_of(model, logits_BSV)
        assert len(watched.take_calls()) == len(routers.routers)
    (routes_NLk,) = by_forward(calls)
    assert torch.equal(routes_NLk.long(), stacked(first_calls))
    assert equal_bits(gradients, plain_gradients)


def test_routers_that_run_unequally_often_are_an_error() -> None:
    model, routers = build("mixtral")
    (first_router, *_) = routers_of(model).values()
    with routers.recording() as calls:
        run(model)
        first_router(torch.zeros(1, 32))
    with pytest.raises(RuntimeError, match=r"ran \[1, 2\] times, and must run equally often"):
        by_forward(calls)


# Replaying


@all_families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_own_routes_change_no_bit(family: str, dtype: torch.dtype) -> None:
    model, routers = build(family, dtype=dtype)
    with routers.recording() as calls:
        plain_BSV = run(model)
    plain_gradients = gradients_of(model, plain_BSV)
    (routes_NLk,) = by_forward(calls)
    logits_BSV = replay(model, routers, routes_NLk)
    assert torch.equal(logits_BSV, plain_BSV)
    assert equal_bits(gradients_of(model, logits_BSV), plain_gradients)
    assert not equal_bits(gradients_of(model, replay(model, routers, draw_routes(routers))), plain_gradients)
    # After the `with` block the routers choose for themselves
    assert torch.equal(run(model), plain_BSV)


@all_families
@all_checkpointing
def test_replayed_routes_are_used_and_unknown_ones_are_the_routers_own(family: str, checkpointing: str) -> None:
    model, routers = build(family, checkpointing)
    routes_NLk = draw_routes(routers)
    is_unknown_N = forget_some(routes_NLk, routers)
    own_NLk = plain_routes(model)
    with watch_routes(model) as watched:
        logits_BSV = replay(model, routers, routes_NLk)
        first_calls = watched.take_calls()
        run_backward(logits_BSV)
        later_calls = watched.take_calls()
    used_NLk = stacked(first_calls)
    assert not torch.equal(own_NLk[~is_unknown_N], used_NLk[~is_unknown_N])
    assert torch.equal(used_NLk[~is_unknown_N], routes_NLk[~is_unknown_N].long())
    # The first router reads what no route has changed; the others do where all tokens before are unknown
    assert torch.equal(used_NLk[is_unknown_N, 0], own_NLk[is_unknown_N, 0])
    only_unknown_N = is_unknown_N.view(B, S).cumprod(1).flatten().bool()
    assert torch.equal(used_NLk[only_unknown_N], own_NLk[only_unknown_N])
    if checkpointing == "none":
        assert later_calls == []
    else:
        assert all(call.in_backward for call in later_calls)
        assert torch.equal(stacked(later_calls), used_NLk)


@all_families
def test_checkpointing_changes_no_bit_of_a_gradient(family: str) -> None:
    gradients = {}
    logits = {}
    for checkpointing in CHECKPOINTING:
        model, routers = build(family, checkpointing)
        routes_NLk = draw_routes(routers)
        forget_some(routes_NLk, routers)
        logits[checkpointing] = replay(model, routers, routes_NLk)
        gradients[checkpointing] = gradients_of(model, logits[checkpointing])
    for checkpointing in CHECKPOINTING:
        assert torch.equal(logits[checkpointing], logits["none"]), checkpointing
        assert equal_bits(gradients[checkpointing], gradients["none"]), checkpointing


@all_families
@recomputing
def test_each_recompute_uses_the_routes_of_its_pass(family: str, checkpointing: str) -> None:
    """Two replaying passes and a plain one wait for their backward, which then comes in another order."""
    plain_model, routers = build(family)
    first_NLk, second_NLk = (draw_routes(routers, seed) for seed in range(2))
    forget_some(second_NLk, routers)
    expected = [gradients_of(plain_model, replay(plain_model, routers, x)) for x in (first_NLk, second_NLk)]
    expected.append(gradients_of(plain_model, run(plain_model)))

    model, routers = build(family, checkpointing)
    own_NLk = plain_routes(model)
    first_BSV = replay(model, routers, first_NLk)
    second_BSV = replay(model, routers, second_NLk)
    plain_BSV = run(model)
    with torch.no_grad():
        replay(model, routers, draw_routes(routers, seed=2))
    with watch_routes(model) as watched:
        for logits_BSV, gradients, routes_NLk in zip(
            (first_BSV, plain_BSV, second_BSV),
            (expected[0], expected[2], expected[1]),
            (first_NLk, own_NLk, second_NLk),
            strict=True,
        ):
            assert equal_bits(gradients_of(model, logits_BSV), gradients)
            is_known_N = (routes_NLk != routers.unknown).flatten(1).all(1)
            assert torch.equal(stacked(watched.take_calls())[is_known_N], routes_NLk[is_known_N].long())


@recomputing
def test_a_recompute_in_the_context_of_another_pass_uses_its_own_routes(checkpointing: str) -> None:
    model, routers = build("mixtral", checkpointing)
    first_NLk, second_NLk = (draw_routes(routers, seed) for seed in range(2))
    first_gradients = gradients_of(model, replay(model, routers, first_NLk))
    second_BSV = replay(model, routers, second_NLk)
    second_gradients = gradients_of(model, second_BSV)
    first_BSV = replay(model, routers, first_NLk)
    with routers.replaying(model, second_NLk):
        assert equal_bits(gradients_of(model, first_BSV), first_gradients)
        logits_BSV = run(model)  # the recompute has left the routes of this context in place
        assert torch.equal(logits_BSV, second_BSV)
    assert equal_bits(gradients_of(model, logits_BSV), second_gradients)


def weights_by_definition(family: str, router: Any, logits_NE: Tensor, routes_Nk: Tensor) -> Tensor:
    """Return the weights `(N, k)` of the chosen experts."""
    chosen_Nk = logits_NE.gather(-1, routes_Nk)
    if family in ("gpt_oss", "granite_hybrid"):
        return chosen_Nk.softmax(-1)
    if family == "deepseek_v3":
        scores_Nk = chosen_Nk.sigmoid()
        return router.routed_scaling_factor * scores_Nk / scores_Nk.sum(-1, keepdim=True)
    probabilities_Nk = logits_NE.softmax(-1).gather(-1, routes_Nk)
    return probabilities_Nk / probabilities_Nk.sum(-1, keepdim=True)


@all_families
def test_the_gradient_of_a_router_is_the_definition_in_float64(family: str) -> None:
    model, routers = build(family)
    model.double().set_experts_implementation("eager")  # grouped matrix products have no float64
    routes_NLk = draw_routes(routers)
    gradients = gradients_of(model, replay(model, routers, routes_NLk))

    def defined_router(router: Any, routes_Nk: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits_NE = nn.functional.linear(hidden.reshape(N, -1), router.weight, getattr(router, "bias", None))
            return logits_NE, weights_by_definition(family, router, logits_NE, routes_Nk), routes_Nk

        return forward

    for layer, router in enumerate(routers_of(model).values()):
        router.forward = defined_router(router, routes_NLk[:, layer].long())
    expected = gradients_of(model, run(model))
    assert gradients.keys() == expected.keys()
    names = [f"{name}.weight" for name in routers_of(model)]
    for name in names:
        assert expected[name].abs().max() > 1e-3
    for name in expected:
        # Their code computes weights in fp32
        scale = expected[name].abs().max()
        assert (gradients[name] - expected[name]).abs().max() <= 1e-6 * scale, name


# Adapters


@all_families
@pytest.mark.parametrize("checkpointing", ["non_reentrant", "reentrant"])
def test_trained_copies_of_a_router_use_routes_too(family: str, checkpointing: str) -> None:
    base_model = WITH_TOPK[family](VOCABULARY)
    router_names = routers_of(base_model)
    (last_name,) = {name.rpartition(".")[2] for name in router_names}
    model = get_peft_model(base_model, LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=[last_name]))
    for name, module in routers_of(model).items():
        if "modules_to_save" in name:
            nn.init.normal_(module.weight, std=0.5)
    routers = Routers.of(model, lambda: run(model))
    assert [{*router.modules} for router in routers.routers] == [
        {x for name, x in routers_of(model).items() if router_name in name} for router_name in router_names
    ]
    with model.disable_adapter():
        assert Routers.of(model, lambda: run(model)).routers == routers.routers
    CHECKPOINTING[checkpointing](base_model.train())
    model.enable_input_require_grads()
    routes_NLk = draw_routes(routers)
    is_unknown_N = forget_some(routes_NLk, routers)
    own = []
    for copy, is_enabled in (("modules_to_save.default", True), ("original_module", False)):
        with watch_routes(model) as watched, nullcontext() if is_enabled else model.disable_adapter():
            with routers.recording() as recorded, torch.no_grad():
                run(model)
            plain_calls = watched.take_calls()
            logits_BSV = replay(model, routers, routes_NLk)
            first_calls = watched.take_calls()
            run_backward(logits_BSV)
            later_calls = watched.take_calls()
        assert all(call.name.endswith(copy) for call in (*plain_calls, *first_calls, *later_calls))
        (own_NLk,) = by_forward(recorded)
        assert torch.equal(own_NLk.long(), stacked(plain_calls))
        used_NLk = stacked(first_calls)
        assert torch.equal(used_NLk[~is_unknown_N], routes_NLk[~is_unknown_N].long())
        assert torch.equal(used_NLk[:S], own_NLk[:S].long())
        assert torch.equal(stacked(later_calls), used_NLk)
        gradients = take_gradients(model)
        assert any(last_name in name and gradients[name].any() for name in gradients) == is_enabled
        own.append(own_NLk)
    assert not torch.equal(*own)


@all_families
@pytest.mark.parametrize("checkpointing", ["non_reentrant", "reentrant"])
def test_routes_are_used_under_low_rank_adapters(family: str, checkpointing: str) -> None:
    """Adapters of attention, of the experts' weights and of a router's, which change the classes of modules."""
    base_model = WITH_TOPK[family](VOCABULARY)
    router_names = routers_of(base_model)
    (last_name,) = {name.rpartition(".")[2] for name in router_names}
    parameters = ["experts.gate_up_proj", "experts.down_proj", f"{last_name}.weight"]
    adapter = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=parameters, init_lora_weights=False)
    model = get_peft_model(base_model, adapter)
    routers = Routers.of(model, lambda: run(model))
    assert [router.modules for router in routers.routers] == [(module,) for module in routers_of(model).values()]
    CHECKPOINTING[checkpointing](base_model.train())
    model.enable_input_require_grads()
    routes_NLk = draw_routes(routers)
    is_unknown_N = forget_some(routes_NLk, routers)
    for is_enabled in (True, False):
        with watch_routes(model) as watched, nullcontext() if is_enabled else model.disable_adapter():
            with torch.no_grad():
                run(model)
            own_NLk = stacked(watched.take_calls())
            logits_BSV = replay(model, routers, routes_NLk)
            used_NLk = stacked(watched.take_calls())
            run_backward(logits_BSV)
            later_calls = watched.take_calls()
        assert torch.equal(used_NLk[~is_unknown_N], routes_NLk[~is_unknown_N].long())
        assert torch.equal(used_NLk[:S], own_NLk[:S])
        assert torch.equal(stacked(later_calls), used_NLk)
        gradients = take_gradients(model)
        adapted = [name for name in gradients if "lora_" in name and gradients[name].any()]
        assert any("experts" in name for name in adapted) == is_enabled
        assert any("o_proj" in name for name in adapted) == is_enabled


# What is counted


@all_families
@all_checkpointing
def test_differing_choices_are_counted_once(family: str, checkpointing: str) -> None:
    model, routers = build(family, checkpointing)
    own_NLk = plain_routes(model).to(routers.dtype)
    routes_NLk = own_NLk.flip(-1)  # the order of experts is no difference
    # Only the last router's, so that all others read what they read without routes
    different_NLk = own_NLk.clone()
    different_NLk[:, -1, 0] = other_experts(own_NLk[:, -1], routers.experts)
    is_different_N = torch.arange(N) % 3 == 0
    routes_NLk[is_different_N] = different_NLk[is_different_N]
    is_unknown_N = torch.arange(N) % 4 == 0
    routes_NLk[is_unknown_N] = routers.unknown
    known = int((~is_unknown_N).sum())
    differing = int((is_different_N & ~is_unknown_N).sum())
    assert 0 < differing < known < N

    assert routers.differences.take() == (0, 0)
    run_backward(replay(model, routers, routes_NLk))
    assert routers.differences.take() == (differing, known * len(routers.routers))
    assert routers.differences.take() == (0, 0)
    for _ in range(2):
        run_backward(replay(model, routers, routes_NLk))
    run_backward(run(model))
    assert routers.differences.take() == (2 * differing, 2 * known * len(routers.routers))
    with torch.no_grad():  # a pass that trains nothing
        replay(model, routers, routes_NLk)
    assert routers.differences.take() == (0, 0)


def other_experts(routes_Nk: Tensor, experts: int) -> Tensor:
    """Return an expert for each token that it did not choose."""
    is_chosen_NE = torch.zeros(len(routes_Nk), experts, dtype=torch.bool).scatter(1, routes_Nk.long(), True)
    return is_chosen_NE.int().argmin(-1).to(routes_Nk.dtype)


def test_counts_of_choices() -> None:
    differences = Differences()
    own_Nk = torch.tensor([[1, 2], [1, 2], [1, 2], [3, 0]])
    differences.add(own_Nk, torch.tensor([[1, 2], [2, 1], [2, 3], [-1, -1]]))
    assert differences.take() == (1, 3)
    differences.add(own_Nk, torch.full_like(own_Nk, -1))
    assert differences.take() == (0, 0)


# Nothing else is changed

ATTRIBUTES = ("forward", "_gradient_checkpointing_func", "checkpoint_fn")


def attributes_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return what the modules themselves, and not their classes, have under these names."""
    return {
        (place, name): vars(module)[name]
        for place, module in model.named_modules()
        for name in ATTRIBUTES
        if name in vars(module)
    }


@pytest.mark.parametrize("context", ["finding", "recording", "replaying"])
@pytest.mark.parametrize("failure", ["none", "forward", "backward"])
@all_checkpointing
def test_no_attribute_stays_changed(context: str, failure: str, checkpointing: str) -> None:
    model, routers = build("qwen3_moe", checkpointing)
    first_name, first_router = next(iter(routers_of(model).items()))
    # Another library has replaced a forward, as accelerate does
    replaced_calls = []
    original_forward = first_router.forward

    def replaced_forward(hidden: Tensor) -> Any:
        replaced_calls.append(hidden)
        return original_forward(hidden)

    first_router.forward = replaced_forward

    def fail(*_: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if failure == ("backward" if in_backward else "forward"):
            raise InterruptedError

    first_router.register_forward_hook(fail)
    before = attributes_of(model)
    # Finding the routers, in `build`, has left none either
    assert [place for place, name in before if name == "forward"] == [first_name]
    is_checkpointed = any(name != "forward" for _, name in before)
    assert is_checkpointed == (checkpointing != "none")
    contexts = {
        "finding": nullcontext,
        "recording": routers.recording,
        "replaying": partial(routers.replaying, model, draw_routes(routers)),
    }
    fails_in_forward = failure == "forward"
    with pytest.raises(InterruptedError) if fails_in_forward else nullcontext(), contexts[context]():
        if context == "finding":
            Routers.of(model, lambda: run(model))
        else:
            assert attributes_of(model) != before
        logits_BSV = run(model)
    assert replaced_calls
    assert attributes_of(model) == before
    if not fails_in_forward:
        fails_in_backward = failure == "backward" and is_checkpointed
        replaced_calls.clear()
        with pytest.raises(InterruptedError) if fails_in_backward else nullcontext():
            run_backward(logits_BSV)
        assert bool(replaced_calls) == is_checkpointed
        assert attributes_of(model) == before


# The calls of `topk`

CALLS_OF_TOPK: list[Callable[[Tensor], Any]] = [
    lambda x: torch.topk(x, 2, dim=-1),
    lambda x: torch.topk(x, k=2, dim=-1, sorted=False),
    lambda x: torch.topk(input=x, k=2),
    lambda x: x.topk(2, dim=-1),
    lambda x: Tensor.topk(x, k=2),
]


@pytest.mark.parametrize("call", CALLS_OF_TOPK)
def test_each_form_of_a_call_is_answered(call: Callable[[Tensor], Any]) -> None:
    x = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]], requires_grad=True)
    answer_Nk = torch.tensor([[0, 2], [-1, -1]])
    with TopKCalls(2, answer_Nk) as top_k:
        first = call(x)
        second = call(x)
        third = call(x)
    assert top_k.calls == 3
    for result in (first, third):
        assert [{*row} for row in result.indices.tolist()] == [{1, 2}, {0, 2}]
    assert second.indices.tolist()[0] == [0, 2]
    assert {*second.indices.tolist()[1]} == {0, 2}
    assert second.values.tolist()[0] == [1, 2]
    values, indices = second
    assert torch.equal(x.gather(-1, indices), values)
    assert torch.equal(top_k.indices, first.indices)
    values.sum().backward()
    assert x.grad.tolist() == [[1, 0, 1], [1, 0, 1]]


def test_calls_of_topk_are_watched() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0]])
    with TopKCalls() as top_k:
        x.topk(1)
        (-x).topk(1)
        x.sort()
    assert top_k.calls == 2
    assert top_k.indices.tolist() == [[0]]
    with TopKCalls(3) as top_k:
        x.topk(1)
    assert top_k.indices is None
