"""Randomly drawn heads with the weight on several ranks: the operands, and what one rank computes."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from head_definition import ALL, FROZEN, defined, floats_apart
from trl_ext import linear_log_probs
from trl_ext.heads import parallel as exchange
from trl_ext.heads import tiled
from trl_ext.heads.adapters import Operands as HeadOperands
from trl_ext.heads.linear_log_probs import operand_dtype, run_head
from trl_ext.heads.logits import LogitTransform
from trl_ext.heads.parallel import Block, BroadcastShards, Exchange, LocalShards, VocabularyShard
from trl_ext.heads.sampling_mask import SamplingMask
from trl_ext.heads.tiled import Head, tiled_log_probs


@dataclass(frozen=True)
class Problem:
    """The rows and tokens of each rank, the options, and the seed of the numbers.

    Args:
        edges (`tuple[tuple[int, int], ...]`): (first class, rows) of each rank.
        tokens (`tuple[int, ...]`): tokens of each rank. Without `own`, all ranks have the same tokens.
        dtype (`str`): the dtype of the operands. `"autocast"` rounds fp32 operands to bf16, with gradients in fp32.
        ties (`bool`): whether the operands are small whole numbers, so that some logits are exactly equal.
        entropy_used, mean_used (`tuple[bool, ...]`): whether each rank's loss includes the entropy, or the mean
            log-prob.
        blocks (`int`): the number of blocks of a rank's rows.
    """

    edges: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    own: bool
    width: int
    dtype: str
    ties: bool
    spread: float
    only_target: int | None
    bias: bool
    trained: bool
    frozen_hidden: bool
    entropy_requires_grad: bool
    entropy_used: tuple[bool, ...]
    mean_used: tuple[bool, ...]
    blocks: int
    chunk_size: int | None
    columns: int
    gathered_tokens: int
    slice_bytes: int
    temperature: float
    logit_scale: float
    softcap: float | None
    seed: int

    @property
    def ranks(self) -> int:
        return len(self.edges)

    @property
    def vocabulary(self) -> int:
        return sum(count for _, count in self.edges)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ALL if any(self.mean_used) else FROZEN

    @property
    def options(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "logit_scale": self.logit_scale, "softcap": self.softcap}

    def owner(self, rank: int) -> int:
        """Return the index of the tokens that a rank has."""
        return rank if self.own else 0


@st.composite
def problems(draw: Any, way: str = "public") -> Problem:
    """Draw any distribution of rows and tokens over 1 to 5 ranks, within the limits of `way`."""
    ranks = draw(st.integers(1, 5))
    vocabulary = draw(st.one_of(st.just(2), st.integers(2, 12), st.integers(13, 300)))
    cuts = sorted(draw(st.lists(st.integers(0, vocabulary), min_size=ranks - 1, max_size=ranks - 1)))
    only_target = None
    if ranks > 2 and draw(st.booleans()):  # a rank whose only row is the target
        only_target = draw(st.integers(0, vocabulary - 1))
        where = draw(st.integers(0, ranks - 2))
        cuts = [min(x, only_target) for x in cuts[:where]] + [only_target]
        cuts = (cuts + [only_target + 1] * ranks)[: ranks - 1]
    edges = [(first, end - first) for first, end in pairwise([0, *cuts, vocabulary])]
    if way != "in turn":
        edges = draw(st.permutations(edges))
    own = draw(st.booleans())
    counts = st.one_of(st.just(0), st.integers(1, 4), st.integers(5, 20))
    tokens = [draw(counts) for _ in range(ranks)] if own else [draw(counts)] * ranks
    trained = way == "public" and draw(st.booleans())
    mean_asked = draw(st.booleans())
    return Problem(
        edges=tuple(edges),
        tokens=tuple(tokens),
        own=own,
        width=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(["float64", "bfloat16", "autocast"])),
        ties=draw(st.booleans()),
        spread=draw(st.sampled_from([0.1, 1.0, 5.0])),
        only_target=only_target,
        bias=way != "in turn" and draw(st.booleans()),
        trained=trained,
        frozen_hidden=trained and draw(st.booleans()),
        entropy_requires_grad=draw(st.booleans()),
        entropy_used=tuple(draw(st.booleans()) for _ in range(ranks)),
        mean_used=tuple(mean_asked and draw(st.booleans()) for _ in range(ranks)),
        blocks=draw(st.integers(1, 2)),
        chunk_size=draw(st.sampled_from([None, 3, 16])),
        columns=draw(st.sampled_from([5, 32, 4096])),
        gathered_tokens=draw(st.sampled_from([5, 32, 2048])),
        slice_bytes=draw(st.sampled_from([64, 800, 2**21])),
        temperature=draw(st.sampled_from([1.0, 0.7, 2.0])),
        logit_scale=draw(st.sampled_from([1.0, 0.0625, -2.0])),
        softcap=draw(st.sampled_from([None, 3.0])),
        seed=draw(st.integers(0, 2**20)),
    )


class Operands(NamedTuple):
    """The operands, equal on every rank. Lists have an entry for each rank."""

    weight: Tensor
    bias: Tensor | None
    hidden: list[Tensor]
    targets: list[Tensor]
    upstream: list[Tensor]


def operands(problem: Problem) -> Operands:
    generator = torch.Generator().manual_seed(problem.seed)

    def randn(*size: int, scale: float = 1.0, rounded: bool = True) -> Tensor:
        x = torch.randn(*size, generator=generator, dtype=torch.float64)
        x = x.clamp(-1, 1).round() if problem.ties else x * scale
        if not rounded:
            return x if problem.dtype == "float64" else x.float()
        # fp32 operands have only bf16 values too, so autocast does not round them
        return x.bfloat16().float() if problem.dtype == "autocast" else x.to(getattr(torch, problem.dtype))

    weight = randn(problem.vocabulary, problem.width, scale=problem.spread / math.sqrt(problem.width))
    bias = randn(problem.vocabulary, rounded=False) if problem.bias else None
    hidden = [randn(count, problem.width) for count in problem.tokens]
    targets = [torch.randint(problem.vocabulary, (count,), generator=generator) for count in problem.tokens]
    if problem.only_target is not None:
        targets = [torch.full_like(x, problem.only_target) for x in targets]
    elif problem.ties:  # every other target is the last of the classes with the highest logit
        for h, t in zip(hidden, targets, strict=True):
            logits = (h.double() @ weight.double().t() + (0 if bias is None else bias.double())) * problem.logit_scale
            t[::2] = (problem.vocabulary - 1 - logits.flip(-1).argmax(-1))[::2]
    upstream = [torch.randn(3, count, generator=generator, dtype=torch.float64) for count in problem.tokens]
    owners = [problem.owner(rank) for rank in range(problem.ranks)]
    return Operands(weight, bias, *([x[i] for i in owners] for x in (hidden, targets, upstream)))


class Scored(NamedTuple):
    """The results of a rank, with gradients of its hidden states and rows."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor | None]


def scored_on(group: dist.ProcessGroup, problem: Problem, way: str) -> Scored:
    """Score as a rank of the group: `"public"` function, rows in several `"blocks"`, or broadcast rows `"in turn"`."""
    with pytest.MonkeyPatch.context() as sizes:  # undone at the end, because the ranks run other cases later
        sizes.setitem(tiled._ELEMENTS, "cpu", 1)
        sizes.setattr(tiled, "_COLUMNS", problem.columns)
        sizes.setitem(exchange._GATHERED_TOKENS, "cpu", problem.gathered_tokens)
        sizes.setitem(exchange._SLICE, "cpu", problem.slice_bytes)
        return _scored(group, problem, way)


def _scored(group: dist.ProcessGroup, problem: Problem, way: str) -> Scored:
    weight, bias, *lists = operands(problem)
    rank = group.rank()
    hidden, targets, upstream = (x[rank] for x in lists)
    first, count = problem.edges[rank]
    hidden = hidden.clone().requires_grad_(not problem.frozen_hidden)
    weight = weight[first : first + count].clone().requires_grad_(problem.trained)
    bias = None if bias is None else bias[first : first + count].clone().requires_grad_(problem.trained)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=problem.dtype == "autocast"):
        if way == "public":
            scored = linear_log_probs(
                *(hidden, weight, targets),
                bias=bias,
                outputs=problem.outputs,
                entropy_requires_grad=problem.entropy_requires_grad,
                chunk_size=problem.chunk_size,
                group=group,
                first_class=first,
                vocab_size=problem.vocabulary,
                own_tokens=problem.own,
                **problem.options,
            )
        else:
            transform = LogitTransform(**problem.options)
            shard = _shard(group, problem, way, Block(first, weight, bias))
            head = Head(operand_dtype(hidden, weight), transform, problem.outputs, shard, problem.chunk_size)
            entropy_grad = problem.entropy_requires_grad
            scored = tiled_log_probs(
                head, HeadOperands(hidden, weight, bias), targets, entropy_requires_grad=entropy_grad
            )
    loss = (scored.log_probs * upstream[0]).sum()
    if problem.entropy_requires_grad and problem.entropy_used[problem.owner(rank)]:
        loss = loss + (scored.entropy * upstream[1]).sum()
    if problem.mean_used[problem.owner(rank)]:
        loss = loss + (scored.mean_log_probs * upstream[2]).sum()
    if loss.requires_grad:
        loss.backward()
    values = {name: x.detach() for name, x in scored._asdict().items() if x is not None}
    named = {"hidden": hidden, "weight": weight, "bias": bias}
    return Scored(values, {name: None if x is None else x.grad for name, x in named.items()})


def _shard(group: dist.ProcessGroup, problem: Problem, way: str, own: Block) -> VocabularyShard:
    ranges = [_cut(edge, problem.blocks) for edge in problem.edges]
    blocks = []
    for first, count in ranges[group.rank()]:
        here = slice(first - own.first, first - own.first + count)
        blocks.append(Block(first, own.weight[here], None if own.bias is None else own.bias[here]))
    if way == "in turn":
        return VocabularyShard(
            problem.vocabulary, rows_for=lambda x: BroadcastShards(tuple(blocks), ranges, group, own.weight.detach(), x)
        )
    tokens = Exchange(group, problem.tokens if problem.own else None)
    vocabulary = problem.vocabulary
    return VocabularyShard(vocabulary, own.first, tokens, lambda x: LocalShards(tuple(blocks), x, vocabulary))


def _cut(edge: tuple[int, int], blocks: int) -> list[tuple[int, int]]:
    first, count = edge
    return [edge] if blocks == 1 else [(first, count // 3), (first + count // 3, count - count // 3)]


def over_mask_on(
    group: dist.ProcessGroup, way: str, softcap: float | None, trained: bool
) -> tuple[float, float, float]:
    """Score over kept classes on a rank. Returns the largest errors of log-probs and of gradients, against float64.

    Args:
        way (`str`): `"local"`: each rank has rows of the weight, and all have the same tokens; or `"in turn"`.
    """
    vocabulary, width, ranks, rank = 23, 6, group.size(), group.rank()
    generator = torch.Generator().manual_seed(rank if way == "in turn" else 0)
    common = torch.Generator().manual_seed(9)
    weight = torch.randn(vocabulary, width, generator=common, dtype=torch.float64)
    hidden = torch.randn(9, width, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(vocabulary, (9,), generator=generator)
    mask = torch.rand(9, vocabulary, generator=generator) < 0.2
    mask[0], mask[1], mask[2] = True, False, torch.arange(vocabulary) < 3
    tokens, classes = mask.nonzero().unbind(1)
    kept = SamplingMask(tokens, classes, torch.ones(9, dtype=torch.bool))
    mask = mask.scatter(1, targets[:, None], True)
    edges = [(i * vocabulary // ranks, (i + 1) * vocabulary // ranks) for i in range(ranks)]
    first, last = edges[rank]
    own = weight[first:last].clone().requires_grad_(trained)
    if way == "in turn":
        ranges = [[(start, stop - start)] for start, stop in edges]
        block = (Block(first, own.detach(), None),)
        shard = VocabularyShard(vocabulary, rows_for=lambda x: BroadcastShards(block, ranges, group, own.detach(), x))
    else:
        shard = VocabularyShard(vocabulary, first, Exchange(group))
    scored = run_head(
        *("tiled", hidden, own.detach() if way == "in turn" else own, targets),
        bias=None,
        transform=LogitTransform(0.7, 1.0, softcap),
        outputs=("log_probs", "entropy"),
        entropy_requires_grad=True,
        shard=shard,
        sampling_mask=kept,
    )
    (scored.log_probs.sum() + scored.entropy.square().sum()).backward()
    exact_hidden, exact_weight = hidden.detach().requires_grad_(), weight.requires_grad_()
    exact = defined(exact_hidden, exact_weight, targets, temperature=0.7, softcap=softcap, kept=mask)
    (exact.log_probs.sum() + exact.entropy.square().sum()).backward()
    of_weight = 0.0 if own.grad is None else floats_apart(own.grad, exact_weight.grad[first:last])
    return floats_apart(scored.log_probs, exact.log_probs), floats_apart(hidden.grad, exact_hidden.grad), of_weight
