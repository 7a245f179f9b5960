"""Values and gradients of the head equal float64 on the same operands, in every dtype."""

import math
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp32_precision import WAYS, fewer_digits, fp32_switches
from head_definition import ALL, FROZEN, defined, floats_apart, has_one_maximum, log_p_where_certain, relative
from trl_ext import linear_log_probs
from trl_ext.heads import tiled
from trl_ext.heads.adapters import Factors, low_rank_term
from trl_ext.heads.kernels.work import work_of
from trl_ext.heads.linear_log_probs import run_head
from trl_ext.heads.logits import LogitTransform

# Triton's interpreter runs NumPy, which warns where a device does not
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
HALF = (torch.bfloat16, torch.float16)
SMALL = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    """Run with each implementation of the operations between the products.

    Tiles have at most 2^14 elements, so that small inputs need several tiles. In Triton's interpreter each row of a
    tile takes milliseconds, so there are fewer rows.
    """
    name = getattr(request, "param", "torch")
    monkeypatch.setitem(tiled._ELEMENTS, "cpu", 2**14 if name == "torch" else 2**18)
    monkeypatch.setattr(tiled, "work_of", lambda kernels, *about: work_of(kernels or name, *about))
    return name


# The bounds hold for both torch and Triton
WITH_BOTH = pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture
def rounds_coefficients(monkeypatch):
    """Round the coefficients of gradient products to the operands' dtype, as tensor cores require on CUDA."""
    monkeypatch.setattr(tiled, "coefficients_dtype", lambda operands, device: operands)


def cuts_off(kernels, dtype):
    """Whether fp32 is truncated to bf16, with twice the error: Triton's interpreter does that, devices round."""
    return kernels == "triton" and dtype == torch.bfloat16


def operands(tokens, width, vocabulary, dtype, spread, seed=0):
    """Return operands whose logits have standard deviation `spread`; half of the targets are likely."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) * spread / math.sqrt(width)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[::2] = (hidden.double() @ weight.double().t()).argmax(-1)[::2]
    return hidden, weight, targets


def allowed(logits):
    return 1e-5 * max(1.0, float(logits.detach().abs().max()) / 32)


@WITH_BOTH
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("width", [64, 1024, 8192])
@pytest.mark.parametrize("dtype", HALF + (torch.float32,), ids=str)
def test_values_equal_float64_on_the_same_operands(dtype, width, spread):
    hidden, weight, targets = operands(64, width, 1501, dtype, spread)
    ours = linear_log_probs(hidden, weight, targets, outputs=ALL)
    exact = defined(hidden, weight, targets)
    for name in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "mean_log_probs"):
        # Products of bf16 numbers have so few bits that most partial sums are exact
        bound = allowed(exact.logits) * (1 if dtype == torch.bfloat16 else 2)
        assert floats_apart(getattr(ours, name), getattr(exact, name)) <= bound, name
    assert torch.equal(ours.is_top1, exact.is_top1)


@WITH_BOTH
@pytest.mark.parametrize("cuda_rounding", [False, True])
@pytest.mark.parametrize("entropy_requires_grad", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradient_of_hidden_states_has_only_the_rounding_error_of_its_dtype(
    dtype, spread, trained, entropy_requires_grad, cuda_rounding, kernels, request
):
    cut_off = cuda_rounding and cuts_off(kernels, dtype)
    if cuda_rounding:
        request.getfixturevalue("rounds_coefficients")
    hidden, weight, targets = operands(128, 512, 3001, dtype, spread)
    upstream = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    hidden.requires_grad_()
    weight.requires_grad_(trained)
    ours = linear_log_probs(
        hidden, weight, targets, outputs=("log_probs", "entropy"), entropy_requires_grad=entropy_requires_grad
    )
    loss = (ours.log_probs * upstream[0]).sum()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = defined(exact_hidden, exact_weight, targets)
    exact_loss = (exact.log_probs * upstream[0]).sum()
    if entropy_requires_grad:
        loss = loss + (ours.entropy * upstream[1]).sum()
        exact_loss = exact_loss + (exact.entropy * upstream[1]).sum()
    loss.backward()
    exact_loss.backward()
    # fp16 cannot represent smaller gradients of a nearly certain token
    floor = relative(exact_hidden.grad.to(dtype), exact_hidden.grad)
    assert relative(hidden.grad, exact_hidden.grad) <= (2.5 if cut_off else 1.15) * floor
    if trained:
        floor = relative(exact_weight.grad.to(dtype), exact_weight.grad)
        assert relative(weight.grad, exact_weight.grad) <= (2.5 if cut_off else 1.5) * floor


@WITH_BOTH
@pytest.mark.parametrize("head", ["frozen", "trained", "entropy", "mean"])
@pytest.mark.parametrize("dtype", HALF + (torch.float32,), ids=str)
def test_logits_of_ten_thousand_give_finite_values_and_gradients(dtype, head):
    hidden = torch.tensor([[1e2, 0.0], [-1e2, 0.0], [0.0, 1.0]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1e2, 0.0], [-1e2, 0.0], [0.0, 1.0], [1e2, 0.0]], dtype=dtype)
    weight.requires_grad_(head == "trained")
    for target in range(4):
        targets = torch.full((3,), target)
        outputs = ALL if head == "mean" else FROZEN
        ours = linear_log_probs(hidden, weight, targets, outputs=outputs, entropy_requires_grad=head == "entropy")
        exact = defined(hidden.detach(), weight.detach(), targets)
        for name in outputs:
            if name == "is_top1":
                continue
            assert getattr(ours, name).isfinite().all()
            assert floats_apart(getattr(ours, name), getattr(exact, name)) <= allowed(exact.logits), name
        also = {"entropy": "entropy", "mean": "mean_log_probs"}.get(head, "log_probs")
        loss = ours.log_probs.sum() + getattr(ours, also).sum()
        gradients = torch.autograd.grad(loss, [x for x in (hidden, weight) if x.requires_grad])
        h, w = (x.detach().double().requires_grad_(x.requires_grad) for x in (hidden, weight))
        exact = defined(h, w, targets)
        exact_loss = exact.log_probs.sum() + getattr(exact, also).sum()
        exact_gradients = torch.autograd.grad(exact_loss, [x for x in (h, w) if x.requires_grad])
        for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
            assert gradient.isfinite().all()
            assert floats_apart(gradient, exact_gradient) <= 1e-2 * float(exact_gradient.abs().max())


@WITH_BOTH
@pytest.mark.parametrize("dtype", HALF + (torch.float32,), ids=str)
def test_a_nearly_certain_token_keeps_its_relative_precision(dtype):
    hidden, weight, targets = operands(256, 128, 2003, dtype, 1.0)
    # Raise each target's own logit so that p runs from 0.99 to 1 - 1e-12
    lift = torch.linspace(0.6, 2.5, 256)[:, None]
    hidden = (hidden.double() + lift * 30 * weight[targets].double()).to(dtype)
    ours = linear_log_probs(hidden, weight, targets).log_probs.double()
    exact = log_p_where_certain(defined(hidden, weight, targets).logits, targets)
    certain = exact > math.log(0.99)
    assert certain.sum() > 100
    assert exact[certain].max() > -1e-9
    assert ((ours - exact) / exact).abs()[certain].max() < 5e-5


@WITH_BOTH
@pytest.mark.parametrize("cap", [None, 5.0])
def test_the_gradient_of_a_nearly_certain_token_does_not_cancel(cap):
    hidden, weight, targets = operands(64, 32, 501, torch.float32, 1.0)
    hidden = hidden + 60 * weight[targets]
    for trained in (False, True):
        a, b = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
        linear_log_probs(
            a, weight.clone().requires_grad_(trained), targets, softcap=cap, temperature=0.3
        ).log_probs.sum().backward()
        logits = defined(b, weight, targets, softcap=cap, temperature=0.3).logits
        log_p_where_certain(logits, targets).sum().backward()
        assert relative(a.grad, b.grad) < 1e-4


@st.composite
def problems(draw):
    """Draw shapes, options and a dtype, with V at least 2 and any number of tokens, also 0."""
    return {
        "shape": draw(st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 1, 4), (40,)])),
        "width": draw(st.integers(1, 40)),
        "vocabulary": draw(st.integers(2, 300)),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        "bias": draw(st.sampled_from([None, torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        "trained": draw(st.booleans()),
        "entropy_requires_grad": draw(st.booleans()),
        "mean": draw(st.booleans()),
        "chunk_size": draw(st.sampled_from([None, 1, 3, 16])),
        "columns": draw(st.sampled_from([1, 7, 64, 4096])),
        "options": {
            "temperature": draw(st.sampled_from([1.0, 0.7, 2.0])),
            "logit_scale": draw(st.sampled_from([1.0, 0.0625, -2.0])),
            "softcap": draw(st.sampled_from([None, 3.0])),
        },
        "seed": draw(st.integers(0, 2**20)),
    }


@SMALL
@given(problem=problems())
def test_values_and_gradients_equal_the_definition_for_every_shape_option_and_tile(monkeypatch, problem):
    monkeypatch.setattr(tiled, "_COLUMNS", problem["columns"])
    monkeypatch.setitem(tiled._ELEMENTS, "cpu", 1)
    dtype, shape = problem["dtype"], problem["shape"]
    generator = torch.Generator().manual_seed(problem["seed"])

    def randn(*size, dtype=dtype):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    hidden = randn(*shape, problem["width"]).requires_grad_()
    weight = randn(problem["vocabulary"], problem["width"]).requires_grad_(problem["trained"])
    bias = None
    if problem["bias"]:  # the bias may be wider than the operands, and is not rounded
        bias = randn(problem["vocabulary"], dtype=problem["bias"]).requires_grad_(problem["trained"])
    targets = torch.randint(problem["vocabulary"], shape, generator=generator)
    upstream = torch.randn(3, *shape, generator=generator, dtype=torch.float64)

    exact_inputs = [None if x is None else x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    exact = defined(exact_inputs[0], exact_inputs[1], targets, exact_inputs[2], **problem["options"])
    ours = linear_log_probs(
        hidden,
        weight,
        targets,
        bias=bias,
        outputs=ALL if problem["mean"] else FROZEN,
        entropy_requires_grad=problem["entropy_requires_grad"],
        chunk_size=problem["chunk_size"],
        **problem["options"],
    )
    wide = dtype == torch.float64
    # A logit is a sum of up to 40 fp32 products, each of which rounds: a rare draw reaches 1.02 of 1e-5 logits / 32
    scale = max(1.0, float(exact.logits.detach().abs().max()) / 24) if exact.logits.numel() else 1.0
    for name in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", *["mean_log_probs"] * problem["mean"]):
        value = getattr(ours, name)
        assert value.shape == targets.shape
        assert value.dtype == (torch.float64 if wide else torch.float32)
        assert floats_apart(value, getattr(exact, name)) <= (1e-12 if wide else 1e-5) * scale, name
    assert ours.entropy.requires_grad == problem["entropy_requires_grad"]
    if wide:
        is_certain = has_one_maximum(exact.logits)
        assert torch.equal(ours.is_top1[is_certain], exact.is_top1[is_certain])

    loss, exact_loss = (ours.log_probs * upstream[0]).sum(), (exact.log_probs * upstream[0]).sum()
    if problem["entropy_requires_grad"]:
        loss, exact_loss = loss + (ours.entropy * upstream[1]).sum(), exact_loss + (exact.entropy * upstream[1]).sum()
    if problem["mean"]:
        loss = loss + (ours.mean_log_probs * upstream[2]).sum()
        exact_loss = exact_loss + (exact.mean_log_probs * upstream[2]).sum()
    loss.backward()
    exact_loss.backward()
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
    for x, exact_x in zip((hidden, weight, bias), exact_inputs, strict=True):
        if x is None or not x.requires_grad:
            continue
        assert x.grad.dtype == x.dtype
        if x.numel():
            scale = max(float(exact_x.grad.norm()), 1e-3)
            assert float((x.grad.double() - exact_x.grad).norm()) <= max(tolerance[dtype], tolerance[x.dtype]) * scale


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_scale": 0.3, "softcap": 2.0}])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_gradcheck_in_float64(trained, entropy, mean, options, monkeypatch):
    monkeypatch.setattr(tiled, "_COLUMNS", 4)
    monkeypatch.setitem(tiled._ELEMENTS, "cpu", 1)
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 3, dtype=torch.float64, requires_grad=trained)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=trained)
    targets = torch.randint(11, (5,))

    def head(hidden, weight, bias):
        out = linear_log_probs(
            hidden,
            weight,
            targets,
            bias=bias,
            outputs=ALL if mean else FROZEN,
            entropy_requires_grad=entropy,
            chunk_size=2,
            **options,
        )
        return tuple(x for x in out if x is not None and x.requires_grad)

    assert torch.autograd.gradcheck(head, (hidden, weight, bias), fast_mode=False)


def test_the_result_does_not_depend_on_the_path():
    hidden, weight, targets = operands(50, 64, 1001, torch.float32, 2.0)
    with torch.no_grad():
        plain = linear_log_probs(hidden, weight, targets, outputs=ALL)
    gradients = []
    for trained, entropy_requires_grad, outputs in product((False, True), (False, True), (FROZEN, ALL)):
        h = hidden.clone().requires_grad_()
        other = linear_log_probs(
            h,
            weight.clone().requires_grad_(trained),
            targets,
            outputs=outputs,
            entropy_requires_grad=entropy_requires_grad,
        )
        for a, b in zip(plain, other, strict=True):
            assert b is None or torch.equal(a, b)
        gradients.append(torch.autograd.grad(other.log_probs.sum(), h)[0])
    for gradient in gradients[1:]:
        assert relative(gradient, gradients[0]) < 1e-6


@pytest.mark.parametrize("head", ["frozen", "trained", "dense"])
def test_a_second_derivative_is_an_error(head):
    hidden, weight, targets = operands(10, 16, 101, torch.float32, 2.0)
    hidden.requires_grad_()
    weight.requires_grad_(head == "trained")
    name = "dense" if head == "dense" else "tiled"
    options = {"bias": None, "transform": LogitTransform(), "outputs": ("log_probs",)}
    log_probs = run_head(name, hidden, weight, targets, **options).log_probs
    torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True)
    # A second call of the backward is not a second derivative
    torch.autograd.grad(log_probs.sum(), hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="second derivative, which the LM head does not have"):
        torch.autograd.grad(log_probs.sum(), hidden, create_graph=True)


# Dynamo reads the `.grad` of every tensor
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_head_is_exact_in_a_compiled_function():
    hidden, weight, targets = operands(32, 64, 501, torch.float32, 3.0)

    compiled_calls = []

    def backend(graph, inputs):
        compiled_calls.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    def step(hidden):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_log_probs(hidden * 2, weight, targets).log_probs + 0

    a, b = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    eager, compiled = step(a), torch.compile(step, backend=backend)(b)
    assert torch.equal(eager, compiled)
    assert compiled_calls
    assert not [call for call in compiled_calls if "mm" in call or "apply" in call or "exp" in call]
    eager.sum().backward()
    compiled.sum().backward()
    assert torch.equal(a.grad, b.grad)


def test_only_requested_outputs_are_computed():
    hidden, weight, targets = operands(20, 16, 101, torch.float32, 2.0)
    everything = linear_log_probs(hidden, weight, targets, outputs=ALL)
    for name in ALL:
        alone = linear_log_probs(hidden, weight, targets, outputs=(name,))
        assert torch.equal(getattr(alone, name), getattr(everything, name))
        assert all(getattr(alone, other) is None for other in ALL if other != name)


def test_autocast_rounds_the_operands_once_and_nothing_else():
    hidden, weight, targets = operands(64, 256, 2003, torch.float32, 3.0)
    for trained in (False, True):
        a, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = linear_log_probs(a, w, targets, outputs=("log_probs", "entropy"))
        ours.log_probs.sum().backward()
        exact = defined(hidden.bfloat16(), weight.bfloat16(), targets)
        assert floats_apart(ours.log_probs, exact.log_probs) <= allowed(exact.logits)
        assert floats_apart(ours.entropy, exact.entropy) <= allowed(exact.logits)
        assert a.grad.dtype == torch.float32
        rounded = hidden.bfloat16().double().requires_grad_()
        defined(rounded, weight.bfloat16(), targets).log_probs.sum().backward()
        assert relative(a.grad, rounded.grad) < 1e-5
        assert torch.is_autocast_enabled("cpu") is False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        doubles = linear_log_probs(hidden.double(), weight.double(), targets).log_probs
    assert floats_apart(doubles, defined(hidden, weight, targets).log_probs) < 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_the_head_ignores_switches_for_less_precise_fp32_products(way):
    hidden, weight, targets = operands(64, 256, 2003, torch.float32, 3.0)
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in ("aten::mm", "aten::addmm"):
                seen.append(fp32_switches()[1:])
            return func(*args, **(kwargs or {}))

    with fewer_digits(way):
        switched = fp32_switches()
        for trained in (False, True):
            a, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
            with Spy():
                ours = linear_log_probs(a, w, targets)
                ours.log_probs.sum().backward()
            exact = defined(hidden, weight, targets)
            assert floats_apart(ours.log_probs, exact.log_probs) <= allowed(exact.logits)
        assert seen
        assert {x for switches in seen for x in switches} <= {"ieee", "none"}
        assert fp32_switches() == switched


def test_mixed_operands_are_multiplied_in_the_wider_dtype():
    hidden, weight, targets = operands(32, 64, 501, torch.float32, 2.0)
    exact = defined(hidden, weight.bfloat16(), targets)
    ours = linear_log_probs(hidden, weight.bfloat16(), targets)
    assert floats_apart(ours.log_probs, exact.log_probs) <= allowed(exact.logits)


def test_the_dense_head_equals_the_tiled_head():
    transform = LogitTransform(0.7, 0.5, 9.0)
    for dtype in HALF + (torch.float32, torch.float64):
        hidden, weight, targets = operands(40, 64, 701, dtype, 3.0)
        bias = torch.randn(701).to(dtype)
        results = {}
        for name in ("tiled", "dense"):
            inputs = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
            out = run_head(
                name,
                inputs[0],
                inputs[1],
                targets,
                bias=inputs[2],
                transform=transform,
                outputs=ALL,
                entropy_requires_grad=True,
            )
            (out.log_probs.sum() + out.entropy.square().sum() - out.mean_log_probs.square().sum()).backward()
            results[name] = out, [x.grad for x in inputs]
        for a, b in zip(results["tiled"][0], results["dense"][0], strict=True):
            assert floats_apart(a, b) < 1e-5
        for a, b in zip(results["tiled"][1], results["dense"][1], strict=True):
            assert relative(a, b) < {torch.bfloat16: 4e-3, torch.float16: 1e-3}.get(dtype, 1e-5)


@WITH_BOTH
@pytest.mark.parametrize("cuda_rounding", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("dtype", HALF + (torch.float32,), ids=str)
def test_label_smoothing_has_the_gradient_of_its_definition(dtype, spread, trained, cuda_rounding, kernels, request):
    """At a spread of 30 most probabilities underflow, and half of the targets are nearly certain."""
    if cuda_rounding:
        request.getfixturevalue("rounds_coefficients")
    hidden, weight, targets = operands(128, 512, 3001, dtype, spread)
    hidden.requires_grad_()
    weight.requires_grad_(trained)
    ours = linear_log_probs(hidden, weight, targets, outputs=("log_probs", "mean_log_probs"))
    loss = -(0.9 * ours.log_probs + 0.1 * ours.mean_log_probs).mean()
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.nn.functional.cross_entropy(inputs[0] @ inputs[1].t(), targets, label_smoothing=0.1)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    loss.backward()
    exact.backward()
    for x, exact_x in zip((hidden, weight), inputs, strict=True):
        if x.requires_grad:
            floor = max(relative(exact_x.grad.to(dtype), exact_x.grad), 5e-6)
            cut_off = cuda_rounding and cuts_off(kernels, dtype)
            assert relative(x.grad, exact_x.grad) <= (2.5 if cut_off else 1.5) * floor


def test_the_mean_log_prob_of_a_large_vocabulary_keeps_its_gradient():
    """1 / V is small there, and it is the whole gradient of most rows of the weight."""
    hidden, weight, targets = operands(16, 32, 150_001, torch.float32, 3.0)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    linear_log_probs(hidden, weight, targets, outputs=("mean_log_probs",)).mean_log_probs.sum().backward()
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    defined(*inputs, targets).mean_log_probs.sum().backward()
    for x, exact in zip((hidden, weight), inputs, strict=True):
        assert relative(x.grad, exact.grad) < 1e-5
    unlikely = inputs[1].grad.norm(dim=-1) < 2e-4
    assert unlikely.sum() > 100_000
    assert relative(weight.grad[unlikely], inputs[1].grad[unlikely]) < 1e-5


@WITH_BOTH
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_bias_wider_than_the_operands_is_not_rounded_to_them_nor_by_autocast(dtype, trained):
    hidden, weight, targets = operands(64, 128, 1501, dtype, 1.0)
    bias = torch.linspace(-9, 9, 1501).cos() * 5
    exact_bias = bias.double().requires_grad_()
    exact = defined(hidden, weight, targets, exact_bias)
    exact.log_probs.sum().backward()
    for autocast in (False, True):
        b = bias.clone().requires_grad_(trained)
        h, w = (x.float().requires_grad_() if autocast else x for x in (hidden, weight))
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            ours = linear_log_probs(h, w, targets, bias=b)
        assert floats_apart(ours.log_probs, exact.log_probs) <= allowed(exact.logits)
        if trained:
            ours.log_probs.sum().backward()
            assert b.grad.dtype == torch.float32
            assert relative(b.grad, exact_bias.grad) < 1e-5


@pytest.mark.parametrize("head", ["tiled", "dense"])
def test_the_bias_of_an_adapter_is_not_rounded(head):
    hidden, weight, targets = operands(64, 128, 1501, torch.bfloat16, 1.0)
    bias = torch.linspace(-9, 9, 1501).cos() * 5
    factors = (Factors(torch.zeros(2, 128), torch.zeros(1501, 2), bias, 0.7),)
    ours = run_head(
        *(head, hidden, weight, targets),
        bias=bias,
        transform=LogitTransform(),
        outputs=("log_probs",),
        low_rank=low_rank_term(hidden, factors, torch.bfloat16, torch.float32),
    )
    exact = defined(hidden, weight, targets, 1.7 * bias.double())
    assert floats_apart(ours.log_probs, exact.log_probs) <= allowed(exact.logits)
