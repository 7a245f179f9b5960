"""The config fields of GRPO that decide which passes run, where TRL's own arguments do not."""

from dataclasses import dataclass, field


@dataclass
class GRPOPassArguments:
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
