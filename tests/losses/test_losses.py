"""The added loss terms equal values computed by hand from the published formulas, and their gradients in float64."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch.nn.functional import cross_entropy

from trl_ext.losses.preference import PREFERENCE_LOSSES, LossOptions, Pairs, rpo_margins, smoothing_term

DOUBLE = torch.float64
# Two pairs. beta = 0.5 times the log-ratio differences, 2 ln 3 each, gives margins of ln 3: sigmoid 3/4. Twice the
# reward differences, 0 and ln 3, gives margins of 0 and ln 9: sigmoid 1/2 and 9/10.
PAIRS = Pairs(
    chosen=torch.tensor([log(3), 2 * log(3)], dtype=DOUBLE),
    rejected=torch.tensor([-log(3), 0.0], dtype=DOUBLE),
    chosen_tokens=torch.tensor([2, 4]),
    rejected_tokens=torch.tensor([1, 3]),
    chosen_reward=torch.tensor([7.0, 1.0 + log(3)], dtype=DOUBLE),
    rejected_reward=torch.tensor([7.0, 1.0], dtype=DOUBLE),
)
OPTIONS = LossOptions(beta=0.5, label_smoothing=0.1, reward_scale=2.0)
# With means over tokens, the log-ratio differences are 3/2 ln 3 and 1/2 ln 3: margins of 0.75 ln 3 and 0.25 ln 3
AVERAGE = replace(OPTIONS, rpo_average_log_probs=True)

BY_HAND = [
    # 3/4 ln(3/4 : 1/2) + 1/4 ln(1/4 : 1/2);  3/4 ln(3/4 : 9/10) + 1/4 ln(1/4 : 1/10)
    ("rpo_forward_kl", OPTIONS, [0.13081203594, 0.09233151539]),
    # 1/2 ln(1/2 : 3/4) + 1/2 ln(1/2 : 1/4);  9/10 ln(9/10 : 3/4) + 1/10 ln(1/10 : 1/4)
    ("rpo_backward_kl", OPTIONS, [0.14384103622, 0.07246032795]),
    # (ln 3)^2;  (ln 3 - ln 9)^2
    ("rpo_squared", OPTIONS, [1.20694896085, 1.20694896085]),
    # (0.75 ln 3)^2;  (0.25 ln 3 - 2 ln 3)^2 = 3.0625 (ln 3)^2
    ("rpo_squared", AVERAGE, [0.67890879048, 3.69628119261]),
    # 1/2 ln(1/2 : p) + 1/2 ln(1/2 : 1 - p), p = sigmoid(0.75 ln 3) = 0.695076;  of 9/10, p = 0.568235
    ("rpo_backward_kl", AVERAGE, [0.08256633478, 0.26760277809]),
    # (2 ln 3 - 1)^2
    ("ipo_sum", OPTIONS, [1.43334668850, 1.43334668850]),
    # -0.9 ln 3/4 - 0.1 ln 1/4
    ("cdpo", OPTIONS, [0.39754330133, 0.39754330133]),
    # -ln 3/4: TRL's sigmoid
    ("cdpo", replace(OPTIONS, label_smoothing=0.0), [0.28768207245, 0.28768207245]),
]


@pytest.mark.parametrize(("name", "options", "want"), BY_HAND)
def test_a_loss_is_the_published_formula(name: str, options: LossOptions, want: list[float]):
    got = PREFERENCE_LOSSES[name](PAIRS, options)
    torch.testing.assert_close(got, torch.tensor(want, dtype=DOUBLE), rtol=0, atol=1e-9)


# Derivatives by the log-ratio difference, with a = beta * log-ratio difference and b = eta * reward difference
SLOPES = {
    "rpo_forward_kl": lambda a, b: 0.5 * a.sigmoid() * (-a).sigmoid() * (a - b),
    "rpo_backward_kl": lambda a, b: 0.5 * (a.sigmoid() - b.sigmoid()),
    "rpo_squared": lambda a, b: a - b,
    "ipo_sum": lambda a, b: 2 * (2 * a - 1),
    "cdpo": lambda a, b: 0.5 * (a.sigmoid() - 0.9),
}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@pytest.mark.parametrize("size", [1.0, 500.0])
def test_a_gradient_is_the_formula_even_for_large_margins(name: str, size: float):
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, better, worse = (
        size * torch.randn(64, generator=generator, dtype=DOUBLE).requires_grad_() for _ in range(4)
    )
    chosen, rejected = (x.detach().requires_grad_() for x in (chosen, rejected))
    tokens = torch.ones(64)
    pairs = Pairs(chosen, rejected, tokens, tokens, better.detach(), worse.detach())
    loss = PREFERENCE_LOSSES[name](pairs, OPTIONS)
    assert loss.isfinite().all()
    up, down = torch.autograd.grad(loss.sum(), (chosen, rejected))
    margin, target = rpo_margins(pairs, OPTIONS)
    want = SLOPES[name](margin.detach(), target)
    torch.testing.assert_close(up, want, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(down, -want, rtol=1e-8, atol=1e-10)


def test_the_kl_of_rpo_is_zero_only_if_the_margins_are_equal():
    margin = torch.linspace(-30, 30, 121, dtype=DOUBLE)
    tokens = torch.ones(121)
    for name in ("rpo_forward_kl", "rpo_backward_kl"):
        agreeing = Pairs(margin / 0.5, margin * 0, tokens, tokens, margin / 2, margin * 0)
        assert PREFERENCE_LOSSES[name](agreeing, OPTIONS).abs().max() < 1e-14
        other = Pairs(margin / 0.5, margin * 0, tokens, tokens, margin / 2 + 0.5, margin * 0)
        assert PREFERENCE_LOSSES[name](other, OPTIONS).min() > 0


@pytest.mark.parametrize("convention", ["pytorch", "megatron"])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_token_smoothing_equals_the_dense_definition(convention: str, size: float):
    torch.manual_seed(0)
    logits = (size * torch.randn(3, 5, 11, dtype=DOUBLE)).requires_grad_()
    targets = torch.randint(11, (3, 5))
    mask = torch.rand(3, 5) < 0.7
    a, classes = 0.2, 11
    every = logits.log_softmax(-1)
    log_probs = every.gather(-1, targets[..., None])[..., 0]
    term = smoothing_term(log_probs, every.mean(-1), mask.long(), a, convention, classes)
    got = term - log_probs[mask].mean()
    if convention == "pytorch":
        want = cross_entropy(logits[mask], targets[mask], label_smoothing=a)
    else:
        labels = torch.full((3, 5, classes), a / (classes - 1), dtype=DOUBLE)
        labels.scatter_(-1, targets[..., None], 1 - a)
        want = cross_entropy(logits[mask], labels[mask])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
