"""Which rows of a batch of GRPO or RLOO a model runs on, and which of their completion tokens are scored.

Dimensions: B rows, R rows that run, C completion tokens, P prompt tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class ScoredTokens:
    """The rows of a batch that a pass runs, and the tokens whose log-probs it computes."""

    rows_R: Tensor  # int64, ascending; at least one row, because every rank runs a pass
    tokens_BC: Tensor  # bool, all of them in these rows

    @property
    def all_rows_run(self) -> bool:
        return len(self.rows_R) == len(self.tokens_BC)

    @property
    def skipped_rows(self) -> int:
        return len(self.tokens_BC) - len(self.rows_R)

    @cached_property
    def unscored_BC(self) -> Tensor:
        return ~self.tokens_BC

    def scatter(self, values_RC: Tensor) -> Tensor:
        """Return `values_RC` as `(B, C)`, with 0 where nothing was scored.

        The result depends on `values_RC` in the autograd graph, even if no token is scored.
        """
        values_BC = values_RC
        if not self.all_rows_run:
            values_BC = values_RC.new_zeros(self.tokens_BC.shape).index_copy(0, self.rows_R, values_RC)
        return values_BC.masked_fill(self.unscored_BC, 0.0)

    def skipped_tokens(self, batch: dict[str, Any]) -> int:
        """Return the number of tokens of `batch` in rows that do not run, padding included."""
        return padded_tokens(batch) // len(self.tokens_BC) * self.skipped_rows

    def select_rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of `batch` that a pass reads, for the R rows. With images, all rows of a batch run."""
        if self.all_rows_run:
            return batch
        keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        return {key: batch[key][self.rows_R] for key in keys}

    def limit_scoring(
        self,
        model: Callable[..., Any],
        outputs: tuple[str, ...],
        sampling_mask: tuple[Tensor, ...] = (),
        routes: Any = None,
    ) -> Callable[..., Any]:
        """Return a function that calls `model(..., labels=labels)` to compute `outputs` for these tokens only.

        Call it with the R rows, all at once or in successive chunks of r rows, as TRL's pass does with `batch_size`.
        `sampling_mask` are the entries `SAMPLING_MASK_KEYS` of the batch, `routes` its `HostRoutes`, if it has them.
        """
        unscored_RC = self.unscored_BC
        if not self.all_rows_run:
            unscored_RC = unscored_RC[self.rows_R]
            sampling_mask = tuple(values_BX[self.rows_R] for values_BX in sampling_mask)
            routes = None if routes is None else routes[self.rows_R]
        start = 0

        def score_chunk(*positional: Any, labels: Tensor, **model_inputs: Any) -> Any:
            nonlocal start
            chunk = slice(start, start + len(labels))
            start = chunk.stop
            if sampling_mask:
                model_inputs["sampling_mask"] = tuple(values_RX[chunk] for values_RX in sampling_mask)
            if routes is not None:
                model_inputs["routes"] = routes[chunk]
            # Labels cover the positions of prompt and completion; no token of a prompt is scored
            unscored_rC = unscored_RC[chunk]
            unscored_rS = pad(unscored_rC, (labels.size(1) - unscored_rC.size(1), 0), value=True)
            # In place of the caller's `head_outputs`, which RLOO's pass sets too
            model_inputs.update(labels=labels.masked_fill(unscored_rS, -100), head_outputs=outputs)
            return model(*positional, **model_inputs)

        return score_chunk


@dataclass(frozen=True)
class PolicyScores:
    """What the policy's pass over a micro-batch computed."""

    scored_tokens: ScoredTokens
    log_probs_RC: Tensor  # with the graph of the training forward
    entropies_RC: Tensor
    router_loss: Tensor | None = None  # scalar, of a mixture of experts

    def detach(self) -> "PolicyScores":
        return replace(self, log_probs_RC=self.log_probs_RC.detach(), entropies_RC=self.entropies_RC.detach())


def is_rowwise(value: Any) -> bool:
    """Whether an entry of TRL's batch has one item per row. Its only scalar tensor is the number of items."""
    return isinstance(value, Tensor) and value.ndim > 0


def padded_tokens(batch: dict[str, Any]) -> int:
    """Return how many tokens TRL processes for `batch`, padding included."""
    return batch["prompt_ids"].numel() + batch["completion_ids"].numel()


def all_tokens(batch: dict[str, Any], *, of_tools: bool = False) -> ScoredTokens:
    """Return all rows, and all tokens of the loss; with `of_tools` also the tokens that a tool wrote."""
    tokens_BC = batch["completion_mask"].bool() if of_tools else loss_mask(batch)
    return ScoredTokens(torch.arange(len(tokens_BC), device=tokens_BC.device), tokens_BC)


def live_tokens(batch: dict[str, Any], *, skip_masked: bool, skip_zero_advantages: bool) -> ScoredTokens:
    """Return the tokens of the loss in live rows, which are the rows that are not dead.

    With `skip_masked`, rows without a token in the loss are dead, and with `skip_zero_advantages` rows whose advantage
    is exactly 0. The loss multiplies tokens of padding, masked completions and tools by 0, so they are never scored.
    """
    if not (skip_masked or skip_zero_advantages):
        return all_tokens(batch)  # without waiting for the device
    tokens_BC = loss_mask(batch)
    live_B = tokens_BC.any(dim=1) if skip_masked else torch.ones_like(tokens_BC[:, 0])
    if skip_zero_advantages:
        live_B = live_B & ~zero_advantages(batch["advantages"])
    rows_R = live_B.nonzero().squeeze(1)
    if not len(rows_R):
        # Ranks run the same collectives, so a rank without live rows runs its shortest row and scores none of it
        lengths_B = batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)
        rows_R = lengths_B.argmin().unsqueeze(0)
    return ScoredTokens(rows_R, tokens_BC & live_B.unsqueeze(1))


def zero_advantages(advantages: Tensor) -> Tensor:
    """Return which rows have an advantage of exactly 0, at every token if tokens have their own: `(B,)`, bool."""
    return (advantages == 0).reshape(len(advantages), -1).all(dim=1)


def loss_mask(batch: dict[str, Any]) -> Tensor:
    """Return a mask of the completion tokens in TRL's loss: `(B, C)`, bool."""
    mask_BC = batch["completion_mask"]
    if "tool_mask" in batch:
        mask_BC = mask_BC * batch["tool_mask"]
    return mask_BC.bool()


def rows_of_equal_rewards(rewards_BF: Tensor, weights_F: Tensor, group_size: int, *, normalized_apart: bool) -> Tensor:
    """Return which rows belong to a group whose rewards are all identical: `(B,)`, bool.

    Their advantage is 0 in exact arithmetic. In fp32 the mean of equal numbers can differ from them in the last bit,
    and TRL divides the difference by a standard deviation of about 0 plus 1e-4: eight rewards of 0.7 get advantages of
    6e-4. A completion that no function scores (NaN from each) already has advantage 0.

    Args:
        rewards_BF (`Tensor`): rewards of F functions on all ranks, NaN where one gave none; groups are contiguous.
        weights_F (`Tensor`): the functions' weights.
        normalized_apart (`bool`): whether TRL normalises each function's rewards before it adds them
            (`multi_objective_aggregation="normalize_then_sum"`). Then the rewards of each function must be identical.
    """
    values_BK = rewards_BF
    if not normalized_apart:
        values_BK = (rewards_BF * weights_F).nansum(dim=1, keepdim=True)
        values_BK = values_BK.masked_fill(rewards_BF.isnan().all(dim=1, keepdim=True), torch.nan)
    values_GSK = values_BK.reshape(-1, group_size, values_BK.size(1))
    missing_GSK = values_GSK.isnan()
    lowest_GK = values_GSK.masked_fill(missing_GSK, torch.inf).amin(dim=1)
    highest_GK = values_GSK.masked_fill(missing_GSK, -torch.inf).amax(dim=1)
    # Without any value, the lowest is +inf and the highest -inf
    equal_G = (lowest_GK >= highest_GK).all(dim=1)
    return equal_G.repeat_interleave(group_size)
