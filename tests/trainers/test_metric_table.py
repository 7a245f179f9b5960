"""The comparison allows differences only in metrics, and under conditions, that docs/following.md names."""

import copy
import functools
from collections.abc import Callable

import pytest
import trl

from drop_in_cases import CASES, Case
from metric_table import CONDITIONS, Situation, may_differ, rows
from run_losses import Record, Trainers, train
from tiny import Workshop
from training_comparison import metrics_differ

STOCK = Trainers.of(trl)
LIVE, DEAD = CASES["grpo-defaults"], CASES["grpo-dead-group"]


def _changed(key: str, change: Callable[[float], float]) -> Callable[[dict[str, float]], None]:
    def edit(log: dict[str, float]) -> None:
        log[key] = change(log[key])

    return edit


def _added(key: str) -> Callable[[dict[str, float]], None]:
    return lambda log: log.update({key: 1.0})


def _removed(key: str) -> Callable[[dict[str, float]], None]:
    return lambda log: log.pop(key)


NOTICED = [
    (LIVE, "loss", _changed("loss", lambda x: 1.001 * x)),
    (LIVE, "entropy", _changed("entropy", lambda x: 1.001 * x)),
    (LIVE, "entropy", _removed("entropy")),
    (LIVE, "grad_norm", _changed("grad_norm", lambda x: float("nan"))),
    (LIVE, "skipped/tokens", _added("skipped/tokens")),
    (LIVE, "skipped/rows", _added("skipped/rows")),
    (LIVE, "skipped/passes", _added("skipped/passes")),
    (LIVE, "sampling/mismatch_kl", _added("sampling/mismatch_kl")),
    (LIVE, "another", _added("another")),
    (DEAD, "loss", _changed("loss", lambda x: 1.001 * x)),
    (DEAD, "clip_ratio/low_mean", _changed("clip_ratio/low_mean", lambda x: x + 0.1)),
    (DEAD, "learning_rate", _removed("learning_rate")),
]


@pytest.mark.parametrize(
    ("case", "key", "edit"), NOTICED, ids=[f"{case}-{key}-{i}" for i, (case, key, _) in enumerate(NOTICED)]
)
def test_another_metric_is_noticed(
    case: Case, key: str, edit: Callable[[dict[str, float]], None], workshop: Workshop
) -> None:
    stock, ours = _alike(case, workshop)
    assert not metrics_differ(case, ours, stock)
    edit(ours.logs[1])
    (difference,) = metrics_differ(case, ours, stock)
    assert difference.startswith(f"log 1 {key}: ")


@functools.cache
def _stock(name: str, workshop: Workshop) -> Record:
    return train(CASES[name], STOCK, workshop)


def _alike(case: Case, workshop: Workshop) -> tuple[Record, Record]:
    stock = _stock(case.name, workshop)
    return stock, copy.deepcopy(stock)


@pytest.mark.parametrize("edit", [_changed("entropy", lambda x: 2 * x), _removed("entropy")])
def test_a_mean_over_fewer_rows_may_differ(edit: Callable[[dict[str, float]], None], workshop: Workshop) -> None:
    stock, ours = _alike(DEAD, workshop)
    edit(ours.logs[0])
    assert not metrics_differ(DEAD, ours, stock)


def test_every_condition_is_on_the_page() -> None:
    assert {when for _, when in rows()} == CONDITIONS.keys()


def test_equal_rewards_with_a_kl_term_have_a_share_of_rounding() -> None:
    with_kl, without = (Case("rloo", "rloo", "full", config={"beta": beta}) for beta in (0.05, 0.0))
    for evaluation in (False, True):
        situation = Situation(evaluation=evaluation, rows_not_scored=False)
        assert may_differ("frac_reward_zero_std", with_kl, situation)
        assert not may_differ("frac_reward_zero_std", without, situation)
        assert not may_differ("reward_std", with_kl, situation)


def test_a_set_of_several_adds_its_name_and_changes_no_loss() -> None:
    case = Case("sets", "dpo", "full", eval_sets=("a", "b"))
    situation = Situation(evaluation=True, rows_not_scored=False)
    assert may_differ("eval_a_rewards/margins", case, situation)
    assert not may_differ("eval_a_loss", case, situation)
    assert not may_differ("eval_c_rewards/margins", case, situation)
