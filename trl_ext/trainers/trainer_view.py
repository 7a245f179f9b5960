"""What functions that run beside training see of the trainer: what does not race with it. All else is an error."""

import copy
from typing import Any

_WEIGHTS = (
    "Training changes its weights meanwhile. Sample from a copy, and copy the weights in "
    "`rollout_func.sync_weights(trainer)`, which trl_ext calls between optimizer steps."
)
_LOGS = "Training logs meanwhile. A reward function logs with its arguments `log_metric` and `log_extra`."
_COLLECTIVE = "Ranks would run collectives in different orders. Each rank must sample and reward its own rows alone."

_REFUSED = {
    **dict.fromkeys(
        ("model", "model_wrapped", "ref_model", "optimizer", "lr_scheduler", "deepspeed", "save_model", "evaluate"),
        _WEIGHTS,
    ),
    **dict.fromkeys(("log", "log_metrics", "save_metrics", "_metrics", "_logs"), _LOGS),
}
_REFUSED_OF_ACCELERATOR = {
    **dict.fromkeys(
        ("gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone"), _COLLECTIVE
    ),
    **dict.fromkeys(("unwrap_model", "get_state_dict"), _WEIGHTS),
}


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
        if reason is not None:
            raise RuntimeError(
                f"`{type(viewed).__name__}.{name}` was read by a function that runs beside training. {reason}"
            )
        return getattr(viewed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(vars(self)["viewed"]).__name__
        raise RuntimeError(
            f"`{kind}.{name}` was set by a function that runs beside training, which reads it. Keep the value in the "
            "function."
        )


def view_of(trainer: Any, tokenizer: Any) -> Any:
    """Return what `rollout_func` and reward functions see of the trainer, with its state as it is now."""
    state = copy.copy(trainer.state)
    state.log_history = list(state.log_history)
    accelerator = _View(trainer.accelerator, _REFUSED_OF_ACCELERATOR)
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    return _View(trainer, _REFUSED, accelerator=accelerator, processing_class=tokenizer, _tokenizer=inner, state=state)
