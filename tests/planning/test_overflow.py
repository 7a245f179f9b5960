"""Log-ratios that overflow in an exponential: loss and gradient stay finite, and nothing changes where none does."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid, softplus

from crafted_batches import LIVE, OURS, STOCK, WITH_TOOL, built, crafted, is_finite, loss_and_gradients
from drop_in_cases import DPO_LOSSES, GRPO_LOSSES, Case
from run_losses import Record, Trainers, build
from tiny import Workshop
from trl_ext.compat import dpo as internals
from trl_ext.compat.reference import labels_of
from trl_ext.planning.non_finite import (
    BOUND,
    PairExponential,
    bounded_log_ratios,
    bounded_old_and_reference,
    bounded_pairs,
)
from trl_ext.planning.sampler_ratio import RatioRule, SamplerRatio
from trl_ext.trainers.dpo_loss import LossInputs

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
    # The policy's own log-probs are the old ones in the first iteration: the ratio is 1
    of_own, without = (
        bounded_old_and_reference(
            *(policy_BC, policy_BC, reference_BC, tokens_BC, scale),
            of_sequences=sequences,
            bounds_ratio=False,
            kl_times_ratio=biased,
        )
        for scale in (torch.tensor(2.0), None)
    )
    assert torch.equal(of_own[0], policy_BC)
    assert without[0] is policy_BC
    assert torch.equal(without[1], of_own[1])

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


# DPO: pairs, chosen and rejected

BETA, TAU, ALPHA = 0.1, 0.05, 0.5  # TRL's defaults

SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reverse_kl": lambda x: x,
    "forward_kl": lambda x: 1 - (-x).exp(),
    "js_divergence": lambda x: math.log(2) + logsigmoid(x),
    "alpha_divergence": lambda x: (((ALPHA - 1) * x).exp() - 1) / (ALPHA - 1),
}


def of_pairs(loss_type: str, divergence: str, ratio_2B: torch.Tensor, tokens_2B: torch.Tensor) -> torch.Tensor:
    """The definition of a loss type: its value for each pair."""
    scores_2B = SCORES[divergence](ratio_2B)
    d, e = BETA * (scores_2B[0] - scores_2B[1]), DPO_LOSSES[loss_type].get("label_smoothing", 0.0)
    mean_2B = scores_2B / tokens_2B
    mean = mean_2B[0] - mean_2B[1]
    if loss_type == "sigmoid":
        return softplus(-d)
    if loss_type == "sigmoid_norm":
        return softplus(-BETA * mean)
    if loss_type == "hinge":
        return (1 - d).relu()
    if loss_type == "ipo":
        return (mean - 1 / (2 * BETA)) ** 2
    if loss_type == "robust":
        return ((1 - e) * softplus(-d) - e * softplus(d)) / (1 - 2 * e)
    if loss_type == "exo_pair":
        p, q = d.sigmoid(), (-d).sigmoid()
        return p * (logsigmoid(d) - math.log(1 - e)) + q * (logsigmoid(-d) - math.log(e))
    if loss_type == "sppo_hard":
        return (ratio_2B[0] - 0.5 / BETA) ** 2 + (ratio_2B[1] + 0.5 / BETA) ** 2
    assert loss_type == "discopop"
    m = (d / TAU).sigmoid()
    return softplus(-d) * (1 - m) + (logsigmoid(d / TAU) - d).exp()


@contextmanager
def dpo(trainers: Trainers, workshop: Workshop, pairs: int, model: str = "tied", **config: Any) -> Iterator[Any]:
    case = Case("far", "dpo", "ref_model", model, config={"per_device_train_batch_size": pairs, **config})
    with TemporaryDirectory() as output_dir:
        trainer = build(case, trainers, workshop, output_dir, Record())
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1  # set by `train()`
        if trainers is STOCK:
            trainer.precompute_ref_logps = True  # the batch has columns
        yield trainer


def sums(model: Any, batch: dict[str, torch.Tensor], ld_alpha: float = 1.0) -> torch.Tensor:
    """Of each completion's log-probs, `(2, B)`; tokens beyond the shorter one's length times `ld_alpha`."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    log_probs = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    mask = batch["completion_mask"][:, 1:]
    shorter = mask.sum(1).view(2, -1).amin(0).repeat(2)[:, None]
    return (log_probs * mask * torch.where(mask.cumsum(1) > shorter, ld_alpha, 1.0)).sum(1).view(2, -1)


def far_batch(trainer: Any, chosen: float, rejected: float, ld_alpha: float = 1.0) -> dict[str, torch.Tensor]:
    """A batch with reference columns: the first pair has these log-ratios, the others are near."""
    batch = next(iter(trainer.get_train_dataloader()))
    near = torch.tensor([[0.0, 0.1, 0.2, -0.3], [0.0, 0.3, -0.2, 0.1]])
    near[:, 0] = torch.tensor([chosen, rejected])
    with torch.no_grad():
        reference = sums(trainer.model, batch, ld_alpha)
        reference = reference - near[:, : reference.shape[1]]
    return {**batch, "ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1]}


def definition(
    trainer: Any, batch: dict[str, torch.Tensor], losses: dict[str, float], divergence: str, ld_alpha: float = 1.0
) -> dict[str, torch.Tensor]:
    """The gradient of the weighted losses, in float64; its direction where it is larger than 1e6."""
    model = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model)).double()
    model.zero_grad()
    model.forward = type(model).forward.__get__(model)  # without the scoring head that the trainer has attached
    sums_2B = sums(model, batch, ld_alpha)
    reference_2B = torch.stack([batch["ref_chosen_logps"], batch["ref_rejected_logps"]]).double()
    ratio_2B = (sums_2B.detach() - reference_2B).requires_grad_()
    tokens_2B = batch["completion_mask"].sum(1).view(2, -1)
    sum(w * of_pairs(name, divergence, ratio_2B, tokens_2B).mean() for name, w in losses.items()).backward()
    largest = ratio_2B.grad.abs().max()
    # The models' norms are in fp32
    sums_2B.backward(ratio_2B.grad / largest if largest > 1e6 else ratio_2B.grad)
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def directions(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    norm = sum(x.double().pow(2).sum() for x in gradients.values()) ** 0.5
    return {name: x.double() / norm for name, x in gradients.items()}


# Loss type, divergence, log-ratios of the first pair, and whether fp32 can hold the true gradient
FAR_PAIRS: list[tuple[str, str, float, float, bool]] = [
    ("discopop", "reverse_kl", -1000.0, 0.0, True),
    ("sigmoid", "forward_kl", -100.0, 0.0, False),
    ("sigmoid", "forward_kl", -100.0, -150.0, True),
    ("ipo", "forward_kl", 0.0, -50.0, False),
]
MORE_FAR_PAIRS: list[tuple[str, str, float, float, bool]] = [
    ("discopop", "reverse_kl", 0.0, 1000.0, True),
    ("discopop", "reverse_kl", -500.0, 500.0, True),
    ("discopop", "forward_kl", -20.0, 0.0, False),
    ("discopop", "forward_kl", -100.0, 0.0, False),
    ("discopop", "forward_kl", -100.0, -150.0, True),
    ("discopop", "js_divergence", -1000.0, 0.0, True),
    ("discopop", "alpha_divergence", -30.0, 0.0, False),
    ("ipo", "alpha_divergence", -120.0, 0.0, False),
    *((name, "forward_kl", -120.0, -100.0, False) for name in ("sigmoid", "sigmoid_norm", "hinge", "robust", "ipo")),
    *((name, "forward_kl", 0.0, -150.0, True) for name in ("sigmoid", "sigmoid_norm", "hinge", "exo_pair", "discopop")),
    ("exo_pair", "forward_kl", -100.0, 0.0, True),
    ("robust", "forward_kl", 0.0, -150.0, False),
]


@pytest.mark.parametrize(
    ("loss_type", "divergence", "chosen", "rejected", "holds"),
    [*FAR_PAIRS, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE_FAR_PAIRS)],
)
def test_a_pair_far_from_its_reference_has_the_gradient_of_float64(
    loss_type: str, divergence: str, chosen: float, rejected: float, holds: bool, workshop: Workshop
) -> None:
    """Its direction alone where fp32 cannot hold it; the rewards are logged of the log-ratios as they are."""
    config = {"loss_type": loss_type, "f_divergence_type": divergence, **DPO_LOSSES[loss_type]}
    pairs = 4 if holds else 1
    with dpo(STOCK, workshop, pairs, **config) as stock:
        loss, gradients = loss_and_gradients(stock, far_batch(stock, chosen, rejected))
        assert not (math.isfinite(loss) and all(x.isfinite().all() for x in gradients.values()))
        logged = {name: x for name, x in stock._metrics["train"].items() if name.startswith("rewards/")}
    with dpo(OURS, workshop, pairs, **config) as ours:
        batch = far_batch(ours, chosen, rejected)
        loss, gradients = loss_and_gradients(ours, batch)
        assert is_finite(ours, loss, gradients)
        assert torch.cat([x.flatten() for x in gradients.values()]).norm().isfinite()
        want = definition(ours, batch, {loss_type: 1.0}, divergence)
        if not holds:
            gradients, want = directions(gradients), directions(want)
        assert differ(gradients, want) <= 1e-4
        for name, values in logged.items():
            assert ours._metrics["train"][name] == pytest.approx(values, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("loss_type", "divergence", "far"), [("sigmoid", "forward_kl", -80.0), ("discopop", "reverse_kl", -800.0)]
)
def test_a_pair_that_does_not_overflow_is_left_bit_for_bit(
    loss_type: str, divergence: str, far: float, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dpo(OURS, workshop, 4, loss_type=loss_type, f_divergence_type=divergence) as ours:
        batch = far_batch(ours, far, 0.0)
        loss, gradients = loss_and_gradients(ours, batch)
        monkeypatch.setattr(PairExponential, "of", lambda *_, **__: None)  # TRL's loss alone
        trls_loss, trls_gradients = loss_and_gradients(ours, batch)
        assert loss == trls_loss
        assert math.isfinite(loss)
        assert all(torch.equal(x, trls_gradients[name]) for name, x in gradients.items())


def test_other_loss_types_beside_read_the_reference_as_it_is(workshop: Workshop) -> None:
    """Given by token, of which those beyond the shorter completion's length have a weight of their own."""
    losses = {"discopop": 0.5, "sppo_hard": 0.25}
    config = {"loss_type": list(losses), "loss_weights": list(losses.values()), "ld_alpha": 0.5}
    with dpo(OURS, workshop, 4, **config) as ours:
        batch = far_batch(ours, -1000.0, 0.0, 0.5)
        want = definition(ours, batch, losses, "reverse_kl", 0.5)
        reference = torch.cat([batch.pop("ref_chosen_logps"), batch.pop("ref_rejected_logps")])
        mask = batch["completion_mask"][:, 1:]
        first = (mask.cumsum(1) == 1) & mask.bool()
        ours.model.zero_grad()
        scores = internals.score_policy(ours, ours.model, batch, labels_of(batch))
        loss = ours._loss(LossInputs(batch, scores, first * reference[:, None]), None)
        loss.backward()
        gradients = {name: x.grad for name, x in ours.model.named_parameters()}
        assert is_finite(ours, loss.item(), gradients)
        assert differ(gradients, want) <= 1e-4


def test_a_far_pair_hides_no_nan_from_the_watch(workshop: Workshop) -> None:
    """One pair's reference is moved; a NaN in that of another stays in the loss, and its row is named."""
    apart = {"padding_free": False, "share_prompts": False}  # in one packed row a NaN reaches the others
    config = {"loss_type": "discopop", "beta": 1e4, "on_non_finite_loss": "stop", "reference_store": "off", **apart}
    with dpo(OURS, workshop, 4, "untied", **config) as ours:
        batch = next(iter(ours.get_train_dataloader()))
        with torch.no_grad():
            ours.model.get_output_embeddings().weight.mul_(2.0)
            ratio_2B = sums(ours.model, batch) - sums(ours.ref_model, batch)
        assert not (1e4 * ratio_2B.diff(dim=0)).exp().sum().isfinite()
        assert ours.compute_loss(ours.model, batch).isfinite()
        rows_of = {token: (batch["input_ids"] == token).any(dim=1) for token in batch["input_ids"].unique()}
        token, rows = next((token, rows) for token, rows in rows_of.items() if rows.sum() == 1)
        with torch.no_grad():
            ours.ref_model.get_input_embeddings().weight[token] = torch.nan
        row = int(rows.nonzero())
        with pytest.raises(FloatingPointError, match=rf"Rank 0: row {row} \(reference\) of the prompt"):
            ours.compute_loss(ours.model, batch)


FAR_RATIOS = st.lists(
    st.one_of(st.floats(-2000, 2000, width=32), st.floats(-100, 100, width=32)), min_size=6, max_size=6
)
EXPONENTIALS = [
    *(("forward_kl", name) for name in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")),
    *((name, "discopop") for name in ("reverse_kl", "js_divergence", "alpha_divergence")),
    ("alpha_divergence", "ipo"),
]


@settings(max_examples=300, deadline=None)
@example(case=("forward_kl", "sigmoid"), ratios=[-88.5, 0.0, 0.0, -88.5, 0.0, 0.0], policy=0.0)
@example(case=("forward_kl", "sigmoid"), ratios=[-88.5, -88.5, 0.0, 0.0, 0.0, 0.0], policy=0.0)
@given(case=st.sampled_from(EXPONENTIALS), ratios=FAR_RATIOS, policy=st.floats(-500, 0, width=32))
def test_pairs_are_moved_where_their_loss_overflows_and_nowhere_else(
    case: tuple[str, str], ratios: list[float], policy: float
) -> None:
    divergence, loss_type = case
    exponential = PairExponential.of(loss_type, divergence, alpha=ALPHA, beta=BETA, label_smoothing=0.2, weight=1.0)
    assert exponential is not None
    policy_2B = torch.full((2, 3), policy)
    reference_2B = policy_2B - torch.tensor(ratios).view(2, 3)
    ratio_2B = policy_2B - reference_2B
    moved_2B = bounded_pairs(policy_2B, reference_2B, exponential)
    exponents_2B = {"forward_kl": -ratio_2B, "alpha_divergence": ((ALPHA - 1) * ratio_2B).clamp(max=80.0)}.get(
        divergence
    )
    size = 0.0
    cut_2B = ratio_2B.clamp(min=-160.0) if divergence == "alpha_divergence" else ratio_2B  # TRL cuts its exponents
    if exponents_2B is not None:
        size = (exponents_2B.double() * (2 if loss_type == "ipo" else 1)).exp().sum().item()
    if divergence == "alpha_divergence":
        size /= abs(ALPHA - 1)
    if loss_type == "discopop":
        scores_2B = SCORES[divergence](cut_2B.double())
        size = max(size, (-BETA * (scores_2B[0] - scores_2B[1])).exp().sum().item())  # TRL forms this factor
    if size < 1e38:
        assert moved_2B is None
    if moved_2B is None:
        assert size < 1e39
        bounded_2B = ratio_2B
    else:
        bounded_2B = policy_2B - moved_2B
        near = 30.0 if loss_type == "ipo" else 70.0
        if loss_type == "discopop" and exponents_2B is not None:
            near = 3.0
        near_B = (ratio_2B.abs() <= near).all(dim=0)
        assert torch.equal(moved_2B[:, near_B], reference_2B[:, near_B])
        assert ((bounded_2B[0] - bounded_2B[1]) * (ratio_2B[0] - ratio_2B[1]) >= 0).all()  # the order is kept
    bounded_2B = bounded_2B.requires_grad_()
    cut_2B = bounded_2B.clamp(min=-160.0) if divergence == "alpha_divergence" else bounded_2B
    if loss_type == "discopop":
        scores_2B = SCORES[divergence](cut_2B)
        assert (-BETA * (scores_2B[0] - scores_2B[1])).exp().sum().isfinite()
    loss = of_pairs(loss_type, divergence, cut_2B, torch.full((2, 3), 4)).mean()
    loss.backward()
    assert loss.isfinite()
    assert bounded_2B.grad is not None
    assert bounded_2B.grad.isfinite().all()


@pytest.mark.parametrize(
    ("loss_type", "divergence", "changes"),
    [
        ("sigmoid", "forward_kl", {"beta": 100.0}),
        ("sigmoid", "forward_kl", {"weight": -100.0}),
        ("robust", "forward_kl", {"label_smoothing": 0.49}),
        ("discopop", "reverse_kl", {"weight": 100.0}),
    ],
)
def test_factors_of_an_exponential_count(loss_type: str, divergence: str, changes: dict[str, float]) -> None:
    """exp(86) is 2e37."""
    near: dict[str, Any] = {"alpha": ALPHA, "beta": 1.0, "label_smoothing": 0.1, "weight": 1.0}
    policy_2B, reference_2B = torch.tensor([[-86.0], [0.0]]), torch.zeros(2, 1)
    for options, overflows in ((near, False), ({**near, **changes}, True)):
        exponential = PairExponential.of(loss_type, divergence, **options)
        assert exponential is not None
        assert (bounded_pairs(policy_2B, reference_2B, exponential) is not None) == overflows


def test_it_is_the_sum_of_a_micro_batch_that_overflows() -> None:
    exponential = PairExponential.of("discopop", "reverse_kl", alpha=ALPHA, beta=1.0, label_smoothing=0.0, weight=1.0)
    assert exponential is not None
    for chosen, overflows in (([-88.5, 0.0, 0.0], False), ([-88.5, -88.5, 0.0], True)):
        assert (
            bounded_pairs(torch.tensor([chosen, [0.0] * 3]), torch.zeros(2, 3), exponential) is not None
        ) == overflows


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", sorted(DPO_LOSSES.keys() - {"discopop"}))
def test_stocks_other_loss_types_are_finite_far_away_and_left_alone(loss_type: str, workshop: Workshop) -> None:
    config = {"loss_type": loss_type, **DPO_LOSSES[loss_type]}
    with dpo(STOCK, workshop, 4, **config) as stock, dpo(OURS, workshop, 4, **config) as ours:
        assert (
            PairExponential.of(loss_type, "reverse_kl", alpha=ALPHA, beta=BETA, label_smoothing=0.0, weight=1.0) is None
        )
        for chosen, rejected in [(1e4, 0.0), (-1e4, 0.0), (0.0, 1e4), (0.0, -1e4), (1e3, -1e3), (-1e3, 1e3)]:
            for trainer in (stock, ours):
                assert is_finite(trainer, *loss_and_gradients(trainer, far_batch(trainer, chosen, rejected)))
