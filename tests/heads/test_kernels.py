"""Triton's kernels equal torch for every tile in Triton's interpreter, they compile, and the right ones are chosen."""

import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tiny import Workshop, preferences
from trl_ext import DPOConfig, DPOTrainer, linear_log_probs
from trl_ext.heads import products
from trl_ext.heads.gradients import Coefficients
from trl_ext.heads.kernels import work as kernels_work
from trl_ext.heads.kernels.triton_work import TritonWork
from trl_ext.heads.kernels.work import (
    Tile,
    TorchWork,
    as_tile,
    check_kernels,
    row_stride,
    triton_unavailable_reason,
    work_of,
)
from trl_ext.heads.logits import OUTPUTS, LinearLogProbs, LogitTransform
from trl_ext.heads.statistics import RunningStatistics

# The interpreter runs NumPy, which warns where a device does not
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU  # `make bench-gpu` runs this file too
INTERPRETED = pytest.mark.skipif(DEVICE != CPU, reason="runs the kernels on the CPU, in the interpreter")
HALVES = (torch.bfloat16, torch.float16, torch.float32)
DIFFERENTIABLE = ("log_probs", "entropy", "mean_log_probs")
# No shrinking of failures, because in the interpreter a row takes milliseconds
GENERATE = (Phase.explicit, Phase.reuse, Phase.generate)
FEW = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=25, phases=GENERATE)
MANY = settings(FEW, max_examples=300)


@st.composite
def problems(draw):
    """Draw uneven tiles of some tokens' products, all options, and targets inside and outside of the tiles."""
    return {
        "seed": draw(st.integers(0, 2**31)),
        "tokens": draw(st.integers(1, 4)),
        "widths": draw(st.lists(st.integers(1, 37), min_size=1, max_size=3)),
        "spread": draw(st.sampled_from([0.1, 3.0, 30.0, 1000.0])),
        "climb": draw(st.sampled_from([0.0, 9.0, 12.0])),  # from tile to tile, near the value that moves the shift
        "bias": draw(st.sampled_from([None, *HALVES])),
        "transform": LogitTransform(
            draw(st.sampled_from([1.0, 0.3])),
            draw(st.sampled_from([1.0, -0.5])),
            draw(st.sampled_from([None, 5.0, 50.0])),
        ),
        "outputs": tuple(draw(st.just(OUTPUTS) | st.sets(st.sampled_from(OUTPUTS), min_size=1))),
        "operand": draw(st.sampled_from(HALVES)),
        "upstream": draw(st.sets(st.sampled_from(DIFFERENTIABLE), min_size=1)),
        "asks": draw(st.sampled_from([("nontarget_grad",), ("grad_logits",), ("nontarget_grad", "grad_logits")])),
    }


class Problem:
    """Makes new tiles for each implementation, because torch overwrites the product."""

    def __init__(self, problem):
        self.__dict__.update(problem)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.vocabulary = sum(self.widths) + 1  # one row of the weight is on another rank
        self.products = [
            self.random(self.tokens, width) * self.spread + self.climb * i for i, width in enumerate(self.widths)
        ]
        self.biases = [None if self.bias is None else column(self.random(width).to(self.bias)) for width in self.widths]
        targets = torch.randint(self.vocabulary, (self.tokens,), generator=self.generator)
        self.targets = column(targets.to(DEVICE))
        self.given = {name: self.random(self.tokens) for name in DIFFERENTIABLE}
        self.sums = self.random(self.tokens, 5)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(DEVICE)

    def tiles(self):
        start = 0
        for product, bias in zip(self.products, self.biases, strict=True):
            classes = slice(start, start + product.shape[1])
            # What lies between the rows, where the kernels read too, reaches no result
            buffer = product.new_full((self.tokens * row_stride(product.shape[1]),), torch.nan)
            padded = as_tile(buffer, *product.shape).copy_(product)
            yield Tile(slice(0, self.tokens), classes, padded, bias, self.sums, self.sums, None, None)
            start = classes.stop

    def run(self, work):
        """Return the statistics, coefficients and rescaled sums after each tile, then each tile's gradient."""
        statistics = RunningStatistics(self.targets, self.vocabulary, self.outputs, torch.float32, partial=True)
        sums, seen = self.sums.clone(), []
        for tile in self.tiles():
            first = tile.classes.start == 0
            written = work.fold(statistics, tile, self.operand, None if first else sums)
            numbers = {name: x.clone() for name, x in vars(statistics).items() if isinstance(x, torch.Tensor)}
            seen.append({**numbers, "coefficients": written.clone(), "sums": sums.clone()})
        rescale, log_odds, results = work.finish(statistics, self.outputs)
        found = {name: x for name, x in results._asdict().items() if x is not None}
        seen.append({"rescale": rescale, "log_odds": log_odds, "sum_exp": statistics.sum_exp.clone(), **found})
        asked = {name: x if name in self.upstream else None for name, x in self.given.items()}
        entropy = self.given["log_probs"].abs()
        numbers = (column(statistics.shift), statistics.sum_exp.clamp(min=1), statistics.target_logit, entropy)
        coefficients = Coefficients(*numbers, LinearLogProbs(**asked), self.transform, self.vocabulary)
        coefficients.use_unit(coefficients.unit())
        dtypes = {name: self.operand if name in self.asks else None for name in ("nontarget_grad", "grad_logits")}
        for tile in self.tiles():
            found = work.gradient(coefficients, tile, self.targets, **dtypes)
            seen.append({name: x.clone() for name, x in zip(dtypes, found, strict=True) if x is not None})
        return seen


def column(numbers):
    """Return the same numbers as a column of another tensor, as callers and exchanges between ranks give them."""
    return torch.stack([numbers, numbers.new_full(numbers.shape, 3)], 1)[:, 0]


def compare(problem):
    problem = Problem(problem)
    works = [work_of(name, DEVICE, torch.float32, problem.transform) for name in ("torch", "triton")]
    for place, (right, ours) in enumerate(zip(*map(problem.run, works), strict=True)):
        assert right.keys() == ours.keys()
        for name in right:
            want, got = right[name], ours[name]
            assert (want.dtype, want.shape) == (got.dtype, got.shape)
            # exp is as exact as the last place of the logit; the last place of half precision may round differently
            rounding = torch.finfo(want.dtype).eps if want.dtype in HALVES[:2] else 0
            biases = 4 if problem.bias is not None else 0
            logits = max(1.0, (5 * problem.spread + 2 * problem.climb + biases) / problem.transform.temperature)
            largest = float(want.double().nan_to_num(posinf=0, neginf=0).abs().max())
            if name == "sum_shifted_exp":
                largest = max(largest, float(right["sum_exp"].max()))  # its terms may cancel
            if name in ("log_odds", *OUTPUTS):
                largest = max(largest, 1.0)  # differences of logits
            if name == "sum_logits":
                largest = max(largest, problem.vocabulary**0.5)  # its terms may cancel
            off = (got.double() - want.double()).abs()
            # The interpreter rounds to subnormal bf16 numbers differently than torch
            subnormal = torch.finfo(want.dtype).tiny if want.dtype == torch.bfloat16 else 0
            bound = max(max(rounding, 1e-6 * logits) * largest, subnormal)
            if problem.transform.softcap is not None and name in ("coefficients", "nontarget_grad", "grad_logits"):
                # Both compute 1 - tanh^2 to fp32 rounding of 1, and multiply it by exp(z - shift), at most exp(8)
                exponential = float((right["max"] - right["shift"]).max().exp()) if "shift" in right else 1.0
                bound += 5e-7 * exponential * max(1.0, abs(problem.transform.slope))
            same = (off <= bound) | (got == want) | (got.isnan() & want.isnan())
            assert same.all(), f"{name} of tile {place}: {got} is not {want}"


# 46 small terms with both signs: their sum is much smaller than the rounding bound
CANCELS = {
    "seed": 253,
    "tokens": 1,
    "widths": [14, 22, 11],
    "spread": 0.1,
    "climb": 0.0,
    "bias": torch.float32,
    "transform": LogitTransform(softcap=50.0),
    "outputs": OUTPUTS,
    "operand": torch.float32,
    "upstream": set(DIFFERENTIABLE),
    "asks": ("nontarget_grad", "grad_logits"),
}
# Biases add to the logits, and so to the rounding of their exponentials
LARGE_BIASES = CANCELS | {
    **{"seed": 1605251, "tokens": 4, "widths": [30, 17, 30], "bias": torch.float16, "operand": torch.bfloat16},
    **{"transform": LogitTransform(temperature=0.3, softcap=50.0), "outputs": ("log_sum_sq_probs",)},
    "upstream": {"mean_log_probs"},
}


# Logits whose sum is much smaller than they are
LOGITS_CANCEL = CANCELS | {
    **{"seed": 2, "widths": [15, 23, 2], "bias": None, "transform": LogitTransform(temperature=0.3)},
    **{"operand": torch.bfloat16, "upstream": {"log_probs"}, "asks": ("nontarget_grad",)},
}


# Exponentials of 120 times a slope of the softcap of 4e-4
EXPONENTIALS = CANCELS | {
    **{"seed": 365, "tokens": 4, "widths": [1, 26, 33], "climb": 12.0, "bias": torch.float16},
    **{"transform": LogitTransform(softcap=5.0), "outputs": ("log_sum_sq_probs",), "upstream": {"mean_log_probs"}},
}
# Of 135 times 2.5e-4: torch and the kernel are both off by 2.0e-5 from float64, 1.3 times the fp32 rounding of 135
WIDE_EXPONENTIALS = EXPONENTIALS | {"seed": 4194304, "tokens": 3, "widths": [24, 33, 15], "bias": None}


@FEW
@given(problems())
@example(CANCELS)
@example(EXPONENTIALS)
@example(WIDE_EXPONENTIALS)
@example(LOGITS_CANCEL)
@example(LARGE_BIASES)
def test_every_kernel_equals_torch_tile_for_tile(problem):
    compare(problem)


@pytest.mark.slow
@MANY
@given(problems())
def test_every_kernel_equals_torch_tile_for_tile_in_many_problems(problem):
    compare(problem)


@pytest.mark.skipif(DEVICE == CPU, reason="tests/heads/test_head_is_exact.py holds the bounds in the interpreter")
@pytest.mark.parametrize("trained", [False, True])
def test_every_kernel_equals_torch_on_the_device(trained):
    hidden, weight, targets = (
        torch.randn(300, 1024, dtype=torch.bfloat16, device=DEVICE, requires_grad=True),
        (torch.randn(32003, 1024, device=DEVICE) / 8).bfloat16().requires_grad_(trained),
        torch.randint(32003, (300,), device=DEVICE),
    )
    found = linear_log_probs(hidden, weight, targets, outputs=("log_probs", "entropy"), kernels="triton")
    h, w = (x.detach().double().requires_grad_(x.requires_grad) for x in (hidden, weight))
    log_p = (h @ w.t()).log_softmax(-1)
    exact = log_p.gather(1, targets[:, None])[:, 0]
    # Tensor cores keep fewer bits of a sum than fp32 has: 3.5e-5 on an H200, where rounded logits are off by 5e-2
    assert (found.log_probs - exact).abs().max() <= 1e-4
    assert (found.entropy + (log_p.exp() * log_p).sum(-1)).abs().max() <= 1e-4
    for ours, right in ((hidden, h), (weight, w))[: 1 + trained]:
        (gradient,) = torch.autograd.grad(found.log_probs.sum(), ours, retain_graph=True)
        (wanted,) = torch.autograd.grad(exact.sum(), right, retain_graph=True)
        floor = (wanted.to(ours.dtype) - wanted).norm()
        assert (gradient - wanted).norm() <= 1.5 * floor


def share_of_rows(group, own):
    """Return a rank's results and gradients of a head whose rows are on two ranks, for torch and for Triton."""
    torch.manual_seed(group.rank() if own else 0)
    numbers = torch.randn(5, 8), torch.randint(40, (5,)), torch.randn(3, 5)
    torch.manual_seed(9)
    first, last = ((0, 17), (17, 40))[group.rank()]
    rows, found = torch.randn(40, 8)[first:last], []
    for kernels in ("torch", "triton"):
        hidden, targets, given = numbers
        hidden, weight = (x.clone().requires_grad_() for x in (hidden, rows))
        outputs = ("log_probs", "entropy", "mean_log_probs")
        spread = {"group": group, "first_class": first, "own_tokens": own}
        results = linear_log_probs(
            *(hidden, weight, targets), **spread, outputs=outputs, entropy_requires_grad=True, kernels=kernels
        )
        results = [getattr(results, name) for name in outputs]
        gradients = torch.autograd.grad(results, (hidden, weight), list(given))
        found.append([x.detach() for x in (*results, *gradients)])
    return found


@INTERPRETED
@pytest.mark.parametrize("own", [False, True])
def test_torch_and_triton_give_the_same_for_a_share_of_the_rows(ranks, own):
    for right, ours in ranks.run(share_of_rows, 2, own):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_nan_stays_nan():
    hidden, weight = torch.randn(3, 8, device=DEVICE), torch.randn(300, 8, device=DEVICE)
    weight[7, 0] = torch.inf
    hidden[:, 0] = torch.tensor([1.0, torch.nan, 2.0])
    targets = torch.arange(3, device=DEVICE)
    found = linear_log_probs(hidden, weight, targets, kernels="triton", tile_columns=128).log_probs
    assert not found.isfinite().any()


def test_tiles_are_no_wider_than_a_program():
    hidden, weight = torch.randn(1, 4, device=DEVICE), torch.randn(20000, 4, device=DEVICE)
    target = torch.tensor([19999], device=DEVICE)
    ours, right = (
        linear_log_probs(hidden, weight, target, kernels=kernels, tile_columns=50000).log_probs
        for kernels in ("triton", "torch")
    )
    torch.testing.assert_close(ours, right)


def test_the_cpu_and_float64_use_torch():
    assert isinstance(work_of(None, CPU, torch.float32, LogitTransform()), TorchWork)
    assert isinstance(work_of("triton", CPU, torch.float64, LogitTransform()), TorchWork)
    assert not isinstance(work_of("triton", CPU, torch.float32, LogitTransform()), TorchWork)


@pytest.fixture
def unsettled():
    """Clear the cached checks of devices before and after the test."""
    remembered = (triton_unavailable_reason, products.multiplies_halves)
    for asked in remembered:
        asked.cache_clear()
    yield
    for asked in remembered:
        asked.cache_clear()


@pytest.mark.usefixtures("unsettled")
def test_kernels_that_cannot_run_are_an_error_with_the_reason(monkeypatch, workshop: Workshop, tmp_path: Path):
    with pytest.raises(ValueError, match=r"`kernels` must be None or one of \['torch', 'triton'\], got 'cuda'"):
        check_kernels("cuda", CPU)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden, weight = torch.randn(2, 4), torch.randn(9, 4)
    with pytest.raises(ValueError, match="`kernels='triton'` is not available: Triton runs on the CPU only with"):
        linear_log_probs(hidden, weight, torch.tensor([0, 1]), kernels="triton")
    with pytest.raises(ValueError, match="`head_kernels` must be None or one of"):
        DPOConfig(str(tmp_path), head_kernels="cuda", use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="`head_kernels='torch'` is for the tiled head, but `head` is 'dense'"):
        DPOConfig(str(tmp_path), head_kernels="torch", head="dense", use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="`head_kernels='triton'` is not available"):
        trainer_with("triton", workshop, tmp_path)


def trainer_with(kernels, workshop, folder):
    args = DPOConfig(str(folder), head_kernels=kernels, use_cpu=True, bf16=False, report_to="none", max_steps=1)
    return DPOTrainer(workshop.model("untied"), args=args, train_dataset=preferences(4, seed=0))


@INTERPRETED
def test_the_plan_says_which_kernels_run(workshop: Workshop, tmp_path: Path):
    losses = {}
    for kernels in (None, "triton"):
        trainer = trainer_with(kernels, workshop, tmp_path)
        assert ("Triton" in trainer.explain()["head"].reason) == (kernels == "triton")
        losses[kernels] = trainer.train().training_loss
    assert losses["triton"] == pytest.approx(losses[None], rel=1e-6)


@pytest.mark.usefixtures("unsettled")
@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_kernels_that_fail_on_a_device_are_replaced_with_a_warning(fault, monkeypatch):
    def difference(device):
        if fault == "raises":
            raise OSError("no C compiler")
        return 0.5

    monkeypatch.setattr(kernels_work, "_difference", difference)
    words = "fail on cuda:7: OSError: no C compiler" if fault == "raises" else "differ from torch by 5.0e-01 on cuda:7"
    with pytest.warns(
        UserWarning, match=f"The LM head runs in torch: Triton's kernels {words}.* 1.6 to 2 times as long"
    ):
        assert isinstance(work_of(None, torch.device("cuda", 7), torch.float32, LogitTransform()), TorchWork)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert words in triton_unavailable_reason(torch.device("cuda", 7))  # warned once


@pytest.mark.usefixtures("unsettled")
@pytest.mark.parametrize(
    ("asked", "module", "tried"),
    [
        (triton_unavailable_reason, kernels_work, "_difference"),
        (products.multiplies_halves, products, "_multiply_halves"),
    ],
)
def test_running_out_of_memory_does_not_rule_out_a_device(asked, module, tried, monkeypatch):
    device, found = torch.device("cuda", 7), [torch.OutOfMemoryError("full"), 0.0]

    def attempt(device):
        outcome = found.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(module, tried, attempt)
    with pytest.raises(torch.OutOfMemoryError):
        asked(device)
    assert asked(device) in (None, True)


@pytest.mark.usefixtures("unsettled")
def test_a_device_without_half_precision_products_warns_once(monkeypatch):
    def attempt(device):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(products, "_multiply_halves", attempt)
    words = "On cuda:7 torch cannot multiply .* 15 times faster .* newer build .*: no such kernel"
    with pytest.warns(UserWarning, match=words):
        assert not products.multiplies_halves(torch.device("cuda", 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not products.multiplies_halves(torch.device("cuda", 7))


def test_the_check_of_a_device_detects_a_wrong_kernel(monkeypatch):
    assert kernels_work._difference(DEVICE) < 1e-4
    monkeypatch.setattr("trl_ext.heads.kernels.triton_work.FAR", 80.0)
    assert kernels_work._difference(DEVICE) > 1e-4


@pytest.mark.parametrize("written", ["rescale", "log_odds", "results"])
def test_the_check_of_a_device_detects_nan(monkeypatch, written):
    finish = TritonWork.finish

    def spoilt(*positional):
        finished = finish(*positional)
        for x in finished.results if written == "results" else [getattr(finished, written)]:
            if x is not None and x.is_floating_point():
                x.fill_(torch.nan)
        return finished

    monkeypatch.setattr(TritonWork, "finish", spoilt)
    assert kernels_work._difference(DEVICE) == math.inf


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_caller_may_write_into_the_log_probs(kernels):
    hidden = torch.randn(5, 8, device=DEVICE, requires_grad=True)
    weight, targets = torch.randn(10, 8, device=DEVICE), torch.arange(5, device=DEVICE)
    found = linear_log_probs(hidden, weight, targets, kernels=kernels, outputs=("log_probs", "entropy"))
    log_probs = found.log_probs
    log_probs[targets < 2] = 0.0
    log_probs.sum().backward()
    assert hidden.grad[:2].eq(0).all()
    assert hidden.grad[2:].ne(0).all()


@pytest.mark.parametrize("default", ["dtype", "device"])
def test_the_check_of_a_device_does_not_depend_on_the_callers_defaults(default):
    change, back = (torch.set_default_dtype, torch.float32) if default == "dtype" else (torch.set_default_device, None)
    change(torch.bfloat16 if default == "dtype" else "meta")
    try:
        assert kernels_work._difference(DEVICE) < 1e-4
    finally:
        change(back)


def test_a_device_is_not_checked_inside_a_compiled_function(monkeypatch):
    def traced(device):
        return "traced" if torch.compiler.is_compiling() else None

    monkeypatch.setattr("trl_ext.heads.kernels.work.triton_unavailable_reason", traced)
    torch.compile(lambda name: check_kernels(name, CPU), backend="eager")("triton")


def run(code, **env):
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import importlib.util as util
found = util.find_spec
util.find_spec = lambda name, *a: None if name == "triton" else found(name, *a)
import torch
from trl_ext.heads.kernels.work import check_kernels
from trl_ext.heads.linear_log_probs import linear_log_probs
print(linear_log_probs(torch.randn(2, 4), torch.randn(9, 4), torch.tensor([0, 8])).log_probs.shape)
try:
    check_kernels("triton", torch.device("cuda"))
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_head_runs_without_triton_and_says_that_it_is_missing():
    assert "Triton is not installed" in run(WITHOUT_TRITON, PYTHONPATH=str(Path(__file__).parents[2]))


COMPILE = """
import re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from trl_ext.heads.kernels import triton_kernels as kernels
from trl_ext.heads.kernels.triton_work import _launch_options

HALVES = {"bias_ptr", "coefficients_ptr", "nontarget_grad_ptr", "grad_logits_ptr"}
NUMBERS = {"targets_ptr": "*i64", "start": "i32", "width": "i32", "stride": "i32"}
# These pointers may be None
OPTIONAL = {"bias_ptr", "sum_shifted_exp_ptr", "sum_sq_exp_ptr", "sum_logits_ptr", "max_before_target_ptr", "sums_ptr",
    "entropy_ptr", "offset_ptr", "entropy_slope_ptr", "scale_ptr", "uniform_grad_ptr", "grad_logits_ptr"}

def type_of(name):
    return NUMBERS.get(name) or ("*" if name.endswith("_ptr") else "") + ("bf16" if name in HALVES else "fp32")

def compiled(kernel, flags, width, target):
    sizes = {"FAR": 8.0, "COLUMNS": width, "UNITS": 4096, "CAPPED": flags, "BLOCK": 1024}
    constants = {p.name: sizes[p.name] for p in kernel.params if p.is_constexpr}
    if not flags:
        constants |= {name: None for name in kernel.arg_names if name in OPTIONAL}
    signature = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    place = kernel.arg_names.index
    # The width of the last tile may be odd, but not its stride
    even = [name for name, x in signature.items() if x[0] == "*" or name == "stride"]
    aligned = {(place(name),): [["tt.divisibility", 16]] for name in even}
    source = ASTSource(kernel, signature, {(place(name),): x for name, x in constants.items()}, aligned)
    options = {name: x for name, x in _launch_options(width).items() if name != "COLUMNS"}
    return triton.compile(source, target=target, options=options)

backend, arch, lanes = TARGET
for kernel in (kernels.fold, kernels.finish, kernels.gradient):
    for flags, width in ((True, 8192), (False, 1024)):
        made = compiled(kernel, flags, width, GPUTarget(backend, arch, lanes))
        assert made.asm["cubin" if backend == "cuda" else "hsaco"]
        if backend == "cuda":
            ptx = Path(tempfile.mkdtemp(), "kernel.ptx")
            ptx.write_text(made.asm["ptx"])
            name = re.search(r"[.]target (\\w+)", made.asm["ptx"])[1]
            command = [get_ptxas(arch).path, "-v", "--gpu-name", name, ptx, "-o", "/dev/null"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            assert "0 bytes spill stores, 0 bytes spill loads" in said, said
            if kernel is kernels.finish:  # one number of each token: too few to need vectors
                continue
            each = width // 32 // _launch_options(width)["num_warps"]  # columns of a thread
            vectors = {way: len(re.findall(way + r"[.]global\\S*[.]v4", made.asm["ptx"])) for way in ("ld", "st")}
            assert vectors["ld"] >= each // 4, vectors  # fp32, 16 bytes each
            assert vectors["st"] >= each // 8, vectors  # bf16
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)], ids=str
)
def test_the_kernels_compile_without_spilling_registers_for(target, tmp_path: Path):
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    assert "compiled" in run(COMPILE.replace("= TARGET", f"= {target!r}"), **env)
