"""A loss that is not finite is named, and stops training or costs its optimizer step on all ranks."""

import logging
from collections.abc import Callable
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from transformers.training_args import OptimizerNames

from ..distributed.detect import detect_engine
from ..planning.non_finite import why_not_skipped

logger = logging.getLogger("trl_ext")


class NonFiniteLoss:
    def __init__(self, trainer: Any, ranks: Any) -> None:
        self.trainer, self.ranks, self._spoilt = trainer, ranks, False

    @property
    def action(self) -> str | None:
        return getattr(self.trainer.args, "on_non_finite_loss", None)

    def check_options(self) -> None:
        if self.action != "skip":
            return
        trainer = self.trainer
        reason = why_not_skipped(
            engine=detect_engine(trainer.accelerator, trainer.model).data_engine,
            precision=trainer.accelerator.mixed_precision,
            optimizer=OptimizerNames(trainer.args.optim).value,
        )
        if reason is not None:
            raise ValueError(f"`on_non_finite_loss='skip'` is not supported here: {reason}. Use 'stop'.")

    def step_begins(self) -> None:
        self._spoilt = False

    def before_step(self, model: Any) -> None:
        if self._spoilt:
            for param in model.parameters():
                param.grad = None

    def watch(
        self, loss: Tensor, rows_of: Callable[[], dict[int, list[str]]], prompt_of: Callable[[int], list[int]]
    ) -> None:
        """Called on every rank with the loss of each micro-batch."""
        if self.action is None or not self.trainer.model.training:
            return
        spoilt = self.ranks.every.reduce((~loss.detach().isfinite()).float(), reduction="sum")
        if not int(spoilt):
            return
        reports = gather_object([self._report(loss, rows_of, prompt_of)])
        where = (
            f"The loss is not finite in step {self.trainer.state.global_step + 1}. {' '.join(filter(None, reports))}"
        )
        if self.action == "stop":
            raise FloatingPointError(where)
        if self.ranks.every.is_main_process:
            logger.warning("%s The optimizer step is left out on all ranks.", where)
        self._spoilt = True

    def _report(self, loss: Tensor, rows_of: Any, prompt_of: Any) -> str | None:
        if loss.detach().isfinite():
            return None
        rank = f"Rank {self.ranks.every.process_index}"
        rows = rows_of()
        if not rows:
            return f"{rank}: log-probs and rewards are finite, and what the loss makes of them is {loss.item()}."
        named = [f"row {row} ({', '.join(rows[row])}) of the prompt {self._start_of(prompt_of(row))}" for row in rows]
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        return f"{rank}: {'; '.join(named[:4])}{more}."

    def _start_of(self, prompt_ids: list[int]) -> str:
        return repr(self.trainer._tokenizer.decode(prompt_ids[:16]) + ("..." if len(prompt_ids) > 16 else ""))
