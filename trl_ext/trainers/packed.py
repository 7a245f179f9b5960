"""What both trainers share of packing: its plan, and how many tokens of the padded batches it left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel

from ..dropout import has_dropout
from ..passes import PackingFacts, PackingPlan, plan_packing
from .packing_arguments import PackingArguments


class PackedMixin:
    """Mixed in before a TRL trainer: its models are fed rows without padding, where they can be.

    Attributes:
        packing_arguments (`PackingArguments`): the fields of the config.
    """

    packing_arguments: PackingArguments
    scoring_forwards: list[Any]

    def _packing_plan(self) -> PackingPlan:
        """What is fed of a padded batch, as far as it is known now.

        Raises:
            `ValueError`: an option asks for what the model cannot give.
        """
        trainer: Any = self
        packing = self.scoring_forwards[0].packing
        return plan_packing(
            PackingFacts(
                padding_free=self.packing_arguments.padding_free,
                share_prompts=self.packing_arguments.share_prompts,
                unsupported=_why_prompt_learning(trainer.model) or packing.why_padded,
                unshared=packing.why_unshared,
                active_dropout=has_dropout(trainer.model),
            )
        )

    def _packed_away(self) -> int:
        """Tokens of padded batches that were not fed on this rank, since the last call."""
        left_out = 0
        for scoring in self.scoring_forwards:
            left_out += scoring.packing.left_out
            scoring.packing.left_out = 0
        return left_out


@contextmanager
def padding_free_is_ours(config: Any) -> Iterator[None]:
    """Within, TRL does not find `padding_free=True` in `config`: its `DPOTrainer` would warn, and take it back."""
    given = getattr(config, "padding_free", None)
    if given:
        config.padding_free = False
    try:
        yield
    finally:
        if given:
            config.padding_free = given


def _why_prompt_learning(model: Any) -> str | None:
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return "the adapter puts virtual tokens before each row"
    return None
