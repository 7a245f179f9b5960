"""benchmarks/training.py: both subjects in one run, on the same tokens, in lines that a report can read."""

import gc
import json
import time
import weakref
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import training
from steps import Case
from turns import take

import trl_ext

FIELDS = {
    *("benchmark", "shape", "subject", "run", "median_ms", "min_ms", "max_ms", "peak_mib", "max_error"),
    *("tokens", "device", "versions", "date"),
}
CURVES = {"grpo_loss_curve", "dpo_loss_curve"}
STEPS = {"grpo_step_lora", "grpo_step_full", "dpo_step_lora_epoch_1", "dpo_step_lora_epoch_2"}
FAR = float("inf")


@pytest.fixture(scope="module", params=[pytest.param(x, marks=pytest.mark.slow) for x in ("curve", "step")])
def lines(request, tmp_path_factory):
    """What the smoke run writes, by benchmark and subject."""
    folder = tmp_path_factory.mktemp("results")
    chosen = Namespace(only=request.param, budget=600, results=folder)
    take(training.measurements(training.SMOKE), chosen)
    (path,) = folder.iterdir()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    lines = {}
    for line in found:
        lines.setdefault(line["benchmark"], {})[line["subject"]] = line
    assert len(found) == 2 * len(lines)
    assert set(lines) == (CURVES if request.param == "curve" else STEPS)
    return lines


def test_a_line_says_what_was_measured_where(lines):
    for name, measured in lines.items():
        assert list(measured) == ["trl", "trl_ext"]
        for line in measured.values():
            assert set(line) >= FIELDS
            if name in STEPS:
                assert 0 < line["min_ms"] <= line["median_ms"] <= line["max_ms"]
        stock, ours = measured.values()
        assert all(stock[what] == ours[what] for what in ("run", "shape", "device", "versions", "date"))


def test_ours_is_fed_no_more_tokens(lines):
    for measured in lines.values():
        assert 0 < measured["trl_ext"]["tokens"] < measured["trl"]["tokens"]


def test_the_reference_is_not_run_again_in_the_second_epoch(lines):
    for epoch, forwards in ((1, 2), (2, 0)):
        if measured := lines.get(f"dpo_step_lora_epoch_{epoch}"):
            assert measured["trl"]["no_grad_forwards"] == 2
            assert measured["trl_ext"]["no_grad_forwards"] == forwards


def test_loss_curves_agree(lines):
    for name in CURVES & set(lines):
        stock, ours = lines[name].values()
        for what in ("loss", "grad_norm"):
            assert len(stock[what]) == training.SMOKE.curve.steps
            assert len(set(stock[what])) > 1
            assert ours[what] == pytest.approx(stock[what], rel=1e-5, abs=1e-6)
            difference = max(abs(a - b) for a, b in zip(stock[what], ours[what], strict=True))
            assert ours["largest_difference"][what] == difference


@pytest.mark.parametrize("limit", [5, 100, 1000, 5000])
def test_the_longest_is_found_by_doubling_and_bisection(limit):
    tried = []

    def fits(length):
        tried.append(length)
        return length <= limit

    good, bad = training.longest_that_fits(fits, 64, 20, FAR)
    assert good <= limit < bad
    assert bad - good <= max(1, bad / 16)
    assert len(tried) == len(set(tried))


def test_the_search_ends_with_its_trials_and_its_time():
    assert training.longest_that_fits(lambda length: True, 64, 3, FAR) == (256, None)
    assert training.longest_that_fits(lambda length: length < 100, 64, 2, FAR) == (64, 128)
    assert training.longest_that_fits(lambda length: True, 64, 20, time.monotonic()) == (64, None)
    assert training.longest_that_fits(lambda length: False, 64, 3, FAR) == (0, 16)


def test_what_has_no_memory_left_does_not_fit_and_leaves_nothing_behind():
    class Small(trl_ext.GRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            models.append(weakref.ref(self.model))
            raise torch.OutOfMemoryError

    models = []
    case = Case("", "grpo", training.SMOKE.grpo, {"per_device_train_batch_size": 8})
    library = SimpleNamespace(GRPOTrainer=Small, GRPOConfig=trl_ext.GRPOConfig)
    found = training.longest_of(library, case, deadline=0)
    assert found == {"longest": 0, "fails_at": 8, "peak_mib": None, "tokens": 0}
    gc.collect()
    assert [model() for model in models] == [None]
