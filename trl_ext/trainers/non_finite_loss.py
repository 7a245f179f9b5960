"""Both trainers: a loss that is not finite is named, and stops training or costs its optimizer step on all ranks."""

import logging
from collections.abc import Callable
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from transformers.training_args import OptimizerNames

from ..engines.running import running
from ..passes.non_finite import why_not_skipped

logger = logging.getLogger("trl_ext")


class NonFiniteLossMixin:
    """Mixed in before a TRL trainer, whose `compute_loss` calls `_watch_loss` with each loss."""

    accelerator: Any
    args: Any
    model: Any
    _step_is_spoilt = False
    _as_every_rank: Callable[[], Any]

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        if self._on_non_finite_loss == "skip":
            self._check_that_steps_can_be_skipped()
            self.add_callback(_LeavesOutSpoiltSteps(self))  # type: ignore[attr-defined]

    @property
    def _on_non_finite_loss(self) -> str | None:
        return getattr(self.args, "on_non_finite_loss", None)

    def _check_that_steps_can_be_skipped(self) -> None:
        runs = running(self.accelerator, self.model)
        reason = why_not_skipped(
            engine=runs.data_engine,
            precision=self.accelerator.mixed_precision,
            optimizer=OptimizerNames(self.args.optim).value,
        )
        if reason is not None:
            raise ValueError(f"`on_non_finite_loss='skip'` cannot be had here: {reason}. Use 'stop'.")

    def _watch_loss(
        self, loss: Tensor, rows_of: Callable[[], dict[int, list[str]]], prompt_of: Callable[[int], list[int]]
    ) -> None:
        """Called on every rank with the loss of each micro-batch.

        Args:
            rows_of (`Callable`): the rows of this rank that are to blame, and the passes.
            prompt_of (`Callable`): the token ids of the prompt of a row.

        Raises:
            `FloatingPointError`: a rank's loss is not finite, and training is to stop there.
        """
        if self._on_non_finite_loss is None or not self.model.training:
            return
        with self._as_every_rank():
            spoilt = self.accelerator.reduce((~loss.detach().isfinite()).float(), reduction="sum")
            if not int(spoilt):
                return
            reports = gather_object([self._report(loss, rows_of, prompt_of)])
        trainer: Any = self
        where = f"The loss is not finite in step {trainer.state.global_step + 1}. {' '.join(filter(None, reports))}"
        if self._on_non_finite_loss == "stop":
            raise FloatingPointError(where)
        if self.accelerator.is_main_process:
            logger.warning("%s The optimizer step is left out on all ranks.", where)
        self._step_is_spoilt = True

    def _report(self, loss: Tensor, rows_of: Any, prompt_of: Any) -> str | None:
        if loss.detach().isfinite():
            return None
        rank = f"Rank {self.accelerator.process_index}"
        rows = rows_of()
        if not rows:
            return f"{rank}: log-probs and rewards are finite, and what the loss makes of them is {loss.item()}."
        named = [f"row {row} ({', '.join(rows[row])}) of the prompt {self._start_of(prompt_of(row))}" for row in rows]
        more = f" and {len(named) - 4} more" if len(named) > 4 else ""
        return f"{rank}: {'; '.join(named[:4])}{more}."

    def _start_of(self, prompt_ids: list[int]) -> str:
        processing: Any = self.processing_class  # type: ignore[attr-defined]
        tokenizer = getattr(processing, "tokenizer", processing)
        return repr(tokenizer.decode(prompt_ids[:16]) + ("..." if len(prompt_ids) > 16 else ""))


class _LeavesOutSpoiltSteps(TrainerCallback):
    """An optimizer leaves parameters without a gradient as they are, decay and moments included."""

    def __init__(self, trainer: NonFiniteLossMixin) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._step_is_spoilt = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if self.trainer._step_is_spoilt:
            for param in model.parameters():
                param.grad = None
