"""What both trainers share of packing: its plan, and how many tokens were fed and left out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object
from peft import PeftModel

from ..dropout import has_dropout
from ..passes import PackingFacts, PackingPlan, check_packing_options, plan_packing
from .packing_arguments import PackingArguments


class PackedMixin:
    """Mixed in before a TRL trainer: its models are fed rows without padding, where they can be.

    Attributes:
        packing_arguments (`PackingArguments`): the fields of the config.
    """

    packing_arguments: PackingArguments
    scoring_forwards: list[Any]

    def _packing_plan(self) -> PackingPlan:
        """What is fed of a padded batch, as far as it is known now."""
        return plan_packing(self._packing_facts())

    def _packing_facts(self) -> PackingFacts:
        packing = self.scoring_forwards[0].packing
        return PackingFacts(
            padding_free=self.packing_arguments.padding_free,
            share_prompts=self.packing_arguments.share_prompts,
            unsupported=packing.why_padded,
            unshared=packing.why_unshared,
            active_dropout=has_dropout(self.model),  # type: ignore[attr-defined]
        )

    def _tell_packing_of_the_run(self) -> None:
        """What forbids one row for all beside the model itself.

        Raises:
            `ValueError`: an option asks for what the model cannot give.
        """
        reason = _why_padded(self)
        for scoring in self.scoring_forwards if reason else ():
            scoring.packing.why_padded = reason
        check_packing_options(self._packing_facts())

    def _agree_on_packing(self) -> None:
        """After a pass: what the first batch of one rank has shown holds for all. Every rank calls it."""
        for packing in (scoring.packing for scoring in self.scoring_forwards):
            if packing.checked and not packing.agreed:
                every = gather_object([(packing.why_padded, packing.why_unshared)])
                packing.agree(*(list(why) for why in zip(*every, strict=True)))

    @contextmanager
    def _fed_padded(self) -> Iterator[None]:
        """Within, models are fed padded batches, and the first one that is not padded is still to be checked."""
        held = [(scoring.packing, scoring.packing.why_padded) for scoring in self.scoring_forwards]
        for packing, _ in held:
            packing.why_padded = "it is fed padded here"
        try:
            yield
        finally:
            for packing, why in held:
                packing.why_padded = why

    def _tokens_fed(self) -> list[int]:
        """On this rank since the last call: tokens of padded batches that were not fed; fed with a gradient; fed
        without; scored by the head."""
        counts = [[scoring.packing.left_out, *scoring.fed] for scoring in self.scoring_forwards]
        for scoring in self.scoring_forwards:
            scoring.packing.left_out, scoring.fed = 0, [0, 0, 0]
        return [sum(count) for count in zip(*counts, strict=True)]


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


def _why_padded(trainer: Any) -> str | None:
    for config in trainer.model.peft_config.values() if isinstance(trainer.model, PeftModel) else ():
        if config.is_prompt_learning:
            return "the adapter puts virtual tokens before each row"
        if getattr(config, "alora_invocation_tokens", None):
            return "the adapter looks for its invocation tokens in each row (`alora_invocation_tokens`)"
    if trainer.args.neftune_noise_alpha is not None:
        return "the noise of `neftune_noise_alpha` depends on the width of the batch"
    if trainer.args.n_gpu > 1:
        return "one process drives several GPUs; start one for each (`accelerate launch`)"
    return None
