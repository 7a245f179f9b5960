"""GRPO scores exactly the rows whose gradient can be other than zero."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import trl

import trl_ext
from drop_in_cases import Case
from run_losses import Record, Trainers, train
from short_training import Bench, reward
from tiny import Workshop
from training_comparison import assert_same, live_rows, metrics_differ

STOCK = Trainers.of(trl)
OURS = Trainers.of(trl_ext).padded()
SWITCHED_OFF = replace(OURS, grpo_config=partial(OURS.grpo_config, zero_advantages_of_equal_rewards=False))

POLICY = {"model": "policy", "grad": True}
OLD_POLICY = {"model": "policy", "grad": False, "training": True}
MISALIGNED = {"gradient_accumulation_steps": 3, "steps_per_generation": 4, "num_iterations": 2}


def case_of(name: str, rewards: str | tuple[str, ...] = "half_dead", setup: str = "full", **config: Any) -> Case:
    keys = {key: config.pop(key) for key in ("steps", "rollout", "model", "prompts") if key in config}
    rewards = (rewards,) if isinstance(rewards, str) else rewards
    # Without shuffling, every second group of a generation batch is odd
    config = {"shuffle_dataset": False, **config}
    return Case(name, "grpo", setup, config=config, rewards=rewards, learning_rate=0.02, **{"steps": 3, **keys})


def both(case: Case, workshop: Workshop) -> tuple[Record, Record]:
    """Run `case` with ours and stock; check that ours processed only live rows, at least one per micro-batch."""
    stock = train(case, STOCK, workshop)
    ours = train(case, OURS, workshop)
    assert_same(case, ours, stock)
    assert ours.fed("rows", **POLICY) == rows_to_feed(case, stock)
    assert ours.fed("forwards", **POLICY) == stock.fed("forwards", **POLICY)
    return ours, stock


def rows_to_feed(case: Case, stock: Record) -> int:
    return sum(max(1, int(live_rows(case, batch).sum())) for batch in stock.batches)


@pytest.mark.parametrize("setup", ["full", "lora"])
def test_with_half_the_groups_dead_half_the_tokens_are_processed(setup: str, workshop: Workshop) -> None:
    ours, stock = both(case_of("half", setup=setup), workshop)
    assert 0 < ours.fed("tokens", **POLICY) <= 0.55 * stock.fed("tokens", **POLICY)


def test_the_old_policy_does_not_score_dead_rows(workshop: Workshop) -> None:
    ours, stock = both(case_of("half-misaligned", steps=4, **MISALIGNED), workshop)
    # Slice 3 of the first generation and 1, 2, 3 of the second (windows 012 301 230 | 123) come after an optimizer step
    assert ours.fed("forwards", **OLD_POLICY) < stock.fed("forwards", **OLD_POLICY)
    waiting_rows = 8 * ours.fed("forwards", **OLD_POLICY)
    assert ours.fed("rows", **OLD_POLICY) <= 0.75 * waiting_rows


@pytest.mark.parametrize("iterations", [1, 2])
def test_with_all_groups_dead_one_row_of_each_micro_batch_is_processed(iterations: int, workshop: Workshop) -> None:
    case = case_of("all-dead", "dead", num_iterations=iterations, steps=4)
    stock, ours = train(case, STOCK, workshop), train(case, OURS, workshop)
    assert [feed.rows for feed in ours.feeds] == [1, 1, 1, 1]
    assert ours.fed("forwards", **POLICY) == stock.fed("forwards", **POLICY) == 4
    assert not metrics_differ(case, ours, stock)
    for record in (ours, stock):
        assert all(not update.any() for update in record.updates.values())
    assert not any("entropy" in log for log in ours.logs)


EQUAL_REWARDS = [
    pytest.param(rewards, size, marks=pytest.mark.slow if rewards == "half_tenths" and size != 8 else ())
    for rewards in ("tenths", "half_tenths")
    for size in (6, 8, 12)
]


@pytest.mark.parametrize(("rewards", "generations"), EQUAL_REWARDS)
def test_rewards_that_are_equal_but_not_exact_have_no_advantage(
    rewards: str, generations: int, workshop: Workshop
) -> None:
    config = {"num_generations": generations, "per_device_train_batch_size": 2 * generations}
    case = case_of(f"{rewards}-{generations}", rewards, steps=2, **config)
    stock, ours = train(case, STOCK, workshop), train(case, OURS, workshop)
    # One row instead of each dead micro-batch
    assert ours.fed("rows", **POLICY) == rows_to_feed(case, stock) == (2 if rewards == "tenths" else 2 * generations)
    noise = [batch.advantages.abs().max().item() for batch in stock.batches]
    if rewards == "tenths":
        assert all(not update.any() for update in ours.updates.values())
        assert max(noise) < 2e-3
        assert (min(noise) > 0) == (generations > 6)  # the mean of six of them is exact
    else:
        assert_same(case, ours, train(case, replace(STOCK, grpo_trainer=_WithoutNoise), workshop))


class _WithoutNoise(trl.GRPOTrainer):
    """Stock TRL, with advantages of 0 for groups of equal rewards."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        batch["advantages"] = torch.where(batch["advantages"].abs() < 2e-3, 0.0, batch["advantages"])
        return batch


@pytest.mark.parametrize(("rewards", "generations"), EQUAL_REWARDS)
def test_with_the_switch_off_equal_rewards_train_as_in_trl(rewards: str, generations: int, workshop: Workshop) -> None:
    config = {"num_generations": generations, "per_device_train_batch_size": 2 * generations}
    case = case_of(f"off-{rewards}-{generations}", rewards, steps=2, **config)
    if rewards == "tenths":  # so that a gradient of 1e-3 changes weights by more than rounding
        case = replace(case, learning_rate=10.0)
    stock, ours = train(case, STOCK, workshop), train(case, SWITCHED_OFF, workshop)
    rows = sum(max(1, int((batch.advantages != 0).sum())) for batch in stock.batches)
    assert ours.fed("rows", **POLICY) == rows
    assert any(update.any() for update in stock.updates.values()) == (rewards == "half_tenths" or generations > 6)
    if any(update.any() for update in stock.updates.values()):
        assert_same(replace(case, rewards=("id",)), ours, stock)  # as the strict part of the table says


def test_adamw_steps_on_trls_rounding_noise_but_not_with_ours(workshop: Workshop) -> None:
    """The figures of docs/differences.md: eight rewards of 0.7."""
    config = {"num_generations": 8, "per_device_train_batch_size": 8, "optim": "adamw_torch", "learning_rate": 1e-3}
    case = case_of("noise", "tenths", steps=1, **config)
    stock, ours = train(case, STOCK, workshop), train(case, OURS, workshop)
    noise = stock.batches[0].advantages.abs()
    assert 5e-4 < noise.max() < 7e-4
    assert 1e-4 < stock.logs[0]["grad_norm"] < 1e-2
    assert max(update.abs().max().item() for update in stock.updates.values()) > 0.9e-3
    assert all(not update.any() for update in ours.updates.values())
    assert ours.logs[0]["grad_norm"] == 0.0


def test_equal_rewards_are_found_if_some_completions_have_none(workshop: Workshop) -> None:
    config = {"num_generations": 8, "per_device_train_batch_size": 16}
    case = case_of("missing", "tenths_missing", steps=2, **config)
    stock, ours = train(case, STOCK, workshop), train(case, OURS, workshop)
    for batch in stock.batches:
        assert 0 < (batch.advantages != 0).sum() < 16  # noise, and 0 for completions without a reward
    assert [feed.rows for feed in ours.feeds] == [1, 1]
    assert all(not update.any() for update in ours.updates.values())


def test_groups_without_any_reward_are_not_processed(workshop: Workshop) -> None:
    ours, stock = both(case_of("unscorable", "unscorable"), workshop)
    assert ours.fed("rows", **POLICY) < stock.fed("rows", **POLICY)


def test_rewards_equal_only_in_sum_are_not_equal_if_each_function_is_normalized(workshop: Workshop) -> None:
    case = case_of("sum", ("step_up", "step_down"), reward_weights=[1.0, 0.5], steps=2)
    ours = train(case, OURS, workshop)
    assert [feed.rows for feed in ours.feeds] == [1, 1]
    apart = replace(case, config={**case.config, "multi_objective_aggregation": "normalize_then_sum"})
    ours, stock = both(apart, workshop)
    assert ours.fed("rows", **POLICY) == stock.fed("rows", **POLICY)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    "how", [{"rollout": "masked_whole"}, {"mask_truncated_completions": True}], ids=["masked_whole", "truncated"]
)
def test_fully_masked_completions_are_not_processed(how: dict[str, Any], beta: float, workshop: Workshop) -> None:
    case = case_of("masked", "id", "ref_model" if beta else "full", beta=beta, num_iterations=2, steps=4, **how)
    ours, stock = both(case, workshop)
    assert 0 < ours.fed("rows", **POLICY) < stock.fed("rows", **POLICY)
    live = sum(int((batch.tokens > 0).sum()) for batch in stock.batches[::2])
    assert ours.fed("rows", model="reference") == (live if beta else 0)


NOT_ALLOWED: dict[str, tuple[dict[str, Any], str]] = {
    "beta": ({"setup": "ref_model", "beta": 0.1}, "KL"),
    "lora-beta": ({"setup": "lora", "beta": 0.1}, "KL"),
    "entropy bonus": ({"entropy_coef": 0.05}, "entropy bonus"),
    "adaptive entropy": ({"use_adaptive_entropy": True, "entropy_target": 10.0}, "entropy bonus"),
    "entropy quantile": ({"top_entropy_quantile": 0.2, "steps": 2}, "top_entropy_quantile"),
    "router loss": ({"model": "experts"}, "router loss"),
}


@pytest.mark.parametrize("rewards", ["half_tenths", pytest.param("half_dead", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NOT_ALLOWED)
def test_dead_rows_are_processed_if_they_have_another_gradient(name: str, rewards: str, workshop: Workshop) -> None:
    config, reason = NOT_ALLOWED[name]
    seen = []

    class Explaining(trl_ext.GRPOTrainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(self.explain())
            return super().train(*args, **kwargs)

    # TRL's advantages of eight equal rewards of 0.7 are rounding noise, which stays if all rows are scored
    case = case_of(name, rewards, num_generations=8, per_device_train_batch_size=16, **config)
    stock = train(case, STOCK, workshop)
    ours = train(case, replace(OURS, grpo_trainer=Explaining), workshop)
    assert_same(case, ours, stock)
    assert ours.fed("rows", **POLICY) == stock.fed("rows", **POLICY)
    assert seen[0]["policy"].action == "run"
    assert reason in seen[0]["policy"].reason


def test_fully_masked_rows_are_processed_if_the_router_loss_counts_them(workshop: Workshop) -> None:
    ours, stock = both(case_of("router", "id", model="experts", rollout="masked_whole"), workshop)
    assert ours.fed("rows", **POLICY) == stock.fed("rows", **POLICY)


def test_evaluation_processes_every_row(workshop: Workshop) -> None:
    config = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    ours, stock = both(case_of("evaluation", **config), workshop)
    evaluation = {"model": "policy", "training": False}
    assert ours.fed("rows", **evaluation) == stock.fed("rows", **evaluation) > 0


class _Watching(trl.GRPOTrainer):
    """Stock TRL that records the values its metrics are means of."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.live = inputs["advantages"] != 0
        self.mask = inputs["completion_mask"]
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if kwargs.get("compute_entropy"):
            mask = self.mask * self.live[:, None]
            self.watched.append(((result[1] * mask).sum() / mask.sum()).item())
        return result

    def get_gamma_weights(self, **kwargs: Any) -> torch.Tensor:
        phi = trl.GRPOTrainer.get_gamma_weights(**kwargs)
        self.watched_phi.append(phi[self.live].mean().item())
        return phi


def test_entropy_and_phi_are_means_over_the_scored_rows(workshop: Workshop) -> None:
    class Watching(_Watching):
        watched: list[float] = []  # noqa: RUF012
        watched_phi: list[float] = []  # noqa: RUF012

    case = case_of("means", loss_type="vespo", num_iterations=2, steps=4)
    stock = train(case, replace(STOCK, grpo_trainer=Watching), workshop)
    ours = train(case, OURS, workshop)
    assert [log["entropy"] for log in ours.logs[:4]] == pytest.approx(Watching.watched, rel=1e-4)
    assert [log["vespo/phi_seq_mean"] for log in ours.logs[:4]] == pytest.approx(Watching.watched_phi, rel=1e-4)
    assert [log["entropy"] for log in stock.logs[:4]] != pytest.approx(Watching.watched, rel=1e-3)


def test_a_micro_batch_of_one_dead_row_logs_no_entropy(workshop: Workshop) -> None:
    config = {"per_device_train_batch_size": 1, "num_generations": 2, "steps_per_generation": 4}
    case = case_of("one-row", steps=8, **config)
    ours, stock = both(case, workshop)
    dead = [not live_rows(case, batch).any() for batch in stock.batches]
    assert any(dead)
    assert not all(dead)
    assert ["entropy" not in log for log in ours.logs[:8]] == dead


def test_totals_are_those_since_the_last_log(workshop: Workshop) -> None:
    ours, _ = both(case_of("logging", logging_steps=3, steps=6, **MISALIGNED), workshop)
    assert [log["skipped/rows"] > 0 for log in ours.logs[:2]] == [True, True]


@pytest.mark.parametrize("scale", ["batch", pytest.param("none", marks=pytest.mark.slow)])
def test_equal_rewards_have_no_advantage_however_rewards_are_scaled(scale: str, workshop: Workshop) -> None:
    config = {"num_generations": 8, "per_device_train_batch_size": 16, "scale_rewards": scale}
    case = case_of(f"scaled-{scale}", "half_tenths", steps=2, **config)
    stock, ours = train(case, replace(STOCK, grpo_trainer=_WithoutNoise), workshop), train(case, OURS, workshop)
    assert_same(case, ours, stock)
    assert ours.fed("rows", **POLICY) == rows_to_feed(case, stock) == 16


@pytest.mark.parametrize(("rewards", "warnings"), [("constant", 1), ("id", 0)])
def test_rewards_that_never_differ_are_said_once(rewards: str, warnings: int, workshop: Workshop, tmp_path, caplog):
    bench = Bench(workshop, tmp_path)
    funcs = reward if rewards == "id" else lambda completions, **kwargs: [1.0] * len(completions)
    bench.grpo(reward_funcs=funcs, max_steps=3, logging_steps=1)
    assert sum("every advantage is zero" in x for x in caplog.messages) == warnings
