"""DPO's metrics on several ranks: those that one process has on the same rows, from one gather a batch."""

from collections.abc import Callable
from typing import Any

import torch

from ..compat import DPOLossInternals, Recorded
from ..losses import Counts, counts_of, of_all_ranks, weighted


class MetricsOfAllRanksMixin(DPOLossInternals):
    """Mixed in before TRL's `DPOTrainer`.

    TRL's own code forms each metric of this rank's rows; what is combined over the ranks is the result, weighted by the
    pairs or tokens that it is a mean over. Rows that accelerate has repeated at the end of a data set do not count.
    """

    _tokens_fed: Callable[[], list[int]]
    _count_tokens_fed: Callable[[list[int]], None]

    def _loss_on_rank(self, model: Any, batch: dict[str, Any], return_outputs: bool) -> Any:
        """The loss of this rank's batch, as TRL's `_compute_loss` gives it."""
        raise NotImplementedError

    def _loss_of(self, model: Any, batch: dict[str, Any], return_outputs: bool) -> Any:
        if self.accelerator.state.num_processes == 1:
            return self._loss_on_rank(model, batch, return_outputs)
        every = len(batch["completion_mask"]) // 2
        pairs = self._pairs_not_repeated(every) if self._can_score_again() else every
        scored = Recorded(model)
        with self._metrics_of_this_rank() as found:
            result = self._loss_on_rank(scored, batch, return_outputs)
        counts = Counts()
        if pairs == every:
            counts = counts_of(batch["completion_mask"])
        elif pairs:

            def loss_of(answers: Any, part: dict[str, Any]) -> Any:
                nonlocal counts
                counts = counts_of(part["completion_mask"])
                return self._loss_on_rank(answers, part, False)

            with self._metrics_of_this_rank() as found:
                loss = self._loss_of_pairs(pairs, scored.outputs, batch, loss_of)
            if not self.model.training:  # transformers takes its mean over the rows that are not repeated
                result = (loss, result[1]) if return_outputs else loss
        self._log_of_all_ranks(found, counts)
        return result

    def _pairs_not_repeated(self, every: int) -> int:
        """How many of this rank's pairs, from the first on, no rank has had before."""
        end = self._repeated_rows_at_end()
        return every if end is None else min(max(end - self.accelerator.process_index * every, 0), every)

    def _log_of_all_ranks(self, found: dict[str, list[float]], counts: Counts) -> None:
        """Log the metrics that `found` holds of this rank's rows as those of all ranks'; one gather."""
        values = {name: of_batch[-1] for name, of_batch in found.items()}
        tokens = values.pop("num_tokens", 0)
        mean, fed = weighted(values, counts), self._tokens_fed()
        numbers = [*mean, tokens if counts.pairs else 0, *fed]
        gathered = self.accelerator.gather(torch.tensor([numbers], dtype=torch.float64, device=self.accelerator.device))
        self._log_metrics(of_all_ranks(sorted(values), gathered[:, : len(mean)]))
        total, *fed = map(int, gathered[:, len(mean) :].sum(0).tolist())
        self._log_tokens(total)
        self._count_tokens_fed(fed)
