"""`as_trl=True`: a trainer whose methods are TRL's, because TRL's classes come before ours in its class.

All methods of ours give way at once, as those of a single feature do where names of TRL have moved (`base.py`).
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from ..callbacks.progress import show
from ..callbacks.summary import show_saved
from ..config import AddedCommonFields
from ..planning.plan import Decision, Plan
from .checkpointing import checkpoint_to_resume


class AsTRL:
    """What a trainer with `as_trl=True` does beyond TRL: it says what runs, and where the model is saved."""

    # Of our trainer, whose names remain where TRL has none
    _added_fields: type[AddedCommonFields]
    _config_class: Any
    args: Any
    model: Any
    accelerator: Any

    def explain(self, verbose: bool = False) -> Plan:
        """Return the plan, which has one row."""
        changed_fields = self._added_fields.changed(self.args)
        # TRL reads its own field of the same name, as SFT's `padding_free`
        unused = changed_fields.keys() - {"as_trl", *(x.name for x in fields(self._config_class))}
        reason = "As stock TRL, because `as_trl` is True."
        if unused:
            reason += f" These arguments have no effect: {', '.join(f'`{name}`' for name in sorted(unused))}."
        return Plan(decisions=(Decision("training", "run", reason),))

    def train(self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **keywords: Any) -> Any:
        """Log the plan, and train as TRL does. `resume_from_checkpoint` takes the same words as in our trainers."""
        if self.accelerator.is_main_process and self.args.show_plan:
            show(f"{type(self).__name__}: what runs, and why\n{self.explain()}")
        checkpoint = None
        if resume_from_checkpoint:
            checkpoint = checkpoint_to_resume(resume_from_checkpoint, Path(self.args.output_dir))
        return super().train(checkpoint, *positional, **keywords)  # type: ignore[misc]

    def save_model(self, *positional: Any, **keywords: Any) -> None:
        super().save_model(*positional, **keywords)  # type: ignore[misc]
        if self.accelerator.is_main_process and self.args.show_plan:
            show_saved(self, *positional, **keywords)


def give_way_to_trl(instance: Any, ours: tuple[type, ...]) -> None:
    """Make a trainer find TRL's methods before those of `ours`, the classes of trl_ext among its classes.

    Methods of a user's class still come first, and `super()` in them is TRL's.
    """
    trainer_class = type(instance)

    class TRLFirst(type(trainer_class)):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            classes = super().mro()
            place = classes.index(ours[0])
            later = [x for x in classes[place:] if x not in (*ours, AsTRL, object)]
            return [*classes[:place], AsTRL, *later, *ours, object]

    names = {"__module__": trainer_class.__module__, "__qualname__": trainer_class.__qualname__}
    instance.__class__ = TRLFirst(trainer_class.__name__, (trainer_class, AsTRL), names)
