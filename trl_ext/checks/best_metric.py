"""`metric_for_best_model`: which metrics an evaluation gives, and what happens if it gives another name."""

import difflib
import dis
import inspect
import logging
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from ..compat.choices import METRICS
from ..losses.loss_types import dpo_loss_type
from .overrides import code_of, methods_of_user

logger = logging.getLogger("trl_ext")

_OF_EACH_SET = ("loss", "runtime", "samples_per_second", "steps_per_second")
_ALSO_OF_EACH_SET = ("model_preparation_time", "mem_*", "jit_*")
_ADDED = ("skipped/*", "tokens_processed/*", "head/*", "rewards/target_margins", "rewards/margin_errors")
_SHOWN = 12  # names in a message
_LOGS_METRICS = {"log_metric", "_log_metric", "_metrics", "locals"}


def check_best_metric(trainer: Any) -> None:
    """Raise `ValueError` if no evaluation can give `metric_for_best_model`; warn if one of several sets gives it.

    If the user's code may give metrics of any name, the first evaluation tells (`check_given_metrics`).
    """
    args = trainer.args
    if args.metric_for_best_model is None or args.eval_strategy == "no":
        return
    metric = _full_name(args.metric_for_best_model)
    several = isinstance(trainer.eval_dataset, Mapping)
    sets = [f"eval_{name}_" for name in trainer.eval_dataset] if several else ["eval_"]
    trl_metrics = _metrics_of_trl(trainer)
    known_metrics = [f"{x}{name}" for x in sets for name in _OF_EACH_SET]
    known_metrics += [f"{x}{name}" for x in dict.fromkeys(("eval_", *sets)) for name in trl_metrics]
    unlisted = [f"{x}{name}" for x in sets for name in (*_ALSO_OF_EACH_SET, *_ADDED)]
    is_of_last_set = several and any(fnmatchcase(metric, f"eval_{name}") for name in trl_metrics)
    if is_of_last_set and not any(metric.startswith(x) for x in sets):
        metrics_of_sets = ", ".join(f"'{x}{metric.removeprefix('eval_')}'" for x in sets)
        logger.warning(
            f"`metric_for_best_model={args.metric_for_best_model!r}` is the metric of the last evaluation set. To use "
            f"the metric of a certain set, choose from: {metrics_of_sets}."
        )
    if any(fnmatchcase(metric, name) for name in (*known_metrics, *unlisted)) or _gives_other_metrics(trainer):
        return
    raise ValueError(
        f"Unknown `metric_for_best_model` {args.metric_for_best_model!r}. {_choices(metric, known_metrics)}"
    )


def check_given_metrics(trainer: Any, metrics: Mapping[str, Any], trial: Any) -> None:
    """Raise `ValueError` if an evaluation did not give `metric_for_best_model`, after a checkpoint is saved."""
    step = trainer.state.global_step
    name = trainer.args.metric_for_best_model
    # At step 0 (`eval_on_start`), transformers does not read it
    if name is None or not step or _full_name(name) in metrics:
        return
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    trainer._save_checkpoint(trainer.model, trial)
    raise ValueError(
        f"Unknown `metric_for_best_model` {name!r}. {_choices(_full_name(name), list(metrics))} Correct the "
        f"name, and resume from `{PREFIX_CHECKPOINT_DIR}-{step}`, which has just been saved."
    )


def has_no_value(trainer: Any, metrics: Mapping[str, Any]) -> bool:
    """Return whether `metric_for_best_model` is None in an evaluation, such as if a reward function never applied."""
    name = trainer.args.metric_for_best_model
    return name is not None and metrics.get(_full_name(name), 0.0) is None


def _full_name(name: str) -> str:
    return name if name.startswith("eval_") else f"eval_{name}"


def _choices(metric: str, known_metrics: list[str]) -> str:
    closest = difflib.get_close_matches(metric, known_metrics, n=_SHOWN, cutoff=0.0)
    more = ", and others" if len(known_metrics) > _SHOWN else ""
    return f"The evaluation gives: {', '.join(map(repr, closest))}{more}."


def _metrics_of_trl(trainer: Any) -> list[str]:
    names = list(METRICS[trainer._trl_trainer.__name__])
    loss_types = getattr(trainer, "loss_types", ())  # of DPO, which logs no rewards without a reference
    if loss_types and not any(dpo_loss_type(name).needs_reference for name in loss_types):
        names = [name for name in names if not name.startswith("rewards/")]
    of_rewards = getattr(trainer, "reward_func_names", ())
    return names + [f"rewards/{name}/{value}" for name in of_rewards for value in ("mean", "std")]


def _gives_other_metrics(trainer: Any) -> bool:
    """Return whether the user's code, or a loss that is unknown, may give metrics of any name."""
    if trainer._unknown_loss_types:
        return True
    if trainer.compute_metrics is not None or next(methods_of_user(trainer), None) is not None:
        return True
    if (
        getattr(trainer, "rollout_func", None) is not None
        or getattr(trainer, "environment_factories", None) is not None
    ):
        return True
    callbacks = (code for x in trainer.callback_handler.callbacks for code in _code_of_class(type(x)))
    return next(callbacks, None) is not None or any(map(_may_log, getattr(trainer, "reward_funcs", ())))


def _code_of_class(cls: type) -> Iterator[CodeType]:
    for parent in cls.__mro__:
        for value in vars(parent).values():
            yield from code_of(value)


def _may_log(reward: Any) -> bool:
    """Return whether a reward function may use `log_metric`, which TRL passes to it."""
    if isinstance(reward, nn.Module):
        return False
    if not isinstance(reward, FunctionType):  # such as an object
        return True
    parameters = inspect.signature(reward, follow_wrapped=False).parameters.values()
    collected = next((x.name for x in parameters if x.kind is x.VAR_KEYWORD), None)
    for code in code_of(reward):
        if _LOGS_METRICS & {*code.co_names, *code.co_varnames, *code.co_freevars, *map(str, code.co_consts)}:
            return True
        for instruction in dis.get_instructions(code):
            value = instruction.argval
            if collected is not None and collected in (value if isinstance(value, tuple) else (value,)):
                return True
    return False
