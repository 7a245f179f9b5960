"""Reads the tables of docs/following.md: which logged metrics may differ from stock TRL's, and when."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path

from drop_in_cases import Case
from rewards import NOISY_REWARDS
from trl_ext.losses.preference import READ_REWARDS

PAGE = Path(__file__).parents[2] / "docs" / "following.md"
HEADER = "| metric | when it differs | value |"


_GROUPED = ("grpo", "rloo")


@dataclass(frozen=True)
class Situation:
    """Facts about one log entry that do not follow from the case's arguments."""

    evaluation: bool
    rows_not_scored: bool  # since the previous entry, some row could not change the gradient
    first: bool = False


def _corrects(case: Case) -> bool:
    return case.vllm and case.config.get("vllm_importance_sampling_correction", True)


def has_router_loss(case: Case) -> bool:
    return case.model == "experts" and case.config.get("router_aux_loss_coef") != 0.0


def skips_zero_advantages(case: Case) -> bool:
    """Return whether only the policy's loss has a gradient through a row of `case`."""
    config = case.config
    if case.trainer == "rloo":  # its KL term is part of the reward
        return not has_router_loss(case)
    has_bonus = config.get("entropy_coef", 0.0) != 0.0 or config.get("use_adaptive_entropy", False)
    has_kl = config.get("beta", 0.0) != 0.0 or case.setup == "ref_model"
    return not (has_kl or has_bonus or config.get("top_entropy_quantile", 1.0) < 1.0 or has_router_loss(case))


def _zeroes_noise(case: Case) -> bool:
    has_kl = case.trainer == "rloo" and case.config.get("beta", 0.05) != 0.0
    return (
        case.trainer in _GROUPED
        and skips_zero_advantages(case)
        and not has_kl
        # The mean that TRL subtracts to normalize is not exactly 0
        and (not NOISY_REWARDS.isdisjoint(case.rewards) or case.config.get("normalize_advantages", False))
    )


def _generates(case: Case) -> bool:
    return case.trainer == "rloo" or (case.trainer == "grpo" and case.rollout == "generate")  # RLOO has no rollouts


def _masks_whole_completions(case: Case) -> bool:
    return "masked" in case.rollout or case.config.get("mask_truncated_completions", False)


def _loss_types(case: Case) -> list[str]:
    loss_type = case.config.get("loss_type", "sigmoid")
    return loss_type if isinstance(loss_type, list) else [loss_type]


# Condition in the page's second column -> function that tells whether it holds
CONDITIONS: dict[str, Callable[[Case, Situation], bool]] = {
    "always": lambda case, situation: True,
    "GRPO, RLOO": lambda case, situation: case.trainer in _GROUPED,
    "GRPO, RLOO, training": lambda case, situation: case.trainer in _GROUPED and not situation.evaluation,
    "GRPO, RLOO with `generate`": lambda case, situation: _generates(case),
    "training, rows not scored": lambda case, situation: (
        case.trainer in _GROUPED and not situation.evaluation and situation.rows_not_scored
    ),
    "ratio to the sampler; RLOO with continuous batching": lambda case, situation: _corrects(case),
    "ratio to the sampler": lambda case, situation: _corrects(case),
    "ratio to the sampler, training": lambda case, situation: _corrects(case) and not situation.evaluation,
    "ratio to the sampler, evaluation with masked completions or missing log-probs": (
        lambda case, situation: (
            _corrects(case)
            and situation.evaluation
            and (_masks_whole_completions(case) or case.rollout.startswith("no_log_probs"))
        )
    ),
    "RLOO, KL term": lambda case, situation: case.trainer == "rloo" and case.config.get("beta", 0.05) != 0.0,
    "completions of one token, some masked": lambda case, situation: (
        case.config.get("max_completion_length") == 1 and _masks_whole_completions(case)
    ),
    "training, equal rewards in a group": lambda case, situation: _zeroes_noise(case) and not situation.evaluation,
    "training, groups kept together": lambda case, situation: (
        case.trainer in _GROUPED
        and case.ours.get("keep_groups_together") is not False
        and case.config.get("gradient_accumulation_steps", 1) > 1  # rows stay in their optimizer step
        and not situation.evaluation
    ),
    "rows move between processes": lambda case, situation: False,  # these cases run on one
    "DPO, policy equals a reference scored in another batch": (
        lambda case, situation: case.accuracy_is_noise_at_first and situation.first
    ),
    "batches sampled ahead": lambda case, situation: False,  # these cases have no sampler with weights
    "`replay_routes`": lambda case, situation: bool(case.config.get("replay_routes")),
    "`dynamic_sampling`": lambda case, situation: case.config.get("dynamic_sampling", False),
    "DPO, only `sft`": lambda case, situation: case.trainer == "dpo" and _loss_types(case) == ["sft"],
    "evaluation of several sets": lambda case, situation: bool(case.eval_sets) and situation.evaluation,
    'SFT, `padding_free=True`, `include_num_input_tokens_seen="all"`': lambda case, situation: (
        case.trainer == "sft"
        and bool(case.config.get("padding_free"))
        and case.config.get("include_num_input_tokens_seen") == "all"
    ),
    "training, `max_tokens_per_micro_batch`, gradient accumulation": lambda case, situation: (
        bool(case.ours.get("max_tokens_per_micro_batch"))
        and case.config.get("gradient_accumulation_steps", 1) > 1
        and not situation.evaluation
    ),
    "RPO losses": lambda case, situation: not READ_REWARDS.isdisjoint(_loss_types(case)),
}


@functools.cache
def rows() -> tuple[tuple[str, str], ...]:
    """Return (metric or pattern, condition) of every metric that the page names."""
    page = PAGE.read_text()
    assert page.count(HEADER) == 2
    table = []
    for part in page.split(f"{HEADER}\n")[1:]:
        for line in takewhile(lambda line: line.startswith("|"), part.splitlines()[1:]):
            metrics, when, then = (cell.strip() for cell in line.strip("|").split("|"))
            assert when in CONDITIONS, f"{PAGE.name} names a condition that no test knows: {when!r}"
            assert then, line
            table += [(metric, when) for metric in re.findall(r"`([^`]+)`", metrics)]
    assert table
    return tuple(table)


def counts_work(key: str) -> bool:
    """Whether a metric counts what was processed, scored or skipped, which depends on how a batch is cut."""
    return key.removeprefix("eval_").startswith(("skipped/", "tokens_processed/", "head/"))


def may_differ(key: str, case: Case, situation: Situation) -> bool:
    """Return whether the logged metric `key` of `case` may differ from stock's, be added, or be absent."""
    key = key.removeprefix("eval_")
    for name in case.eval_sets:
        if key.startswith(f"{name}_") and key != f"{name}_loss":
            key = f"NAME_{key.removeprefix(name + '_')}"
    return any(fnmatchcase(key, metric) and CONDITIONS[when](case, situation) for metric, when in rows())
