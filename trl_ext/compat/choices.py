"""What TRL's trainers compare the texts of their configs with, reward functions' keywords, what users override."""

# TRL itself finds a text that it does not know in the first step, and names the argument of none
DPO_LOSS_TYPES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
DPO_CHOICES = {"f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")}
TRUNCATION_MODES = ("keep_start", "keep_end")
GRPO_LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
GRPO_CHOICES = {"importance_sampling_level": ("token", "sequence")}
ADVANTAGE_CHOICES = {
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}

# Beside them the columns of the data set; `environments` only where there are some
REWARD_KEYWORDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
REWARD_COLUMNS_LEFT_OUT = ("prompt", "completion", "completion_ids")

# Parts of a trainer, and the methods that a subclass replaces one by
REPLACEABLE = {
    "loss": ("_compute_loss", "compute_loss"),
    "rollouts": ("_generate",),
    "generation": ("_generate", "_generate_single_turn"),
    "rendering": ("_tokenize_prompts",),
    "rewards": ("_calculate_rewards", "_generate_and_score_completions"),
    "batches": ("_generate_and_score_completions",),
    "pass": ("_get_per_token_logps_and_entropies",),
    "sampler": ("_get_train_sampler", "get_train_dataloader"),
}
