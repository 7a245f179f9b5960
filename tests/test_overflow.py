"""Log-ratios that overflow in an exponential: loss and gradient stay finite, and nothing changes where none does."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drop_in_cases import GRPO_LOSSES
from test_unscored_positions import LIVE, OURS, STOCK, WITH_TOOL, built, crafted, is_finite, loss_and_gradients
from tiny import Workshop
from trl_ext.passes.overflow import BOUND, bounded_log_ratios, bounded_old_and_reference
from trl_ext.passes.sampler_ratio import RatioRule, SamplerRatio

LEVELS = ["token", pytest.param("sequence", marks=pytest.mark.slow)]


def moved(trainer: Any, log_ratio: float, name: str = "old_per_token_logps", row: int = LIVE) -> dict[str, Any]:
    """A batch of near values, but for the tokens of one row, whose values in `name` are moved by `log_ratio`."""
    inputs = crafted(trainer, dead=-4.0)
    inputs[name][row] -= log_ratio
    return inputs


def differ(ours: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The norm of the difference, relative to that of `want`."""
    norms = [
        sum(x.double().pow(2).sum() for x in xs) ** 0.5 for xs in ([ours[n] - want[n] for n in want], want.values())
    ]
    return float(norms[0] / norms[1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_a_log_ratio_of_100_leaves_loss_and_gradient_finite(loss_type: str, level: str, workshop: Workshop) -> None:
    config = {"loss_type": loss_type, "importance_sampling_level": level, **GRPO_LOSSES[loss_type]}
    with built(STOCK, workshop, **config) as stock:
        stock_at_60 = loss_and_gradients(stock, moved(stock, 60.0))
        stock_at_100 = loss_and_gradients(stock, moved(stock, 100.0))
        assert all(x.isfinite().all() for x in stock_at_100[1].values()) == (loss_type in ("cispo", "vespo"))
        assert math.isfinite(stock_at_100[0])  # nothing to see in the logs
    with built(OURS, workshop, **config) as ours:
        loss, gradients = loss_and_gradients(ours, moved(ours, 100.0))
        assert is_finite(ours, loss, gradients)
        # Clipped, saturated or bounded by the loss itself, 100 is as good as 60; there is the value to be had
        want = stock_at_100 if loss_type in ("cispo", "vespo") else stock_at_60
        assert loss == pytest.approx(want[0], rel=1e-5, abs=1e-6)
        assert differ(gradients, want[1]) <= 1e-5
        # A negative advantage, where no clipping bounds the ratio
        assert is_finite(ours, *loss_and_gradients(ours, moved(ours, 100.0, row=WITH_TOOL)))


@pytest.mark.parametrize("bias_correction", [False, True])
def test_a_far_reference_leaves_the_kl_term_finite(bias_correction: bool, workshop: Workshop) -> None:
    config = {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": bias_correction}
    with built(STOCK, workshop, "ref_model", **config) as stock:
        loss, _ = loss_and_gradients(stock, moved(stock, -100.0, "ref_per_token_logps"))
        assert not math.isfinite(loss)
    with built(OURS, workshop, "ref_model", **config) as ours:
        assert is_finite(ours, *loss_and_gradients(ours, moved(ours, -100.0, "ref_per_token_logps")))
        far = moved(ours, -60.0, "ref_per_token_logps")  # each is finite, their product is not
        far["old_per_token_logps"][LIVE] -= 60.0
        assert is_finite(ours, *loss_and_gradients(ours, far)) is True
        far["old_per_token_logps"][LIVE] -= 60.0
        assert is_finite(ours, *loss_and_gradients(ours, far))


@pytest.mark.parametrize(("level", "far"), [("token", 100.0), ("sequence", 1000.0)])
def test_vespo_reads_each_tokens_ratio_as_it_is(level: str, far: float, workshop: Workshop) -> None:
    """It bounds them at 20 itself, so a bound below that, or one amount for all tokens of a row, would be seen."""

    def batch(trainer: Any) -> dict[str, Any]:
        inputs = crafted(trainer, dead=-4.0)
        inputs["old_per_token_logps"][LIVE] += torch.tensor([-far, 7.0, 8.0, 6.0, 0.0, 0.0])
        return inputs

    results = []
    for trainers in (STOCK, OURS):
        with built(trainers, workshop, loss_type="vespo", importance_sampling_level=level) as trainer:
            results.append(loss_and_gradients(trainer, batch(trainer)))
    (want, gradients), (got, own_gradients) = results
    assert got == pytest.approx(want, rel=1e-5)
    assert differ(own_gradients, gradients) <= 1e-5


@pytest.mark.parametrize("loss_type", ["cispo", "vespo"])
def test_a_loss_that_bounds_the_ratio_itself_is_given_it_as_it_is(loss_type: str, workshop: Workshop) -> None:
    """The mask of far rows reads the same log-probs: a moved one would shut out a row that is near in the mean."""

    def batch(trainer: Any) -> dict[str, Any]:
        inputs = crafted(trainer, dead=-4.0)
        inputs["old_per_token_logps"][WITH_TOOL] += torch.tensor([-100.0, 99.0, 0.0, 0.0, 0.0, 0.0])
        del inputs["sampling_per_token_logps"]  # the mask would read them
        return inputs

    config = {"loss_type": loss_type, "off_policy_mask_threshold": 0.1, **GRPO_LOSSES[loss_type]}
    results = []
    for trainers in (STOCK, OURS):
        with built(trainers, workshop, **config) as trainer:
            results.append(loss_and_gradients(trainer, batch(trainer)))
    (want, gradients), (got, own_gradients) = results
    assert got == pytest.approx(want, rel=1e-5)
    assert differ(own_gradients, gradients) <= 1e-5


LOG_PROBS = st.lists(st.floats(-200, 0, width=32), min_size=6, max_size=6)


@settings(max_examples=300, deadline=None)
@given(
    policy=LOG_PROBS,
    old=LOG_PROBS,
    reference=LOG_PROBS,
    sequences=st.booleans(),
    biased=st.booleans(),
    far=st.booleans(),
)
def test_values_are_moved_where_an_exponential_overflows_and_nowhere_else(
    policy: list[float], old: list[float], reference: list[float], sequences: bool, biased: bool, far: bool
) -> None:
    policy_BC, old_BC, reference_BC = (torch.tensor(x).view(2, 3) for x in (policy, old, reference))
    if not far:  # no sum of these overflows
        old_BC, reference_BC = policy_BC + (old_BC - policy_BC) / 5, policy_BC + (reference_BC - policy_BC) / 5
    tokens_BC = torch.tensor([[True, True, False], [True, True, True]])
    got_old, got_reference = bounded_old_and_reference(
        policy_BC,
        old_BC,
        reference_BC,
        tokens_BC,
        torch.tensor(2.0),
        of_sequences=sequences,
        bounds_ratio=False,
        kl_times_ratio=biased,
    )
    assert got_reference is not None

    def exponentials(old_BC: torch.Tensor, reference_BC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_ratio = policy_BC - old_BC
        if sequences:
            log_ratio = (log_ratio * tokens_BC).sum(1, keepdim=True) / tokens_BC.sum(1, keepdim=True)
        ratio = log_ratio.exp().expand(2, 3)[tokens_BC]
        kl = (reference_BC - policy_BC).exp()[tokens_BC]
        return ratio, kl * ratio if biased else kl

    stock_ratio, stock_kl = exponentials(old_BC, reference_BC)
    ratio, kl = exponentials(got_old, got_reference)
    overflows, kl_overflows = not (2 * stock_ratio.sum()).isfinite(), not stock_kl.sum().isfinite()
    if not overflows and not (biased and kl_overflows):
        assert torch.equal(got_old, old_BC)
    if not kl_overflows:
        assert torch.equal(got_reference, reference_BC)
    assert (2 * ratio.sum()).isfinite()
    assert kl.sum().isfinite()
    if overflows:
        torch.testing.assert_close(ratio, stock_ratio.clamp(max=math.exp(BOUND)), rtol=1e-3, atol=0)
    if kl_overflows and not biased:
        torch.testing.assert_close(kl, stock_kl.clamp(max=math.exp(BOUND)), rtol=1e-3, atol=0)
    assert torch.equal(got_old[~tokens_BC], old_BC[~tokens_BC])


def test_nan_moves_nothing_of_itself() -> None:
    nan = torch.full((1, 2), torch.nan)
    old, _ = bounded_old_and_reference(
        nan,
        torch.zeros(1, 2),
        None,
        torch.ones(1, 2, dtype=torch.bool),
        torch.tensor(1.0),
        of_sequences=False,
        bounds_ratio=False,
        kl_times_ratio=False,
    )
    assert torch.equal(old, torch.zeros(1, 2))


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("old", [-100.0, -1e4, -torch.inf])
def test_any_old_log_prob_gives_a_finite_ratio(old: float, sequences: bool) -> None:
    """A sampler may give its token no probability at all."""
    policy, tokens = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]]), torch.ones(2, 2, dtype=torch.bool)
    old_BC = torch.tensor([[old, old], [-1.5, -2.0]])
    got, _ = bounded_old_and_reference(
        policy,
        old_BC,
        None,
        tokens,
        torch.tensor(1.0),
        of_sequences=sequences,
        bounds_ratio=False,
        kl_times_ratio=False,
    )
    log_ratio = (policy - got)[0]
    assert (log_ratio.mean() if sequences else log_ratio).tolist() == pytest.approx(BOUND if sequences else [BOUND] * 2)
    assert torch.equal(got[1], old_BC[1])


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_ratio_to_the_sampler_is_finite_without_a_bound_of_the_users(mode: str) -> None:
    old_BC, sampler_BC = torch.zeros(2, 3), torch.tensor([[-100.0, -1, -1], [-1, -1, -1]])
    tokens_BC = torch.ones(2, 3, dtype=torch.bool)
    found = SamplerRatio.of(old_BC, sampler_BC, tokens_BC, RatioRule(mode, None, None))
    assert found.ratio.isfinite().all()
    assert found.ratio.max() == pytest.approx(math.exp(BOUND), rel=1e-4)
    assert SamplerRatio.of(old_BC, sampler_BC, tokens_BC, RatioRule(mode, None, 3.0)).ratio.max() <= 3.0


def test_float64_overflows_later() -> None:
    log_ratio = torch.tensor([100.0], dtype=torch.float64)
    assert torch.equal(bounded_log_ratios(log_ratio), log_ratio)
    assert bounded_log_ratios(torch.tensor([800.0], dtype=torch.float64)) == BOUND
