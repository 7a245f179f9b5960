"""The keys of a batch: what each holds, who writes it, and who reads it. And the keys that we add, as constants.

A batch is TRL's dict, because TRL's buffer, TRL's loss and users' subclasses pass it on. Dimensions: B rows (a batch of
DPO has those of all chosen completions, then those of the rejected ones), S tokens of a row, P prompt tokens, C
completion tokens, K tokens that the sampler could choose in all steps of a completion together, L routers that choose k
experts of a token.

GRPO and RLOO:

| key | shape, dtype | written by | read by |
|---|---|---|---|
| `prompt_ids`, `prompt_mask` | (B, P) int64, padded on the left | TRL's generation | every pass |
| `completion_ids`, `completion_mask` | (B, C) int64, padded on the right | TRL's generation | every pass, the loss |
| `tool_mask` | (B, C) int64, 0 for tokens of a tool | TRL, with tools | `loss_mask`, the loss |
| `advantages` | (B,) fp32; a subclass may give (B, C) | TRL; we set exact zeros | `live_tokens`, the loss |
| `num_items_in_batch` | scalar int64 | TRL; `GRPOGeneration` after more draws | TRL's dapo, cispo, vespo |
| `sampling_per_token_logps` | (B, C) fp32, NaN if unknown | a sampler that gives them | `SamplerRatio` |
| `old_per_token_logps` | (B, C) fp32 | TRL's passes, `score_as_trl` | `LossInputs`, the loss |
| `old_policy_log_probs` | (B, C) fp32, 0 if not scored | `GRPOPasses`, `Buffer.store` | `LossInputs` |
| `old_policy_scored` | (B, C) bool | together with `old_policy_log_probs` | `LossInputs` |
| `ref_per_token_logps` | (B, C) fp32 | `GRPOPasses.score_reference` | `LossInputs`, the loss |
| `importance_sampling_ratio` | (B, C) or (B, 1) fp32 | TRL, `score_as_trl`, `LossInputs` | the loss |
| `old_policy_sampler_ratio` | (B, C) or (B, 1) fp32, 1 if not scored | `Buffer.store` | `LossInputs` |
| `kept_ids`, `kept_counts` | (B, K) and (B, C) int64 | `SamplingMaskRecorder` | the head, in every pass |
| `prompt_routes` | (B, P, L, k) uint8 or int16, on the host | `RouteReplay` | the policy's routers, in every pass |
| `completion_routes` | (B, C, L, k), as above | `RouteReplay` | the policy's routers, in every pass |
| `merged_micro_batches` | int | `Buffer.merge` | `merged_micro_batches` in `compat/sampled.py` |
| `old_logps` | (B,) fp32 | TRL's generation, `RLOOLossInputs` | RLOO's loss |
| `old_policy_sums` | (B,) fp32 | RLOO's `compute_loss` | RLOO's `compute_loss`, if the batch recurs |
| `pixel_values` and others of images | as the processor gives them | TRL's generation | the pass of the model |

DPO, KTO and SFT:

| key | shape, dtype | written by | read by |
|---|---|---|---|
| `input_ids`, `attention_mask` | (B, S) int64, padded on the right | TRL's collator | every pass, the store |
| `completion_mask` | (B, S) int64 | TRL's collator (not SFT's) | every pass, the store, the loss |
| `chosen_input_ids` and others | (B, S) int64, a row for each pair | `DPOBatches`, while pairs move | `DPOBatches` |
| `ref_chosen_logps`, `ref_rejected_logps` | (B,) fp32, one for each pair | data set, `DPOReference` | DPO's loss |
| `chosen_reward`, `rejected_reward` | (B,) fp32, one for each pair | data set, `RewardCollator` | the RPO terms |
| `label` | (B,) bool | data set | KTO's loss |
| `KL_input_ids` and others | (B, S) int64 | TRL's collator, for KTO's KL term | `sequences_of`, TRL |
| `ref_logps`, `ref_KL_logps` | (B,) fp32 | `KTOReference` | KTO's loss |
| `labels` | (B, S) int64, -100 if not scored | TRL's SFT collator | the head |
"""

from typing import Any

import torch
from torch import Tensor

# TRL's names for the first and the last would promise a value for each token, also to code of the user
OLD_POLICY = "old_policy_log_probs"
OLD_POLICY_SCORED = "old_policy_scored"
OLD_POLICY_SAMPLER_RATIO = "old_policy_sampler_ratio"
# RLOO's: the sum over each completion that ran
OLD_POLICY_SUMS = "old_policy_sums"
# The sampling mask: the tokens that the sampler could choose at each step of a completion, one step after another; and
# how many at each step, 0 for the whole vocabulary
SAMPLING_MASK_KEYS = ("kept_ids", "kept_counts")
# The experts that each router has chosen for each token
PROMPT_ROUTES = "prompt_routes"
COMPLETION_ROUTES = "completion_routes"
ROUTE_KEYS = (PROMPT_ROUTES, COMPLETION_ROUTES)

# With a column for each token of the completion
TOKEN_KEYS = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
)


def old_policy_entries(log_probs_BC: Tensor, scored_BC: Tensor) -> dict[str, Tensor]:
    """Return the entries that store the old policy's log-probs `(B, C)`, which are 0 outside of `scored_BC`.

    The mask is stored too, because a log-prob can be 0, and a token that was not scored must not be trained on.
    """
    return {OLD_POLICY: log_probs_BC, OLD_POLICY_SCORED: scored_BC}


def has_old_policy(batch: dict[str, Any]) -> bool:
    """Return whether a batch has the old policy's log-probs, of all tokens or of the scored ones."""
    return OLD_POLICY in batch or "old_per_token_logps" in batch


def with_old_policy_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's micro-batch with the keys of `old_policy_entries`.

    Earlier checkpoints have TRL's key, with `OLD_POLICY_SCORED`, or with NaN for "not scored" and inf for NaN.
    """
    log_probs_BC = batch.get("old_per_token_logps")
    scored_BC = batch.get(OLD_POLICY_SCORED)
    # Without either, every token was scored, because code of the user may read it
    if log_probs_BC is None or (scored_BC is None and not log_probs_BC.isnan().any()):
        return batch
    other_entries = {key: value for key, value in batch.items() if key != "old_per_token_logps"}
    if scored_BC is None:
        scored_BC = ~log_probs_BC.isnan()
        log_probs_BC = log_probs_BC.nan_to_num(0.0, torch.nan, -torch.inf)
    return other_entries | old_policy_entries(log_probs_BC, scored_BC)


def with_routes_on_host(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's micro-batch with its routes on the host, where they take no memory of the device."""
    return {**batch, **{key: batch[key].cpu() for key in ROUTE_KEYS if key in batch}}


def prompt_of(batch: dict[str, Any], row: int) -> list[int]:
    """Return the token ids of a row's prompt, without padding."""
    ids: list[int] = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
    return ids


def sampler_log_probs(batch: dict[str, Any]) -> Tensor:
    """Return the sampler's log-probs of the completions: `(B, C)`, NaN where it gave none."""
    if "sampling_per_token_logps" not in batch:
        raise ValueError(
            "`vllm_importance_sampling_correction` or `trust_sampling_log_probs` needs the sampler's log-probs, but "
            "the `rollout_func` returned None as `logprobs`. Return the log-probs, or switch the option off."
        )
    log_probs_BC: Tensor = batch["sampling_per_token_logps"]
    return log_probs_BC
