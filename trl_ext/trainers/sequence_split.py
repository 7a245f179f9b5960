"""What both trainers share of context and sequence parallelism: every rank of a group is given the batch whole."""

from typing import Any

import torch

from ..compat import WholeBatches
from ..engines.sequence_parallel import SequenceGroup, batches_stay_whole, loader_of_group, why_not_split
from ..passes import Skipped


class SequenceSplitMixin(WholeBatches):
    """Mixed in before a TRL trainer: a group of ranks that split the tokens of a batch is to TRL what one rank is.

    Attributes:
        sequence_group (`SequenceGroup`, *optional*): this rank's; None where tokens are not split.
    """

    sequence_group: SequenceGroup | None = None
    scoring_forwards: list[Any]
    skipped: Skipped

    def _meet_sequence_group(self) -> None:
        """Called once TRL's `__init__` has run.

        Raises:
            `ValueError`: the engine, the model or an argument forbids that tokens of a batch are split over ranks.
        """
        group = SequenceGroup.of(self.accelerator)
        if group is None:
            return
        reason = self._why_not_split(group)
        if reason is not None:
            raise ValueError(f"`{group.kind}_size={group.size}` cannot be had here: {reason}.")
        self.sequence_group = group
        batches_stay_whole(self.accelerator, group)
        for scoring in self.scoring_forwards:
            scoring.sequence_group = group
        self._ranks_given_the_same(group.size)
        self.skipped.ranks_alike = {"train": group.size, "eval": group.size if group.kind == "cp" else 1}

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

    def get_train_dataloader(self) -> Any:
        """TRL's own, with the same batches on all ranks of a group."""
        with loader_of_group(self.accelerator, self.sequence_group), self._generation_batch_of_groups():
            return super().get_train_dataloader()


class GRPOSequenceSplitMixin(SequenceSplitMixin):
    """As [`SequenceSplitMixin`], for a trainer that generates: the ranks of a group draw the same completions."""

    num_generations: int

    def _why_not_split(self, group: SequenceGroup) -> str | None:
        reason = super()._why_not_split(group)
        if reason is not None:
            return reason
        args = self.args
        rows = args.per_device_train_batch_size * args.steps_per_generation
        if rows % self.num_generations:
            return (
                f"the completions of a prompt must lie on one rank, and the {rows} rows that a rank generates "
                f"(`per_device_train_batch_size * steps_per_generation`) do not divide by "
                f"`num_generations={self.num_generations}`"
            )
        if args.use_vllm:
            return "vLLM gives each rank completions of its own. Set `use_vllm=False`"
        if getattr(args, "dynamic_sampling", False):
            return "the ranks of a group would draw other further prompts. Set `dynamic_sampling=False`"
        return None

    def _draw(self, inputs: Any) -> dict[str, Any]:
        group = self.sequence_group
        if group is None or self._mode == "eval":
            return super()._draw(inputs)
        group.draw_alike()
        batch = super()._draw(inputs)
        if not group.alike(*(x for _, x in sorted(batch.items()) if isinstance(x, torch.Tensor))):
            raise RuntimeError(
                f"The {group.size} ranks that split the tokens of a batch (`{group.kind}_size`) have generated "
                "different completions, or rewarded them otherwise. A rollout or reward function that draws at random, "
                "or asks a service, must give all ranks of a group the same."
            )
        return batch
