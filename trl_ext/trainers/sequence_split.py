"""What both trainers share of context and sequence parallelism: every rank of a group is given the batch whole."""

from typing import Any

import torch

from ..compat import WholeBatches, gathered_by
from ..engines.sequence_parallel import SequenceGroup, batches_stay_whole, why_not_split
from ..engines.tensor_parallel import TensorParallel
from .counted_once import CountedOnceMixin, count_generation_batch


class SequenceSplitMixin(CountedOnceMixin, WholeBatches):
    """Mixed in before a TRL trainer: a group of ranks that split the tokens of a batch is to TRL what one rank is.

    Attributes:
        sequence_group (`SequenceGroup`, *optional*): this rank's; None where tokens are not split.
    """

    sequence_group: SequenceGroup | None = None
    scoring_forwards: list[Any]

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' own, called in its `__init__`."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        group = SequenceGroup.of(self.accelerator)
        if group is not None:
            batches_stay_whole(self.accelerator, group)
            self._count_once(group.ranks)
            self.sequence_group, self._ranks_of_group = group, group.size

    def _ranks_in_step(self) -> TensorParallel | None:
        group = self.sequence_group
        return super()._ranks_in_step() if group is None or group.processes is None else group.ranks

    def _join_sequence_group(self) -> None:
        """Called once TRL's `__init__` has run.

        Raises:
            `ValueError`: the engine, the model or an argument forbids that tokens of a batch are split over ranks.
        """
        group = self.sequence_group
        if group is None:
            return
        reason = self._why_not_split(group)
        if reason is not None:
            raise ValueError(f"`{group.kind}_size={group.size}` cannot be had here: {reason}.")
        for scoring in self.scoring_forwards:
            scoring.sequence_group = group

    def _why_not_split(self, group: SequenceGroup) -> str | None:
        """The first reason that is met."""
        model: Any = self.accelerator.unwrap_model(self.model)
        reason = why_not_split(self.accelerator, group, model.config.get_text_config())
        if reason is not None:
            return reason
        for scoring in self.scoring_forwards:
            if scoring.packing.why_padded is not None:
                return f"rows that are fed padded are not split, and here they are: {scoring.packing.why_padded}"
        return None


class GRPOSequenceSplitMixin(SequenceSplitMixin):
    """As [`SequenceSplitMixin`], for a trainer that generates: the ranks of a group draw the same completions."""

    _trl_trainer: type

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' own; then the rows of a generation batch are those of the groups.

        Raises:
            `ValueError`: the completions of a prompt do not fit into them.
        """
        super().create_accelerator_and_postprocess()
        if self.sequence_group is not None:
            group = self.sequence_group
            count_generation_batch(self.args, group.ranks, f"`{group.kind}_size={group.size}`")

    def _why_not_split(self, group: SequenceGroup) -> str | None:
        for name in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(self.args, name, False):
                return f"the ranks of a group would be given other completions. Set `{name}=False`"
        return super()._why_not_split(group)

    def _draw(self, inputs: Any) -> dict[str, Any]:
        group = self.sequence_group
        if group is None:
            return super()._draw(inputs)  # type: ignore[misc, no-any-return]
        if group.processes is not None:
            group.ranks.share_random_state(self.accelerator.device)
        with gathered_by(self.accelerator, self._trl_trainer):
            batch: dict[str, Any] = super()._draw(inputs)  # type: ignore[misc]
        tensors = [x for _, x in sorted(batch.items()) if isinstance(x, torch.Tensor)]
        if group.processes is not None and not group.alike(*tensors):
            raise RuntimeError(
                f"The {group.size} ranks that split the tokens of a batch (`{group.kind}_size`) have generated "
                "different completions. A rollout function that draws at random, or asks a service, must give all "
                "ranks of a group the same."
            )
        return batch
