"""What both trainers share of the plan: made when training starts, shown by `explain()`, and counted in the logs."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from ..engines.roll_call import roll_call
from ..passes import Decision, Fed, PackingPlan, Plan, Skipped

logger = logging.getLogger("trl_ext")


class PlannedPassesMixin:
    """Mixed in before a TRL trainer: `_make_plan` decides which log-prob passes run, and `plan` is what was decided.

    Attributes:
        skipped (`Skipped`): what TRL would have run and this trainer did not, since the last log.
        fed (`Fed`): what ran.
    """

    _plan: Plan | None = None
    _packing_plan: Callable[[], PackingPlan]
    _engine_decision: Callable[[], Decision]
    _head_decision: Callable[[], Decision]

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
        return dataclasses.replace(
            plan,
            decisions=(self._engine_decision(), *plan.decisions, packing.decision, self._head_decision()),
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
