"""Which rows of a batch of GRPO or RLOO a model runs on, and which of their completion tokens are scored.

Dimensions: B rows, R rows that run, C completion tokens, P prompt tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Entries of a batch: the tokens that the sampler could choose at each step of a completion, one step after another,
# (B, K); and how many at each step, (B, C), 0 for the whole vocabulary
KEPT_CLASSES = ("kept_ids", "kept_counts")


@dataclass(frozen=True)
class ScoredTokens:
    """The rows of a batch that run, and the tokens whose log-probs are computed."""

    rows_R: Tensor  # the rows that run, ascending; at least one, because every rank runs a pass
    tokens_BC: Tensor  # bool: the tokens that are scored, all of them in these rows

    @property
    def every_row(self) -> bool:
        return len(self.rows_R) == len(self.tokens_BC)

    @cached_property
    def unscored_BC(self) -> Tensor:
        return ~self.tokens_BC

    def spread(self, values_RC: Tensor) -> Tensor:
        """Return `values_RC` as `(B, C)`, with 0 where nothing was scored.

        The result depends on `values_RC` in the autograd graph, even if no token is scored.
        """
        values_BC = values_RC
        if not self.every_row:
            values_BC = values_RC.new_zeros(self.tokens_BC.shape).index_copy(0, self.rows_R, values_RC)
        return values_BC.masked_fill(self.unscored_BC, 0.0)

    def tokens_left_out(self, batch: dict[str, Any]) -> int:
        """Return the number of skipped tokens of `batch`, padding included."""
        return tokens_of(batch) // len(self.tokens_BC) * (len(self.tokens_BC) - len(self.rows_R))

    def labelled(
        self, model: Callable[..., Any], outputs: tuple[str, ...], kept: tuple[Tensor, ...] = ()
    ) -> Callable[..., Any]:
        """Return a function that calls `model(..., labels=labels)` to compute `outputs` for these tokens only.

        Call it with the R rows, all at once or in successive chunks. `kept` are the entries `KEPT_CLASSES` of the
        batch, if it has them.
        """
        unscored_RC, *kept_R = (x if self.every_row else x[self.rows_R] for x in (self.unscored_BC, *kept))
        start = 0

        def call(*args: Any, labels: Tensor, **inputs: Any) -> Any:
            nonlocal start
            chunk = slice(start, start + len(labels))
            chunk_rC, start = unscored_RC[chunk], chunk.stop
            if kept_R:
                inputs["kept"] = tuple(x[chunk] for x in kept_R)
            unscored_rS = torch.nn.functional.pad(chunk_rC, (labels.size(1) - chunk_rC.size(1), 0), value=True)
            inputs |= {"labels": labels.masked_fill(unscored_rS, -100), "head_outputs": outputs}
            return model(*args, **inputs)

        return call

    def fed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of `batch` that a pass reads, for the R rows. With images, all rows of a batch run."""
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        return batch if self.every_row else {name: batch[name][self.rows_R] for name in names}


def is_rowwise(value: Any) -> bool:
    """Whether an entry of TRL's batch has one item per row. Its only scalar tensor is the number of items."""
    return isinstance(value, Tensor) and value.ndim > 0


def tokens_of(batch: dict[str, Any]) -> int:
    """Return how many tokens TRL processes for `batch`, padding included."""
    return batch["prompt_ids"].numel() + batch["completion_ids"].numel()


def every_token(batch: dict[str, Any], *, of_tools: bool = False) -> ScoredTokens:
    """Return every row, and every token of the loss; with `of_tools` also the tokens that a tool wrote."""
    tokens_BC = batch["completion_mask"].bool() if of_tools else loss_mask(batch)
    return ScoredTokens(torch.arange(len(tokens_BC), device=tokens_BC.device), tokens_BC)


def scored_tokens(batch: dict[str, Any], *, skip_masked: bool, skip_zero_advantages: bool) -> ScoredTokens:
    """Return the tokens of the loss, without those of dead rows.

    With `skip_masked`, rows without a token in the loss are dead, and with `skip_zero_advantages` rows whose advantage
    is exactly 0. The loss multiplies tokens of padding, masked completions and tools by 0, so they are never scored.
    """
    tokens_BC = loss_mask(batch)
    live_B = tokens_BC.any(dim=1) if skip_masked else torch.ones_like(tokens_BC[:, 0])
    if skip_zero_advantages:
        live_B = live_B & ~zero_advantages(batch["advantages"])
    rows_R = live_B.nonzero().squeeze(1)
    if not len(rows_R):
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
