"""The config fields of GRPO that decide which passes run, where TRL's own arguments do not."""

from dataclasses import dataclass, field

from .added_fields import AddedFields


@dataclass
class GRPOPassArguments(AddedFields):
    """Fields of the plan; with every default nothing but useless work is left out."""

    force_on_policy_ratio: bool = field(
        default=False,
        metadata={
            "help": "Demand that the ratio of the policy to the old policy is exactly 1: every completion meets the "
            "weights it was sampled with. An error before training where rollout and training batch differ."
        },
    )
    trust_sampling_log_probs: bool = field(
        default=False,
        metadata={
            "help": "Take the sampler's log-probs (vLLM's, or those of a `rollout_func`) for the old policy's, instead "
            "of scoring. An approximation: the sampler's distance from the policy becomes a bias of the ratio."
        },
    )
    zero_advantages_of_equal_rewards: bool = field(
        default=True,
        metadata={
            "help": "Set the advantages of a group whose completions were rewarded alike, bit for bit, to 0. In fp32 "
            "TRL gives them rounding noise of about 6e-4, on which AdamW moves the weights by the full learning rate. "
            "It acts where rows without advantage need not be fed."
        },
    )
    dynamic_sampling: bool = field(
        default=False,
        metadata={
            "help": "Replace groups without advantage by drawing further prompts, as DAPO does: every step then trains "
            "on as many live groups as it has room for. It changes which prompts are trained on."
        },
    )
    dynamic_sampling_max_draws: int = field(
        default=10,
        metadata={
            "help": "With `dynamic_sampling`, the most generation batches to draw for one, the first included. Groups "
            "that are dead after the last draw stay."
        },
    )
    keep_groups_together: bool | None = field(
        default=None,
        metadata={
            "help": "Whether the completions of a prompt share a micro-batch as far as there is room, among those of "
            "one optimizer step. `None`: where that changes no gradient. `True`: an error before training where it "
            "would, or would save nothing; it also says that what a subclass overrides does not look at a micro-batch "
            "as a whole. `False`: TRL's order."
        },
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "The most tokens that one forward of the policy feeds in training; a longer row is fed alone. Rows "
            "of a micro-batch are fed in as many forwards and backwards as that takes, which changes no gradient. "
            "`None`: one forward."
        },
    )

    def __post_init__(self) -> None:
        draws = self.dynamic_sampling_max_draws
        if not isinstance(draws, int) or isinstance(draws, bool) or draws < 1:
            raise ValueError(f"`dynamic_sampling_max_draws` must be an integer of at least 1, got {draws!r}.")
        budget = self.max_tokens_per_micro_batch
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
            raise ValueError(f"`max_tokens_per_micro_batch` must be None or an integer of at least 1, got {budget!r}.")
        super().__post_init__()
