"""The head at the limits of numbers: infinite or NaN logits, and upstream gradients up to the largest number."""

import math
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from head_definition import ALL, defined, log_p_where_certain
from trl_ext import linear_log_probs
from trl_ext.heads import parallel as exchange
from trl_ext.heads.adapters import Factors, low_rank_term
from trl_ext.heads.dense import log_probs_from_logits
from trl_ext.heads.linear_log_probs import run_head
from trl_ext.heads.logits import LinearLogProbs, LogitTransform

# Triton's interpreter runs NumPy, which warns where a device does not
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
SMALL = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
INF, NAN = math.inf, math.nan

ROWS = {
    "all finite": [0.3, -1.0, 2.0, 0.5],
    "+inf": [0.3, INF, 2.0, -1.0],
    "+inf twice": [INF, 0.3, INF, 2.0],
    "-inf": [0.3, -INF, 2.0, -1.0],
    "-inf first and last": [-INF, 0.3, 2.0, -INF],
    "-inf but for one": [-INF, -INF, 2.0, -INF],
    "-inf alone": [-INF, -INF, -INF, -INF],
    "+inf and -inf": [INF, 0.3, -INF, 2.0],
    "NaN": [0.3, NAN, 2.0, -1.0],
    "NaN and +inf": [NAN, 0.3, 2.0, INF],
}


def by_definition(logits: Tensor, target: int) -> LinearLogProbs:
    """Return the results by torch's log_softmax in float64."""
    log_p = logits.log_softmax(-1)
    return LinearLogProbs(
        log_p[target],
        -(log_p.exp() * log_p).sum(),
        (2 * log_p).logsumexp(-1),
        logits.mean(),
        (logits.argmax() == target) & ~log_p[target].isnan(),
        log_p.mean(),
    )


def scored(way: str, logits: Tensor, target: int, columns: int, cap: float | None) -> tuple[LinearLogProbs, Tensor]:
    """Return the results of a head for one token with these logits, and the gradient of the log-prob."""
    hidden, weight = torch.zeros(1, 3, dtype=logits.dtype), torch.arange(1.0, 3 * len(logits) + 1).view(-1, 3)
    hidden, weight = hidden.requires_grad_(), weight.to(logits.dtype)
    targets, transform = torch.tensor([target]), LogitTransform(0.5, 1.0, cap)
    if way == "product":
        found = log_probs_from_logits(hidden @ weight.t() + logits, targets, transform, ALL)
    else:
        kernels = "triton" if way.endswith("Triton") else "torch"
        found = run_head(
            *("dense" if way == "dense" else "tiled", hidden, weight.requires_grad_("trained" in way), targets),
            bias=logits,
            transform=transform,
            # Without the mean, a head with a frozen weight computes the gradient in the forward
            outputs=ALL if "trained" in way else ALL[:-1],
            tile_columns=columns,
            kernels=kernels,
        )
    (gradient,) = torch.autograd.grad(found.log_probs.sum(), hidden)
    return found, gradient


def assert_as_defined(way: str, logits: list[float], target: int, columns: int, cap: float | None, dtype: Any) -> None:
    given = torch.tensor(logits, dtype=dtype)
    found, gradient = scored(way, given, target, columns, cap)
    exact_hidden = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    weight = torch.arange(1.0, 3 * len(logits) + 1, dtype=torch.float64).view(-1, 3)
    exact_logits = LogitTransform(0.5, 1.0, cap)(weight @ exact_hidden + given.double())
    exact = by_definition(exact_logits, target)
    for name, value in found._asdict().items():
        if value is not None:
            want = getattr(exact, name)
            assert value.dtype == (dtype if want.is_floating_point() else torch.bool)
            torch.testing.assert_close(value[0].to(want.dtype), want, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)
    if exact.log_probs.isnan():
        assert gradient.isnan().any()
    else:
        (want,) = torch.autograd.grad(exact.log_probs, exact_hidden)
        torch.testing.assert_close(gradient[0].double(), want, rtol=1e-5, atol=1e-5)


WAYS = ["frozen", "trained", "dense", "product"]
TRITON = [pytest.param(f"{way}, Triton", marks=pytest.mark.slow) for way in WAYS[:2]]


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("way", [*WAYS, *TRITON])
def test_logits_that_are_not_finite_give_the_results_of_log_softmax(way: str, row: str, cap: float | None) -> None:
    for target in range(4):
        for columns in (1, 3, 4):
            assert_as_defined(way, ROWS[row], target, columns, cap, torch.float32)


@SMALL
@hypothesis.given(st.data())
def test_any_drawn_logits_give_the_results_of_log_softmax(data: Any) -> None:
    # The softcap rounds numbers below 1e-37, so unequal logits may become equal
    finite = st.floats(-30, 30, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)
    number = st.sampled_from([INF, -INF, NAN]) | finite
    logits = data.draw(st.lists(number, min_size=2, max_size=9))
    assert_as_defined(
        data.draw(st.sampled_from(WAYS)),
        logits,
        data.draw(st.integers(0, len(logits) - 1)),
        data.draw(st.integers(1, 9)),
        data.draw(st.sampled_from([None, 4.0])),
        data.draw(st.sampled_from([torch.float32, torch.float64])),
    )


def of_a_rank(group: Any) -> dict[str, list[LinearLogProbs]]:
    """Run each row of the table with its first class on one rank and the other classes on the other."""
    first, last = ((0, 1), (1, 4))[group.rank()]
    found = {}
    for name, row in ROWS.items():
        hidden, weight = torch.zeros(4, 3), torch.zeros(last - first, 3)
        spread = {"group": group, "first_class": first, "tile_columns": 2, "temperature": 0.5}
        found[name] = linear_log_probs(
            hidden, weight, torch.arange(4), bias=torch.tensor(row[first:last]), outputs=ALL, **spread
        )
    return found


def test_rows_on_several_ranks_give_the_results_of_log_softmax(ranks: Any) -> None:
    for found in ranks.run(of_a_rank, 2):
        for name, results in found.items():
            for target in range(4):
                exact = by_definition(torch.tensor(ROWS[name], dtype=torch.float64) * 2, target)
                for value, want in zip(results, exact, strict=True):
                    torch.testing.assert_close(
                        value[target].to(want.dtype), want, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name
                    )


class Given(NamedTuple):
    """A small head, and upstream gradients of log-probs, entropy and mean log-probs, fp32 or float64 `(3, N)`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    upstream: Tensor


def problem(upstream: list[list[float]], dtype: torch.dtype, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
        for size, scale in (((len(upstream[0]), 8), 1.0), ((37, 8), 0.2), ((37,), 0.2))
    )
    targets = torch.randint(37, (len(upstream[0]),), generator=generator)
    return Given(hidden, weight, bias, targets, torch.tensor(upstream, dtype=torch.float64).float())


def backward(results: Any, upstream: Tensor, inputs: list[Tensor]) -> list[Tensor | None]:
    names = ("log_probs", "entropy", "mean_log_probs")
    pairs = [(x, g) for name, g in zip(names, upstream, strict=True) if (x := getattr(results, name)) is not None]
    pairs = [(x, g.to(x.dtype)) for x, g in pairs if x.requires_grad]
    return list(torch.autograd.grad([x for x, _ in pairs], inputs, [g for _, g in pairs]))


def assert_right_or_overflown(got: Tensor, want: Tensor, of_row: bool, of_entropy: Tensor | float = 0.0) -> None:
    """Check for equality up to rounding. Numbers too large for their dtype are infinite, never NaN.

    Args:
        of_entropy (`Tensor` or `float`): the upstream gradient of the entropy. Of a token whose probability is
            1 - 1e-16, float64 knows the entropy's gradient, about 1e-14 of it, to a few percent.
    """
    finite = torch.finfo(got.dtype)
    size = want.abs().amax(-1, keepdim=True) if of_row else want.abs().max()
    # Half-precision coefficients are rounded, fp32 sums are not; subnormal numbers differ by at least the smallest
    off = max(4 * finite.eps, 2e-5) * size + 2 * finite.smallest_normal * finite.eps
    off = off + 1e-12 * of_entropy
    lowest, highest = ((want + sign * off).clamp(-finite.max, finite.max) for sign in (-1, 1))
    number = got.double().clamp(-finite.max, finite.max)
    assert ((lowest <= number) & (number <= highest)).all(), f"{got} is not {want}"


def assert_gradients(x: Given, kind: str, kernels: str, options: dict[str, Any], chunk_size: int | None = None) -> None:
    trained, entropy = kind != "frozen", kind == "all"
    outputs = {"frozen": ("log_probs",), "trained": ("log_probs",), "all": ALL}[kind]
    inputs = [y.clone().requires_grad_(trained or i == 0) for i, y in enumerate(x[:3])]
    found = linear_log_probs(
        *(inputs[0], inputs[1], x.targets),
        bias=inputs[2],
        outputs=outputs,
        entropy_requires_grad=entropy,
        chunk_size=chunk_size,
        kernels=kernels,
        **options,
    )
    asked = inputs if trained else inputs[:1]
    exact_inputs = [y.double().requires_grad_() for y in x[:3]]
    exact = defined(exact_inputs[0], exact_inputs[1], x.targets, exact_inputs[2], **options)
    exact = LinearLogProbs(**{name: getattr(exact, name) for name in outputs})
    got, want = backward(found, x.upstream, asked), backward(exact, x.upstream.double(), exact_inputs)
    of_entropy_N = x.upstream[1].abs().double() * entropy
    for place, (mine, right) in enumerate(zip(got, want, strict=False)):
        of_entropy = of_entropy_N[:, None] if place == 0 else of_entropy_N.max()
        assert_right_or_overflown(mine, right, of_row=place == 0, of_entropy=of_entropy)


LARGEST, SMALLEST = torch.finfo(torch.float32).max, 2.0**-149
UPSTREAM = {
    "the largest": [LARGEST, -LARGEST, LARGEST, -LARGEST],
    "2^127": [2.0**127, 0.0, -(2.0**127), 2.0**127],
    "the smallest": [SMALLEST, -7 * SMALLEST, 1000 * SMALLEST, 2.0**-130],
    "all there are": [LARGEST, SMALLEST, 1.0, -(2.0**-126)],
    "none": [0.0, 0.0, 0.0, 0.0],
}
OPTIONS = {
    "plain": {},
    "steep": {"temperature": 0.05},
    "capped": {"temperature": 0.5, "logit_scale": -2.0, "softcap": 4.0},
}


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("upstream", UPSTREAM)
@pytest.mark.parametrize("kind", ["frozen", "trained", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_upstream_gradients_of_any_size_give_the_right_gradient(
    dtype: torch.dtype, kind: str, upstream: str, options: str, kernels: str
) -> None:
    of_log_probs = UPSTREAM[upstream]
    of_others = [x / 3 for x in of_log_probs[::-1]], [-x for x in of_log_probs]
    assert_gradients(problem([of_log_probs, *of_others], dtype), kind, kernels, OPTIONS[options])


@SMALL
@hypothesis.given(st.data())
def test_any_drawn_upstream_gradients_give_the_right_gradient(data: Any) -> None:
    number = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
    number |= st.builds(math.ldexp, st.sampled_from([1.0, -1.5]), st.integers(-148, 126))
    tokens = data.draw(st.integers(1, 6))
    upstream = [data.draw(st.lists(number, min_size=tokens, max_size=tokens)) for _ in range(3)]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    assert_gradients(
        problem(upstream, dtype, data.draw(st.integers(0, 99))),
        data.draw(st.sampled_from(["frozen", "trained", "all"])),
        "torch",
        OPTIONS[data.draw(st.sampled_from(sorted(OPTIONS)))],
        data.draw(st.sampled_from([None, 2])),
    )


@pytest.mark.parametrize("upstream", UPSTREAM)
def test_a_given_product_and_a_head_with_an_adapter_give_the_right_gradient(upstream: str) -> None:
    x = problem([UPSTREAM[upstream]] * 3, torch.float32)
    product = (x.hidden @ x.weight.t()).requires_grad_()
    found = log_probs_from_logits(product, x.targets, LogitTransform(), ALL, entropy_requires_grad=True)
    exact_product = product.detach().double().requires_grad_()
    eye = torch.eye(37, dtype=torch.float64)
    exact = defined(exact_product, eye, x.targets)
    (got,), (want,) = backward(found, x.upstream, [product]), backward(exact, x.upstream.double(), [exact_product])
    assert_right_or_overflown(got, want, of_row=True)

    inputs = [y.clone().requires_grad_() for y in (x.hidden, 0.01 * x.weight[:2], 0.01 * x.weight[:, :2], x.bias)]
    exact_inputs = [y.detach().double().requires_grad_() for y in inputs]
    term = low_rank_term(inputs[0], (Factors(*inputs[1:], 0.5),), torch.float32, torch.float32)
    options = {"bias": None, "transform": LogitTransform(), "outputs": ("log_probs",), "low_rank": term}
    found = run_head("tiled", inputs[0], x.weight, x.targets, **options)
    hidden, first, second, bias = exact_inputs
    exact = defined(hidden, x.weight.double() + 0.5 * second @ first, x.targets, 0.5 * bias)
    given = x.upstream[0] / 4  # tensors between head and factors have gradients twice as large
    got = torch.autograd.grad(found.log_probs, inputs, given)
    want = torch.autograd.grad(exact.log_probs, exact_inputs, given.double())
    for place, (mine, right) in enumerate(zip(got, want, strict=True)):
        assert_right_or_overflown(mine, right, of_row=place == 0)


@pytest.mark.parametrize("odds", [80.0, 95.0, 200.0])
def test_nearly_certain_tokens_give_the_right_gradient(odds: float) -> None:
    """1 - p is a subnormal number at log-odds of 95, and 0 at 200."""
    hidden = torch.eye(4).mul(odds).requires_grad_()
    weight = torch.eye(4).requires_grad_()
    targets, upstream = torch.arange(4), torch.tensor(UPSTREAM["the largest"])
    found = linear_log_probs(hidden, weight, targets).log_probs
    exact_inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = log_p_where_certain(exact_inputs[0] @ exact_inputs[1].t(), targets)
    got = torch.autograd.grad(found, (hidden, weight), upstream)
    want = torch.autograd.grad(exact, exact_inputs, upstream.double())
    for mine, right, largest in zip(got, want, (1.0, odds), strict=True):
        # Exact while fp32 can represent 1 - p
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=2 * SMALLEST * LARGEST * largest)


def gradients_of_a_rank(group: Any, own: bool, upstream: list[float]) -> None:
    """Return gradients of one rank's hidden states and rows; `own` tokens are gathered in several parts of two."""
    rank, count = group.rank(), len(upstream)
    x = problem([upstream * 2, [0.0] * 2 * count, [0.0] * 2 * count], torch.float32)
    tokens = slice(rank * count, (rank + 1) * count) if own else slice(0, count)
    rows = slice(0, 17) if rank == 0 else slice(17, 37)
    hidden, weight = (y.clone().requires_grad_() for y in (x.hidden[tokens], x.weight[rows]))
    with pytest.MonkeyPatch.context() as sizes:
        sizes.setitem(exchange._GATHERED_TOKENS, "cpu", 4)
        spread = {"group": group, "first_class": rows.start, "own_tokens": own}
        found = linear_log_probs(hidden, weight, x.targets[tokens], **spread)
        got = torch.autograd.grad(found.log_probs, (hidden, weight), x.upstream[0, tokens])
    every = slice(None) if own else tokens
    exact_hidden, exact_weight = (y.double().requires_grad_() for y in (x.hidden[every], x.weight))
    exact = defined(exact_hidden, exact_weight, x.targets[every])
    exact_given = x.upstream[0, every].double()
    want = torch.autograd.grad(exact.log_probs, (exact_hidden, exact_weight), exact_given)
    assert_right_or_overflown(got[0], want[0][tokens if own else every], of_row=True)
    assert_right_or_overflown(got[1], want[1][rows], of_row=False)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("upstream", UPSTREAM)
def test_upstream_gradients_of_any_size_on_several_ranks(upstream: str, own: bool, ranks: Any) -> None:
    ranks.run(gradients_of_a_rank, 2, own, UPSTREAM[upstream])
