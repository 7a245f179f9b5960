"""The head with a low-rank term and replaced rows, and log-probs of a given product, equal float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from head_definition import ALL, FROZEN, defined, floats_apart, log_p_where_certain, relative
from trl_ext.heads import tiled
from trl_ext.heads.adapters import Factors, ReplacedRows, low_rank_term
from trl_ext.heads.dense import log_probs_from_logits
from trl_ext.heads.linear_log_probs import run_head
from trl_ext.heads.logits import LogitTransform

SMALL = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)

BIAS = {torch.float64: 0.0, torch.float32: 1e-6, torch.bfloat16: 4e-3}  # rounding of its gradient
BIASES = (None, *BIAS)


@st.composite
def problems(draw):
    """Draw which operands exist, which are trained, and the size of the tiles."""
    vocabulary = draw(st.integers(2, 120))
    return {
        "tokens": draw(st.sampled_from([0, 1, 7, 20])),
        "width": draw(st.integers(1, 24)),
        "vocabulary": vocabulary,
        "ranks": draw(st.lists(st.integers(1, 5), max_size=2)),
        "own_bias": draw(st.sampled_from(BIASES)),
        "classes": tuple(sorted(draw(st.sets(st.integers(0, vocabulary - 1), max_size=6)))),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16])),
        "bias": draw(st.sampled_from(BIASES)),
        "trained": draw(st.sets(st.sampled_from(["hidden", "weight", "bias", "factors", "rows"]), min_size=1)),
        "outputs": draw(st.sampled_from([ALL, FROZEN])),
        "entropy_requires_grad": draw(st.booleans()),
        "chunk_size": draw(st.sampled_from([None, 3])),
        "columns": draw(st.sampled_from([1, 7, 4096])),
        "head": draw(st.sampled_from(["tiled", "tiled", "dense"])),
        "options": {
            "temperature": draw(st.sampled_from([1.0, 0.7])),
            "logit_scale": draw(st.sampled_from([1.0, -2.0])),
            "softcap": draw(st.sampled_from([None, 3.0])),
        },
        "seed": draw(st.integers(0, 2**20)),
    }


@SMALL
@given(problem=problems())
def test_values_and_gradients_equal_the_definition_with_every_adapter(monkeypatch, problem):
    monkeypatch.setattr(tiled, "_COLUMNS", problem["columns"])
    monkeypatch.setitem(tiled._ELEMENTS, "cpu", 1)
    generator = torch.Generator().manual_seed(problem["seed"])
    N, H, V, dtype = problem["tokens"], problem["width"], problem["vocabulary"], problem["dtype"]

    def leaf(kind, *size, dtype=dtype):
        x = torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)
        return x.requires_grad_(kind in problem["trained"])

    hidden, weight = leaf("hidden", N, H), leaf("weight", V, H)
    bias = leaf("bias", V, dtype=problem["bias"]) if problem["bias"] else None
    own = [leaf("factors", V, dtype=problem["own_bias"]) if problem["own_bias"] else None for _ in range(2)]
    factors = tuple(
        Factors(leaf("factors", r, H), leaf("factors", V, r), own.pop(), s)
        for r, s in zip(problem["ranks"], (0.5, -1.25), strict=False)
    )
    rows = leaf("rows", len(problem["classes"]), H) if problem["classes"] else None
    targets = torch.randint(V, (N,), generator=generator)
    upstream = torch.randn(3, N, generator=generator, dtype=torch.float64)
    leaves = [hidden, weight, bias, *(x for f in factors for x in f[:3]), rows]
    leaves = [x for x in leaves if x is not None]
    exact_leaves = {id(x): x.detach().double().requires_grad_(x.requires_grad) for x in leaves}

    def exactly(x):
        return None if x is None else exact_leaves[id(x)]

    exact_weight, exact_bias = (
        exactly(weight),
        torch.zeros(V, dtype=torch.float64) + (0 if bias is None else exactly(bias)),
    )
    if rows is not None:
        exact_weight = exact_weight.index_copy(0, torch.tensor(problem["classes"]), exactly(rows))
    for first, second, own, scaling in factors:
        exact_weight = exact_weight + scaling * exactly(second) @ exactly(first)
        exact_bias = exact_bias + (0 if own is None else scaling * exactly(own))
    exact = defined(exactly(hidden), exact_weight, targets, exact_bias, **problem["options"])

    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    ours = run_head(
        *(problem["head"], hidden, weight, targets),
        bias=bias,
        transform=LogitTransform(**problem["options"]),
        outputs=problem["outputs"],
        entropy_requires_grad=problem["entropy_requires_grad"],
        chunk_size=problem["chunk_size"],
        low_rank=low_rank_term(hidden, factors, dtype, accumulate) if factors else None,
        replaced=ReplacedRows.of(problem["classes"], hidden.device) if problem["classes"] else None,
        rows=rows,
    )
    wide = dtype == torch.float64
    scale = max(1.0, float(exact.logits.detach().abs().max()) / 32) if exact.logits.numel() else 1.0
    for name in problem["outputs"]:
        if name != "is_top1":
            # With tiles of one class, which only tests have, the sums of the entropy are rounded most often
            limit = 1e-11 if wide else 2e-5 if name == "entropy" and problem["columns"] == 1 else 1e-5
            assert floats_apart(getattr(ours, name), getattr(exact, name)) <= limit * scale, name
    if wide:
        assert torch.equal(ours.is_top1, exact.is_top1)

    loss, exact_loss = (ours.log_probs * upstream[0]).sum(), (exact.log_probs * upstream[0]).sum()
    if problem["entropy_requires_grad"]:
        loss, exact_loss = loss + (ours.entropy * upstream[1]).sum(), exact_loss + (exact.entropy * upstream[1]).sum()
    if ours.mean_log_probs is not None:
        loss = loss + (ours.mean_log_probs * upstream[2]).sum()
        exact_loss = exact_loss + (exact.mean_log_probs * upstream[2]).sum()
    if not loss.requires_grad:  # the trained operand is missing
        return
    loss.backward()
    exact_loss.backward()
    for x in leaves:
        rounded_twice = x is hidden and factors and dtype == torch.bfloat16  # through weight and A
        if x.requires_grad and not rounded_twice:
            want = exactly(x).grad
            allowed = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-3}[dtype]
            assert x.grad.dtype == x.dtype
            assert float((x.grad.double() - want).norm()) <= max(allowed, BIAS[x.dtype]) * max(float(want.norm()), 1.0)


@pytest.mark.parametrize("outputs", [ALL, FROZEN])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_scale": -0.5, "softcap": 4.0}])
def test_log_probs_of_a_given_product_equal_the_definition(outputs, options):
    product = torch.randn(40, 301, generator=torch.Generator().manual_seed(0)) * 4
    targets = torch.randint(301, (40,), generator=torch.Generator().manual_seed(1))
    a, b = product.clone().requires_grad_(), product.double().requires_grad_()
    ours = log_probs_from_logits(a, targets, LogitTransform(**options), outputs, entropy_requires_grad=True)
    exact = defined(b, torch.eye(301), targets, **options)
    for name in outputs:
        if name != "is_top1":
            assert floats_apart(getattr(ours, name), getattr(exact, name)) < 1e-5, name
    assert torch.equal(ours.is_top1, exact.is_top1)
    for which in (ours, exact):
        loss = which.log_probs.sum() + which.entropy.square().sum()
        (loss if outputs == FROZEN else loss - which.mean_log_probs.square().sum()).backward()
    assert relative(a.grad, b.grad) < 1e-5
    # A nearly certain token keeps its digits
    certain = product.scatter_add(1, targets[:, None], torch.linspace(10, 40, 40)[:, None])
    a, b = certain.clone().requires_grad_(), certain.double().requires_grad_()
    log_p = log_probs_from_logits(a, targets, LogitTransform(), ("log_probs",)).log_probs
    sure = log_p_where_certain(b, targets)
    assert (((log_p - sure) / sure).abs() < 5e-5).all()
    log_p.sum().backward()
    sure.sum().backward()
    assert ((a.grad - b.grad).norm(dim=1) <= 1e-4 * b.grad.norm(dim=1)).all()
