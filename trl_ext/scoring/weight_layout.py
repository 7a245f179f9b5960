"""Choose which rows of the LM head's weight a rank scores with: its own, all in slices, or all at once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..distributed.gradients import scale_grad
from ..distributed.shards import ShardedWeight, gathered_by_zero3, is_zero3, sharded_weight, whole_tensor
from ..heads.parallel import Block, BroadcastShards, Exchange, LocalShards, VocabularyShard, tokens_of_ranks
from .head import HeadAdapter, LinearHead

WHOLE_HERE = "the whole weight is on this rank"


class WeightLayout(NamedTuple):
    """How one pass reads the head's weight."""

    weight: Tensor  # (v, H), the rows on this rank
    bias: Tensor | None  # (v,)
    trained: tuple[bool, bool]  # whether the weight and the bias get a gradient
    shard: VocabularyShard | None  # which rank has which rows; None if this rank has all
    sharded: ShardedWeight | None  # how the engine shards the weight; given with `shard`
    readable: Callable[[], AbstractContextManager[Any]]  # a context in which weight and bias can be read
    reason: str  # the choice and why, for the plan
    adapter: HeadAdapter = HeadAdapter()


def weight_layout_of(
    head: LinearHead,
    hidden_NH: Tensor,
    *,
    outputs: tuple[str, ...],
    whole: bool,
    entropy_grad: bool,
    has_sampling_mask: bool = False,
    counts: tuple[int, ...] | None = None,
) -> WeightLayout:
    """Return the layout for one pass over the hidden states `(N, H)` of this rank.

    All ranks of the weight's group call it together, even one without a token.

    Args:
        outputs (`tuple[str, ...]`): the fields that the head computes.
        whole (`bool`): whether the head needs the whole weight.
        entropy_grad (`bool`): whether the entropy has a gradient, which needs one more read of the weight.
        has_sampling_mask (`bool`): whether tokens have a sampling mask; then the ranks do not exchange tokens.
        counts (`tuple[int, ...]`, *optional*): tokens of each rank. `None`: the ranks exchange them.
    """
    if head.module is not None:
        rows = _whole(head.linear)
        return rows._replace(reason=f"{rows.reason}, with {head.description}", adapter=head.adapter)
    sharded = None if whole else sharded_weight(head.linear)
    if sharded is not None and sharded.engine == "tensor parallel":
        return _local(sharded, None, "each rank scores with its rows of the weight (tensor parallel)")
    if sharded is not None and sharded.blocks[0][1].device == hidden_NH.device:
        counts = counts or tokens_of_ranks(len(hidden_NH), sharded.group, hidden_NH.device)
        tokens, weight = bytes_moved(
            sharded,
            counts,
            hidden_NH,
            outputs=outputs,
            gradient=torch.is_grad_enabled(),
            entropy_grad=entropy_grad,
        )
        if tokens <= weight and not has_sampling_mask:
            reason = (
                f"each rank scores the tokens of all ranks with its rows of the weight ({sharded.engine}), because a "
                f"pass exchanges {_mib(tokens)} for the tokens and {_mib(weight)} for the weight"
            )
            return _local(sharded, counts, reason)
        if not sharded.trained and sharded.blocks[0][2] is None:
            cost = f"a pass exchanges {_mib(weight)} for the weight and {_mib(tokens)} for the tokens"
            why = "each token keeps only some classes" if has_sampling_mask else cost
            reason = f"the ranks broadcast their rows of the weight in slices ({sharded.engine}), because {why}"
            return _in_turn(sharded, reason)
    return _whole(head.linear)


def bytes_moved(
    sharded: ShardedWeight,
    counts: tuple[int, ...],
    hidden_NH: Tensor,
    *,
    outputs: tuple[str, ...],
    gradient: bool,
    entropy_grad: bool,
) -> tuple[int, int]:
    """Return the bytes that each rank receives over a ring: if the ranks exchange tokens, and if they exchange weights.

    Both are means over the ranks. Tokens: hidden states and targets of the other ranks, a few fp32 numbers per token
    to sum, and the gradients of the hidden states in fp32. Weights: the other ranks' rows, and their gradient if the
    weight is trained.
    """
    ranks = len(counts)
    width = hidden_NH.shape[1]
    item = hidden_NH.element_size()
    accumulated = max(4, item)
    target = 8
    mean_grad = "mean_log_probs" in outputs
    # The backward reads hidden states or weight once more
    reads_again = gradient and (sharded.trained or entropy_grad or mean_grad)
    # A max, two sums, and one number for each output besides the log-probs. An all-reduce sends each number twice
    statistics = 3 + len({*outputs} - {"log_probs"})
    token_bytes = width * item + target + 2 * statistics * accumulated
    if gradient:
        token_bytes += width * accumulated
    if reads_again:
        token_bytes += width * item + target + (4 + 2 * entropy_grad + mean_grad) * accumulated
    # A gathered weight that is trained is kept for the backward
    passes = 1 + (gradient if sharded.trained else reads_again)
    weight = sharded.vocabulary * width * sharded.blocks[0][1].element_size()
    return (ranks - 1) * max(counts) * token_bytes, weight * passes * (ranks - 1) // ranks


def _local(sharded: ShardedWeight, counts: tuple[int, ...] | None, reason: str) -> WeightLayout:
    first, weight, bias = sharded.blocks[0]
    trained = (weight.requires_grad, bias is not None and bias.requires_grad)
    if counts is not None:
        # The engine averages gradients over its ranks, but this is the gradient of the sum of their losses
        mean = 1 / sharded.group.size()
        weight = scale_grad(weight, mean)
        bias = None if bias is None else scale_grad(bias, mean)
    blocks = tuple(Block(*block) for block in sharded.blocks)
    # A trained weight is one block, which autograd records
    rows_for = None if len(blocks) == 1 else lambda targets: LocalShards(blocks, targets, sharded.vocabulary)
    shard = VocabularyShard(sharded.vocabulary, first, Exchange(sharded.group, counts), rows_for)
    return WeightLayout(weight, bias, trained, shard, sharded, nullcontext, reason)


def _in_turn(sharded: ShardedWeight, reason: str) -> WeightLayout:
    blocks = tuple(Block(*block) for block in sharded.blocks)
    like = blocks[0].weight.detach()

    def rows_for(targets: Tensor) -> BroadcastShards:
        return BroadcastShards(blocks, sharded.ranges, sharded.group, like, targets)

    shard = VocabularyShard(sharded.vocabulary, rows_for=rows_for)
    return WeightLayout(like, None, (False, False), shard, sharded, nullcontext, reason)


def _whole(linear: nn.Module) -> WeightLayout:
    weight = cast(Any, linear.weight)
    bias = cast(Any, linear.bias)
    trained = (weight.requires_grad, bias is not None and bias.requires_grad)
    reason = "DeepSpeed gathers the whole weight" if is_zero3(weight) else WHOLE_HERE
    if isinstance(weight, DTensor):
        reason = "each pass gathers the whole weight"
    weight, bias = (whole_tensor(x) if isinstance(x, DTensor) else x for x in (weight, bias))
    # ZeRO-3 gathers weight and bias while they are read, here and again in the backward
    return WeightLayout(weight, bias, trained, None, None, partial(gathered_by_zero3, weight, bias), reason)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
