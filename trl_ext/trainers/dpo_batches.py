"""The micro-batches of a DPO optimizer step: which pairs they hold, on which rank, and in how many forward passes."""

from typing import Any, Protocol

import torch
from torch import Tensor

from ..compat import dpo as internals
from ..compat.reference import PAIR_COLUMNS
from ..distributed.exchange import Column, equally_wide
from ..distributed.ranks import Ranks
from ..planning.dpo import DPOPlan
from ..planning.micro_batches import UNSHARED, RowTokens, StepRows, content_hash
from ..planning.plan import PackingPlan
from .dpo_metrics import DPOMetrics
from .part_training import PartTraining
from .row_balance import RowBalance

_SIDES = ("chosen", "rejected")


class Trainer(internals.DPOInternals, Protocol):
    """The trainer members that this file reads."""

    @property
    def plan(self) -> DPOPlan: ...

    def _packing_plan(self) -> PackingPlan: ...


class DPOBatches:
    def __init__(
        self, trainer: Trainer, ranks: Ranks, balance: RowBalance, metrics: DPOMetrics, part_training: PartTraining
    ) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.balance = balance
        self.metrics = metrics
        self.part_training = part_training
        self.merged_micro_batches = 1  # how many micro-batches of TRL's the last one of the optimizer step stands for

    def rearranged(self, samples: list[Any]) -> list[Any]:
        """Return the micro-batches of an optimizer step, with pairs of all ranks, in as few as the plan allows.

        If they are merged, the last one holds all pairs, and those before it have none.
        """
        plan = self.trainer.plan
        self.part_training.divides_loss = True
        self.merged_micro_batches = 1
        if not samples or not (plan.balances or plan.merges):
            return samples
        count = len(samples)
        columns = self._columns()
        pairs = self._pairs(samples, columns)
        if self.ranks.any(not pairs):
            return samples
        size = len(pairs["chosen_input_ids"]) // count
        if plan.balances:
            step = StepRows(size, count).merged if plan.merges else StepRows(size, count)
            tokens = pair_tokens(_batch(pairs, columns), self.trainer._packing_plan())
            pairs = self.balance.reorder(pairs, tokens, columns, step, completions=2)
            self.metrics.record_balance()
        if plan.merges:
            self.part_training.divides_loss = False
            self.merged_micro_batches = count
            merged_batch = _batch(pairs, columns)
            without_rows = {name: x[:0] for name, x in merged_batch.items()}
            batches = [without_rows] * (count - 1) + [merged_batch]
        else:
            starts = range(0, size * count, size)
            batches = [_batch({name: x[i : i + size] for name, x in pairs.items()}, columns) for i in starts]
        self._count_padding(samples, batches)
        return batches

    def _count_padding(self, samples: list[Any], batches: list[dict[str, Tensor]]) -> None:
        """Keep padding that TRL's micro-batches do not have out of the skipped tokens, in each of TRL's passes."""
        tokens, trl_tokens = (sum(x["input_ids"].numel() for x in group) for group in (batches, samples))
        passes = 1 if self.trainer.args.precompute_ref_log_probs else 2
        self.metrics.scorer.policy.packing.skipped_tokens -= passes * (tokens - trl_tokens)

    def _columns(self) -> dict[str, Column]:
        args = self.trainer.args
        fills = {"input_ids": internals.pad_token_id(self.trainer), "attention_mask": 0, "completion_mask": 0}
        return {
            f"{side}_{name}": Column(fill, width="sequence", multiple=args.pad_to_multiple_of or 1)
            for side in _SIDES
            for name, fill in fills.items()
        }

    def _pairs(self, samples: list[Any], columns: dict[str, Column]) -> dict[str, Tensor]:
        """Return the pairs of micro-batches, one item for each; none if they must stay where they are."""
        supported_names = {*PAIR_COLUMNS, "input_ids", "attention_mask", "completion_mask"}
        names = samples[0].keys()
        alike = all(x.keys() == names and len(x["input_ids"]) == len(samples[0]["input_ids"]) for x in samples)
        if not alike or not names <= supported_names or internals.has_repeats(self.trainer):
            return {}
        one = torch.ones_like(samples[0]["attention_mask"][:, :1])
        if any((x["attention_mask"].diff(dim=1, prepend=one) > 0).any() for x in samples):  # padded elsewhere
            return {}
        pairs = {}
        for name in names:
            if name in PAIR_COLUMNS:
                pairs[name] = torch.cat([x[name] for x in samples])
                continue
            for side, of_samples in zip(_SIDES, zip(*(x[name].chunk(2) for x in samples), strict=True), strict=True):
                pairs[f"{side}_{name}"] = torch.cat(equally_wide(list(of_samples), columns[f"{side}_{name}"]))
        return pairs


def sequence_tokens(batch: dict[str, Tensor], packing: PackingPlan) -> RowTokens:
    """Return the tokens of each row of a batch in TRL's form."""
    names = ("input_ids", "attention_mask", "completion_mask")
    on_host = torch.stack([batch[name] for name in names]).cpu()  # one copy, so the host waits for the device once
    (rows, width), (ids_BS, real_BS, scored_BS) = on_host.shape[1:], on_host.unbind()
    length_B, scored_B = real_BS.sum(dim=1), scored_BS.sum(dim=1)
    prompt_B = length_B - scored_B
    # The last token is only predicted; it is not an input
    own_B = (scored_B - 1).clamp(min=0) if packing.padding_free else width - prompt_B
    prompts = [UNSHARED] * rows
    if packing.share_in_training:
        prompts = [content_hash(ids_BS[row, :length].numpy()) for row, length in enumerate(prompt_B.tolist())]
    return RowTokens(prompts, prompt_B.tolist(), own_B.tolist(), scored_B.tolist())


def pair_tokens(batch: dict[str, Tensor], packing: PackingPlan) -> RowTokens:
    """Return the tokens of each pair of a batch: the prompt once, where rows share it, and both completions."""
    rows = sequence_tokens(batch, packing)
    pairs = len(batch["input_ids"]) // 2
    prompts = rows.prompt_tokens_B
    unshared = [sum(rows.own_tokens_B[pair::pairs]) for pair in range(pairs)]
    for pair, prompt in enumerate(rows.prompt_B[:pairs]):
        if prompt == UNSHARED or prompt != rows.prompt_B[pairs + pair]:  # the prompt is computed twice
            unshared[pair] += prompts[pairs + pair]
    scored_tokens = [sum(rows.scored_tokens_B[pair::pairs]) for pair in range(pairs)]
    return RowTokens(rows.prompt_B[:pairs], prompts[:pairs], unshared, scored_tokens)


def _batch(pairs: dict[str, Tensor], columns: dict[str, Column]) -> dict[str, Tensor]:
    """Return pairs in TRL's form: the chosen rows, then the rejected ones, as wide as the longest."""
    longest = int(max(pairs[f"{side}_attention_mask"].sum(dim=1).max() for side in _SIDES))
    multiple = columns["chosen_input_ids"].multiple
    width = -(-longest // multiple) * multiple
    batch = {name: x for name, x in pairs.items() if name not in columns}
    for name in ("input_ids", "attention_mask", "completion_mask"):
        batch[name] = torch.cat([pairs[f"{side}_{name}"][:, :width] for side in _SIDES])
    return batch
