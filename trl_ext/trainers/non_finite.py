"""Stops training, or skips the optimizer step, on all ranks if a loss is not finite."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from accelerate.utils import gather_object
from torch import Tensor

from ..distributed.detect import detect_engine
from ..distributed.ranks import Ranks
from ..planning.non_finite import why_not_skipped

logger = logging.getLogger("trl_ext")

# Returns row -> names of its values that are not finite; None if no pass of the policy was seen
Rows = Callable[[], dict[int, list[str]] | None]


class Trainer(Protocol):
    """The trainer members that `NonFiniteLoss` reads."""

    accelerator: Any
    args: Any
    model: Any
    state: Any
    _tokenizer: Any


def _log_probs_of(inputs: dict[str, Any], outputs: Any) -> Tensor | None:
    """Return the log-probs of a scoring forward. Virtual tokens of prompt tuning have none."""
    if not inputs.get("fused_lm_head"):
        return None
    tokens = inputs.get("labels", inputs.get("input_ids"))
    first_column = 0 if tokens is None else -(tokens.shape[1] - 1)
    log_probs: Tensor = outputs.log_probs[:, first_column:]
    return log_probs


class NonFiniteLoss:
    """Implements `on_non_finite_loss`: checks the loss of each micro-batch, and names the rows at fault."""

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self._skips_step = False  # because a loss of this optimizer step is not finite

    @property
    def action(self) -> str | None:
        return getattr(self.trainer.args, "on_non_finite_loss", None)

    def check_options(self) -> None:
        if self.action != "skip":
            return
        from transformers.training_args import OptimizerNames

        accelerator = self.trainer.accelerator
        optimizer = OptimizerNames(self.trainer.args.optim).value
        engine = detect_engine(accelerator, self.trainer.model).data_engine
        reason = why_not_skipped(engine=engine, precision=accelerator.mixed_precision, optimizer=optimizer)
        if reason is not None:
            raise ValueError(f"`on_non_finite_loss='skip'` is not supported here: {reason}. Set it to 'stop'.")

    def step_begins(self) -> None:
        self._skips_step = False

    def before_step(self, model: Any) -> None:
        if self._skips_step:
            for param in model.parameters():
                param.grad = None

    @contextmanager
    def recorded(
        self, model: Any, values_of: Callable[[dict[str, Any], Any], Tensor | None] = _log_probs_of
    ) -> Iterator[list[Tensor]]:
        """Record the values that `model` is trained with in the `with` block.

        Args:
            values_of (`Callable`): returns them from a forward's inputs and outputs; by default, log-probs.
        """
        recorded_values: list[Tensor] = []
        if self.action is None:
            yield recorded_values
            return

        def record(module: Any, positional: Any, inputs: dict[str, Any], outputs: Any) -> None:
            values = values_of(inputs, outputs)
            if values is not None and values.requires_grad:
                recorded_values.append(values.detach())

        hook = model.register_forward_hook(record, with_kwargs=True)
        try:
            yield recorded_values
        finally:
            hook.remove()

    def watch(self, loss: Any, rows_of: Rows, prompt_of: Callable[[int], list[int]]) -> None:
        """Check what `compute_loss` returns for a micro-batch. Every rank must call it.

        Raises:
            `FloatingPointError`: the loss is not finite on some rank, and the action is `"stop"`.
        """
        if self.action is None or not self.trainer.model.training:
            return
        loss = loss[0] if isinstance(loss, tuple) else loss
        if not int(self.ranks.world.reduce((~loss.detach().isfinite()).float(), reduction="sum")):
            return
        reports = " ".join(filter(None, gather_object([self._report(loss, rows_of, prompt_of)])))
        where = f"The loss is not finite in step {self.trainer.state.global_step + 1}. {reports}"
        if self.action == "stop":
            raise FloatingPointError(where)
        if self.ranks.world.is_main_process:
            logger.warning("%s All ranks skip this optimizer step.", where)
        self._skips_step = True

    def _report(self, loss: Tensor, rows_of: Rows, prompt_of: Callable[[int], list[int]]) -> str | None:
        if loss.detach().isfinite():
            return None
        rank = f"Rank {self.ranks.world.process_index}"
        rows = rows_of()
        if rows is None:
            return f"{rank}: the loss is {loss.item()}."
        if not rows:
            return f"{rank}: log-probs and rewards are finite, but the loss is {loss.item()}."
        descriptions = []
        for row in list(rows)[:4]:
            ids = prompt_of(row)
            prompt = self.trainer._tokenizer.decode(ids[:16]) + ("..." if len(ids) > 16 else "")
            descriptions.append(f"row {row} ({', '.join(rows[row])}) of the prompt {prompt!r}")
        more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
        return f"{rank}: {'; '.join(descriptions)}{more}."
