"""GRPO's plan: which of its log-prob passes run, on which rows, and why."""

from dataclasses import dataclass

from .micro_batches import plan_micro_batches
from .plan import Decision, Plan
from .sampler_ratio import RatioRule

_DROPOUT = " Dropout is active: same distribution as a pass of its own, other random draws."


@dataclass(frozen=True, kw_only=True)
class GRPOFacts:
    """What the plan is made from.

    Args:
        per_device_batch_size, processes, gradient_accumulation_steps, steps_per_generation, num_iterations (`int`):
            the schedule.
        epoch_is_known (`bool`): whether the training data has a length.
        num_generations (`int`): completions of a prompt.
        loss_type (`str`): TRL's.
        beta (`float`): coefficient of the KL term.
        own_reference (`str`, *optional*): what of a PEFT policy is the reference, in words.
        normalized_over_batch (`bool`): whether an advantage depends on other groups of its generation batch.
        has_own_pass (`bool`): whether a subclass has replaced TRL's scoring pass.
        has_own_batches (`bool`): whether a subclass has replaced what makes generation batches.
        buffers_batches (`bool`): whether a subclass keeps them in a buffer of its own.
        bypasses_loss (`bool`): whether a subclass's `compute_loss` does not call ours.
        has_own_loss (`bool`): whether a subclass has replaced TRL's loss, of which nothing is known then.
        own_step (`str`, *optional*): a method that is given whole micro-batches and that a subclass has replaced.
        of_sequences (`bool`): whether the importance ratio is one of a completion, instead of one of a token.
        kl_times_ratio (`bool`): whether the KL term is multiplied by the ratio.
        has_images (`bool`): whether batches can hold images, whose rows are not told apart.
        has_entropy_bonus, has_router_loss (`bool`): terms of the loss in which every row takes part.
        trains_expert_modules (`bool`): whether an expert that no token reaches gets no gradient, instead of 0.
        top_entropy_quantile (`float`): below 1, only tokens of high entropy are trained.
        active_dropout (`bool`): whether two passes over the same tokens differ.
        sampler_ratio (`RatioRule`, *optional*): how the ratio to the sampler is bounded, where it is corrected for.
        sampler_gives_log_probs (`bool`): whether completions can come with the log-probs of their sampler.
        truncated_sampling (`tuple[str, ...]`): the sampling arguments that cut the sampler's distribution, if TRL does
            not correct for that.
        max_draws (`int`): generation batches to draw for one at most; 1 without dynamic sampling.
        shares_prompts (`bool`): whether rows of one micro-batch feed the prompt that they have in common once.
        optimizer (`str`): `args.optim`.
        keep_groups_together (`bool`, *optional*): the option; `None` stands for "where it changes no gradient".
        max_tokens_per_micro_batch (`int`, *optional*): the option.
        force_on_policy_ratio, trust_sampling_log_probs, zero_advantages_of_equal_rewards (`bool`): the options.
    """

    per_device_batch_size: int
    processes: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    epoch_is_known: bool
    num_generations: int
    loss_type: str
    beta: float
    own_reference: str | None
    normalized_over_batch: bool
    has_own_pass: bool
    has_own_batches: bool
    buffers_batches: bool
    bypasses_loss: bool
    has_own_loss: bool
    own_step: str | None
    of_sequences: bool
    kl_times_ratio: bool
    has_images: bool
    has_entropy_bonus: bool
    has_router_loss: bool
    trains_expert_modules: bool
    top_entropy_quantile: float
    active_dropout: bool
    sampler_ratio: RatioRule | None
    sampler_gives_log_probs: bool
    truncated_sampling: tuple[str, ...]
    max_draws: int
    shares_prompts: bool
    optimizer: str
    keep_groups_together: bool | None
    max_tokens_per_micro_batch: int | None
    force_on_policy_ratio: bool
    trust_sampling_log_probs: bool
    zero_advantages_of_equal_rewards: bool


@dataclass(frozen=True, kw_only=True)
class GRPOPlan(Plan):
    """The decisions, and what follows from them for each batch.

    Args:
        leave_zero_advantages (`bool`): rows whose advantage is exactly 0 are not fed in training.
        leave_masked (`bool`): rows without a token in the loss are not fed.
        score_tools (`bool`): tokens that a tool wrote are scored.
        of_sequences (`bool`): a ratio of a completion is exponentiated, instead of one of a token.
        bounds_ratio (`bool`): the loss bounds the ratio itself, and reads it without a gradient.
        kl_times_ratio (`bool`): the KL term is multiplied by the ratio.
        zero_equal_rewards (`bool`): the advantages of groups rewarded alike are set to 0.
        trust_sampler (`bool`): the sampler's log-probs are the old policy's.
        sampler_ratio (`RatioRule`, *optional*): how the ratio to the sampler is bounded, where it is corrected for.
        trl_scores_old_policy (`bool`): whether stock TRL scores every generation batch.
        scores_at_generation (`bool`): every row is scored when it is generated, as in stock TRL.
        own_pass (`bool`): a subclass's own method scores, and gets the model itself.
        max_draws (`int`): generation batches to draw for one at most; 1 without dynamic sampling.
        keep_groups_together (`bool`): a group's rows are kept in one micro-batch, as far as there is room.
        max_tokens (`int`, *optional*): the most tokens that a forward in training feeds.
    """

    leave_zero_advantages: bool
    leave_masked: bool
    score_tools: bool
    of_sequences: bool
    bounds_ratio: bool
    kl_times_ratio: bool
    zero_equal_rewards: bool
    trust_sampler: bool
    sampler_ratio: RatioRule | None
    trl_scores_old_policy: bool
    scores_at_generation: bool
    own_pass: bool
    max_draws: int
    keep_groups_together: bool
    max_tokens: int | None


def plan_grpo(facts: GRPOFacts) -> GRPOPlan:
    """The plan of a GRPO trainer.

    Raises:
        `ValueError`: an option asks for what the schedule or the sampler cannot give.
    """
    _check_options(facts)
    leave_zero_advantages = _why_zero_advantages_stay(facts) is None
    warnings = []
    if facts.sampler_ratio is not None and facts.truncated_sampling:
        warnings.append(
            f"The importance ratio to the sampler is biased: {', '.join(facts.truncated_sampling)} cut(s) the "
            "distribution that completions are drawn from, while the policy's log-probs are those of the whole "
            "distribution. Sample without them, or set `vllm_importance_sampling_correction=False`."
        )
    every = facts.steps_per_generation * facts.num_iterations
    misaligned = facts.gradient_accumulation_steps % every != 0
    micro_batches, keep_groups_together = plan_micro_batches(facts)
    return GRPOPlan(
        decisions=(_policy(facts), _old_policy(facts, misaligned), _reference(facts), micro_batches),
        leave_zero_advantages=leave_zero_advantages,
        leave_masked=not (facts.has_router_loss or facts.has_own_loss or facts.trains_expert_modules),
        score_tools=facts.has_own_loss,
        # vespo reads the ratios of tokens at either level
        of_sequences=facts.of_sequences and facts.loss_type != "vespo",
        bounds_ratio=facts.loss_type in ("cispo", "vespo") and not facts.has_own_loss,
        kl_times_ratio=facts.kl_times_ratio,
        zero_equal_rewards=leave_zero_advantages and facts.zero_advantages_of_equal_rewards,
        trust_sampler=facts.trust_sampling_log_probs,
        sampler_ratio=facts.sampler_ratio,
        trl_scores_old_policy=misaligned or facts.sampler_ratio is not None,
        scores_at_generation=facts.has_own_batches or facts.buffers_batches or facts.bypasses_loss,
        own_pass=facts.has_own_pass,
        max_draws=facts.max_draws,
        keep_groups_together=keep_groups_together,
        max_tokens=facts.max_tokens_per_micro_batch,
        warnings=tuple(warnings),
    )


def _check_options(facts: GRPOFacts) -> None:
    devices = facts.per_device_batch_size * facts.processes
    rollout = devices * facts.steps_per_generation
    training = devices * facts.gradient_accumulation_steps
    if facts.force_on_policy_ratio and (rollout != training or facts.num_iterations != 1):
        raise ValueError(
            "`force_on_policy_ratio=True` needs every completion to meet the weights it was sampled with, but the "
            f"rollout batch has {rollout} completions (`steps_per_generation`={facts.steps_per_generation}), the "
            f"training batch {training} (`gradient_accumulation_steps`={facts.gradient_accumulation_steps}), and each "
            f"is used {facts.num_iterations} time(s) (`num_iterations`). Set `steps_per_generation` to "
            f"{facts.gradient_accumulation_steps} and `num_iterations` to 1, or leave `force_on_policy_ratio` off."
        )
    if facts.trust_sampling_log_probs and not facts.sampler_gives_log_probs:
        raise ValueError(
            "`trust_sampling_log_probs=True` takes the sampler's log-probs for the old policy's, but neither vLLM "
            "(`use_vllm=True`) nor a `rollout_func` is there to give them. Leave it off."
        )
    if facts.trust_sampling_log_probs and facts.bypasses_loss:
        raise ValueError(
            "`trust_sampling_log_probs=True` needs a `compute_loss` that calls `super().compute_loss(...)`. Call it, "
            "or leave the option off."
        )
    if facts.max_draws > 1:
        _check_dynamic_sampling(facts)


def _check_dynamic_sampling(facts: GRPOFacts) -> None:
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
        raise ValueError("`dynamic_sampling=True` is not there for vision-language models. Leave it off.")


def _why_zero_advantages_stay(facts: GRPOFacts) -> str | None:
    """Why a row without advantage can have a gradient all the same, or takes part in that of others."""
    if facts.has_own_loss:
        return "this trainer has a loss of its own, which may send a gradient through them"
    if facts.beta != 0.0:
        return f"the KL term (beta={facts.beta}) sends a gradient through them"
    if facts.has_entropy_bonus:
        return "the entropy bonus sends a gradient through them"
    if facts.has_router_loss:
        return "the router loss counts their tokens"
    if facts.trains_expert_modules:
        return "an expert that only rows without an advantage reach has a gradient of 0 in TRL, not none"
    if facts.top_entropy_quantile < 1.0:
        return f"their entropies count in the quantile (top_entropy_quantile={facts.top_entropy_quantile})"
    return None


def _policy(facts: GRPOFacts) -> Decision:
    stay = _why_zero_advantages_stay(facts)
    drawn = (
        f" Dead groups are replaced first, from up to {facts.max_draws} draws (`dynamic_sampling`)."
        if facts.max_draws > 1
        else ""
    )
    if facts.has_router_loss or facts.has_own_loss or facts.trains_expert_modules:
        return Decision("policy", "run", f"every row: {stay}.{drawn}")
    if stay is not None:
        return Decision(
            "policy",
            "run",
            f"rows with a token in the loss. Rows whose advantage is 0 are fed too: {stay}.{drawn}",
        )
    images = " Every row of a batch with images, too." if facts.has_images else ""
    alike = (
        " Groups rewarded alike, bit for bit, have it (`zero_advantages_of_equal_rewards`)."
        if facts.zero_advantages_of_equal_rewards
        else " Groups rewarded alike keep the rounding noise of TRL's advantages (`zero_advantages_of_equal_rewards` "
        "is off)."
    )
    return Decision(
        "policy",
        "run",
        "rows whose gradient can be non-zero: not those whose advantage is exactly 0, nor those without a token in the "
        f"loss; at least one row on every rank.{alike} In evaluation every row.{images}{drawn}",
    )


def _old_policy(facts: GRPOFacts, misaligned: bool) -> Decision:
    dropout = _DROPOUT if facts.active_dropout else ""
    if facts.trust_sampling_log_probs:
        return Decision(
            "old policy",
            "skip",
            "the sampler's log-probs are taken for it (`trust_sampling_log_probs`). An approximation: their distance "
            "from the policy's is a bias that nothing corrects.",
        )
    trl_scores = misaligned or facts.sampler_ratio is not None
    if facts.bypasses_loss and not trl_scores:
        return Decision("old policy", "skip", "as in TRL: each micro-batch meets the weights it was sampled with.")
    if (facts.has_own_batches or facts.buffers_batches or facts.bypasses_loss) and trl_scores:
        reason = "`_generate_and_score_completions`, which may read or change the log-probs"
        if facts.buffers_batches:
            reason = "a `_prepare_inputs` that keeps the batches in a buffer of its own"
        if facts.bypasses_loss:
            reason = "a `compute_loss` that does not call `super().compute_loss(...)`"
        return Decision("old policy", "run", f"every generation batch, as in TRL: this trainer has {reason}.")
    own = "the log-probs of the training forward, detached, where a micro-batch meets the weights it was sampled with"
    if facts.force_on_policy_ratio:
        own += "; here always, so the ratio is exactly 1 (`force_on_policy_ratio`)"
    if facts.num_iterations > 1 and trl_scores:
        own += "; remembered for the later iterations"
    # Where an optimizer step takes whole generation batches, none waits; a streaming epoch may end in the midst of one
    slices_wait = facts.gradient_accumulation_steps % facts.steps_per_generation != 0 or not facts.epoch_is_known
    if misaligned and facts.steps_per_generation > 1 and slices_wait:
        own += (
            "; slices of the generation batch that are still to be visited when the weights are about to change are "
            "scored just before"
        )
    if facts.sampler_ratio is not None:
        own += "; the ratio to the sampler is formed from them"
    return Decision("old policy", "reuse", f"{own}.{dropout}")


def _reference(facts: GRPOFacts) -> Decision:
    if facts.beta == 0.0:
        return Decision("reference", "skip", "beta is 0: no KL term.")
    what = "" if facts.own_reference is None else f" It is {facts.own_reference}."
    return Decision(
        "reference",
        "run",
        f"rows with a token in the loss, once for each generation batch: the KL term (beta={facts.beta}).{what}",
    )
