"""The divergence of two heads equals its definition in float64, and is closer to it than TRL's."""

import math
from contextlib import contextmanager

import pytest
import torch
from allocations import peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from divergence_definition import Problem, defined_divergence, outcome, random_problem, trl_divergence
from trl_ext.heads import divergence as divergence_module
from trl_ext.heads.divergence import DivergenceHead, linear_divergence
from trl_ext.heads.divergence_terms import DEGREE, NEAR_GAP, GapTile, divergence_of
from trl_ext.heads.logits import LogitTransform

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
TRANSFORMS = (LogitTransform(), LogitTransform(0.7, 0.5, 5.0), LogitTransform(1.7, -0.3))


def largest_error(found, exact):
    """Return the largest error of results and gradients, relative to the largest number of each or to 1e-3."""
    errors = [
        float((x - y).abs().max() / y.abs().max().clamp(min=1e-3))
        for x, y in zip(found, exact, strict=True)
        if y is not None and y.numel()
    ]
    return max(errors)


@settings(deadline=None, max_examples=60)
@given(
    beta=st.one_of(st.sampled_from(BETAS), st.floats(0.01, 0.99)),
    transform=st.sampled_from(TRANSFORMS),
    spread=st.sampled_from([0.05, 1.0, 8.0, 40.0]),
    apart=st.sampled_from([None, 0.0, 1e-3, 0.3, 5.0, 100.0]),
    trained=st.booleans(),
    has_bias=st.booleans(),
    tile=st.sampled_from([(None, None), (1, 300), (3, 77), (7, 1), (5, 64)]),
    tokens=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_the_definition(
    beta, transform, spread, apart, trained, has_bias, tile, tokens, seed
):
    problem = random_problem(tokens, spread=spread, apart=apart, transform=transform, has_bias=has_bias, seed=seed)
    upstream = torch.linspace(-1, 2, tokens, dtype=torch.float64)
    exact = outcome(defined_divergence, problem, beta, trained=trained, upstream=upstream)
    chunk_size, tile_columns = tile
    ours = outcome(
        linear_divergence,
        problem,
        beta,
        trained=trained,
        upstream=upstream,
        chunk_size=chunk_size,
        tile_columns=tile_columns,
    )
    assert (ours.weight is not None) == trained
    assert largest_error(ours, exact) < 1e-8


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("apart", [None, 0.02, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_errors_are_those_of_fp32(dtype, apart, beta, trained):
    problem = random_problem(16, 3001, width=96, apart=apart, dtype=dtype, has_bias=True)
    exact = outcome(defined_divergence, problem, beta, trained=trained, dtype=torch.float64)
    ours = outcome(linear_divergence, problem, beta, trained=trained)
    assert float((ours.divergence - exact.divergence).abs().max() / exact.divergence.mean()) < 1e-5
    assert float((ours.entropy - exact.entropy).abs().max()) < 1e-5
    # A gradient of this dtype is rounded
    for found, expected in zip(ours[2:], exact[2:], strict=True):
        if expected is not None:
            floor = (expected.to(dtype).double() - expected).norm()
            assert (found - expected).norm() <= 1.01 * floor + 2e-5 * expected.norm()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("spread", "apart"), [(4.0, None), (12.0, None), (4.0, 1e-3), (7.0, 0.1), (4.0, 5.0)])
def test_tiles_in_fp32_as_on_a_gpu(monkeypatch, spread, apart, beta, trained):
    monkeypatch.setattr(divergence_module.Settings, "logits_dtype", lambda self, device: self.accumulate)
    problem = random_problem(16, 5001, spread=spread, apart=apart, width=96, dtype=torch.float32)
    exact = outcome(defined_divergence, problem, beta, trained=trained, dtype=torch.float64)
    ours = outcome(linear_divergence, problem, beta, trained=trained)
    assert float((ours.divergence - exact.divergence).abs().max() / exact.divergence.mean()) < 2e-5
    assert float((ours.hidden - exact.hidden).norm() / exact.hidden.norm()) < 5e-5


@pytest.mark.parametrize("spread", [1.0, 4.0, 7.0, 12.0])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_no_further_from_float64_than_trl_in_bf16(beta, spread):
    problem = random_problem(16, 4001, spread=spread, width=96, dtype=torch.bfloat16)
    for trained in (False, True):
        exact = outcome(defined_divergence, problem, beta, trained=trained, dtype=torch.float64)
        ours = outcome(linear_divergence, problem, beta, trained=trained)
        trls = outcome(trl_divergence, problem, beta, trained=trained)
        for our_result, trl_result, expected in zip(ours, trls, exact, strict=True):
            if expected is not None:
                assert (our_result - expected).norm() <= (trl_result - expected).norm()


@pytest.mark.parametrize(("spread", "apart"), [(4.0, 0.1), (7.0, 0.06), (7.0, 0.03), (4.0, 0.02)])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.9, 1.1, 30.0)], ids=["plain", "softcap"])
def test_with_one_head_small_divergences_are_100_times_closer_than_trls(transform, beta, spread, apart):
    problem = random_problem(16, 8192, spread=spread, apart=apart, width=96, dtype=torch.bfloat16, transform=transform)
    exact = outcome(defined_divergence, problem, beta, dtype=torch.float64)
    assert 0 < float(exact.divergence.max()) < 1e-2
    errors = [
        float((outcome(f, problem, beta).divergence - exact.divergence).abs().max())
        for f in (linear_divergence, trl_divergence)
    ]
    assert errors[0] * 100 <= errors[1]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("beta", BETAS)
def test_gradient_of_one_head_has_a_relative_error(beta, trained):
    problem = random_problem(8, 2001, spread=5.0, apart=1e-4, width=96, dtype=torch.float32)
    exact = outcome(defined_divergence, problem, beta, trained=trained, dtype=torch.float64)
    ours = outcome(linear_divergence, problem, beta, trained=trained)
    assert float((ours.hidden - exact.hidden).norm() / exact.hidden.norm()) < 1e-5
    if trained:
        assert float((ours.weight - exact.weight).norm() / exact.weight.norm()) < 1e-5


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("beta", BETAS)
def test_equal_models_have_no_divergence_and_no_gradient(beta, trained):
    problem = random_problem(8, apart=0.0, dtype=torch.bfloat16)
    ours = outcome(linear_divergence, problem, beta, trained=trained)
    assert not ours.divergence.any()
    assert not ours.hidden.any()
    assert not trained or not ours.weight.any()


def test_a_copy_of_the_head_is_another_head(monkeypatch):
    """The gap is formed from the difference only if weight, bias and transform are the same."""
    projected = []
    project = divergence_module._project_exactly
    monkeypatch.setattr(divergence_module, "_project_exactly", lambda *args: projected.append(args) or project(*args))
    problem = random_problem(apart=0.1, has_bias=True)
    head = problem.student
    others = {
        "weight": DivergenceHead(head.weight.clone(), head.bias, head.transform),
        "bias": DivergenceHead(head.weight, head.bias.clone(), head.transform),
        "no bias": DivergenceHead(head.weight, None, head.transform),
        "transform": DivergenceHead(head.weight, head.bias, LogitTransform(2.0)),
    }
    for teacher in others.values():
        linear_divergence(problem.student_hidden, head, problem.teacher_hidden, teacher, 0.0)
        assert not projected
    views = DivergenceHead(head.weight.view_as(head.weight), head.bias.detach(), LogitTransform())
    linear_divergence(problem.student_hidden, head, problem.teacher_hidden, views, 0.0)
    assert projected


def test_the_difference_of_hidden_states_is_not_rounded_under_autocast():
    problem = random_problem(8, 2001, spread=5.0, apart=1e-3, width=96, dtype=torch.float32)
    rounded = problem.student.weight.bfloat16().float()
    head = DivergenceHead(rounded)
    problem = Problem(problem.student_hidden.bfloat16().float(), head, problem.teacher_hidden, head)
    exact = outcome(defined_divergence, problem, 0.0, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = outcome(linear_divergence, problem, 0.0)
    assert float((ours.divergence - exact.divergence).abs().max() / exact.divergence.mean()) < 1e-4


def test_each_model_is_cast_to_its_own_dtype():
    problem = random_problem(8, 500, dtype=torch.float32)
    narrow = problem.teacher.weight.bfloat16()
    teacher = DivergenceHead(narrow, None, problem.teacher.transform)
    mixed = Problem(problem.student_hidden, problem.student, problem.teacher_hidden.bfloat16(), teacher)
    exact = outcome(defined_divergence, mixed, 0.5, dtype=torch.float64)
    ours = outcome(linear_divergence, mixed, 0.5)
    assert largest_error(ours, exact) < 1e-5


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("apart", [None, 0.1])
def test_no_token_gives_empty_results_and_zero_gradients(apart, beta, trained):
    ours = outcome(linear_divergence, random_problem(0, apart=apart, has_bias=True), beta, trained=trained)
    assert ours.divergence.shape == ours.entropy.shape == (0,)
    assert ours.hidden.shape == (0, 24)
    if trained:
        assert not ours.weight.any()
        assert not ours.bias.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("tile_columns", [None, 13])
@pytest.mark.parametrize("absent", ["student", "teacher", "both", "first tile", "one head"])
def test_absent_classes_have_the_textbook_value(absent, tile_columns, beta, dtype):
    problem = random_problem(5, 60, dtype=dtype, apart=0.5 if absent == "one head" else None)
    places = slice(0, 30) if absent == "first tile" else slice(20, 40)
    masked, zeros = torch.zeros(60), torch.zeros(60)
    masked[places] = -torch.inf
    if absent == "one head":
        head = DivergenceHead(problem.student.weight, masked)
        problem = Problem(problem.student_hidden, head, problem.teacher_hidden, head)
    else:
        student = DivergenceHead(problem.student.weight, zeros if absent == "teacher" else masked)
        teacher = DivergenceHead(problem.teacher.weight, zeros if absent == "student" else masked)
        problem = problem._replace(student=student, teacher=teacher)
    exact = outcome(defined_divergence, problem, beta, dtype=torch.float64)
    ours = outcome(linear_divergence, problem, beta, tile_columns=tile_columns)
    is_infinite = (absent == "student" and beta == 0) or (absent == "teacher" and beta == 1)
    assert exact.divergence.isinf().all() == is_infinite
    torch.testing.assert_close(ours.divergence, exact.divergence, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.entropy, exact.entropy, rtol=1e-5, atol=0)
    assert not ours.divergence.isnan().any()


@pytest.mark.parametrize("scale", [1e3, 1e6])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("apart", [None, 1.0])
def test_extreme_logits_are_finite(apart, beta, scale):
    problem = random_problem(6, 500, spread=scale, apart=None if apart is None else scale, dtype=torch.float32)
    exact = outcome(defined_divergence, problem, beta, dtype=torch.float64)
    for tile_columns in (None, 7):
        ours = outcome(linear_divergence, problem, beta, tile_columns=tile_columns)
        # With one head, the product of the difference is in fp32
        atol = 1e-4 if apart is None else 2e-7 * scale
        torch.testing.assert_close(ours.divergence, exact.divergence, rtol=1e-4, atol=atol)
        assert ours.hidden.isfinite().all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("apart", [None, 0.1])
@pytest.mark.parametrize("of", ["student", "teacher"])
def test_nan_gives_nan_in_its_row_only(of, apart, beta):
    problem = random_problem(4, dtype=torch.float32, apart=apart)
    hidden = problem.student_hidden if of == "student" else problem.teacher_hidden
    hidden[1, 3] = torch.nan
    ours = outcome(linear_divergence, problem, beta, tile_columns=50)
    assert ours.divergence.isnan().tolist() == [False, True, False, False]
    assert ours.hidden.isnan().any(1).tolist() == [False, True, False, False]


def test_a_frozen_head_saves_only_the_gradient():
    problem = random_problem(6, dtype=torch.bfloat16)
    saved = []
    hidden = problem.student_hidden.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear_divergence(hidden, *problem[1:], 0.5)
    assert [(x.shape, x.dtype) for x in saved] == [(hidden.shape, torch.float32)]


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_no_gradient_is_formed_where_none_is_needed(monkeypatch, needs_gradient):
    monkeypatch.setattr(divergence_module, "Gradients", None)
    problem = random_problem(3)
    hidden = problem.student_hidden.requires_grad_(needs_gradient)
    with torch.set_grad_enabled(not needs_gradient):
        results = linear_divergence(hidden, *problem[1:], 1.0)
    assert not results.divergence.requires_grad


@pytest.mark.parametrize("trained", [False, True])
def test_only_the_student_has_a_gradient_and_no_second_one(trained):
    problem = random_problem(3)
    for x in (problem.student_hidden, problem.teacher_hidden, problem.teacher.weight):
        x.requires_grad_()
    problem.student.weight.requires_grad_(trained)
    results = linear_divergence(*problem, 0.5)
    assert not results.entropy.requires_grad
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(results.divergence.sum(), problem.student_hidden, create_graph=True)
    results = linear_divergence(*problem, 0.5)
    results.divergence.sum().backward()
    assert problem.teacher_hidden.grad is None
    assert problem.teacher.weight.grad is None


@pytest.mark.parametrize(("trained", "entered"), [(False, 1), (True, 2)])
def test_weights_are_read_where_they_are_readable(trained, entered):
    entries = []

    @contextmanager
    def readable():
        entries.append(1)
        yield

    outcome(linear_divergence, random_problem(3), 0.5, trained=trained, readable=readable)
    assert len(entries) == entered


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_beta_out_of_range_is_refused(beta):
    with pytest.raises(ValueError, match="beta"):
        linear_divergence(*random_problem(3), beta)


@pytest.mark.parametrize("beta", BETAS)
def test_the_series_equals_the_formula(beta):
    """Where the formula does not cancel, at the border; f is never negative."""
    divergence = divergence_of(beta)
    gap = torch.tensor([[-NEAR_GAP, -0.3, 0.3, NEAR_GAP]], dtype=torch.float64)
    ones = torch.ones_like(gap)
    tile = GapTile(gap, ones, gap.expm1(), is_exact=True)
    coefficients = divergence.coefficients(tile, torch.empty_like(gap), torch.empty_like(gap))
    formula = divergence.formula(tile, coefficients, torch.empty_like(gap), torch.empty_like(gap))
    series = divergence._near_terms(tile, gap, torch.empty_like(gap))
    assert (formula > 0).all()
    torch.testing.assert_close(series, formula, rtol=1e-8, atol=0)
    assert len(divergence.series) == DEGREE - 1


@pytest.mark.parametrize("has_tensor_cores", [False, True])
def test_the_difference_is_split_for_tensor_cores(monkeypatch, has_tensor_cores):
    """In three bf16 numbers, which together are the fp32 difference."""
    monkeypatch.setattr(divergence_module, "multiplies_halves", lambda device: has_tensor_cores)
    difference, weight = torch.randn(5, 32), torch.randn(40, 32).bfloat16()
    out = torch.empty(5, 40)
    divergence_module._project_exactly(out, difference, weight)
    exact = difference.double() @ weight.double().t()
    assert float((out - exact).abs().max()) < 1e-5


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("apart", [None, 0.1])
@pytest.mark.parametrize("trained", [False, True])
def test_peak_memory_is_that_of_tiles(trained, apart, beta):
    tokens, vocabulary, width = 512, 32768, 64
    problem = random_problem(tokens, vocabulary, width=width, apart=apart, dtype=torch.bfloat16)
    hidden = problem.student_hidden.requires_grad_()
    problem.student.weight.requires_grad_(trained)

    def run():
        linear_divergence(*problem, beta).divergence.sum().backward()

    extra = peak_bytes(run)
    tile = divergence_module._CPU_TOKENS * divergence_module._CPU_COLUMNS * 8
    weights = divergence_module._CPU_COLUMNS * width * 4 * 3 * 3  # of both models, in fp32 and float64
    gradients = 2 * tokens * width * 4 + hidden.nbytes + (problem.student.weight.nbytes if trained else 0)
    # Seven tiles that stay, and temporary ones
    assert extra < 15 * tile + weights + gradients
    assert extra < tokens * vocabulary * 4 / 2
