"""Unscored positions cannot affect the loss: log-probs of -200 on dead rows and tool tokens keep it finite."""

import itertools
from typing import Any

import pytest
import torch

from crafted_batches import DEAD, FAR, OURS, STOCK, built, crafted, is_finite, loss_and_gradients
from drop_in_cases import GRPO_LOSSES
from tiny import Workshop

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "off_policy_mask": {"off_policy_mask_threshold": 0.1},
    "delta": {"delta": 1.5},
    "entropy_quantile": {"top_entropy_quantile": 0.5},
    "entropy_bonus": {"entropy_coef": 0.05},
}


@pytest.mark.parametrize("level", ["token", pytest.param("sequence", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_far_log_probs_at_unscored_positions_change_nothing(loss_type: str, level: str, workshop: Workshop) -> None:
    config = {"loss_type": loss_type, "importance_sampling_level": level, **GRPO_LOSSES[loss_type]}
    with built(STOCK, workshop, **config) as stock:
        # Stock's result for the same batch with harmless values at those positions
        want, gradients = loss_and_gradients(stock, crafted(stock, dead=-4.0))
    with built(OURS, workshop, **config) as ours:
        got, own_gradients = loss_and_gradients(ours, crafted(ours))
        assert is_finite(ours, got, own_gradients)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    total = sum(x.double().pow(2).sum() for x in gradients.values()) ** 0.5
    assert total > 0
    for name, gradient in gradients.items():
        assert (own_gradients[name] - gradient).double().norm() <= 1e-5 * total, name


BESIDE_KL = [
    pytest.param(loss, option, bias, marks=() if bias and (option == "plain" or loss == "dapo") else pytest.mark.slow)
    for loss, option, bias in itertools.product(GRPO_LOSSES, OPTIONS, (False, True))
]


@pytest.mark.parametrize(("loss_type", "option", "bias_correction"), BESIDE_KL)
def test_far_log_probs_stay_finite_with_a_kl_term(
    loss_type: str, option: str, bias_correction: bool, workshop: Workshop
) -> None:
    config = {"loss_type": loss_type, **GRPO_LOSSES[loss_type], **OPTIONS[option]}
    with built(OURS, workshop, "ref_model", beta=0.1, use_bias_correction_kl=bias_correction, **config) as ours:
        far, near = crafted(ours), crafted(ours, dead=-4.0)
        # With a KL term a row without an advantage is scored
        for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
            far[name][DEAD] = -4.0
        want, gradients = loss_and_gradients(ours, near)
        # Log-probs of the reference, of the old policy, or of both are far
        for inputs in (
            far,
            {**far, "ref_per_token_logps": near["ref_per_token_logps"]},
            {**far, "old_per_token_logps": near["old_per_token_logps"]},
        ):
            got, own_gradients = loss_and_gradients(ours, inputs)
            assert is_finite(ours, got, own_gradients)
            assert got == pytest.approx(want, rel=1e-6)
            assert all(torch.allclose(own_gradients[name], x, rtol=1e-5, atol=1e-7) for name, x in gradients.items())


SCORED_ALL_THE_SAME: dict[str, dict[str, Any]] = {
    "beta": {"setup": "ref_model", "beta": 0.1, "use_bias_correction_kl": False},
    "beta_corrected": {"setup": "ref_model", "beta": 0.1},
    "entropy_bonus": OPTIONS["entropy_bonus"],
    "entropy_quantile": OPTIONS["entropy_quantile"],
}


@pytest.mark.parametrize("why", SCORED_ALL_THE_SAME)
@pytest.mark.parametrize(
    "loss_type", [pytest.param(x, marks=() if x in ("dapo", "cispo") else pytest.mark.slow) for x in GRPO_LOSSES]
)
def test_a_far_old_policy_of_a_row_that_is_scored_without_an_advantage_stays_finite(
    loss_type: str, why: str, workshop: Workshop
) -> None:
    config = {"loss_type": loss_type, **GRPO_LOSSES[loss_type], **SCORED_ALL_THE_SAME[why]}
    with built(OURS, workshop, **config) as ours:
        assert is_finite(ours, *loss_and_gradients(ours, crafted(ours)))


def test_stock_trl_does_not_stay_finite(workshop: Workshop) -> None:
    with built(STOCK, workshop, loss_type="grpo") as stock:
        assert not is_finite(stock, *loss_and_gradients(stock, crafted(stock)))


@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_advantages_of_tokens_are_taken_as_stock_takes_them(loss_type: str, workshop: Workshop) -> None:
    """TRL supports subclasses that give an advantage for each token."""
    advantages = torch.tensor([1.0, 0.0, -0.7, 0.5])[:, None] * torch.linspace(0.0, 1.0, 6)
    config = {"loss_type": loss_type, **GRPO_LOSSES[loss_type]}
    results = []
    for trainers, dead in ((STOCK, -4.0), (OURS, FAR)):
        with built(trainers, workshop, **config) as trainer:
            results.append(loss_and_gradients(trainer, crafted(trainer, dead=dead, advantages=advantages)))
    (want, gradients), (got, own_gradients) = results
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    total = sum(x.double().pow(2).sum() for x in gradients.values()) ** 0.5
    for name, gradient in gradients.items():
        assert (own_gradients[name] - gradient).double().norm() <= 1e-5 * total, name
