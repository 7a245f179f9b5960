"""DPO's passes: reference and policy score a batch before TRL's loss; the policy perhaps in parts, which also train.

Dimensions: B pairs, so 2B rows, the chosen ones first; S tokens of the longest row.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compat import dpo as internals
from ..compat.reference import labels_of
from ..distributed.ranks import Ranks
from ..planning.dpo import DPOPlan
from ..planning.parts import few_parts
from ..planning.plan import PackingPlan
from ..scoring.output import FusedCausalLMOutput
from .dpo_batches import pair_tokens
from .dpo_loss import LossInputs
from .dpo_reference import DPOReference
from .part_training import PartTraining

PartLoss = Callable[[LossInputs], Tensor]


class Trainer(internals.DPOInternals, Protocol):
    """The trainer members that the passes read."""

    @property
    def plan(self) -> DPOPlan: ...

    def _packing_plan(self) -> PackingPlan: ...


class DPOPasses:
    def __init__(self, trainer: Trainer, ranks: Ranks, source: DPOReference, part_training: PartTraining) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.source = source
        self.part_training = part_training
        # The place of each row of the batch in the policy's forwards, one after another; None if there was one forward
        self._order: Tensor | None = None

    def score(self, model: Any, batch: dict[str, Any], part_loss: PartLoss | None) -> LossInputs:
        """Run both models over a batch, whose log-probs the loss reads.

        Args:
            part_loss (`Callable`, *optional*):
                the loss of some pairs, a scalar. In a training step with `max_tokens_per_micro_batch`, the pass trains
                all parts of the batch but the last, so that only one of them has activations in memory.
        """
        self._order = None
        labels = labels_of(batch)
        plan = self.trainer.plan
        budget = plan.facts.max_tokens_per_micro_batch
        if budget is not None and plan.splits and part_loss is not None and self.part_training.is_possible:
            reference = self.source.score(batch, labels)
            scores = self._score_in_parts(model, batch, labels, reference, budget, part_loss)
        elif self.source.draws_after_policy:
            scores = internals.score_policy(self.trainer, model, batch, labels)
            reference = self.source.score(batch, labels)
        else:
            # Before the policy has activations in memory
            reference = self.source.score(batch, labels)
            scores = internals.score_policy(self.trainer, model, batch, labels)
        return LossInputs(batch, scores, reference)

    def _score_in_parts(
        self,
        model: Any,
        batch: dict[str, Any],
        labels: Tensor,
        reference: Tensor | None,
        budget: int,
        part_loss: PartLoss,
    ) -> FusedCausalLMOutput:
        """Train all parts of a batch but the last. Returns the scores of all, with a graph for the last."""
        self.part_training.start_micro_batch()
        parts = self._parts(batch, budget)
        rows_of_parts = [internals.rows_of_pairs(batch, pairs) for pairs in parts]
        part_scores: list[dict[str, Any]] = []

        def score_part(pairs: list[int], rows: Tensor) -> LossInputs:
            part = internals.select_pairs(batch, pairs)
            scores = internals.score_policy(self.trainer, model, part, labels[rows])
            return LossInputs(part, scores, None if reference is None else reference[rows])

        for pairs, rows in zip(parts[:-1], rows_of_parts[:-1], strict=True):

            def loss_of_pairs(pairs: list[int] = pairs, rows: Tensor = rows) -> Tensor:
                loss_inputs = score_part(pairs, rows)
                part_scores.append({name: x.detach() for name, x in loss_inputs.scores.items()})
                return part_loss(loss_inputs) * (len(pairs) / (len(labels) // 2))

            # `part_loss` logs nothing: the metrics of all pairs come with the loss of the whole batch
            self.part_training.train_part(model, batch, None, loss_of_pairs)
        last = score_part(parts[-1], rows_of_parts[-1])
        self._order = torch.cat(rows_of_parts).argsort()
        return internals.join_scores([*part_scores, dict(last.scores.items())], self._order)

    def _parts(self, batch: dict[str, Any], budget: int) -> list[list[int]]:
        """Return the pairs of each part. All ranks have equally many parts, because each runs collectives."""
        tokens = pair_tokens(batch, self.trainer._packing_plan())
        pairs = list(range(len(batch["completion_mask"]) // 2))
        parts = few_parts(tokens, pairs, budget)
        most = max(count[0] for count in self.ranks.gather_counts([len(parts)]))
        return few_parts(tokens, pairs, budget, at_least=most)

    def in_order(self, forwards: list[Tensor]) -> Tensor:
        """Return what the policy's forwards over a batch gave, `(rows, ...)` each, as rows of the batch."""
        return forwards[0] if self._order is None else torch.cat(forwards)[self._order]
