"""What both trainers share of the plan: made when training starts, shown by `explain()`, and counted in the logs."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from ..engines.roll_call import roll_call
from ..passes import Decision, Fed, PackingPlan, Plan, Skipped

logger = logging.getLogger("trl_ext")

# What our `compute_loss` adds to a batch
_WITHHELD = {
    *("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"),
    *("ref_chosen_logps", "ref_rejected_logps"),
}


class PlannedPassesMixin:
    """Mixed in before a TRL trainer: `_make_plan` decides which log-prob passes run, and `plan` is what was decided.

    Attributes:
        skipped (`Skipped`): what TRL would have run and this trainer did not, since the last log.
        fed (`Fed`): what ran.
    """

    _plan: Plan | None = None
    _loss_reached: bool | None = None  # whether our `compute_loss` ran in the first training step
    _bypasses_loss = False
    _scored_elsewhere: str | None = None  # what scores the policy in the place of our forward
    scoring_forwards: list[Any]
    _packing_plan: Callable[[], PackingPlan]
    _engine_decision: Callable[[], Decision]
    _head_decision: Callable[[], Decision]
    _replaces: Callable[[str], bool]

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        self.skipped, self.fed = Skipped(), Fed()
        super().__init__(*positional, **keywords)

    def _make_plan(self) -> Plan:
        """The plan, from the arguments as they are now.

        Raises:
            `ValueError`: the arguments ask for what cannot be.
        """
        raise NotImplementedError

    @property
    def plan(self) -> Any:
        """What was decided: when training started, else when it was first asked for."""
        if self._plan is None:
            self._plan = self._make_plan()
        return self._plan

    def explain(self) -> Plan:
        """Which engine runs; which log-prob passes run, are reused or are skipped, which tokens are fed; and why.

        `print(trainer.explain())` shows a table. Before training it speaks of the arguments as they are now.
        """
        plan, packing = self._plan or self._make_plan(), self._packing_plan()
        how = packing.decision, self._head_decision()
        if self._scored_elsewhere is not None:
            how = Decision("packing", "skip", self._scored_elsewhere), Decision("head", "skip", self._scored_elsewhere)
        return dataclasses.replace(
            plan,
            decisions=(self._engine_decision(), *plan.decisions, *how),
            warnings=(*plan.warnings, *packing.warnings),
        )

    def train(self, *positional: Any, **keywords: Any) -> Any:
        """TRL's own, after the plan was made and logged.

        Raises:
            `RankError`: a collective failed because of another rank, which the message names.
        """
        self._plan = self._make_plan()
        if self.accelerator.is_main_process:  # type: ignore[attr-defined]
            plan = self.explain()
            show(f"{type(self).__name__}: what runs, and why\n{plan}")
            for warning in plan.warnings:
                logger.warning(warning)
        with roll_call():
            return super().train(*positional, **keywords)  # type: ignore[misc]

    def training_step(self, *positional: Any, **keywords: Any) -> Any:
        """TRL's own. The first one shows whether a subclass's `compute_loss` calls ours; if not, the plan changes.

        Raises:
            `ValueError`: an option needs our `compute_loss`.
        """
        if self._loss_reached is not None:
            return super().training_step(*positional, **keywords)  # type: ignore[misc]
        self._loss_reached = self.scoring_forwards[0].used = False
        try:
            loss = super().training_step(*positional, **keywords)  # type: ignore[misc]
        except KeyError as error:
            if self._loss_reached or not self._replaces("loss") or not any(error.args == (name,) for name in _WITHHELD):
                raise
            raise RuntimeError(
                f"{self._own_loss()} reads {error} of a batch, and does not call `super().compute_loss(...)`, which "
                "adds it. Call it, or train with TRL's trainer."
            ) from error
        if not self._loss_reached:
            self._bypasses_loss = True
            if not self.scoring_forwards[0].used:
                self._scored_elsewhere = f"{self._own_loss()} scores the policy, without `fused_lm_head=True`."
            self._loss_bypassed()
        return loss

    def _loss_is_ours(self) -> None:
        """Called by our `compute_loss`."""
        if self._loss_reached is False:
            self._loss_reached = True

    def _own_loss(self) -> str:
        return f"`{type(self).__name__}.compute_loss`"

    def _loss_bypassed(self) -> None:
        """Called after the first training step, where a subclass's `compute_loss` did not call ours."""
        if getattr(self.args, "on_non_finite_loss", None) is not None:  # type: ignore[attr-defined]
            raise ValueError(
                f"`on_non_finite_loss={self.args.on_non_finite_loss!r}` needs `super().compute_loss(...)`, which "  # type: ignore[attr-defined]
                f"{self._own_loss()} does not call. Call it, or leave the option unset."
            )
        self._plan = self._make_plan()
        if self.accelerator.is_main_process:  # type: ignore[attr-defined]
            logger.warning(
                f"{self._own_loss()} does not call `super().compute_loss(...)`, so what this trainer adds to TRL's "
                f"loss does not run. The plan is now:\n{self.explain()}"
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's own, with `skipped/*`, `tokens_fed/*` and `head/*`: totals since the last log, of all ranks."""
        mode, prefix = ("train", "") if self.model.training else ("eval", "eval_")  # type: ignore[attr-defined]
        totals = self.skipped.take(mode) | self.fed.take(mode)
        logs.update({f"{prefix}{name}": value for name, value in totals.items()})
        super().log(logs, start_time)  # type: ignore[misc]


def show(message: str) -> None:
    """Log `message` at level INFO, to stderr where the program has not set up logging."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    logger.info(message)
