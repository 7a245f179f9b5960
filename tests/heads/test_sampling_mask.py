"""Values and gradients over kept classes equal float64 over the same classes, in every head, dtype and tile size."""

import functools
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pretended_gpu
from head_definition import defined, floats_apart
from sharded_head_cases import over_mask_on
from trl_ext.heads import tiled
from trl_ext.heads.adapters import Factors, ReplacedRows, low_rank_term
from trl_ext.heads.dense import log_probs_from_logits
from trl_ext.heads.kernels.work import work_of
from trl_ext.heads.linear_log_probs import run_head
from trl_ext.heads.logits import LogitTransform
from trl_ext.heads.sampling_mask import SamplingMask

# Triton's interpreter runs NumPy, which warns where a device does not
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "is_top1")
VALUES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
GRADIENTS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


@st.composite
def problems(draw):
    vocabulary = draw(st.sampled_from([2, 3, 17, 120]))
    kinds = draw(st.lists(st.sampled_from(["every", "all", "target", "few", "range"]), max_size=12))
    return {
        "vocabulary": vocabulary,
        "kinds": kinds,
        "width": draw(st.integers(1, 24)),
        "dtype": draw(st.sampled_from(list(VALUES))),
        "bias": draw(st.booleans()),
        "rank": draw(st.integers(0, 3)),
        "replaced": tuple(sorted(draw(st.sets(st.integers(0, vocabulary - 1), max_size=3)))),
        "trained": draw(st.sampled_from([("hidden",), ("weight",), ("hidden", "weight", "bias", "factors", "rows")])),
        "entropy_requires_grad": draw(st.booleans()),
        "chunk_size": draw(st.sampled_from([None, 1, 3])),
        "columns": draw(st.sampled_from([1, 7, 4096])),
        "head": draw(st.sampled_from(["tiled", "tiled", "dense"])),
        "ties": draw(st.booleans()),
        "spread": draw(st.sampled_from([1.0, 30.0])),
        "options": {
            "temperature": draw(st.sampled_from([1.0, 0.7])),
            "logit_scale": draw(st.sampled_from([1.0, -2.0])),
            "softcap": draw(st.sampled_from([None, 3.0])),
        },
        "seed": draw(st.integers(0, 2**20)),
    }


def sets_of(kinds, targets, vocabulary, generator):
    """Return the kept classes as the head gets them, and as a mask `(N, V)`."""
    kept = torch.ones(len(kinds), vocabulary, dtype=torch.bool)
    pairs = []
    for row, kind in enumerate(kinds):
        if kind == "every":  # of a token without a pair
            continue
        chosen = torch.rand(vocabulary, generator=generator) < {"all": 2.0, "target": -1.0}.get(kind, 0.2)
        if kind == "range":
            first = int(torch.randint(vocabulary, (), generator=generator))
            chosen = (torch.arange(vocabulary) >= first) & (torch.arange(vocabulary) < first + 5)
        kept[row] = chosen.index_fill(0, targets[row], True)
        # One class at least; the target may also come from the caller
        pairs += [(row, int(x)) for x in chosen.nonzero()] or [(row, int(targets[row]))]
    pairs.append((-1, 0))  # padding
    order = torch.randperm(len(pairs), generator=generator).tolist()
    tokens, classes = torch.tensor([pairs[i] for i in order]).unbind(1)
    return SamplingMask(tokens, classes, torch.tensor([kind != "every" for kind in kinds], dtype=torch.bool)), kept


def with_tiles(problem, kernels, monkeypatch):
    monkeypatch.setattr(tiled, "_COLUMNS", problem["columns"])
    monkeypatch.setitem(tiled._ELEMENTS, "cpu", 1)
    monkeypatch.setattr(tiled, "work_of", lambda name, *about: work_of(name or kernels, *about))


def operands(problem):
    """Return leaves (None if absent), targets, and the generator."""
    generator = torch.Generator().manual_seed(problem["seed"])
    N, H, V, rank, dtype = (
        len(problem["kinds"]),
        *(problem[x] for x in ("width", "vocabulary", "rank", "dtype")),
    )

    def leaf(kind, *size, spread=1.0):
        x = torch.randn(*size, generator=generator, dtype=torch.float64) * spread
        x = x.round() if problem["ties"] else x
        return x.to(dtype).requires_grad_(kind in problem["trained"])

    leaves = {
        "hidden": leaf("hidden", N, H),
        "weight": leaf("weight", V, H, spread=problem["spread"] / H**0.5),
        "bias": leaf("bias", V) if problem["bias"] else None,
        "first": leaf("factors", rank, H) if rank else None,
        "second": leaf("factors", V, rank) if rank else None,
        "rows": leaf("rows", len(problem["replaced"]), H) if problem["replaced"] else None,
    }
    return leaves, torch.randint(V, (N,), generator=generator), generator


def scored(problem, leaves, targets, kept):
    hidden, factors = leaves["hidden"], None
    dtype = problem["dtype"]
    if leaves["first"] is not None:
        factors = (Factors(leaves["first"], leaves["second"], None, 0.5),)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    return run_head(
        *(problem["head"], hidden, leaves["weight"], targets),
        bias=leaves["bias"],
        transform=LogitTransform(**problem["options"]),
        outputs=OUTPUTS,
        entropy_requires_grad=problem["entropy_requires_grad"],
        chunk_size=problem["chunk_size"],
        low_rank=low_rank_term(hidden, factors, dtype, accumulate) if factors else None,
        replaced=ReplacedRows.of(problem["replaced"], hidden.device) if problem["replaced"] else None,
        rows=leaves["rows"],
        sampling_mask=kept,
    )


def loss_of(results, problem, seed=3):
    weights = torch.randn(2, len(problem["kinds"]), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    loss = (results.log_probs * weights[0]).sum()
    return loss + (results.entropy * weights[1]).sum() if problem["entropy_requires_grad"] else loss


def assert_defined(monkeypatch, kernels, problem):
    with_tiles(problem, kernels, monkeypatch)
    leaves, targets, generator = operands(problem)
    kept, mask = sets_of(problem["kinds"], targets, problem["vocabulary"], generator)
    ours = scored(problem, leaves, targets, kept)
    exact = {name: None if x is None else x.detach().double().requires_grad_() for name, x in leaves.items()}
    weight = exact["weight"]
    if exact["rows"] is not None:
        weight = weight.index_copy(0, torch.tensor(problem["replaced"]), exact["rows"])
    if exact["first"] is not None:
        weight = weight + 0.5 * exact["second"] @ exact["first"]
    wanted = defined(exact["hidden"], weight, targets, exact["bias"], **problem["options"], kept=mask)
    finite = wanted.logits.detach()[mask]
    scale = max(1.0, float(finite.abs().max()) / 32) if finite.numel() else 1.0
    for name in OUTPUTS[:3]:
        # With tiles of one class, which only tests have, the sums of the entropy are rounded most often
        limit = VALUES[problem["dtype"]] * (2 if problem["columns"] == 1 else 1)
        assert floats_apart(getattr(ours, name), getattr(wanted, name)) <= limit * scale, name
    if problem["dtype"] == torch.float64 and not problem["ties"]:
        assert torch.equal(ours.is_top1, wanted.is_top1)
    only = mask.sum(1) == 1
    assert torch.equal(ours.log_probs[only], torch.zeros_like(ours.log_probs[only]))
    assert torch.equal(ours.entropy[only], torch.zeros_like(ours.entropy[only]))
    loss = loss_of(ours, problem)
    if not loss.requires_grad:
        return
    loss.backward()
    loss_of(wanted, problem).backward()
    for name, x in leaves.items():
        half = problem["dtype"] in (torch.bfloat16, torch.float16)
        rounded_twice = name == "hidden" and leaves["first"] is not None and half
        if x is not None and x.requires_grad and not rounded_twice:
            want, bound = exact[name].grad, GRADIENTS[problem["dtype"]]
            assert float((x.grad.double() - want).norm()) <= bound * max(float(want.norm()), 1.0) * scale, name


SMALL = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("examples", [100, pytest.param(1500, marks=pytest.mark.slow)])
def test_values_and_gradients_equal_the_definition_over_the_kept_classes(monkeypatch, examples):
    check = functools.partial(assert_defined, monkeypatch, "torch")
    settings(SMALL, max_examples=examples)(given(problem=problems())(lambda problem: check(problem)))()


@pytest.mark.slow
def test_with_triton_they_equal_the_definition_too(monkeypatch):
    check = functools.partial(assert_defined, monkeypatch, "triton")
    settings(SMALL, max_examples=60)(given(problem=problems())(lambda problem: check(problem)))()


@pytest.mark.parametrize("head", ["tiled", "dense"])
@pytest.mark.parametrize("trained", [("hidden",), ("hidden", "weight", "bias", "factors", "rows")])
def test_keeping_every_class_changes_no_bit(head, trained, monkeypatch):
    problem = {
        **{"vocabulary": 120, "kinds": ["every", "all"] * 6, "width": 24, "dtype": torch.float32, "bias": True},
        **{"rank": 2, "replaced": (1, 5), "trained": trained, "entropy_requires_grad": True, "chunk_size": 5},
        **{"columns": 7, "head": head, "ties": False, "spread": 3.0, "options": {"softcap": 9.0}, "seed": 1},
    }
    with_tiles(problem, "torch", monkeypatch)
    found = []
    for limited in (True, False):
        leaves, targets, generator = operands(problem)
        kept = sets_of(problem["kinds"], targets, 120, generator)[0] if limited else None
        results = scored(problem, leaves, targets, kept)
        loss_of(results, problem).backward()
        found.append([*results[:3], *(x.grad for x in leaves.values() if x.requires_grad)])
    assert len(found[0]) > 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_scale": -0.5, "softcap": 4.0}])
def test_log_probs_of_a_given_product_equal_the_definition_over_the_kept_classes(options):
    product = torch.randn(40, 301, generator=torch.Generator().manual_seed(0)) * 4
    targets = torch.randint(301, (40,), generator=torch.Generator().manual_seed(1))
    kept, mask = sets_of(["every", "few", "target", "range"] * 10, targets, 301, torch.Generator().manual_seed(2))
    absent = kept.with_targets(targets).absent(slice(0, 40), slice(0, 301))
    assert torch.equal(absent, ~mask)
    a, b = product.clone().requires_grad_(), product.double().requires_grad_()
    given = {"entropy_requires_grad": True, "absent": absent}
    ours = log_probs_from_logits(a, targets, LogitTransform(**options), OUTPUTS, **given)
    exact = defined(b, torch.eye(301), targets, **options, kept=mask)
    for name in OUTPUTS[:3]:
        assert floats_apart(getattr(ours, name), getattr(exact, name)) < 1e-5, name
    for which in (ours, exact):
        (which.log_probs.sum() + which.entropy.square().sum()).backward()
    assert float((a.grad - b.grad).norm() / b.grad.norm()) < 1e-5


def test_pairs_of_rows_reach_their_tokens():
    ids = torch.tensor([[4, 5, 6, 0, 0], [7, 8, 9, 3, 2]])
    counts = torch.tensor([[1, 0, 2], [0, 4, 1]])
    token = torch.tensor([[1, -1, 0], [3, 2, -1]])  # not in order, and two tokens are not scored
    kept = SamplingMask.of_rows(ids, counts, token, 4)
    assert kept.has_pair.tolist() == [True, True, True, False]
    absent = kept.absent(slice(0, 4), slice(0, 10))
    found = [set((~row).nonzero()[:, 0].tolist()) for row in absent]
    assert found == [{5, 6}, {4}, {7, 8, 9, 3}, set(range(10))]
    chosen = torch.tensor([True, False, True, True])
    assert torch.equal(kept.of_tokens(chosen).absent(slice(0, 3), slice(2, 9)), absent[chosen, 2:9])
    assert torch.equal(kept.absent(slice(1, 3), slice(4, 8)), absent[1:3, 4:8])


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("way", "trained"), [("local", True), ("local", False), ("in turn", False)])
def test_rows_of_the_weight_on_several_ranks_give_the_definition_over_the_kept_classes(ranks, way, trained, softcap):
    for errors in ranks.run(over_mask_on, 3, way, softcap, trained):
        assert max(errors) < 1e-11


@pytest.mark.skipif(shutil.which("g++") is None, reason="the pretended GPU needs g++")
@pytest.mark.skipif(torch.version.cuda is not None, reason="the pretended GPU needs a build of torch for the CPU")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_the_host_never_waits_for_the_kept_classes(kernels):
    script = f"""
import pretended_gpu, torch
pretended_gpu.start()
from trl_ext.heads.sampling_mask import SamplingMask
from trl_ext.heads.linear_log_probs import run_head
from trl_ext.heads.logits import LogitTransform
with pretended_gpu.DeviceMode():
    ids = torch.tensor([[4, 5, 6, 0, 0], [7, 8, 9, 3, 2]]).cuda()
    counts, index = (torch.tensor(x).cuda() for x in ([[1, 0, 2], [0, 4, 1]], [[1, -1, 0], [3, 2, -1]]))
    hidden, weight = (torch.randn(n, 8).cuda().requires_grad_() for n in (4, 30))
    targets = torch.arange(4).cuda()
    with pretended_gpu.RECORD.counting(True):
        kept = SamplingMask.of_rows(ids, counts, index, 4)
        scored = run_head("tiled", hidden, weight, targets, bias=None, transform=LogitTransform(), kernels="{kernels}",
                          outputs=("log_probs", "entropy"), sampling_mask=kept, tile_columns=16)
        scored.log_probs.sum().backward()
    print(len(pretended_gpu.RECORD.waits))
"""
    assert pretended_gpu.python("-c", script) == "0"
