"""The DPO loss of a batch: TRL's terms without overflow, the terms that TRL lacks, and metrics of all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compat import dpo as internals
from ..compat.overrides import overrides_below
from ..config import AddedDPOFields
from ..distributed.ranks import Ranks
from ..losses.preference import PREFERENCE_LOSSES, READ_REWARDS, LossOptions, pairs_of, rpo_margins, smoothing_term
from ..losses.reward_columns import REWARD_COLUMNS
from ..losses.weighted_metrics import Counts, counts_of, of_all_ranks, weighted
from ..planning.dpo import DPOPlan
from ..planning.non_finite import PairExponential, bounded_pairs
from ..planning.parts import few_parts
from ..planning.plan import PackingPlan
from ..scoring.scorer import Scorer
from .dpo_batches import pair_tokens
from .part_training import PartTraining


class Trainer(internals.DPOInternals, Protocol):
    """The trainer members that the loss reads."""

    beta: float
    label_smoothing: float
    f_divergence_type: str
    f_alpha_divergence_coef: float

    @property
    def plan(self) -> DPOPlan: ...

    def _packing_plan(self) -> PackingPlan: ...


class DPOLoss:
    def __init__(
        self,
        trainer: Trainer,
        ranks: Ranks,
        scorer: Scorer,
        labels_of: Callable[[dict[str, Any]], Tensor],
        part_training: PartTraining,
    ) -> None:
        self.trainer, self.ranks, self.scorer, self._labels_of = trainer, ranks, scorer, labels_of
        self._part_training = part_training
        self._order: Tensor | None = None  # of the rows of all forward passes, to those of the batch
        self.classes = 0
        self.columns: tuple[str, ...] = ()
        self.counted: list[int] | None = None  # token counts of a batch's passes, if gathered with its metrics

    @property
    def options(self) -> AddedDPOFields:
        """The added fields, read at each use because a user may change `trainer.args`."""
        return AddedDPOFields.of(self.trainer.args)

    def of_batch(self, model: Any, batch: dict[str, Any], return_outputs: bool) -> Any:
        """Compute the loss in place of TRL's `_compute_loss`. One gather combines the metrics of all ranks."""
        trainer, labels, self._order = self.trainer, self._labels_of(batch), None
        self._part_training.start_micro_batch()
        budget = self.options.max_tokens_per_micro_batch
        if budget is not None and trainer.plan.splits and self._part_training.is_possible and not return_outputs:
            model = self._parts_trained(model, batch, labels, budget)
        elif overrides_below(trainer, "_compute_loss") is None:  # otherwise TRL's labels may be those of another batch
            model = internals.with_labels(model, labels)
        if trainer.accelerator.state.num_processes == 1:
            return self._of_rank(model, batch, return_outputs)
        every = len(batch["completion_mask"]) // 2
        pairs = internals.pairs_not_repeated(trainer, every)
        scored = internals.Recorded(model)
        with internals.metrics_of_this_rank(trainer) as found:
            result = self._of_rank(scored, batch, return_outputs)
        counts = counts_of(batch["completion_mask"]) if pairs == every else Counts()
        if 0 < pairs < every:

            def of_part(outputs: Any, part: dict[str, Any]) -> Any:
                nonlocal counts
                counts = counts_of(part["completion_mask"])
                return self._of_rank(outputs, part, False)

            with internals.metrics_of_this_rank(trainer) as found:
                loss = internals.loss_of_first_pairs(trainer, pairs, scored.outputs, batch, of_part)
            if not trainer.model.training:
                result = (loss, result[1]) if return_outputs else loss
        self._log_of_all_ranks(found, counts)
        return result

    def _parts_trained(self, model: Any, batch: dict[str, Any], labels: Tensor, budget: int) -> Callable[..., Any]:
        """Train all parts of a batch but the last. Returns a model that runs the last, with the outputs of all."""
        trainer, every = self.trainer, len(labels) // 2
        tokens = pair_tokens(batch, trainer._packing_plan())
        parts = few_parts(tokens, list(range(every)), budget)
        most = max(count[0] for count in self.ranks.gather_counts([len(parts)]))
        *first, last = few_parts(tokens, list(range(every)), budget, at_least=most)
        rows = [internals.rows_of_pairs(batch, pairs) for pairs in (*first, last)]
        done: list[Any] = []

        def trained(pairs: list[int], rows: Tensor) -> Tensor:
            scored = internals.Recorded(internals.with_labels(model, labels[rows]))
            with internals.part_given(trainer, pairs, batch) as part:
                loss = self._of_rank(scored, part, False) * (len(pairs) / every)
            done.append({name: x.detach() for name, x in scored.outputs.items()})
            return loss

        for pairs, of_part in zip(first, rows[:-1], strict=True):
            aside = internals.metrics_of_this_rank(trainer)
            self._part_training.train_part(model, batch, None, partial(trained, pairs, of_part), aside)
        order = self._order = torch.cat(rows).argsort()

        def run(**inputs: Any) -> Any:
            if not inputs.get("fused_lm_head"):
                return model(**inputs)
            scored = internals.with_labels(model, labels[rows[-1]])(**internals.rows_of(inputs, rows[-1]))
            return internals.joined([*done, dict(scored.items())], order)

        return run

    def in_order(self, values: list[Tensor]) -> Tensor:
        """Return what the forward passes of a batch gave, `(rows, ...)` each, as rows of the batch."""
        return values[0] if self._order is None else torch.cat(values)[self._order]

    def _log_of_all_ranks(self, found: dict[str, list[float]], counts: Counts) -> None:
        values = {name: of_batch[-1] for name, of_batch in found.items()}
        tokens = values.pop("num_tokens", 0)
        mean = weighted(values, counts)
        numbers = [*mean, tokens if counts.pairs else 0, *self.scorer.take_counts()]
        row = torch.tensor([numbers], dtype=torch.float64, device=self.ranks.device)
        gathered = self.ranks.accelerator.gather(row)
        internals.log_metrics(self.trainer, of_all_ranks(sorted(values), gathered[:, : len(mean)]))
        total, *counted = map(int, gathered[:, len(mean) :].sum(0).tolist())
        self.counted = [a + b for a, b in zip(self.counted or (0, 0, 0, 0), counted, strict=True)]
        internals.log_tokens(self.trainer, total)

    def _of_rank(self, model: Any, batch: dict[str, Any], return_outputs: bool) -> Any:
        weights = list(zip(self.trainer.loss_types, self.trainer.loss_weights, strict=True))
        own = [(name, weight) for name, weight in weights if name in PREFERENCE_LOSSES]
        smoothed = [weight for name, weight in weights if name == "sft" and self.options.sft_label_smoothing]
        known = {name: x for name, x in batch.items() if name not in REWARD_COLUMNS}
        if not own and not smoothed:
            return self._of_trl(model, known, return_outputs, but=set())
        scored = internals.Recorded(model)
        result = self._of_trl(scored, known, return_outputs, but=set(PREFERENCE_LOSSES))
        loss = result[0] if return_outputs else result
        if own:
            loss = loss + self._of_pairs(own, scored.outputs, batch)
        for weight in smoothed:
            loss = loss + weight * self._of_smoothing(scored.outputs, batch["completion_mask"])
        return (loss, result[1]) if return_outputs else loss

    def _of_trl(self, model: Any, batch: dict[str, Any], return_outputs: bool, but: set[str]) -> Any:
        """Compute TRL's terms. Terms whose exponentials overflow use reference log-probs nearer to the policy's."""
        trainer, exponentials = self.trainer, {}
        given = {"beta": trainer.beta, "label_smoothing": trainer.label_smoothing}
        given["alpha"] = trainer.f_alpha_divergence_coef
        for name, weight in zip(trainer.loss_types, trainer.loss_weights, strict=True):
            found = PairExponential.of(name, trainer.f_divergence_type, weight=weight, **given)
            if found is not None and name not in but:
                exponentials[name] = found
        if not exponentials:
            return internals.trl_loss(trainer, model, batch, return_outputs, but)
        scored = internals.Recorded(model)
        result = internals.trl_loss(trainer, scored, batch, return_outputs, but)
        policy_2B = torch.stack(internals.policy_sums(trainer, scored.outputs, batch)).detach()
        reference_2B = torch.stack(internals.reference_sums(trainer, batch))
        moved = {name: bounded_pairs(policy_2B, reference_2B, x) for name, x in exponentials.items()}
        overflows = {name: x for name, x in moved.items() if x is not None}
        if not overflows:
            return result
        loss = internals.recompute_trl_loss(trainer, scored.outputs, batch, {*but, *overflows})
        for name, sums in overflows.items():
            others = set(trainer.loss_types) - {name}
            loss = loss + internals.recompute_trl_loss(trainer, scored.outputs, batch, others, sums)
        return (loss, result[1]) if return_outputs else loss

    def _of_pairs(self, own: list[tuple[str, float]], outputs: Any, batch: dict[str, Any]) -> Tensor:
        completion_mask = batch["completion_mask"]
        pairs = pairs_of(
            outputs.log_probs[:, 1 - completion_mask.shape[1] :],
            completion_mask,
            internals.reference_sums(self.trainer, batch),
            tuple(batch[name] for name in self.columns),
        )
        options = LossOptions(
            beta=self.trainer.beta,
            label_smoothing=self.trainer.label_smoothing,
            reward_scale=self.options.reward_scale,
            rpo_average_log_probs=self.options.rpo_average_log_probs,
        )
        if not READ_REWARDS.isdisjoint(name for name, _ in own):
            with torch.no_grad():
                margin, target = rpo_margins(pairs, options)
                means = {"target_margins": target.mean(), "margin_errors": (margin - target).abs().mean()}
                internals.log_metrics(self.trainer, {f"rewards/{name}": x.item() for name, x in means.items()})
        return torch.stack([weight * PREFERENCE_LOSSES[name](pairs, options).mean() for name, weight in own]).sum()

    def _of_smoothing(self, outputs: Any, completion_mask: Tensor) -> Tensor:
        mask = completion_mask[:, 1:].chunk(2)[0]
        of_chosen, means = (x[: len(mask), -mask.shape[1] :] for x in (outputs.log_probs, outputs.mean_log_probs))
        return smoothing_term(
            *(of_chosen, means, mask),
            smoothing=self.options.sft_label_smoothing,
            convention=self.options.sft_label_smoothing_convention,
            vocabulary=self.classes,
        )
