"""With vLLM's importance-sampling correction GRPO's ratio is formed from the training forward: TRL's ratio, no pass.

vLLM cannot be had here: a rollout that returns log-probs stands for it, with `use_vllm` set once the trainer is built.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import trl

import trl_ext
from drop_in_cases import GRPO_LOSSES, Case
from run_losses import Record, Trainers, train
from tiny import ROLLOUTS, Workshop, near_sampler_rollout
from training_comparison import assert_same

STOCK = Trainers.of(trl)
OURS = Trainers.of(trl_ext).padded()

OLD_POLICY = {"model": "policy", "grad": False, "training": True}
EVALUATION = {"model": "policy", "grad": False, "training": False}

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUNDS = {"vllm_importance_sampling_clip_min": 0.7, "vllm_importance_sampling_clip_max": 1.5}
SCHEDULES: dict[str, dict[str, Any]] = {
    "on_policy": {},
    "iterations": {"num_iterations": 2},
    "misaligned": {
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 4,
        "per_device_train_batch_size": 4,
        "num_iterations": 2,
    },
}


def case_of(name: str, steps: int = 3, rollout: str = "near_sampler", setup: str = "full", **config: Any) -> Case:
    rewards = config.pop("rewards", ("id",))
    return Case(
        name, "grpo", setup, config=config, steps=steps, learning_rate=0.02, rollout=rollout, rewards=rewards, vllm=True
    )


def both(case: Case, workshop: Workshop) -> tuple[Record, Record]:
    stock = train(case, STOCK, workshop)
    ours = train(case, OURS, workshop)
    assert_same(case, ours, stock)
    return ours, stock


# The fast tier meets every loss type and every schedule, and each mode twice
FAST = {(MODES[i % 4], loss, list(SCHEDULES)[i % 3]) for i, loss in enumerate(("vespo", *GRPO_LOSSES)) if i != 8}
TABLE = [
    pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow)
    for cell in itertools.product(MODES, GRPO_LOSSES, SCHEDULES)
    # TRL refuses VESPO with one ratio for a sequence
    if cell[1] != "vespo" or cell[0].startswith("token")
]


@pytest.mark.parametrize(("mode", "loss_type", "schedule"), TABLE)
def test_the_ratio_is_trls_and_needs_no_pass(mode: str, loss_type: str, schedule: str, workshop: Workshop) -> None:
    config = {"vllm_importance_sampling_mode": mode, "loss_type": loss_type, **GRPO_LOSSES[loss_type]}
    ours, stock = both(case_of(f"{mode}-{loss_type}-{schedule}", **config, **BOUNDS, **SCHEDULES[schedule]), workshop)
    assert stock.fed("forwards", **OLD_POLICY) == {"on_policy": 3, "iterations": 2, "misaligned": 8}[schedule]
    # misaligned: windows 012 301 230, and slice 3 alone is first visited after a step; then 9 is 1 of the next
    late = {"on_policy": 0, "iterations": 0, "misaligned": 1}[schedule]
    assert ours.fed("forwards", **OLD_POLICY) == late


OPTIONS: dict[str, dict[str, Any]] = {
    "beta": {"setup": "ref_model", "num_iterations": 2},
    "lora-beta": {"setup": "lora", "beta": 0.1, "num_iterations": 2},
    "sequence-level": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "default-bounds": {},
    "far-sampler": {"rollout": "sampler", "vllm_importance_sampling_mode": "token_truncate"},
    "far-sampler-sequence": {"rollout": "sampler", "vllm_importance_sampling_mode": "sequence_truncate"},
    "off_policy_mask": {"off_policy_mask_threshold": 0.05, "num_iterations": 2},
    "entropy_quantile": {"top_entropy_quantile": 0.2},
    "entropy_bonus": {"entropy_coef": 0.05, "num_iterations": 2},
    "truncated": {"mask_truncated_completions": True, "num_iterations": 2},
    "no_correction": {"vllm_importance_sampling_correction": False, "num_iterations": 2},
    "dead_groups": {"rewards": ("half_dead",), "num_iterations": 2, **BOUNDS},
    "dead_groups-vespo": {
        "rewards": ("half_dead",),
        "loss_type": "vespo",
        "vllm_importance_sampling_mode": "token_mask",
        **BOUNDS,
        **SCHEDULES["misaligned"],
    },
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, **BOUNDS},
}


SLOW_OPTIONS = {"lora-beta", "default-bounds", "far-sampler", "sequence-level", "entropy_bonus", "truncated"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_OPTIONS else ()) for name in OPTIONS]
)
def test_the_ratio_is_trls_with_every_option(name: str, workshop: Workshop) -> None:
    ours, stock = both(case_of(name, **OPTIONS[name]), workshop)
    assert ours.fed("forwards", **OLD_POLICY) < stock.fed("forwards", **OLD_POLICY)
    assert 2 * ours.fed("forwards", **EVALUATION) == stock.fed("forwards", **EVALUATION)


@pytest.mark.parametrize("mode", ["sequence_mask", *(pytest.param(x, marks=pytest.mark.slow) for x in MODES[:3])])
def test_the_sampling_metrics_are_trls_where_a_generation_is_one_micro_batch(mode: str, workshop: Workshop) -> None:
    case = case_of(f"metrics-{mode}", vllm_importance_sampling_mode=mode, **BOUNDS)
    ours, stock = both(case, workshop)
    for step in range(3):
        for key, want in stock.logs[step].items():
            if key.startswith("sampling/"):
                assert ours.logs[step][key] == pytest.approx(want, rel=1e-4, abs=1e-6), (step, key)


@pytest.mark.parametrize("mode", MODES)
def test_the_new_sampling_metrics_are_what_stocks_tensors_say(mode: str, workshop: Workshop) -> None:
    seen: list[dict[str, float]] = []
    low, high = BOUNDS.values()

    class Measuring(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            mask = batch["completion_mask"].bool()
            log_ratio = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
            known = mask & ~log_ratio.isnan()
            log_ratio = torch.where(known, log_ratio, 0.0)
            ratio = log_ratio.exp()[mask] if mode.startswith("token") else log_ratio.sum(1).exp()
            d = log_ratio[known]
            seen.append(
                {
                    "importance_sampling_ratio_unclipped/min": ratio.min().item(),
                    "importance_sampling_ratio_unclipped/mean": ratio.mean().item(),
                    "importance_sampling_ratio_unclipped/max": ratio.max().item(),
                    "importance_sampling_ratio_clipped_share": ((ratio < low) | (ratio > high)).float().mean().item(),
                    "mismatch_kl": (d.exp() - d - 1).mean().item(),
                }
            )
            return batch

    case = case_of(f"new-metrics-{mode}", vllm_importance_sampling_mode=mode, **BOUNDS)
    stock = train(case, replace(STOCK, grpo_trainer=Measuring), workshop)
    ours = train(case, OURS, workshop)
    assert_same(case, ours, stock)
    assert len(seen) == 3
    assert all(0 < values["importance_sampling_ratio_clipped_share"] < 1 for values in seen)
    for step, values in enumerate(seen):
        for key, want in values.items():
            assert ours.logs[step][f"sampling/{key}"] == pytest.approx(want, rel=1e-4, abs=1e-6), (step, key)


def test_the_metrics_are_logged_at_the_first_visit_alone(workshop: Workshop) -> None:
    ours, _ = both(case_of("first-visit", steps=4, num_iterations=2), workshop)
    assert ["sampling/mismatch_kl" in log for log in ours.logs[:4]] == [True, False, True, False]


def test_in_evaluation_completions_masked_whole_do_not_count(workshop: Workshop) -> None:
    seen: list[dict[str, float]] = []

    class Measuring(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            if not self.model.training:
                mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
                log_ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask]
                ratio = batch["importance_sampling_ratio"][mask.any(dim=1)]
                seen.append({"ratio": ratio.mean().item(), "difference": log_ratio.abs().nanmean().item()})
            return batch

    schedule = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    mode = {"vllm_importance_sampling_mode": "sequence_truncate"}
    case = case_of("masked-whole", rollout="near_sampler_masked_whole", **schedule, **mode)
    stock = train(case, replace(STOCK, grpo_trainer=Measuring), workshop)
    ours = train(case, OURS, workshop)
    assert_same(case, ours, stock)
    logs = [log for log in ours.logs if "eval_loss" in log]
    batches = len(seen) // len(logs)
    for i, log in enumerate(logs):
        scored = [x for x in seen[i * batches : (i + 1) * batches] if x["ratio"] == x["ratio"]]  # not the empty ones
        for key, name in (("importance_sampling_ratio", "ratio"), ("sampling_logp_difference", "difference")):
            want = sum(x[name] for x in scored) / len(scored)
            assert log[f"eval_sampling/{key}/mean"] == pytest.approx(want, rel=1e-4)


def _no_log_probs_in_evaluation(prompts: list[Any], trainer: Any) -> dict[str, list]:
    output = near_sampler_rollout(prompts, trainer)
    if not trainer.model.training:
        output["logprobs"] = [[None for _ in ids] for ids in output["completion_ids"]]
    return output


def test_a_metric_of_no_token_is_absent(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLLOUTS, "no_log_probs_in_evaluation", _no_log_probs_in_evaluation)
    schedule = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    ours, stock = both(case_of("no-log-probs", steps=1, rollout="no_log_probs_in_evaluation", **schedule), workshop)
    (log,) = (log for log in ours.logs if "eval_loss" in log)
    (of_stock,) = (log for log in stock.logs if "eval_loss" in log)
    for name in ("mean", "max"):
        key = f"eval_sampling/sampling_logp_difference/{name}"
        assert of_stock[key] == 0.0
        assert key not in log
    assert log["eval_sampling/importance_sampling_ratio/mean"] == 1.0


class _Trusting(trl.GRPOTrainer):
    """Stock, told that the sampler's log-probs are the old policy's."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        return batch


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_trusted_sampling_log_probs_are_the_old_policys_and_no_pass_runs(schedule: str, workshop: Workshop) -> None:
    config = {"epsilon": 0.9, "epsilon_high": 2.0, **SCHEDULES[schedule]}
    case = replace(case_of(f"trusted-{schedule}", rollout="sampler", **config), vllm=False)
    trusting = replace(OURS, grpo_config=partial(OURS.grpo_config, trust_sampling_log_probs=True))
    stock = train(case, replace(STOCK, grpo_trainer=_Trusting), workshop)
    ours = train(case, trusting, workshop)
    for log in (*ours.logs, *stock.logs):  # stock scored all the same, some of it in another log entry
        for key in ("skipped/rows", "skipped/tokens", "skipped/passes"):
            log.pop(key, None)
    ours.feeds.clear()
    unscored = list(stock.feeds)
    stock.feeds.clear()
    assert_same(case, ours, stock)
    assert len(unscored) > 0


def test_trusting_a_sampler_that_lacks_some_log_probs_takes_the_policys_own(workshop: Workshop) -> None:
    trusting = replace(OURS, grpo_config=partial(OURS.grpo_config, trust_sampling_log_probs=True))
    case = replace(case_of("trusted-unknown", num_iterations=2), vllm=False)
    ours = train(case, trusting, workshop)
    assert ours.fed("forwards", **OLD_POLICY) == 0
    assert all(torch.tensor(ours.losses).isfinite())
    assert all(update.isfinite().all() for update in ours.updates.values())
