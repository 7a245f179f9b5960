"""Which rows of the head's weight a rank scores with: its own, all in turn, or all at once, and why."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat import maybe_gather_lm_head_ctx
from ..engines import ShardedWeight, is_zero3, sharded_weight
from ..heads import Block, OwnTokens, RowsHere, RowsInTurn, SameTokens, VocabularyShard, tokens_of_ranks


class HeadRows(NamedTuple):
    """The head's weight as one pass reads it.

    Args:
        weight (`Tensor` of shape `(v, H)`), bias (`Tensor` of shape `(v,)`, *optional*): the rows that are here.
        trained (`tuple[bool, bool]`): whether weight and bias get a gradient.
        shard (`VocabularyShard`, *optional*): what is where, if rows are on other ranks.
        sharded (`ShardedWeight`, *optional*): the weight as the engine has spread it, if `shard` is given.
        readable (`Callable`): makes a context in which weight and bias can be read.
        reason (`str`): what was chosen, and why.
    """

    weight: Tensor
    bias: Tensor | None
    trained: tuple[bool, bool]
    shard: VocabularyShard | None
    sharded: ShardedWeight | None
    readable: Callable[[], AbstractContextManager[Any]]
    reason: str


def rows_of_head(lm_head: nn.Module, hidden_NH: Tensor, *, whole: bool, gradient: bool, entropy_grad: bool) -> HeadRows:
    """The rows for one pass over the hidden states `(N, H)` of this rank.

    All ranks of the weight's group call it together, also one without a token.

    Args:
        whole (`bool`): whether the head at hand needs the whole weight.
        gradient (`bool`): whether the hidden states get a gradient.
        entropy_grad (`bool`): whether the entropy's gradient is asked for, which reads the weight once more.
    """
    sharded = None if whole else sharded_weight(lm_head)
    if sharded is not None and sharded.engine == "tensor parallel":
        exchange = SameTokens(sharded.group)
        return _here(sharded, exchange, "each rank scores with its rows of the weight (tensor parallel)")
    if sharded is not None and sharded.blocks[0][1].device == hidden_NH.device:
        counts = tokens_of_ranks(len(hidden_NH), sharded.group, hidden_NH.device)
        moved, sent = bytes_moved(sharded, counts, hidden_NH, gradient=gradient, entropy_grad=entropy_grad)
        if moved <= sent:
            why = f"its tokens cost {_mib(moved)} a pass to move, the weight {_mib(sent)}"
            where = f"each rank scores the tokens of all with its rows of the weight ({sharded.engine}): {why}"
            return _here(sharded, OwnTokens(sharded.group, counts), where)
        if not sharded.trained and sharded.blocks[0][2] is None:
            why = f"the weight costs {_mib(sent)} a pass to move, the tokens {_mib(moved)}"
            return _in_turn(sharded, f"the ranks send their rows of the weight in slices ({sharded.engine}): {why}")
    return _whole(lm_head)


def bytes_moved(
    sharded: ShardedWeight, counts: tuple[int, ...], hidden_NH: Tensor, *, gradient: bool, entropy_grad: bool
) -> tuple[int, int]:
    """Bytes that reach a rank if tokens move, and if the weight's rows do; the same on every rank.

    Tokens: hidden states come, and their gradients go back in fp32, from and to every other rank. The weight: every
    row that is not here comes, and its gradient goes back where it is trained.
    """
    others, width = len(counts) - 1, hidden_NH.shape[1]
    item = hidden_NH.element_size()
    again = sharded.trained or entropy_grad  # the backward reads hidden states or weight once more
    of_token = width * (item * (2 if gradient and again else 1) + (max(4, item) if gradient else 0))
    weight_item = sharded.blocks[0][1].element_size()
    passes = 1 + (gradient and again) + (gradient and sharded.trained)
    rows_elsewhere = sharded.vocabulary * others // len(counts)
    return others * max(counts) * of_token, rows_elsewhere * width * weight_item * passes


def _here(sharded: ShardedWeight, exchange: SameTokens | OwnTokens, reason: str) -> HeadRows:
    first, weight, bias = sharded.blocks[0]
    trained = (weight.requires_grad, bias is not None and bias.requires_grad)
    if isinstance(exchange, OwnTokens):
        # The engine's gradient is the mean over its ranks; here that of the sum of their losses comes back
        weight = _Averaged.apply(weight, sharded.group.size())
        bias = None if bias is None else _Averaged.apply(bias, sharded.group.size())
    blocks = tuple(Block(*block) for block in sharded.blocks)
    shard = VocabularyShard(
        sharded.vocabulary,
        first,
        exchange,
        # A trained weight is one block, and goes through autograd
        None if len(blocks) == 1 else lambda targets: RowsHere(blocks, targets, sharded.vocabulary),
    )
    return HeadRows(weight, bias, trained, shard, sharded, nullcontext, reason)


def _in_turn(sharded: ShardedWeight, reason: str) -> HeadRows:
    blocks = tuple(Block(*block) for block in sharded.blocks)
    like = blocks[0].weight.detach()
    shard = VocabularyShard(
        sharded.vocabulary, rows_for=lambda targets: RowsInTurn(blocks, sharded.ranges, sharded.group, like, targets)
    )
    return HeadRows(like, None, (False, False), shard, sharded, nullcontext, reason)


def _whole(lm_head: nn.Module) -> HeadRows:
    weight, bias = cast(Any, lm_head.weight), cast(Any, lm_head.bias)
    trained = (weight.requires_grad, bias is not None and bias.requires_grad)
    reason = "the whole weight is on this rank"
    if isinstance(weight, DTensor):
        reason = "the whole weight is gathered for each pass"
    elif is_zero3(weight):
        reason = "DeepSpeed gathers the whole weight"
    weight, bias = (x.full_tensor() if isinstance(x, DTensor) else x for x in (weight, bias))
    # Under ZeRO-3 weight and bias are gathered while they are read, here and again in the backward
    return HeadRows(weight, bias, trained, None, None, partial(maybe_gather_lm_head_ctx, weight, bias), reason)


class _Averaged(torch.autograd.Function):
    """A tensor whose gradient is divided by `ranks`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.ranks, None


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
