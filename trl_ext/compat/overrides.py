"""Which methods of a trainer run code of the user in place of TRL's.

A method can be overridden in a subclass of our trainer, in a class between ours and TRL's, on the trainer itself, or by
a function put in place of TRL's. In each case a function runs that is not from one of the `LIBRARIES`.
"""

import functools
import types
from collections.abc import Iterator
from typing import Any

from ..functions import closure_of, package_of

LIBRARIES = frozenset({"trl", "trl_ext", "transformers", "accelerate", "torch", "peft"})

# Methods that get, make or return a batch
STEP = ("training_step", "_prepare_inputs", "compute_loss", "prediction_step")

# GRPO's and RLOO's log-prob pass
PASS = "_get_per_token_logps_and_entropies"

# Methods that read what TRL's loss has computed for each row and token of a batch
LOSS = ("_compute_loss", "get_off_policy_mask", "get_gamma_weights", "get_high_entropy_mask")

# Part of a trainer -> the methods that a subclass can override to replace it
REPLACEABLE = {
    "loss": ("_compute_loss", "compute_loss"),
    "rollouts": ("_generate",),
    "generation": ("_generate", "_generate_single_turn"),
    "rendering": ("_tokenize_prompts",),
    "rewards": ("_calculate_rewards", "_generate_and_score_completions"),
    "batches": ("_generate_and_score_completions",),
    "sampler": ("_get_train_sampler", "get_train_dataloader"),
}


def overrides(trainer: Any, *methods: str) -> str | None:
    """Return the first of `methods` for which code of the user runs; `None` if there is none."""
    classes = type(trainer).__mro__
    return next((x for x in methods if _is_users(vars(trainer).get(x)) or _is_overridden(trainer, x, classes)), None)


def overrides_below(trainer: Any, *methods: str) -> str | None:
    """Return the first of `methods` that is overridden below our trainer: `super()` of ours runs code of the user."""
    classes = type(trainer).__mro__
    below = classes[1 + classes.index(our_class(trainer)) :]
    return next((x for x in methods if _is_overridden(trainer, x, below)), None)


def replaces_backward(accelerator: Any) -> bool:
    """Whether code of the user runs in place of Accelerate's `backward`, and may add to the loss."""
    return _is_users(getattr(accelerator, "backward", None))


def our_class(trainer: Any) -> type:
    return next(cls for cls in type(trainer).__mro__ if "_trl_trainer" in vars(cls))


def _is_overridden(trainer: Any, method: str, classes: tuple[type, ...]) -> bool:
    # Any other class overrides, even one of TRL's that stands between ours and TRL's trainer
    known_classes = {*our_class(trainer).__mro__}
    return any(method in vars(cls) and (cls not in known_classes or _is_users(vars(cls)[method])) for cls in classes)


def _is_users(method: Any) -> bool:
    return any(package_of(x) not in LIBRARIES for x in _functions(method, set()))


def _functions(value: Any, seen_ids: set[int]) -> Iterator[types.FunctionType]:
    """Yield the functions that a call of `value` runs, with those that decorators have wrapped."""
    if value is None or isinstance(value, type) or id(value) in seen_ids:
        return
    seen_ids.add(id(value))
    wrapped: list[Any]
    if isinstance(value, types.FunctionType):
        yield value
        kinds = (types.FunctionType, types.MethodType, functools.partial)
        wrapped = [x for x in closure_of(value) if isinstance(x, kinds)]
    else:
        wrapped = [getattr(value, x, None) for x in ("__func__", "func", "__wrapped__", "fget")]
        if not any(wrapped) and callable(value):
            wrapped = [type(value).__call__]
    for x in wrapped:
        yield from _functions(x, seen_ids)
