"""The cases in which our trainers must equal stock TRL's: every loss type in every setup, and every option once.

`fast` cases name every loss type and every option at least once for each trainer; the others complete the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One training run of a few steps. `config` holds arguments of the trainer's config."""

    name: str
    trainer: str  # "dpo", "grpo", "sft", "kto", "rloo" or "reward"
    setup: str = "full"  # full, lora, ref_adapter, ref_model, lora_ref_model (DPO), prompt_tuning, prefix_tuning
    model: str = "tied"  # a name of tiny.MODELS; "chat" also means conversational data
    config: dict[str, Any] = field(default_factory=dict)
    fast: bool = True
    # Arguments that only our GRPOConfig knows. Per-micro-batch losses and metrics are compared in TRL's own order.
    ours: dict[str, Any] = field(default_factory=lambda: {"keep_groups_together": False})
    steps: int = 2
    learning_rate: float = 0.05
    lora: dict[str, Any] = field(default_factory=dict)  # changes of tiny.lora_config
    rollout: str = "scripted"  # a name of tiny.ROLLOUTS, or "generate" for TRL's own generation
    rewards: tuple[str, ...] = ("id",)  # names of rewards.REWARDS
    streaming: bool = False
    prompts: int = 12  # rows of a GRPO or RLOO dataset
    rows: int = 12  # of an SFT, DPO or KTO dataset
    reward_columns: bool = False  # whether a DPO dataset has rewards of both completions
    eval_sets: tuple[str, ...] = ()  # names; by default there is one set, without a name, if the trainer evaluates
    calls: tuple[str, ...] = ("train",)  # methods of the trainer, called in this order
    vllm: bool = False  # `use_vllm` is set after the trainer is built, and a rollout replaces vLLM

    def __str__(self) -> str:
        return self.name

    @property
    def accuracy_is_noise_at_first(self) -> bool:
        """Whether the policy equals its reference in the first step.

        If the two are scored in batches of different shapes, a reward accuracy is the sign of a rounding error. Whether
        there is such an error depends on the release of torch.
        """
        return self.trainer == "dpo" and self.setup in ("full", "ref_adapter")


SETUPS = ("full", "lora", "ref_adapter", "ref_model")

# Loss type -> its other arguments, such as `label_smoothing` if it reads it.
DPO_LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "hinge": {},
    "ipo": {},
    "exo_pair": {"label_smoothing": 0.1},
    "nca_pair": {},
    "robust": {"label_smoothing": 0.2},
    "bco_pair": {},
    "sppo_hard": {},
    "aot": {"label_smoothing": 0.1},
    "aot_unpaired": {"label_smoothing": 0.1},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {},
    "sft": {},
    "sigmoid_norm": {},
}
# Quadratic in the log-ratio or in its distance to 5, so the same learning rate would be far too high.
DPO_LEARNING_RATES = {"sppo_hard": 5e-4, "ipo": 5e-3}

F_DIVERGENCE_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")

GRPO_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "cispo": {"epsilon_high": 1.1},  # bounds the ratio; TRL's default of 0.2 would clip every token
    "sapo": {},
    "luspo": {},
    "vespo": {},
}
GRPO_LEVELS = ("token", "sequence")

# PEFT's "all-linear" finds no linear layer in the experts and warns.
ATTENTION_ONLY = {"target_modules": ["q_proj", "v_proj"]}

# Two iterations over each generation batch, so that the second step's importance ratio is not 1.
OFF_POLICY = {"num_iterations": 2}


def _dpo_table() -> Iterator[Case]:
    for row, (loss_type, extra) in enumerate(DPO_LOSSES.items()):
        for column, setup in enumerate(SETUPS):
            yield Case(
                f"dpo-{loss_type}-{setup}",
                "dpo",
                setup,
                config={"loss_type": loss_type, **extra},
                learning_rate=DPO_LEARNING_RATES.get(loss_type, 0.05),
                fast=column == row % len(SETUPS),
            )
    # The score contains exp(-log-ratio), or a root of it, which is steep, especially with a steep loss type.
    for divergence, rate in {"forward_kl": 0.05, "js_divergence": 1.0, "alpha_divergence": 0.2}.items():
        for loss_type in F_DIVERGENCE_LOSSES:
            yield Case(
                f"dpo-{divergence}-{loss_type}",
                "dpo",
                "ref_model",
                config={"f_divergence_type": divergence, "loss_type": loss_type, **DPO_LOSSES[loss_type]},
                learning_rate=DPO_LEARNING_RATES.get(loss_type, 0.05) * rate,
                fast=loss_type == "sigmoid",
            )


def _dpo(name: str, setup: str = "full", model: str = "tied", **config: Any) -> Case:
    keys = ("fast", "steps", "learning_rate", "lora", "streaming")
    kwargs = {key: config.pop(key) for key in keys if key in config}
    return Case(f"dpo-{name}", "dpo", setup, model, config, **kwargs)


DPO_OPTIONS = [
    _dpo("beta", "ref_model", beta=0.5),
    _dpo("neftune", "ref_model", neftune_noise_alpha=5.0),  # the noise depends on the width of the batch
    _dpo("use_weighting", "ref_model", use_weighting=True, learning_rate=2.0),
    _dpo("use_weighting-lora", "lora", use_weighting=True, learning_rate=2.0, fast=False),
    _dpo("use_weighting-softcap", "ref_model", "softcap", use_weighting=True, learning_rate=2.0, fast=False),
    _dpo("ld_alpha", "lora", ld_alpha=0.5),
    _dpo("ld_alpha-zero", "ref_model", ld_alpha=0.0, fast=False),
    _dpo("ld_alpha-precompute", "ref_model", ld_alpha=0.5, precompute_ref_log_probs=True, fast=False),
    _dpo(
        "alpha_divergence-coef",
        "lora",
        f_divergence_type="alpha_divergence",
        f_alpha_divergence_coef=0.8,
    ),
    _dpo(
        "alpha_divergence-limit",
        "lora",
        f_divergence_type="alpha_divergence",
        f_alpha_divergence_coef=1.0,
        fast=False,
    ),
    _dpo(
        "label_smoothing-ignored", "ref_model", label_smoothing=0.4, fast=False
    ),  # TRL's sigmoid loss does not read it
    _dpo("discopop_tau", "ref_model", loss_type="discopop", discopop_tau=0.5, fast=False),
    _dpo("precompute", "full", precompute_ref_log_probs=True, steps=3),
    _dpo(
        "precompute-batch-eval",
        "lora",
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=3,
        eval_strategy="steps",
        eval_steps=1,
    ),
    _dpo("precompute-ref_adapter", "ref_adapter", precompute_ref_log_probs=True, fast=False),
    _dpo("precompute-ref_model", "ref_model", precompute_ref_log_probs=True, fast=False),
    _dpo("sync_ref_model", "full", sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.3, steps=3),
    _dpo("sync_ref_model-ref_model", "ref_model", sync_ref_model=True, ref_model_sync_steps=2, steps=3, fast=False),
    _dpo("experts", "full", "experts"),
    _dpo("experts-coef", "ref_model", "experts", router_aux_loss_coef=0.5, fast=False),
    _dpo("experts-no-aux", "full", "experts", router_aux_loss_coef=0.0, fast=False),
    _dpo("experts-lora", "lora", "experts", gradient_accumulation_steps=2, lora=ATTENTION_ONLY, fast=False),
    _dpo(
        "mixed-losses",
        "ref_model",
        loss_type=["sigmoid", "bco_pair", "sft"],
        loss_weights=[0.8, 0.2, 1.0],
    ),
    _dpo("mixed-losses-unweighted", "lora", loss_type=["hinge", "aot", "sigmoid_norm"], fast=False),
    _dpo("accumulation", "lora", gradient_accumulation_steps=2, per_device_train_batch_size=2),
    _dpo("accumulation-full", "full", gradient_accumulation_steps=3, per_device_train_batch_size=1, fast=False),
    _dpo("clipped-gradient", "ref_model", max_grad_norm=0.05, learning_rate=0.5),
    _dpo("evaluation", "ref_model", eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2),
    _dpo("evaluation-lora", "lora", eval_strategy="steps", eval_steps=1, fast=False),
    _dpo("prompt_tuning", "prompt_tuning", learning_rate=1.0),
    _dpo(
        "prompt_tuning-precompute",
        "prompt_tuning",
        learning_rate=1.0,
        precompute_ref_log_probs=True,
        eval_strategy="steps",
        eval_steps=1,
        fast=False,
    ),
    _dpo("prompt_tuning-weighting", "prompt_tuning", "untied", learning_rate=1.0, use_weighting=True, fast=False),
    _dpo("prefix_tuning", "prefix_tuning", learning_rate=1.0, fast=False),
    _dpo("checkpointing", "full", gradient_checkpointing=True),
    _dpo("checkpointing-lora", "lora", "untied", gradient_checkpointing=True, fast=False),
    _dpo("checkpointing-ref_adapter", "ref_adapter", gradient_checkpointing=True, fast=False),
    _dpo(
        "checkpointing-reentrant",
        "ref_model",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        fast=False,
    ),
    _dpo("untied", "ref_model", "untied", fast=False),
    _dpo("softcap", "lora", "softcap"),
    _dpo("softcap-full", "ref_model", "softcap", fast=False),
    _dpo("logits_scaling", "ref_model", "logits_scaling"),
    _dpo("logits_scaling-lora", "lora", "logits_scaling", fast=False),
    _dpo("logit_scale", "lora", "logit_scale", fast=False),
    _dpo("logit_scale-full", "ref_model", "logit_scale", fast=False),
    _dpo("head_bias", "ref_model", "head_bias"),
    _dpo("head_bias-lora", "lora", "head_bias", fast=False),
    _dpo("head_bias_gptj", "lora", "head_bias_gptj", fast=False),
    _dpo("head_bias_gptj-full", "full", "head_bias_gptj", fast=False),
    _dpo("wide_vocab", "ref_model", "wide_vocab", fast=False),
    _dpo("wide_vocab-lora", "lora", "wide_vocab", use_weighting=True, fast=False),
    _dpo("lora-with-ref_model", "lora_ref_model"),
    _dpo("lora-head-saved", "lora", "untied", lora={"modules_to_save": ["lm_head"]}),
    # One step, because from the second on TRL's reference has the trained biases
    _dpo("lora-bias", "lora", "head_bias", lora={"bias": "all"}, steps=1, fast=False),
    _dpo("dora", "lora", lora={"use_dora": True}, fast=False),
    _dpo("max_length", "ref_model", max_length=9),
    _dpo("pad_to_multiple_of", "ref_model", pad_to_multiple_of=8),
    _dpo("conversation", "ref_model", "chat"),
    _dpo("streaming", "lora", streaming=True, fast=False),
]


def _grpo_table() -> Iterator[Case]:
    for row, (loss_type, extra) in enumerate(GRPO_LOSSES.items()):
        for level_index, level in enumerate(GRPO_LEVELS):
            for column, setup in enumerate(SETUPS):
                config = {"loss_type": loss_type, "importance_sampling_level": level, **extra, **OFF_POLICY}
                if setup in ("lora", "ref_adapter"):
                    config["beta"] = 0.1
                yield Case(
                    f"grpo-{loss_type}-{level}-{setup}",
                    "grpo",
                    setup,
                    config=config,
                    learning_rate=0.02,
                    fast=level_index == row % len(GRPO_LEVELS) and column == row % len(SETUPS),
                )


def _grpo(name: str, setup: str = "full", model: str = "tied", **config: Any) -> Case:
    keys = ("fast", "steps", "learning_rate", "lora", "rollout", "rewards", "streaming", "ours")
    kwargs = {key: config.pop(key) for key in keys if key in config}
    return Case(f"grpo-{name}", "grpo", setup, model, config, **{"learning_rate": 0.02, **kwargs})


GRPO_OPTIONS = [
    _grpo("defaults", "full"),  # on-policy, beta 0: no old-policy pass, no reference
    _grpo("on_policy-beta", "ref_model"),
    _grpo("neftune", "lora", neftune_noise_alpha=5.0),
    _grpo("no_bias_correction_kl", "ref_model", use_bias_correction_kl=False, **OFF_POLICY),
    _grpo("lora-without-beta", "lora", **OFF_POLICY, fast=False),
    _grpo("ref_adapter-without-beta", "ref_adapter", **OFF_POLICY, fast=False),
    _grpo(
        "sync_ref_model",
        "ref_model",
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.3,
        learning_rate=0.1,
        steps=3,
    ),
    _grpo("entropy-static", "full", entropy_coef=0.05, fast=False),
    _grpo("entropy-static-lora", "lora", beta=0.1, entropy_coef=0.05, **OFF_POLICY),
    _grpo(
        "entropy-adaptive",
        "full",
        use_adaptive_entropy=True,
        entropy_coef=0.02,
        entropy_target=10.0,  # nats, so that the bonus is active from the second step
        steps=3,
    ),
    _grpo(
        "entropy-adaptive-accumulation",
        "lora",
        use_adaptive_entropy=True,
        entropy_target=10.0,
        gradient_accumulation_steps=2,
        steps=3,
        fast=False,
    ),
    # The first tokens of a group share their context: see test_entropy_quantile.py
    _grpo("top_entropy_quantile", "full", top_entropy_quantile=0.2, **OFF_POLICY),
    _grpo("top_entropy_quantile-bonus", "lora", top_entropy_quantile=0.2, entropy_coef=0.05, beta=0.1, fast=False),
    _grpo("off_policy_mask", "full", off_policy_mask_threshold=0.01, num_iterations=4, steps=4),
    _grpo("off_policy_mask-sampler", "lora", off_policy_mask_threshold=0.5, rollout="sampler", **OFF_POLICY),
    _grpo("env_mask", "ref_model", rollout="masked", **OFF_POLICY),
    _grpo("env_mask-sequence", "lora", rollout="masked", importance_sampling_level="sequence", beta=0.1, fast=False),
    _grpo("env_mask-truncated", "full", rollout="masked", mask_truncated_completions=True, fast=False),
    _grpo("tools", "full", "chat", rollout="tool_call", max_completion_length=120, **OFF_POLICY),
    _grpo("tools-lora", "lora", "chat", rollout="tool_call", max_completion_length=120, beta=0.1, fast=False),
    _grpo("experts", "full", "experts", **OFF_POLICY),
    _grpo("experts-accumulation", "ref_model", "experts", gradient_accumulation_steps=2, learning_rate=0.2, fast=False),
    _grpo("experts-coef", "lora", "experts", router_aux_loss_coef=0.5, beta=0.1, lora=ATTENTION_ONLY, fast=False),
    _grpo("delta", "full", delta=1.05, epsilon_high=0.1, learning_rate=0.1, **OFF_POLICY),
    _grpo("epsilon", "lora", epsilon=0.01, epsilon_high=0.05, learning_rate=0.1, **OFF_POLICY, fast=False),
    _grpo(
        "sapo-temperatures",
        "lora",
        loss_type="sapo",
        sapo_temperature_neg=2.0,
        sapo_temperature_pos=0.5,
        learning_rate=0.5,
        **OFF_POLICY,
    ),
    _grpo(
        "vespo-gamma",
        "full",
        loss_type="vespo",
        vespo_k_pos=1.0,
        vespo_lambda_pos=2.0,
        vespo_k_neg=2.0,
        vespo_lambda_neg=1.0,
        **OFF_POLICY,
    ),
    _grpo("mask_truncated", "lora", mask_truncated_completions=True, **OFF_POLICY),
    _grpo("num_iterations", "full", num_iterations=3, steps=4, fast=False),
    _grpo("accumulation", "lora", gradient_accumulation_steps=2, per_device_train_batch_size=4, beta=0.1),
    _grpo("accumulation-off_policy", "full", gradient_accumulation_steps=2, **OFF_POLICY, steps=3, fast=False),
    _grpo("steps_per_generation", "full", gradient_accumulation_steps=2, steps_per_generation=4, steps=3, fast=False),
    _grpo("steps_per_generation-lora", "lora", steps_per_generation=3, beta=0.1, steps=4, fast=False),
    _grpo("clipped-gradient", "full", max_grad_norm=0.05, learning_rate=0.5, fast=False),
    _grpo("evaluation", "ref_model", eval_strategy="steps", eval_steps=1, **OFF_POLICY, fast=False),
    _grpo("evaluation-generations", "lora", eval_strategy="steps", eval_steps=1, num_generations_eval=2, fast=False),
    _grpo("prompt_tuning", "prompt_tuning", beta=0.1, learning_rate=1.0, **OFF_POLICY),
    _grpo("prompt_tuning-untied", "prompt_tuning", "untied", learning_rate=1.0, entropy_coef=0.05, fast=False),
    _grpo("prefix_tuning", "prefix_tuning", beta=0.1, learning_rate=1.0, **OFF_POLICY, fast=False),
    _grpo("checkpointing", "full", gradient_checkpointing=True, **OFF_POLICY),
    _grpo("checkpointing-lora", "lora", "untied", gradient_checkpointing=True, beta=0.1, fast=False),
    _grpo("checkpointing-ref_adapter", "ref_adapter", gradient_checkpointing=True, beta=0.1, fast=False),
    _grpo("untied", "ref_model", "untied", **OFF_POLICY, fast=False),
    _grpo("softcap", "lora", "softcap", beta=0.1, **OFF_POLICY),
    _grpo("softcap-full", "full", "softcap", entropy_coef=0.05, fast=False),
    _grpo("logits_scaling", "full", "logits_scaling", **OFF_POLICY, fast=False),
    _grpo("logits_scaling-lora", "lora", "logits_scaling", entropy_coef=0.05, fast=False),
    _grpo("logit_scale", "lora", "logit_scale", beta=0.1, **OFF_POLICY),
    _grpo("logit_scale-full", "full", "logit_scale", entropy_coef=0.05, fast=False),
    _grpo("head_bias", "full", "head_bias", **OFF_POLICY, fast=False),
    _grpo("head_bias-lora", "lora", "head_bias", entropy_coef=0.05, fast=False),
    _grpo("head_bias_gptj", "lora", "head_bias_gptj", beta=0.1, fast=False),
    _grpo("wide_vocab", "full", "wide_vocab", entropy_coef=0.05, **OFF_POLICY, fast=False),
    _grpo("wide_vocab-lora", "lora", "wide_vocab", beta=0.1, **OFF_POLICY, fast=False),
    _grpo("cast_lm_head_to_fp32", "ref_model", "untied", cast_lm_head_to_fp32=True, **OFF_POLICY),
    # untied: with tied embeddings and PEFT, stock TRL 1.16 raises AttributeError when it casts the head
    _grpo("cast_lm_head_to_fp32-lora", "lora", "untied", cast_lm_head_to_fp32=True, beta=0.1, fast=False),
    _grpo("temperature", "lora", temperature=1.7, beta=0.1, **OFF_POLICY),
    _grpo("lora-head-saved", "lora", "untied", lora={"modules_to_save": ["lm_head"]}, beta=0.1, **OFF_POLICY),
    _grpo("generation", "full", rollout="generate", **OFF_POLICY),
    _grpo(
        "continuous-batching",
        "full",
        rollout="generate",
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"num_blocks": 64, "max_batch_tokens": 128},
        ours={"keep_groups_together": False, "generate_fewer_rows": False},  # otherwise the samples are others
        **OFF_POLICY,
    ),
    _grpo("generation-lora", "lora", rollout="generate", beta=0.1, fast=False),
    _grpo("scale_rewards-batch", "full", scale_rewards="batch"),
    _grpo("scale_rewards-none", "lora", scale_rewards="none", **OFF_POLICY, fast=False),
    _grpo("rewards-weighted", "full", rewards=("id", "short"), reward_weights=[1.0, 0.5]),
    _grpo(
        "rewards-normalized",
        "lora",
        rewards=("id", "short"),
        multi_objective_aggregation="normalize_then_sum",
        fast=False,
    ),
    _grpo("dead-group", "full", rewards=("half_dead",), **OFF_POLICY, fast=False),
    _grpo("dead-group-beta", "ref_model", rewards=("half_dead",), **OFF_POLICY, fast=False),
    _grpo("dead-group-entropy", "lora", rewards=("half_dead",), entropy_coef=0.05, **OFF_POLICY, fast=False),
    _grpo("pad_to_multiple_of", "lora", pad_to_multiple_of=8, beta=0.1),
    _grpo("streaming", "full", streaming=True, fast=False),
]

LOSS_TABLE = [*_dpo_table(), *_grpo_table()]

CASES: dict[str, Case] = {case.name: case for case in [*LOSS_TABLE, *DPO_OPTIONS, *GRPO_OPTIONS]}
