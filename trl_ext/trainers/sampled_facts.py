"""What a plan of GRPO or RLOO must know that no argument tells."""

from dataclasses import fields
from typing import Any

from ..compat import sampled as internals
from ..compat.readers import batch_reader
from ..packing.support import positions_by_length, trains_expert_modules
from ..planning.sampled import SampledFacts


def facts_of(trainer: Any, kind: type[SampledFacts], **circumstances: Any) -> Any:
    """Return the facts of a plan, the same on all ranks.

    Args:
        trainer (`GRPOTrainer` or `RLOOTrainer`): whose plan is made.
        circumstances (`Any`): fields that only this `kind` has, and no argument.
    """
    names = {field.name for field in fields(kind)} & internals.LIVE_ARGUMENTS
    live = {name: getattr(trainer, name) for name in names}
    options = trainer._added_fields.of(trainer.args)
    facts = kind.of(trainer.args, options, **live, **_circumstances_of(trainer), **circumstances)
    return trainer._for_all_ranks(facts)


def _circumstances_of(trainer: Any) -> dict[str, Any]:
    """Return fields of `SampledFacts`: those of the model and of the user's code."""
    reference = trainer._reference_weights
    if trainer.beta != 0.0 and trainer.ref_model is None and reference.policy_reference is None:
        reference.take_late(trainer.beta)  # a user has added the KL term after construction
    randomness = trainer._randomness()
    return {
        "epoch_is_known": hasattr(trainer.train_dataset, "__len__"),
        "own_reference": None if reference.policy_reference is None else reference.policy_reference.describe(),
        "has_router_loss": trainer.aux_loss_enabled,
        "trains_expert_modules": trainer._look_at_policy(trains_expert_modules),
        "positions_by_length": positions_by_length(trainer.model),
        "shares_prompts": trainer._packing_plan().share_in_training,
        "randomness": None if randomness is None else randomness.reason,
        "draws_for_batch": randomness is not None and not randomness.of_tokens,
        "generation_reader": internals.generation_reader(trainer),
        "has_own_pass": internals.overridden_pass(trainer) is not None,
        "overridden_below": internals.overridden_below(trainer),
        "fixed_order": trainer._features.why_off("balance"),
        "batch_reader": batch_reader(trainer),
    }
