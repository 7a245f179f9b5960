"""Reward functions by name or path, as TRL's own `grpo` command finds them."""

import importlib
import os
import sys
from typing import Any

from .errors import CommandError, did_you_mean

_NAMES = ("accuracy_reward", "get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward")


def rewards_of(script_args: Any) -> list[Any]:
    """The reward model, if any, and the functions of `--reward_funcs`, in TRL's order.

    Raises:
        `CommandError`: there is none, or a name or path leads nowhere.
    """
    model = script_args.reward_model_name_or_path
    rewards: list[Any] = [] if model is None else [model]
    rewards += [_function(path) for path in script_args.reward_funcs or []]
    if not rewards:
        raise CommandError(
            "`--reward_funcs` is not set. Give names in `trl.rewards`, such as `accuracy_reward`, or dotted paths, "
            "such as `my_rewards.brevity`; or give `--reward_model_name_or_path`."
        )
    return rewards


def _function(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    if not module_name:
        if name not in _NAMES:
            raise CommandError(
                f"`--reward_funcs` has `{path}`, which is neither a dotted path such as `my_rewards.{path}` nor one of "
                f"{', '.join(_NAMES)}.{did_you_mean(path, _NAMES)}"
            )
        function = getattr(importlib.import_module("trl.rewards"), name)
        # TRL's command gives it these values
        soft = name == "get_soft_overlong_punishment"
        return function(max_completion_len=1280, soft_punish_cache=256) if soft else function
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another
        raise CommandError(
            f"`--reward_funcs` has `{path}`, but there is no module `{module_name}` in {os.getcwd()} or among the "
            "installed packages. Start in the folder that holds it, or install it."
        ) from error
    if not callable(getattr(module, name, None)):
        raise CommandError(
            f"`--reward_funcs` has `{path}`, but the module `{module_name}` has no function `{name}`."
            f"{did_you_mean(name, vars(module))}"
        )
    return getattr(module, name)
