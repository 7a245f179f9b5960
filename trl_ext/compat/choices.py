"""Values that TRL's arguments accept, and names of its metrics."""

import inspect
import re
import sys
from functools import cache
from importlib import resources


@cache
def compared_values(trainer_class: type, name: str) -> frozenset[str]:
    """Return the texts with which the source of TRL's trainer compares an attribute or argument called `name`.

    None if there is no source.
    """
    try:
        source = inspect.getsource(sys.modules[trainer_class.__module__])
    except OSError:
        return frozenset()
    compared = re.findall(rf'\b{name} (?:==|!=|in|not in) (\[[^\]]*\]|\([^)]*\)|\{{[^}}]*\}}|"\w+")', source)
    return frozenset(re.findall(r'"(\w+)"', " ".join(compared)))


def accelerate_configs() -> list[str]:
    """Return the names of the configs of accelerate that TRL ships."""
    shipped = resources.files("trl.accelerate_configs").iterdir()
    return sorted(x.name.removesuffix(".yaml") for x in shipped if x.name.endswith(".yaml"))


def launch_words_of_config(words: list[str]) -> list[str]:
    """Return words for `accelerate launch` with the file of `--accelerate_config`, a file or a config of TRL."""
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    return resolve_accelerate_config_argument(words)  # type: ignore[no-any-return]


# TRL raises an error for an unknown value only in the first step, and does not name the argument. The loss types are in
# `losses/loss_types.py`
DPO_CHOICES = {"f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")}
SFT_CHOICES = {"packing_strategy": ("bfd", "bfd_split", "wrapped")}
TRUNCATION_MODES = ("keep_start", "keep_end")
GRPO_CHOICES = {"importance_sampling_level": ("token", "sequence")}
ADVANTAGE_CHOICES = {
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}

# Reward functions also get the columns of the dataset, and `environments` if there are any
REWARD_KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
REWARD_COLUMNS_LEFT_OUT = ("prompt", "completion", "completion_ids")

# Trainer of TRL -> metrics that its evaluations may log, without `eval_`. GRPO and RLOO also log those of each reward
_OF_GROUPS = (
    "completions/*",
    "clip_ratio/*",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "kl",
    "entropy",
    "num_tokens",
    "aux_loss",
)
_OF_PREFERENCES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "logits/chosen",
    "logits/rejected",
    "entropy",
    "num_tokens",
    "aux_loss",
)
METRICS = {
    "SFTTrainer": ("entropy", "mean_token_accuracy", "num_tokens", "aux_loss"),
    "DPOTrainer": (*_OF_PREFERENCES, "rewards/accuracies", "mean_token_accuracy"),
    "KTOTrainer": (*_OF_PREFERENCES, "kl"),
    "GRPOTrainer": (*_OF_GROUPS, "cispo_clip_ratio", "entropy_coef", "policy_loss", "sampling/*", "tools/*", "vespo/*"),
    "RLOOTrainer": _OF_GROUPS,
    "DistillationTrainer": ("completions/*", "entropy", "num_tokens", "tools/*"),
    "RewardTrainer": ("num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin"),
}
