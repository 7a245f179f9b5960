"""What the plans of GRPO and RLOO share: facts on a run that samples completions, and reasons that follow from them."""

import math
from dataclasses import dataclass
from typing import Any

from .plan import Decision, Facts

GENERATE = "`generate`"
CONTINUOUS_BATCHING = "transformers' continuous batching"
VLLM = "vLLM"


@dataclass(frozen=True)
class GenerateFacts:
    """What samples the completions."""

    sampler: str  # `GENERATE`, `CONTINUOUS_BATCHING`, `VLLM`, or another, for the user
    all_rows_reason: str | None = None  # why transformers runs each copy of a prompt, apart from randomness
    keeps_log_probs: bool = False  # continuous batching returns log-probs, which are kept


@dataclass(frozen=True, kw_only=True)
class SampledFacts(Facts):
    """What both plans depend on."""

    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    beta: float
    keep_groups_together: bool | None
    zero_advantages_of_equal_rewards: bool
    replay_routes: str | None
    epoch_is_known: bool  # the training data has a length
    generation: GenerateFacts
    own_reference: str | None  # which weights of a PEFT policy are the reference; None: a separate model
    # The model
    has_images: bool  # batches can hold images, which are not split by row
    has_router_loss: bool
    trains_expert_modules: bool  # an expert that no token reaches gets no gradient, instead of 0
    positions_by_length: bool = False  # the model's positions depend on the longest row of a forward pass
    shares_prompts: bool  # rows of one forward share their prompt in training
    randomness: str | None  # why two passes over the same tokens differ
    draws_for_batch: bool  # the draws can depend on the rows of a forward
    # What code of the user overrides or reads
    generation_reader: str | None  # a method that makes or reads generation batches, or the pass that scores them
    has_own_pass: bool  # TRL's scoring pass is overridden
    overridden_below: str | None  # such a method below ours: in a class between ours and TRL's, or in place of TRL's
    fixed_order: str | None = None  # why rows cannot move: an internal of TRL has
    batch_reader: str | None  # what may read or change a micro-batch, such as "overrides `compute_loss`, which ..."

    @property
    def keeps_advantages_of_equal_rewards(self) -> bool:
        # An override below ours may have changed the advantages, on purpose
        return not self.zero_advantages_of_equal_rewards or self.overridden_below is not None


def reader_of(facts: SampledFacts, method: str | None) -> str | None:
    """Return what may read or change a batch, as the end of a sentence on this trainer; `None` if nothing does.

    Args:
        method (`str`, *optional*): an overridden method that gets the log-probs of a batch.
    """
    if method is not None:
        return f"overrides `{method}`, which may read or change the log-probs"
    return facts.batch_reader


def model_row_reason(facts: SampledFacts) -> str | None:
    """Return why even fully masked rows can change the gradient, whatever the loss; `None` if they cannot."""
    if facts.has_router_loss:
        return "the router loss counts their tokens"
    if facts.draws_for_batch:
        return f"{facts.randomness}, which may depend on them"
    if facts.trains_expert_modules:
        return "in TRL, an expert that only such completions reach has a gradient of 0, instead of none"
    return None


def plan_generation(facts: SampledFacts, *, corrects_for_sampler: bool = False) -> Decision:
    """Return the decision on what transformers runs to sample.

    Args:
        corrects_for_sampler (`bool`): whether the sampler's log-probs enter the loss.
    """
    generation = facts.generation
    if generation.keeps_log_probs:
        requests = "Transformers' continuous batching gets each distinct prompt once."
        if generation.all_rows_reason is not None:
            requests = f"Transformers' continuous batching gets every copy of a prompt: {generation.all_rows_reason}."
        if corrects_for_sampler:
            ratio = "the ratio of old policy to sampler"
            requests += f" The loss is multiplied by {ratio} (`vllm_importance_sampling_correction`)."
        return Decision("generation", "run", requests)
    if generation.sampler != GENERATE:
        return Decision("generation", "run", f"Completions come from {generation.sampler}.", routine=True)
    reason = generation.all_rows_reason or facts.randomness
    if reason is not None:
        all_rows = f"`generate` runs every copy of a prompt and finished completions, as in TRL: {reason}."
        return Decision("generation", "run", all_rows)
    fewer_rows = "`generate` runs each distinct prompt once, and drops finished completions. Random draws are TRL's."
    return Decision("generation", "run", fewer_rows)


def plan_routes(facts: SampledFacts, *, is_read_again: bool = True) -> tuple[Decision, ...]:
    """Return the decision on the routers' choices, if `replay_routes` is set.

    Args:
        is_read_again (`bool`): whether a batch that the old policy has scored trains later.
    """
    if facts.replay_routes is None:
        return ()
    option = f"(`replay_routes={facts.replay_routes!r}`)"
    if facts.replay_routes == "sampler":
        reason = f"Routers use the experts that they chose when the completions were sampled {option}."
        return (Decision("routes", "reuse", reason),)
    if is_read_again:
        reason = f"Routers use the experts that they chose when the old policy scored the completions {option}."
        return (Decision("routes", "reuse", reason),)
    reason = f"No experts to replay: each completion trains in the step that the old policy scores it {option}."
    return (Decision("routes", "skip", reason),)


def plan_reference_pass(facts: SampledFacts) -> Decision:
    """Return the decision on the reference."""
    if facts.beta == 0.0:
        return Decision("reference", "skip", "Not needed: `beta` is 0, so there is no KL term.", routine=True)
    reference = "The reference" if facts.own_reference is None else f"The reference ({facts.own_reference})"
    reason = f"{reference} scores each generation batch once, for the KL term (`beta={facts.beta}`)."
    return Decision("reference", "run", reason, routine=facts.own_reference is None)


def plan_order(facts: SampledFacts, stays_because: str | None, regrouped: str) -> Decision:
    """Return the decision on keeping a group's rows together (`"run"`) or not (`"skip"`).

    Args:
        stays_because (`str`, *optional*): why rows stay in the micro-batches of TRL's order.
        regrouped (`str`): what is done, and what it changes.

    Raises:
        `ValueError`: rows stay, although `keep_groups_together=True`.
    """
    if stays_because is None:
        return Decision("micro-batches", "run", regrouped)
    if facts.keep_groups_together and facts.steps_per_generation > 1:
        raise ValueError(
            f"`keep_groups_together=True` is not supported here: {stays_because}. Leave `keep_groups_together` at "
            "None, which then keeps TRL's order."
        )
    saves_nothing = facts.steps_per_generation == 1 or not facts.shares_prompts
    return Decision(
        "micro-batches", "skip", f"Completions stay in TRL's order: {stays_because}.", routine=saves_nothing
    )


def order_reason(facts: SampledFacts, *, rule: str | None, schedule: str, reader: str | None) -> str | None:
    """Return why rows stay in the micro-batches that TRL's order gives them; `None` if they are regrouped.

    Args:
        rule (`str`, *optional*): why another order would change the gradient, or is impossible.
        schedule (`str`): the arguments that keep micro-batches in different optimizer steps, to append to that reason.
        reader (`str`, *optional*): what code of the user may do with a micro-batch.
    """
    if facts.fixed_order is not None:
        return facts.fixed_order
    if facts.keep_groups_together is False:
        return "`keep_groups_together=False`"
    if facts.steps_per_generation == 1:
        return "a generation batch is one micro-batch"
    if rule is not None:
        return rule
    if not facts.shares_prompts:
        return "prompts are not shared in training, so another order saves nothing"
    if micro_batches_of_a_step(facts) == 1:
        return f"no two micro-batches of a generation batch are certain to share an optimizer step{schedule}"
    if not facts.epoch_is_known:
        return "an epoch of a streaming data set, and the optimizer step with it, can end after any micro-batch"
    return None if facts.keep_groups_together else reader


def micro_batches_of_a_step(args: Any) -> int:
    """Return how many micro-batches of a generation batch are certain to share an optimizer step.

    `args` is TRL's config, or `SampledFacts`.
    """
    return math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)


def samples_policy(args: Any) -> bool:
    """Return whether, by the arguments, the sampler's distribution is the policy's."""
    return args.repetition_penalty == 1.0 and not args.generation_kwargs and not truncated_sampling(args)


def sampling_values(args: Any) -> dict[str, float]:
    """Return the values of `top_p`, `top_k` and `min_p` that the sampler gets."""
    untruncated = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    # `generation_kwargs` override the arguments
    overrides = args.generation_kwargs or {}
    return {name: overrides.get(name, getattr(args, name)) or value for name, value in untruncated.items()}


def truncated_sampling(args: Any) -> tuple[str, ...]:
    """Return the arguments, as "name=value", that truncate the distribution of sampled tokens."""
    values = sampling_values(args)
    truncates = {"top_p": values["top_p"] < 1.0, "top_k": values["top_k"] > 0, "min_p": values["min_p"] > 0.0}
    return tuple(f"{name}={values[name]}" for name, is_on in truncates.items() if is_on)
