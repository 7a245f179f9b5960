"""GRPO's plan: which log-prob passes run, on which rows, in which micro-batches, and why.

A row is dead if its gradient is zero: its advantage is 0 and nothing else sends a gradient through it, or it has no
token in the loss.
"""

import math
from dataclasses import dataclass

from .non_finite import steps_in_backward
from .plan import Decision, Plan
from .sampler_ratio import RatioRule

_DROPOUT = " Dropout is active: same distribution as a separate pass, other random draws."


@dataclass(frozen=True, kw_only=True)
class GRPOFacts:
    """What is known of a run before it starts. Fields without a comment are arguments of the trainer by that name."""

    per_device_batch_size: int
    processes: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    num_generations: int
    loss_type: str
    beta: float
    top_entropy_quantile: float
    optimizer: str  # `args.optim`
    epoch_is_known: bool  # the training data has a length
    has_images: bool  # batches can hold images, which are not split by row
    active_dropout: bool  # two passes over the same tokens differ
    shares_prompts: bool  # rows of one forward share their prompt in training
    of_sequences: bool  # one importance ratio per completion, instead of one per token
    kl_times_ratio: bool  # the KL term is multiplied by the ratio
    normalized_over_batch: bool  # an advantage depends on other groups of its generation batch
    own_reference: str | None  # which weights of a PEFT policy are the reference
    # Terms of the loss that read every row
    has_entropy_bonus: bool
    has_router_loss: bool
    trains_expert_modules: bool  # an expert that no token reaches gets no gradient, instead of 0
    # The sampler
    sampler_ratio: RatioRule | None  # None: the ratio to the sampler is not corrected for
    sampler_gives_log_probs: bool
    truncated_sampling: tuple[str, ...]  # arguments that truncate the sampler's distribution, unless TRL corrects it
    # What a subclass overrides
    has_own_pass: bool  # TRL's scoring pass
    has_own_batches: bool  # `_generate_and_score_completions`
    buffers_batches: bool  # it keeps generation batches in its own buffer
    bypasses_loss: bool  # its `compute_loss` does not call ours
    has_own_loss: bool  # TRL's loss, so any row or token may count
    own_step: str | None  # a method that gets whole micro-batches
    # Fields of our config
    max_draws: int  # generation batches drawn for one; 1 without dynamic sampling
    keep_groups_together: bool | None
    max_tokens_per_micro_batch: int | None
    force_on_policy_ratio: bool
    trust_sampling_log_probs: bool
    zero_advantages_of_equal_rewards: bool


@dataclass(frozen=True, kw_only=True)
class GRPOPlan(Plan):
    """The decisions, the facts, and what follows from them for each batch."""

    facts: GRPOFacts
    skips_masked: bool  # rows without a token in the loss
    skips_zero_advantages: bool  # zero-advantage rows, in training
    zeroes_equal_rewards: bool  # the advantages of groups whose rewards are all identical become 0
    of_sequences: bool  # the loss exponentiates one ratio per completion, instead of one per token
    bounds_ratio: bool  # the loss bounds the ratio itself, and reads it without a gradient
    trl_scores_old_policy: bool  # stock TRL scores every generation batch
    scores_at_generation: bool  # every row is scored when it is generated, as in stock TRL
    keeps_groups_together: bool


def plan_grpo(facts: GRPOFacts) -> GRPOPlan:
    """The plan of a GRPO trainer.

    Raises:
        `ValueError`: the schedule, the sampler or the loss does not support an option.
    """
    _check_options(facts)
    skips_zero_advantages = _zero_advantage_reason(facts) is None
    misaligned = facts.gradient_accumulation_steps % (facts.steps_per_generation * facts.num_iterations) != 0
    micro_batches = _micro_batches(facts)
    warnings = []
    if facts.sampler_ratio is not None and facts.truncated_sampling:
        warnings.append(
            f"The importance ratio to the sampler is biased: {', '.join(facts.truncated_sampling)} cut(s) the "
            "distribution that completions are drawn from, while the policy's log-probs are those of the whole "
            "distribution. Sample without them, or set `vllm_importance_sampling_correction=False`."
        )
    return GRPOPlan(
        decisions=(_policy(facts), _old_policy(facts, misaligned), _reference(facts), _in_parts(facts, micro_batches)),
        warnings=tuple(warnings),
        facts=facts,
        skips_masked=not _reads_every_row(facts),
        skips_zero_advantages=skips_zero_advantages,
        zeroes_equal_rewards=skips_zero_advantages and facts.zero_advantages_of_equal_rewards,
        # vespo reads the ratios of tokens at either level
        of_sequences=facts.of_sequences and facts.loss_type != "vespo",
        bounds_ratio=facts.loss_type in ("cispo", "vespo") and not facts.has_own_loss,
        trl_scores_old_policy=misaligned or facts.sampler_ratio is not None,
        scores_at_generation=facts.has_own_batches or facts.buffers_batches or facts.bypasses_loss,
        keeps_groups_together=micro_batches.action == "run",
    )


def _check_options(facts: GRPOFacts) -> None:
    devices = facts.per_device_batch_size * facts.processes
    rollout = devices * facts.steps_per_generation
    training = devices * facts.gradient_accumulation_steps
    if facts.force_on_policy_ratio and (rollout != training or facts.num_iterations != 1):
        raise ValueError(
            "`force_on_policy_ratio=True` trains each completion only on the weights that sampled it, but the "
            f"rollout batch has {rollout} completions (`steps_per_generation`={facts.steps_per_generation}), the "
            f"training batch {training} (`gradient_accumulation_steps`={facts.gradient_accumulation_steps}), and each "
            f"is used {facts.num_iterations} time(s) (`num_iterations`). Set `steps_per_generation` to "
            f"{facts.gradient_accumulation_steps} and `num_iterations` to 1, or leave `force_on_policy_ratio` off."
        )
    if facts.trust_sampling_log_probs and not facts.sampler_gives_log_probs:
        raise ValueError(
            "`trust_sampling_log_probs=True` uses the sampler's log-probs as the old policy's, but neither vLLM "
            "(`use_vllm=True`) nor a `rollout_func` is there to give them. Leave it off."
        )
    if facts.trust_sampling_log_probs and facts.bypasses_loss:
        raise ValueError(
            "`trust_sampling_log_probs=True` needs a `compute_loss` that calls `super().compute_loss(...)`. Call it, "
            "or leave the option off."
        )
    if facts.max_draws == 1:
        return
    rows = facts.per_device_batch_size * facts.steps_per_generation
    if rows % facts.num_generations:
        raise ValueError(
            "`dynamic_sampling=True` replaces whole groups, so each rank must hold whole groups, but it has "
            f"{rows} completions (`per_device_train_batch_size` x `steps_per_generation`) in groups of "
            f"{facts.num_generations} (`num_generations`). Choose a multiple."
        )
    if facts.normalized_over_batch:
        raise ValueError(
            "`dynamic_sampling=True` mixes groups of several generation batches, but with `scale_rewards='batch'` or "
            "`multi_objective_aggregation='normalize_then_sum'` an advantage depends on the other groups of its batch. "
            "Use `scale_rewards='group'` and `multi_objective_aggregation='sum_then_normalize'`."
        )
    if facts.has_images:
        raise ValueError("`dynamic_sampling=True` does not support vision-language models. Leave it off.")


def _reads_every_row(facts: GRPOFacts) -> bool:
    return facts.has_router_loss or facts.has_own_loss or facts.trains_expert_modules


def _zero_advantage_reason(facts: GRPOFacts) -> str | None:
    """Why a zero-advantage row can have a gradient all the same, or takes part in that of others."""
    if facts.has_own_loss:
        return "this trainer overrides the loss, which may send a gradient through them"
    if facts.beta != 0.0:
        return f"the KL term (beta={facts.beta}) sends a gradient through them"
    if facts.has_entropy_bonus:
        return "the entropy bonus sends a gradient through them"
    if facts.has_router_loss:
        return "the router loss counts their tokens"
    if facts.trains_expert_modules:
        return "an expert that only they reach has a gradient of 0 in TRL, not none"
    if facts.top_entropy_quantile < 1.0:
        return f"their entropies count in the quantile (top_entropy_quantile={facts.top_entropy_quantile})"
    return None


def _policy(facts: GRPOFacts) -> Decision:
    reason = _zero_advantage_reason(facts)
    if _reads_every_row(facts):
        rows = f"every row, dead ones too: {reason}."
    elif reason is not None:
        rows = f"rows with a token in the loss, zero-advantage completions too: {reason}."
    else:
        equal = "count as zero-advantage (`zero_advantages_of_equal_rewards`)"
        if not facts.zero_advantages_of_equal_rewards:
            equal = "keep the rounding noise of TRL's advantages (`zero_advantages_of_equal_rewards` is off)"
        images = " Batches with images run whole." if facts.has_images else ""
        rows = (
            "all but dead rows (zero advantage, or no token in the loss), and at least one row on every rank. Groups "
            f"whose rewards are all identical {equal}. Evaluation runs every row.{images}"
        )
    if facts.max_draws > 1:
        rows += f" Dead groups are replaced first, from up to {facts.max_draws} draws (`dynamic_sampling`)."
    return Decision("policy", "run", rows)


def _old_policy(facts: GRPOFacts, misaligned: bool) -> Decision:
    if facts.trust_sampling_log_probs:
        reason = (
            "the sampler's log-probs replace it (`trust_sampling_log_probs`). An approximation: their distance from "
            "the policy's is a bias that nothing corrects."
        )
        return Decision("old policy", "skip", reason)
    trl_scores = misaligned or facts.sampler_ratio is not None
    if facts.bypasses_loss and not trl_scores:
        return Decision("old policy", "skip", "as in TRL: each micro-batch trains the weights that sampled it.")
    if (facts.has_own_batches or facts.buffers_batches or facts.bypasses_loss) and trl_scores:
        overridden = "`_generate_and_score_completions`, which may read or change the log-probs"
        if facts.buffers_batches:
            overridden = "`_prepare_inputs`, and buffers batches itself"
        if facts.bypasses_loss:
            overridden = "`compute_loss` without `super().compute_loss(...)`"
        return Decision("old policy", "run", f"every generation batch, as in TRL: this trainer overrides {overridden}.")
    reused = "the log-probs of the training forward, detached, while the weights are those that sampled the micro-batch"
    if facts.force_on_policy_ratio:
        reused += "; here always, so the ratio is exactly 1 (`force_on_policy_ratio`)"
    if facts.num_iterations > 1 and trl_scores:
        reused += "; remembered for the later iterations"
    # Where an optimizer step takes whole generation batches, none waits; a streaming epoch may end inside one
    slices_wait = facts.gradient_accumulation_steps % facts.steps_per_generation != 0 or not facts.epoch_is_known
    if misaligned and facts.steps_per_generation > 1 and slices_wait:
        reused += "; micro-batches of the generation batch that come after an optimizer step are scored just before it"
    if facts.sampler_ratio is not None:
        reused += "; the ratio to the sampler is formed from them"
    return Decision("old policy", "reuse", f"{reused}.{_DROPOUT if facts.active_dropout else ''}")


def _reference(facts: GRPOFacts) -> Decision:
    if facts.beta == 0.0:
        return Decision("reference", "skip", "beta is 0: no KL term.")
    weights = "" if facts.own_reference is None else f" It is {facts.own_reference}."
    rows = f"rows with a token in the loss, once for each generation batch: the KL term (beta={facts.beta}).{weights}"
    return Decision("reference", "run", rows)


def _micro_batches(facts: GRPOFacts) -> Decision:
    """Whether a group's rows are kept together (`"run"`)."""
    reason = _order_reason(facts)
    if reason is None:
        kept = (
            f"a group's rows are kept together, as far as there is room, within {_micro_batches_of_a_step(facts)} "
            "micro-batches of the same optimizer step: fewer prompts are computed, and the step's gradient is the "
            "same. Per-micro-batch metrics are averaged over different micro-batches."
        )
        return Decision("micro-batches", "run", kept)
    if facts.keep_groups_together and facts.steps_per_generation > 1:
        raise ValueError(
            f"`keep_groups_together=True` is not supported here: {reason}. Leave `keep_groups_together` at None, "
            "which then takes TRL's order."
        )
    return Decision("micro-batches", "skip", f"rows in TRL's order: {reason}.")


def _in_parts(facts: GRPOFacts, decision: Decision) -> Decision:
    budget = facts.max_tokens_per_micro_batch
    if budget is None:
        return decision
    reason, consequence = _micro_batch_reason(facts), "parts of a micro-batch have another gradient"
    if steps_in_backward(facts.optimizer):
        reason = f"the optimizer `{facts.optimizer}` steps in every backward"
        consequence = "it would step after each part of a micro-batch"
    if reason is not None:
        raise ValueError(
            f"`max_tokens_per_micro_batch={budget}` is not supported here: {reason}, so {consequence}. Leave "
            "`max_tokens_per_micro_batch` at None."
        )
    parts = f" Each micro-batch runs in parts of at most {budget} tokens, each with its own forward and backward."
    return Decision(decision.name, "run", decision.reason + parts)


def _micro_batches_of_a_step(facts: GRPOFacts) -> int:
    """How many micro-batches of a generation batch are sure to share an optimizer step."""
    return math.gcd(facts.steps_per_generation, facts.gradient_accumulation_steps)


def _order_reason(facts: GRPOFacts) -> str | None:
    """Why rows keep the micro-batch that TRL's order gives them."""
    if facts.keep_groups_together is False:
        return "`keep_groups_together=False`"
    if facts.steps_per_generation == 1:
        return "a generation batch is one micro-batch"
    rule = _micro_batch_reason(facts)
    if rule is not None:
        return f"{rule}, so other micro-batches have another gradient"
    if not facts.shares_prompts:
        return "prompts are not shared in training, so nothing is gained"
    if _micro_batches_of_a_step(facts) == 1:
        return (
            "no two micro-batches of a generation batch are sure to share an optimizer step "
            f"(`gradient_accumulation_steps`={facts.gradient_accumulation_steps}, "
            f"`steps_per_generation`={facts.steps_per_generation})"
        )
    if not facts.epoch_is_known:
        return "an epoch of a streaming data set, and an optimizer step with it, ends at an unknown place"
    if facts.own_step is not None and not facts.keep_groups_together:
        return (
            f"this trainer overrides `{facts.own_step}`, which may look at a micro-batch as a whole "
            "(`keep_groups_together=True` says that it does not)"
        )
    return None


def _micro_batch_reason(facts: GRPOFacts) -> str | None:
    """Why a step's gradient depends on which rows share a micro-batch."""
    if facts.has_own_loss:
        return "this trainer overrides the loss, which may depend on the rows of a micro-batch"
    if facts.loss_type == "bnpo":
        return "the loss `bnpo` is normalised by the tokens of each micro-batch"
    if facts.has_entropy_bonus:
        return "the entropy bonus is a mean over the tokens of each micro-batch"
    if facts.has_router_loss:
        return "the router loss is formed for each micro-batch"
    if facts.top_entropy_quantile < 1.0:
        return f"tokens are selected in each micro-batch (top_entropy_quantile={facts.top_entropy_quantile})"
    if facts.has_images:
        return "a batch with images is not split by row"
    return None
