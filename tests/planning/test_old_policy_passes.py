"""GRPO's old-policy pass runs where a micro-batch will meet other weights than those it was sampled with, nowhere else.

Forwards and tokens are counted where they enter the model, beside stock TRL's in the same test.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import trl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback

import trl_ext
from drop_in_cases import Case
from run_losses import Record, Trainers, train
from tiny import Workshop
from token_counts import as_of_a_library
from training_comparison import assert_same

STOCK = Trainers.of(trl)
OURS = Trainers.of(trl_ext).padded()

OLD_POLICY = {"model": "policy", "grad": False, "training": True}
POLICY = {"model": "policy", "grad": True}
EVALUATION = {"model": "policy", "grad": False, "training": False}

# Micro-batches of one group, so that generation batches of any number of them can be cut
ONE_GROUP = {"per_device_train_batch_size": 2, "num_generations": 2}


def case_of(name: str, steps: int, setup: str = "full", prompts: int = 12, **config: Any) -> Case:
    return Case(name, "grpo", setup, config=config, steps=steps, learning_rate=0.02, prompts=prompts)


def both(case: Case, workshop: Workshop) -> tuple[Record, Record]:
    """Ours and stock's run of `case`, which agree in everything but the passes."""
    stock = train(case, STOCK, workshop)
    ours = train(case, OURS, workshop)
    assert_same(case, ours, stock)
    assert ours.fed("tokens", **POLICY) == stock.fed("tokens", **POLICY) > 0
    return ours, stock


@pytest.mark.parametrize("accumulation", [1, 2])
def test_iterations_that_are_aligned_need_no_pass(accumulation: int, workshop: Workshop) -> None:
    config = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation, "num_iterations": 2}
    ours, stock = both(case_of("aligned", 4, **config), workshop)
    generations = 2
    assert stock.fed("forwards", **OLD_POLICY) == generations * accumulation
    assert ours.fed("forwards", **OLD_POLICY) == 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_generation_for_two_steps_needs_half_the_passes(accumulation: int, workshop: Workshop) -> None:
    config = {"gradient_accumulation_steps": accumulation, "steps_per_generation": 2 * accumulation, **ONE_GROUP}
    ours, stock = both(case_of("two-steps", 4, **config), workshop)
    assert stock.fed("forwards", **OLD_POLICY) == 2 * 2 * accumulation
    for what in ("forwards", "rows", "tokens"):
        assert 2 * ours.fed(what, **OLD_POLICY) == stock.fed(what, **OLD_POLICY)


# Eight micro-batches in windows of three, which the end of the epoch cuts short: 012 345 67. Completions are generated
# before micro-batches 0 and 4. The weights change after 2, 5 and 7. So 0, 1, 2 (sampled and met before the first
# step) and 4, 5 (after it) meet the weights they were sampled with; 3, 6 and 7 do not.
MID_WINDOW = {"gradient_accumulation_steps": 3, "steps_per_generation": 4, **ONE_GROUP}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_epoch_that_ends_in_mid_window_needs_the_exact_minimum(beta: float, epochs: int, workshop: Workshop) -> None:
    case = case_of("mid-window", -1, prompts=8, num_train_epochs=epochs, beta=beta, **MID_WINDOW)
    ours, stock = both(case, workshop)
    assert stock.fed("forwards", **POLICY) == 8 * epochs
    assert stock.fed("forwards", **OLD_POLICY) == 8 * epochs
    assert ours.fed("forwards", **OLD_POLICY) == 3 * epochs
    assert stock.fed("forwards", model="reference") == (8 * epochs if beta else 0)
    assert ours.fed("tokens", model="reference") == stock.fed("tokens", model="reference")


def test_the_buffered_micro_batches_are_scored_under_the_weights_that_sampled_them(workshop: Workshop) -> None:
    ours, _ = both(case_of("mid-window", -1, prompts=8, num_train_epochs=1, **MID_WINDOW), workshop)
    # 3 before the step from 0 to 1; 6 and 7 before the step from 1 to 2
    assert [feed.step for feed in ours.feeds if not feed.grad] == [0, 1, 1]


def test_later_iterations_reuse_the_first_visit_where_windows_and_generations_are_misaligned(
    workshop: Workshop,
) -> None:
    # Windows 012 | 301 | 230 | 123 of the four slices; 3 alone is first visited after a step
    ours, stock = both(case_of("iterations", 4, prompts=8, num_iterations=3, **MID_WINDOW), workshop)
    assert stock.fed("forwards", **OLD_POLICY) == 4
    assert ours.fed("forwards", **OLD_POLICY) == 1


@pytest.mark.parametrize(("accumulation", "steps"), [(1, 2), (2, 1), (3, 1)])
def test_the_last_step_scores_nothing_that_will_not_be_visited(
    accumulation: int, steps: int, workshop: Workshop
) -> None:
    config = {"gradient_accumulation_steps": accumulation, "steps_per_generation": 4, **ONE_GROUP}
    ours, stock = both(case_of("mid-buffer", steps, prompts=8, **config), workshop)
    assert stock.fed("forwards", **OLD_POLICY) == 4
    # Of three slices that wait at the first of two steps, one will be visited, but which steps will follow is not known
    assert ours.fed("forwards", **OLD_POLICY) == (3 if steps == 2 else 0)


class _StopAfter(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 1


def _stopping(trainers: Trainers) -> Trainers:
    """The same trainers, stopped by a callback after one step, long before `max_steps`."""

    class Stopping(trainers.grpo_trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(_StopAfter())

    Stopping.__name__ = trainers.grpo_trainer.__name__
    return replace(trainers, grpo_trainer=Stopping)


def test_training_that_a_callback_stopped_in_mid_buffer_is_taken_up_again(workshop: Workshop) -> None:
    config = {"gradient_accumulation_steps": 1, "steps_per_generation": 4, **ONE_GROUP}
    case = case_of("stopped", 50, prompts=8, **config)
    stock, ours = (train(case, _stopping(trainers), workshop, rounds=3) for trainers in (STOCK, OURS))
    assert_same(case, ours, stock)
    assert len(ours.losses) == 3


def test_training_that_ended_in_mid_buffer_is_taken_up_with_new_completions(workshop: Workshop) -> None:
    """Not stock's: it trains what other weights have sampled, and ours were not scored while those were there."""
    config = {"gradient_accumulation_steps": 1, "steps_per_generation": 4, **ONE_GROUP}
    case = case_of("ended", 1, prompts=8, **config)
    ours = train(case, OURS, workshop, rounds=2)
    assert [log["loss"] for log in ours.logs if "num_tokens" in log] == ours.losses


@pytest.mark.parametrize("on_start", [False, True])
def test_evaluation_runs_no_pass_and_leaves_the_buffer_alone(on_start: bool, workshop: Workshop) -> None:
    config = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": on_start, "num_iterations": 2, **MID_WINDOW}
    ours, stock = both(case_of("evaluation", 5, prompts=8, **config), workshop)
    assert stock.fed("forwards", **EVALUATION) == 2 * ours.fed("forwards", **EVALUATION) > 0
    # Windows 012 345 678 9ab cde, generations at 0 and 8: 3, 9, a and b are first visited after a step
    assert stock.fed("forwards", **OLD_POLICY) == 8
    assert ours.fed("forwards", **OLD_POLICY) == 4


@pytest.mark.parametrize("setup", ["lora", "ref_adapter", "ref_model"])
def test_the_reference_runs_as_in_trl_and_the_old_policy_does_not(setup: str, workshop: Workshop) -> None:
    ours, stock = both(case_of("beta", 2, setup, num_iterations=2, beta=0.1), workshop)
    no_grad = {"grad": False, "training": True}
    assert stock.fed("forwards", **no_grad) == 2  # old policy and reference
    assert ours.fed("forwards", **no_grad) == 1


def test_force_on_policy_ratio_changes_nothing_where_the_batches_agree(workshop: Workshop) -> None:
    case = case_of("forced", 3, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    forced = replace(OURS, grpo_config=partial(OURS.grpo_config, force_on_policy_ratio=True))
    ours = train(case, forced, workshop)
    assert_same(case, ours, train(case, STOCK, workshop))
    assert ours.fed("forwards", **OLD_POLICY) == 0


def windows(schedule: dict[str, int], prompts: int) -> list[list[int]]:
    """The positions of the micro-batches (counted over the whole training) that each optimizer step accumulates."""
    accumulation, slices = schedule["gradient_accumulation_steps"], schedule["steps_per_generation"]
    epoch = prompts // slices * slices * schedule["num_iterations"]
    steps: list[list[int]] = []
    start = 0
    while len(steps) < schedule["max_steps"]:
        micro_batches = list(range(start, start + epoch))
        steps += [micro_batches[i : i + accumulation] for i in range(0, epoch, accumulation)]
        start += epoch
    return steps[: schedule["max_steps"]]


@dataclass
class Counts:
    least: int = 0  # forwards without which some micro-batch would lack its old log-probs
    unforeseen: int = 0  # the same where only the last step knows that it is the last


def count_by_hand(schedule: dict[str, int], prompts: int) -> Counts:
    """By brute force: when each slice is generated, when it is first visited, and how many steps lie between."""
    slices = schedule["steps_per_generation"]
    cycle = slices * schedule["num_iterations"]
    step_of = {position: step for step, window in enumerate(windows(schedule, prompts)) for position in window}
    counts = Counts()
    last = max(step_of)
    for generated in range(0, last + 1, cycle):
        for first_visit in range(generated, generated + slices):
            if first_visit <= last:
                late = step_of[first_visit] > step_of[generated]
                counts.least += late
                counts.unforeseen += late
            else:
                counts.unforeseen += step_of[generated] < step_of[last]
    return counts


SCHEDULES = st.fixed_dictionaries(
    {
        "gradient_accumulation_steps": st.integers(1, 4),
        "steps_per_generation": st.integers(1, 4),
        "num_iterations": st.integers(1, 3),
        "max_steps": st.integers(1, 5),
    }
)


def _any_schedule(schedule: dict[str, int], beta: float, workshop: Workshop) -> None:
    schedule = dict(schedule)
    case = case_of(f"{schedule}", schedule["max_steps"], prompts=9, beta=beta, **schedule, **ONE_GROUP)
    ours, stock = both(replace(case, config={k: v for k, v in case.config.items() if k != "max_steps"}), workshop)
    counts = count_by_hand(schedule, prompts=9)
    cycle = schedule["steps_per_generation"] * schedule["num_iterations"]
    generations = -(-sum(map(len, windows(schedule, 9))) // cycle)
    aligned = schedule["gradient_accumulation_steps"] % cycle == 0
    assert stock.fed("forwards", **OLD_POLICY) == (0 if aligned else generations * schedule["steps_per_generation"])
    assert counts.least <= ours.fed("forwards", **OLD_POLICY) == counts.unforeseen
    assert ours.fed("tokens", model="reference") == stock.fed("tokens", model="reference")


# No shrinking: an example costs two trainings, and every example is small
quietly = partial(
    settings, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)


@quietly(max_examples=2)
@given(schedule=SCHEDULES, beta=st.sampled_from([0.0, 0.1]))
def test_any_schedule_trains_as_stock_with_the_fewest_passes(
    schedule: dict[str, int], beta: float, workshop: Workshop
) -> None:
    _any_schedule(schedule, beta, workshop)


@pytest.mark.slow
@quietly(max_examples=60)
@given(schedule=SCHEDULES, beta=st.sampled_from([0.0, 0.1]))
def test_any_schedule_trains_as_stock_with_the_fewest_passes_searched(
    schedule: dict[str, int], beta: float, workshop: Workshop
) -> None:
    _any_schedule(schedule, beta, workshop)


def test_each_pass_computes_what_it_uses_of_the_tokens_that_count(workshop: Workshop) -> None:
    """Tool tokens and padding carry no label, and no pass without a gradient forms an entropy."""
    case = Case(
        "outputs",
        "grpo",
        "ref_model",
        config={"beta": 0.1, **MID_WINDOW},
        rollout="masked",
        steps=3,
        learning_rate=0.02,
    )
    passes: list[tuple[bool, int, set[str]]] = []

    class Watching(OURS.grpo_trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for model in (self.model, self.ref_model):
                model.register_forward_hook(as_of_a_library(watch), with_kwargs=True)

    def watch(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        per_token = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        outputs = {name for name in per_token if getattr(output, name) is not None}
        passes.append((output.log_probs.requires_grad, int((kwargs["labels"] != -100).sum()), outputs))

    ours = train(case, replace(OURS, grpo_trainer=Watching), workshop)
    assert_same(case, ours, train(case, STOCK, workshop))
    assert {grad: {frozenset(x) for g, _, x in passes if g == grad} for grad in (True, False)} == {
        True: {frozenset({"log_probs", "entropy"})},
        False: {frozenset({"log_probs"})},
    }
    scored = [labels for grad, labels, _ in passes if grad]
    assert scored == [int(batch.tokens.sum()) for batch in ours.batches]


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_pass_runs_beside_gradient_checkpointing(reentrant: bool, workshop: Workshop) -> None:
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    ours, stock = both(case_of("checkpointing", 3, prompts=8, beta=0.1, **checkpointing, **MID_WINDOW), workshop)
    assert 0 < ours.fed("forwards", **OLD_POLICY) < stock.fed("forwards", **OLD_POLICY)


def test_the_pass_runs_in_the_precision_of_training(workshop: Workshop) -> None:
    """With weights that stay where they are, old policy and policy are one, under autocast as without it."""
    config = {"loss_type": "vespo", "bf16": True, "learning_rate": 0.0, **MID_WINDOW}
    ours = train(case_of("bf16", 3, prompts=8, **config), OURS, workshop)
    assert ours.fed("forwards", **OLD_POLICY) == 3
    # A weight of 1 for each completion is a ratio of 1
    weights = [log["vespo/phi_seq_mean"] for log in ours.logs if "loss" in log]
    assert weights == pytest.approx([1.0] * 3, abs=1e-5)
