"""What functions that run beside training see of the trainer: its values. Its models and methods are errors."""

import copy
from types import MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

_WEIGHTS = (
    "Training changes its weights meanwhile. Sample from a copy, and copy the weights in "
    "`rollout_func.sync_weights(trainer)`, which trl_ext calls between optimizer steps."
)
_COLLECTIVE = "Ranks would run collectives in different orders. Each rank must sample and reward its own rows alone."
_LOGS = "Training logs meanwhile. A reward function logs with its arguments `log_metric` and `log_extra`."
_METHOD = "It may run the model, collectives or logs while training does."

# In addition to what is a model, an optimizer or a method of a library
_REFUSED = {
    **dict.fromkeys(("deepspeed", "callback_handler", "lr_scheduler", "vllm_generation"), _WEIGHTS),
    **dict.fromkeys(("log", "_metrics", "_logs"), _LOGS),
}
_REFUSED_OF_ACCELERATOR = {
    **dict.fromkeys(
        ("gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone"), _COLLECTIVE
    ),
    **dict.fromkeys(("unwrap_model", "get_state_dict", "_models", "_optimizers"), _WEIGHTS),
}
_ALLOWED = ("is_world_process_zero", "is_local_process_zero", "print")
_LIBRARIES = ("transformers", "trl", "trl_ext", "accelerate")


class _View:
    """Passes reads on to an object, except for those that are refused."""

    def __init__(self, viewed: Any, refused: dict[str, str], **members: Any) -> None:
        vars(self).update(viewed=viewed, refused=refused, **members)

    @property
    def __class__(self) -> type:  # so that `isinstance(trainer, GRPOTrainer)` holds
        return type(self.viewed)

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise TypeError("The class of a view cannot be set.")

    def __getattr__(self, name: str) -> Any:
        viewed = vars(self)["viewed"]
        reason = vars(self)["refused"].get(name)
        value = None
        if reason is None:
            value = getattr(viewed, name)
            reason = None if name in _ALLOWED else _refusal(viewed, value)
        if reason is not None:
            raise RuntimeError(
                f"`{type(viewed).__name__}.{name}` was read by a function that runs beside training. {reason}"
            )
        if isinstance(value, MethodType) and value.__self__ is viewed and name not in _ALLOWED:
            return MethodType(value.__func__, self)  # a user's own method reads the view in turn
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(vars(self)["viewed"]).__name__
        raise RuntimeError(
            f"`{kind}.{name}` was set by a function that runs beside training, which reads it. Keep the value in the "
            "function."
        )


def _refusal(viewed: Any, value: Any) -> str | None:
    """Return why a function must not use a `value` of `viewed`; `None` if it may."""
    if isinstance(value, nn.Module | Optimizer):
        return _WEIGHTS
    if not isinstance(value, MethodType) or value.__self__ is not viewed:
        return None
    library, _, _ = value.__func__.__module__.partition(".")
    return _METHOD if library in _LIBRARIES else None


def view_of(trainer: Any, tokenizer: Any) -> Any:
    """Return what `rollout_func` and reward functions see of the trainer, with its state as it is now."""
    state = copy.copy(trainer.state)
    state.log_history = list(state.log_history)
    accelerator = _View(trainer.accelerator, _REFUSED_OF_ACCELERATOR)
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    return _View(trainer, _REFUSED, accelerator=accelerator, processing_class=tokenizer, _tokenizer=inner, state=state)
