"""A backward reads each saved tensor once, because checkpointing and TRL's offloading return it only once."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import trl_ext
from trl_ext.distributed import gradients as gradient_factor
from trl_ext.distributed import sequence_parallel
from trl_ext.heads import dense as given_product
from trl_ext.heads import divergence, products, tiled
from trl_ext.heads import tiled as trained
from trl_ext.heads.adapters import Factors, ReplacedRows, low_rank_term
from trl_ext.heads.dense import log_probs_from_logits
from trl_ext.heads.linear_log_probs import linear_log_probs, run_head
from trl_ext.heads.logits import LogitTransform
from trl_ext.packing import attention as gather
from trl_ext.packing.attention import index_select_fp32_grad

TRANSFORM = LogitTransform(0.7, 1.3, 20.0)
V, H = 300, 16


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


TARGETS = torch.arange(24) * 7 % V


def frozen_head(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear_log_probs(hidden, weight.detach(), TARGETS, bias=bias.detach()).log_probs


def trained_head(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    outputs = ("log_probs", "entropy", "mean_log_probs")
    found = linear_log_probs(hidden, weight, TARGETS, bias=bias, outputs=outputs, entropy_requires_grad=True)
    return found.log_probs + 0.3 * found.entropy - 0.1 * found.mean_log_probs


def dense_head(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return run_head("dense", hidden, weight, TARGETS, bias=bias, transform=TRANSFORM, outputs=("log_probs",)).log_probs


def head_with_adapter(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Make a low-rank term from the first rows of the weight, and replaced rows."""
    factors = (Factors(weight[:4], weight[:, :4], bias, 0.5),)
    return run_head(
        *("tiled", hidden, weight.detach(), TARGETS),
        bias=None,
        transform=TRANSFORM,
        outputs=("log_probs",),
        low_rank=low_rank_term(hidden, factors, hidden.dtype, torch.float32),
        replaced=ReplacedRows.of((7, 21), torch.device("cpu")),
        rows=weight[3:5] * 2,
    ).log_probs


def given_logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return log_probs_from_logits(hidden @ weight.t() + bias, TARGETS, TRANSFORM, ("log_probs",)).log_probs


def divergence_of_heads(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    student = divergence.DivergenceHead(weight, bias, TRANSFORM)
    teacher = divergence.DivergenceHead(draw(V, 8), None, LogitTransform())
    return divergence.linear_divergence(hidden, student, draw(24, 8), teacher, 0.3).divergence


def divergence_of_frozen_heads(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return divergence_of_heads(hidden, weight.detach(), bias.detach())


HEADS = [
    frozen_head,
    trained_head,
    dense_head,
    head_with_adapter,
    given_logits,
    divergence_of_heads,
    divergence_of_frozen_heads,
]


def inputs() -> list[Tensor]:
    return [draw(24, H).requires_grad_(), draw(V, H).requires_grad_(), draw(V).requires_grad_()]


def gradients(score: Callable[..., Tensor], backwards: int = 1) -> list[Tensor | None]:
    """Return gradients of hidden states, weight and bias, from the last of several backwards through one graph."""
    given = inputs()
    loss = (score(*given) * draw(24)).sum()
    for left in reversed(range(backwards)):
        for x in given:
            x.grad = None
        loss.backward(retain_graph=left > 0)
    return [x.grad for x in given]


def assert_equal(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    assert any(x is not None and x.abs().sum() > 0 for x in want)
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


class Once(saved_tensors_hooks):
    """Returns each saved tensor once, as TRL's offloading and non-reentrant checkpointing do."""

    def __init__(self) -> None:
        self.saved: list[Tensor | None] = []
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> int:
        self.saved.append(tensor)
        return len(self.saved) - 1

    def unpack(self, place: int) -> Tensor:
        tensor, self.saved[place] = self.saved[place], None
        assert tensor is not None, "a saved tensor was unpacked a second time"
        return tensor


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_a_checkpointed_head_has_the_same_gradients(head: Callable[..., Tensor], reentrant: bool) -> None:
    assert_equal(gradients(lambda *given: checkpoint(head, *given, use_reentrant=reentrant)), gradients(head))


# Every autograd function of the package, with a call that uses it: from inputs to a tensor
FUNCTIONS: dict[type, Callable[..., Tensor]] = {
    tiled.TiledLogProbsFrozen: frozen_head,
    trained.TiledLogProbsRecompute: trained_head,
    given_product._LogProbsFromLogits: given_logits,
    products.ExactLinear: dense_head,
    divergence._DivergenceFrozen: divergence_of_frozen_heads,
    divergence._DivergenceRecompute: divergence_of_heads,
    gather._IndexSelectFP32Grad: lambda hidden, *_: index_select_fp32_grad(hidden.bfloat16(), TARGETS % 3).sum(1),
    gradient_factor._ScaleGrad: lambda hidden, *_: gradient_factor.scale_grad(hidden, 0.5).sum(1),
}


def of_shard(name: str) -> Callable[..., Tensor]:
    def call(hidden: Tensor, *_: Any) -> Tensor:
        shard = sequence_parallel.Shard(24, 24, 0, 1, torch.distributed.group.WORLD)
        return (shard.whole(hidden) if name == "whole" else shard.to_heads(hidden[..., None])).flatten(1).sum(1)

    return call


EXCHANGES: dict[type, Callable[..., Tensor]] = {
    sequence_parallel._Exchanged: of_shard("to_heads"),
    sequence_parallel._Gathered: of_shard("whole"),
}


def functions_of_the_package() -> Iterator[type]:
    for module in pkgutil.walk_packages(trl_ext.__path__, "trl_ext."):
        # The others import vLLM and axolotl
        if not module.name.endswith(("__main__", "sampler.transfer", "trl_ext.axolotl")):
            names = vars(importlib.import_module(module.name))
            yield from (x for x in names.values() if isinstance(x, type) and issubclass(x, torch.autograd.Function))


def nodes(tensor: Tensor) -> set[str]:
    """Return the names of the nodes of a graph."""
    found, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.add(node.name())
            left += [x for x, _ in node.next_functions]
    return found


def assert_unpacks_once(function: type, call: Callable[..., Tensor]) -> None:
    assert f"{function.__name__}Backward" in nodes(call(*inputs()))
    want = gradients(call)
    with Once():
        assert_equal(gradients(call), want)
    assert_equal(gradients(call, backwards=2), want)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_backward_unpacks_each_tensor_once_and_can_run_twice(function: type) -> None:
    assert_unpacks_once(function, FUNCTIONS[function])


def test_functions_that_exchange_with_other_ranks_unpack_once_too() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for function, call in EXCHANGES.items():
            assert_unpacks_once(function, call)
    finally:
        torch.distributed.destroy_process_group()


def test_every_autograd_function_of_the_package_is_tested() -> None:
    assert {*functions_of_the_package()} == {*FUNCTIONS, *EXCHANGES}
