"""A head with rows on 1 to 5 real gloo ranks equals the definition with the whole weight in float64."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor

from head_definition import ALL, defined, floats_apart, has_one_maximum, log_p_where_certain, relative
from sharded_head_cases import Operands, Problem, Scored, operands, problems, scored_on
from trl_ext import linear_log_probs
from trl_ext.heads import parallel as exchange
from worker_ranks import WorkerRanks

VALUES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits")
# Relative to a gradient's norm. bf16 gradients are rounded once, at the end; `autocast` has the error without that
GRADIENT = {"float64": 1e-12, "autocast": 1e-5, "bfloat16": 4e-3}
# Of results after larger terms cancel: 1 - p of the definition, and sums over tens of terms up to about 10
ROUNDED = {"float64": 1e-13, "autocast": 1e-5, "bfloat16": 1e-5}


@pytest.mark.parametrize("examples", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_values_and_gradients_equal_the_definition_for_every_share_of_rows_and_tokens(ranks, examples):
    assert_defined(ranks, "public", examples)


@pytest.mark.parametrize("examples", [15, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["blocks", "in turn"])
def test_rows_in_several_blocks_and_broadcast_rows_equal_the_definition(ranks, way, examples):
    assert_defined(ranks, way, examples)


def assert_defined(ranks: WorkerRanks, way: str, examples: int) -> None:
    @settings(deadline=None, max_examples=examples)
    @given(problem=problems(way))
    def holds(problem: Problem) -> None:
        expected, bound = by_definition(problem)
        for rank, scored in enumerate(ranks.run(scored_on, problem.ranks, problem, way)):
            assert_values(problem, scored.values, expected[rank].values, bound)
            assert_gradients(problem, scored.gradients, expected[rank].gradients)

    holds()


def by_definition(problem: Problem) -> tuple[list[Scored], float]:
    """Return the results of each rank, and the largest logit in units of 32, at least 1."""
    whole = operands(problem)
    weight, bias, hidden = (_leaves(x) for x in (whole.weight, whole.bias, whole.hidden))
    defined_ones = [defined(h, weight, t, bias, **problem.options) for h, t in zip(hidden, whole.targets, strict=True)]
    loss = weight.new_zeros(())
    for rank in range(problem.ranks) if problem.own else [0]:
        loss = loss + (defined_ones[rank].log_probs * whole.upstream[rank][0]).sum()
        if problem.entropy_requires_grad and problem.entropy_used[rank]:
            loss = loss + (defined_ones[rank].entropy * whole.upstream[rank][1]).sum()
        if problem.mean_used[rank]:
            loss = loss + (defined_ones[rank].mean_log_probs * whole.upstream[rank][2]).sum()
    loss.backward()
    scored = []
    for rank, (first, count) in enumerate(problem.edges):
        values = {name: x.detach() for name, x in defined_ones[rank]._asdict().items()}
        own_rows = slice(first, first + count)
        gradients = {
            "hidden": None if problem.frozen_hidden else hidden[problem.owner(rank)].grad,
            "weight": weight.grad[own_rows] if problem.trained else None,
            "bias": bias.grad[own_rows] if problem.trained and bias is not None else None,
        }
        scored.append(Scored(values, gradients))
    largest = [float(x.logits.detach().abs().max()) for x in defined_ones if x.logits.numel()]
    return scored, max([32.0, *largest]) / 32


def _leaves(x):
    if isinstance(x, list):
        return [_leaves(each) for each in x]
    return None if x is None else x.double().clone().requires_grad_()


def assert_values(problem: Problem, found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    wide = problem.dtype == "float64"
    for name in VALUES + ("mean_log_probs",) * any(problem.mean_used):
        assert found[name].dtype == (torch.float64 if wide else torch.float32)
        assert found[name].shape == expected[name].shape
        # Tiles of one class, as only tests have them, leave the shift far below the largest logit: its terms cancel
        limit = 1e-12 if wide else 2e-5 if name == "entropy" else 1e-5
        assert floats_apart(found[name], expected[name]) <= limit * bound, name
    # In fp32 a softcap can make unequal logits equal
    if wide or (problem.ties and problem.softcap is None):
        is_certain = has_one_maximum(expected["logits"])
        assert torch.equal(found["is_top1"][is_certain], expected["is_top1"][is_certain])


def assert_gradients(problem: Problem, found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, exact in expected.items():
        gradient = found[name]
        if exact is None:
            assert gradient is None, name
            continue
        assert gradient is not None, name
        assert gradient.shape == exact.shape
        bound = GRADIENT[problem.dtype] * float(exact.norm()) + ROUNDED[problem.dtype]
        assert float((gradient.double() - exact).norm()) <= bound, name


def scored(group: dist.ProcessGroup, whole: Operands, edges: list[tuple[int, int]], trained: bool = False) -> Scored:
    """Score the same tokens on all ranks, and run the backward of the sum of their log-probs."""
    first, count = edges[group.rank()]
    hidden = whole.hidden[0].clone().requires_grad_()
    weight = whole.weight[first : first + count].clone().requires_grad_(trained)
    values = linear_log_probs(hidden, weight, whole.targets[0], outputs=ALL, group=group, first_class=first)
    values.log_probs.sum().backward()
    return Scored({k: x.detach() for k, x in values._asdict().items()}, {"hidden": hidden.grad, "weight": weight.grad})


def nemo_aligners(group: dist.ProcessGroup, whole: Operands, edges: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Compute `from_parallel_logits_to_logprobs` (NeMo-Aligner), by default and with `higher_stability`.

    It reduces in the logits' dtype, counts 0 for a target on another rank, and sums over the group.
    """
    first, count = edges[group.rank()]
    logits = whole.hidden[0] @ whole.weight[first : first + count].t()
    targets = whole.targets[0] - first
    inside = (targets >= 0) & (targets < count)
    maximum = logits.amax(-1, keepdim=True)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - maximum
    total = shifted.exp().sum(-1, keepdim=True)
    dist.all_reduce(total, group=group)
    found = []
    for of_all in ((shifted.exp() / total).log(), shifted - total.float().log().to(logits.dtype)):
        of_targets = of_all.gather(-1, targets.clamp(0, count - 1)[:, None])[:, 0].masked_fill(~inside, 0.0).float()
        dist.all_reduce(of_targets, group=group)
        found.append(of_targets)
    return found[0], found[1]


THIRDS = [(0, 333), (333, 334), (667, 334)]


def certain(spread: float, lift: Tensor | float, dtype: torch.dtype) -> Operands:
    """Make 64 tokens and 1001 classes, and add `lift` to the targets' logits, in units of the other logits' size."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1001, 64, generator=generator, dtype=torch.float64)
    targets = torch.randint(1001, (64,), generator=generator)
    hidden = torch.randn(64, 64, generator=generator, dtype=torch.float64) * spread / 8
    hidden = hidden + lift * weight[targets] / 64
    return Operands(weight.to(dtype), None, [hidden.to(dtype)], [targets], [])


@pytest.mark.parametrize("trained", [False, True])
def test_logits_of_ten_thousand_are_finite_and_more_exact_than_nemo_aligners(ranks, trained):
    whole = certain(3e3, 0.0, torch.bfloat16)
    exact_hidden = whole.hidden[0].double().requires_grad_()
    exact = defined(exact_hidden, whole.weight, whole.targets[0])
    assert exact.logits.abs().max() > 1e4
    exact.log_probs.sum().backward()
    ours = ranks.run(scored, 3, whole, THIRDS, trained)
    default, stable = ranks.run(nemo_aligners, 3, whole, THIRDS)[0]
    assert default.isneginf().any()
    for rank in ours:
        assert all(rank.values[name].isfinite().all() for name in VALUES)
        assert rank.gradients["hidden"].isfinite().all()
        off = (rank.values["log_probs"] - exact.log_probs).abs()
        assert off.max() <= 1e-5 * float(exact.logits.detach().abs().max()) / 32
        assert off.max() < 1e-3 * (stable - exact.log_probs).abs().max()
        assert off.max() < 1e-3 * (default - exact.log_probs).abs().max()
        assert relative(rank.gradients["hidden"], exact_hidden.grad) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_nearly_certain_token_keeps_its_relative_precision(ranks, dtype):
    whole = certain(1.0, torch.linspace(9, 25, 64, dtype=torch.float64)[:, None], dtype)
    exact = log_p_where_certain(defined(whole.hidden[0], whole.weight, whole.targets[0]).logits, whole.targets[0])
    nearly = exact > math.log(0.99)
    assert nearly.sum() > 20
    assert exact.max() > -1e-6
    for rank in ranks.run(scored, 3, whole, THIRDS):
        assert ((rank.values["log_probs"] - exact) / exact).abs()[nearly].max() < 5e-5


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_nan_hidden_states_stay_nan_on_every_rank(ranks, trained, own):
    for values, gradient in ranks.run(nan_scored, 4, trained, own):
        assert all(values[name].isnan().tolist() == [False, True, False] for name in VALUES)
        assert not values["is_top1"][1]
        assert gradient.isnan().any(1).tolist() == [False, True, False]


def nan_scored(group: dist.ProcessGroup, trained: bool, own: bool) -> tuple[dict[str, Tensor], Tensor]:
    whole = certain(1.0, 0.0, torch.float32)
    hidden = whole.hidden[0][:3].clone()
    hidden[1, 5] = torch.nan
    hidden.requires_grad_()
    first, count = [(0, 400), (400, 0), (400, 600), (1000, 1)][group.rank()]
    weight = whole.weight[first : first + count].clone().requires_grad_(trained)
    options = {"group": group, "first_class": first, "own_tokens": own}
    values = linear_log_probs(hidden, weight, torch.tensor([3, 500, 1000]), outputs=ALL, **options)
    values.log_probs.sum().backward()
    return {k: x.detach() for k, x in values._asdict().items()}, hidden.grad


ERRORS = {
    "rows that overlap": ({"edges": [(0, 5), (4, 5), (9, 2)]}, r"`first_class`.*\(4, 5\).*class 4 is missing or on"),
    "rows that leave a hole": ({"edges": [(0, 5), (6, 4), (10, 1)]}, r"`first_class`.*\(6, 4\).*class 5 is missing"),
    "rows from another class on": ({"edges": [(1, 5), (6, 4), (10, 1)]}, r"`first_class`.*class 0 is missing"),
    "another vocabulary": ({"vocab_size": 12}, "`vocab_size` must be 11, .* on all ranks together, got 12"),
    "a vocabulary of one": ({"edges": [(0, 0), (0, 1), (1, 0)]}, "at least 2 rows on all ranks together, got 1"),
    "other tokens": ({"tokens": [4, 4, 3]}, r"`own_tokens=False`.*\[4, 4, 3\].*`own_tokens=True`"),
    "one rank's target too high": (
        {"target": [0, 11, 0], "own": True},
        r"`targets` must be class ids in \[0, 11\).*0 to 11",
    ),
    "one rank's ignored label": ({"target": [-100, 0, 0]}, r"`targets` must be class ids in \[0, 11\).*-100 to 0"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_arguments_that_do_not_match_are_an_error_on_every_rank(ranks, case):
    changes, message = ERRORS[case]
    for error in ranks.run(refused, 3, changes):
        with pytest.raises(ValueError, match=message):
            raise error


def refused(group: dist.ProcessGroup, changes: dict) -> Exception | None:
    rank = group.rank()
    first, count = changes.get("edges", [(0, 5), (5, 0), (5, 6)])[rank]
    tokens = changes.get("tokens", [4, 4, 4])[rank]
    targets = torch.full((tokens,), changes.get("target", [0, 0, 0])[rank])
    try:
        linear_log_probs(
            torch.randn(tokens, 8),
            torch.randn(count, 8),
            targets,
            group=group,
            first_class=first,
            vocab_size=changes.get("vocab_size"),
            own_tokens=changes.get("own", False),
        )
    except ValueError as error:
        return error
    return None


@pytest.mark.parametrize("options", [{"first_class": 3}, {"own_tokens": True}, {"vocab_size": 12}], ids=str)
def test_a_share_without_a_group_is_an_error(options):
    with pytest.raises(ValueError, match=r"`first_class`, `vocab_size` and `own_tokens` .* Pass `group` too"):
        linear_log_probs(torch.randn(4, 8), torch.randn(11, 8), torch.zeros(4, dtype=torch.long), **options)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_gradcheck_on_two_ranks(ranks, own, trained, entropy):
    assert ranks.run(gradcheck, 2, own, trained, entropy) == [True, True]


def gradcheck(group: dist.ProcessGroup, own: bool, trained: bool, entropy: bool) -> bool:
    """Check the gradient of what all ranks compute together, as a function of the whole inputs."""
    torch.manual_seed(0)
    first, stop = (0, 3) if group.rank() == 0 else (3, 7)
    own_tokens = (slice(0, 3) if group.rank() == 0 else slice(3, 4)) if own else slice(0, 4)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=trained)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=trained)
    targets = torch.randint(7, (4,))

    def head(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        weight, bias = (_OnAll.apply(x, group) for x in (weight, bias))
        hidden = _OnAll.apply(hidden, group) if own else hidden
        scored = linear_log_probs(
            hidden[own_tokens],
            weight[first:stop],
            targets[own_tokens],
            bias=bias[first:stop],
            outputs=("log_probs", "entropy"),
            entropy_requires_grad=entropy,
            temperature=0.7,
            softcap=2.0,
            group=group,
            first_class=first,
            own_tokens=own,
        )
        results = (scored.log_probs, scored.entropy) if entropy else (scored.log_probs,)
        return tuple(_Gathered.apply(x, own_tokens, group) for x in results) if own else results

    with pytest.MonkeyPatch.context() as sizes:
        sizes.setitem(exchange._GATHERED_TOKENS, "cpu", 4)  # several parts
        return torch.autograd.gradcheck(head, (hidden, weight, bias), fast_mode=False)


class _OnAll(torch.autograd.Function):
    """Inputs that every rank has and uses in part, so their gradients add up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Gathered(torch.autograd.Function):
    """The 4 results of all ranks; `where` are this rank's."""

    @staticmethod
    def forward(ctx, x, where, group):
        ctx.where = where
        every = x.new_zeros(4)
        every[where] = x
        dist.all_reduce(every, group=group)
        return every

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.where], None, None
