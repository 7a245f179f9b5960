"""The check at the start of training: the tiled head against the dense definition, on a few tokens of the first batch.

A fused path that nobody checked has trained on wrong numbers before (positive log-probs, a collapsed reward). The
definition runs in float64, so that a confident policy, whose 1 - p is tiny, is judged rightly too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from ..heads import (
    Exchange,
    Head,
    LinearLogProbs,
    LogitTransform,
    OneProcess,
    Operands,
    OwnTokens,
    Part,
    SameTokens,
    VocabularyShard,
    all_gather,
    dense_logits,
    log_probs_of,
    operand_dtype,
    tiled_log_probs,
    tokens_of_ranks,
)
from .head_parts import HeadAdapter
from .head_rows import HeadRows

_TOKENS = 8
# Of the values, in units of max(1, largest logit / 32); the head is exact to 1e-5 of that
_VALUES = 1e-3
# Of a gradient's norm; half-precision products are good to 2e-3
_GRADIENT = 2e-2
# Of what the gradient would be at p = 0: where every 1 - p is below this, float64's own 1 - p has lost its digits. A
# softcap's slope 1 - tanh^2 is good to 1e-7 in fp32, however small it is where the cap saturates.
_NEGLIGIBLE, _NEGLIGIBLE_CAPPED = 1e-10, 1e-5


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_head(
    hidden_NH: Tensor,
    rows: HeadRows,
    targets_N: Tensor,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    entropy_requires_grad: bool,
    kernels: str | None = None,
) -> bool:
    """Whether there was a token to check; raises `RuntimeError` if the tiled head disagrees with the definition.

    At most 8 tokens are looked at, spread over the batch, in up to three tiles each way; 8 of all ranks together where
    the weight's rows are spread, and then every rank calls this, also one without a token. Values and gradients are
    compared, in the path that training takes: weight and bias get a gradient here where they do there.
    """
    if hidden_NH.device.type == "mps":
        return True  # it has no float64 to define the head in
    sample = _sample(hidden_NH, rows, targets_N)
    if sample is None:
        return False
    # The caller's hooks on saved tensors (activation offloading) are for the model's own graph
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        found = _by_the_tiled_head(sample, rows, transform, outputs, entropy_requires_grad, kernels)
        expected, largest_logit = _by_definition(sample, rows, transform, outputs, entropy_requires_grad)
    slope = abs(transform.logit_scale) / transform.temperature
    sizes = {
        "gradient of the hidden states": rows.weight.detach()[sample.seen_rows].double().norm() * slope,
        "gradient of the weight": sample.hidden_nH.double().norm() * slope,
        "gradient of the bias": torch.tensor(slope * sqrt(_TOKENS)),
    }
    sizes |= _sizes_of_adapter(rows.adapter, sample.hidden_nH, slope)
    for name, value in expected.items():
        difference = (found[name].double() - value.double()).abs()
        if not value.numel():
            continue
        if name in sizes:
            # What fp16 cannot hold at all is lost to every head
            finest = torch.finfo(found[name].dtype)
            lost = finest.smallest_normal * finest.eps * sqrt(value.numel())
            negligible = _NEGLIGIBLE if transform.softcap is None else _NEGLIGIBLE_CAPPED
            allowed = _GRADIENT * value.double().norm() + negligible * sizes[name] + lost
            _raise_if_off(name, value, difference, difference.norm() / allowed)
        else:
            allowed = _VALUES * (largest_logit / 32).clamp(min=1)
            _raise_if_off(name, value, difference, difference.amax() / allowed)
    return True


def _sizes_of_adapter(adapter: HeadAdapter | None, hidden_nH: Tensor, slope: float) -> dict[str, Tensor]:
    """Of each gradient, what it would be at p = 0, at most."""
    if adapter is None:
        return {}
    size = hidden_nH.double().norm() * slope
    scale = max([1.0, *(abs(x.scaling) * float(y.detach().double().norm()) for x in adapter.factors for y in x[:2])])
    return {f"gradient of the {name}": size * scale for name in adapter.trained()}


@dataclass(frozen=True)
class _Sample:
    """The tokens that are looked at: n of this rank, M of all whose tokens are scored together.

    `upstream_M`: the gradients of log-probs, entropy and mean log-probs.
    `seen_rows`: a few of this rank's rows of the weight, whose gradient stands for all: the targets' and others.
    """

    hidden_nH: Tensor
    targets_n: Tensor
    exchange: Exchange
    part: Part
    upstream_M: tuple[Tensor, Tensor, Tensor]
    seen_rows: Tensor


def _sample(hidden_NH: Tensor, rows: HeadRows, targets_N: Tensor) -> _Sample | None:
    N, spread = len(targets_N), rows.sharded
    exchange: Exchange = OneProcess()
    counts: tuple[int, ...] = (min(N, _TOKENS),)
    if spread is not None and spread.engine == "tensor parallel":
        exchange = SameTokens(spread.group)
    elif spread is not None:
        every = tokens_of_ranks(N, spread.group, hidden_NH.device)
        share = max(1, _TOKENS // len(every))
        counts = tuple(min(count, share) if rank < _TOKENS else 0 for rank, count in enumerate(every))
        exchange = OwnTokens(spread.group, counts)
    if not any(counts):
        return None
    n = counts[spread.group.rank()] if isinstance(exchange, OwnTokens) and spread is not None else counts[0]
    some = torch.linspace(0, N - 1, n, device=targets_N.device).long()
    (part,) = exchange.parts(n, hidden_NH.device)
    real_M = part.gathered(torch.ones(n, device=hidden_NH.device))
    first = 0 if spread is None else spread.blocks[0][0]
    local = part.gathered(targets_N[some]) - first
    count = len(rows.weight)
    others = torch.linspace(0, max(count - 1, 0), min(32, count), device=local.device).long()
    seen_rows = torch.cat([local[(local >= 0) & (local < count)], others])
    upstream_M = torch.linspace(1, 2, len(real_M), device=real_M.device)
    upstreams = upstream_M * real_M, upstream_M.flip(0) * real_M, -upstream_M * real_M
    return _Sample(hidden_NH[some].detach(), targets_N[some], exchange, part, upstreams, seen_rows)


def _inputs(sample: _Sample, rows: HeadRows, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None, HeadAdapter]:
    bias = None if rows.bias is None else rows.bias.detach().requires_grad_(rows.trained[1])
    weight = rows.weight.detach().requires_grad_(rows.trained[0])
    return hidden.detach().requires_grad_(), weight, bias, (rows.adapter or HeadAdapter()).detached()


def _trained(hidden: Tensor, weight: Tensor, bias: Tensor | None, adapter: HeadAdapter) -> dict[str, Tensor]:
    named = {"hidden states": hidden, "weight": weight, "bias": bias} | adapter.trained()
    return {name: x for name, x in named.items() if x is not None and x.requires_grad}


def _loss(scored: LinearLogProbs, upstream: tuple[Tensor, Tensor, Tensor], entropy_requires_grad: bool) -> Tensor:
    entropy = scored.entropy if entropy_requires_grad else None
    differentiable = zip((scored.log_probs, entropy, scored.mean_log_probs), upstream, strict=True)
    return torch.stack([(x * grad).sum() for x, grad in differentiable if x is not None]).sum()


def _seen(
    scored: LinearLogProbs, gradients: dict[str, Tensor], own: Callable[[Tensor], Tensor], rows: Tensor
) -> dict[str, Tensor]:
    # Which of several equal logits is the first may turn on the last bit
    seen = {k: own(v.detach()) for k, v in scored._asdict().items() if v is not None and k != "is_top1"}
    for name, gradient in gradients.items():
        seen[f"gradient of the {name}"] = gradient[rows] if name in ("weight", "bias") else gradient
    return seen


def _by_the_tiled_head(
    sample: _Sample,
    rows: HeadRows,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    entropy_requires_grad: bool,
    kernels: str | None,
) -> dict[str, Tensor]:
    h, w, b, adapter = _inputs(sample, rows, sample.hidden_nH)
    term, replaced = adapter.low_rank(h, w), adapter.replaced()
    shard = rows.shard or VocabularyShard()
    if shard.partial:
        shard = replace(shard, exchange=sample.exchange)
    head = Head(
        *(operand_dtype(h, w), transform, outputs, shard),
        chunk_size=-(-len(sample.upstream_M[0]) // 3),
        columns=max(1, -(-len(w) // 3)),
        kernels=kernels,
        up_dtype=w.dtype if term is None else term.dtype,
        replaced=replaced,
    )
    x = Operands.of(h, w, b, term, adapter.rows)
    scored = tiled_log_probs(head, x, sample.targets_n, entropy_requires_grad=entropy_requires_grad)
    log_probs, entropy, mean_log_probs = (sample.part.own(x) for x in sample.upstream_M)
    trained = _trained(h, w, b, adapter)
    loss = _loss(scored, (log_probs, entropy, mean_log_probs), entropy_requires_grad)
    gradients = torch.autograd.grad(loss, list(trained.values()))
    named = dict(zip(trained, gradients, strict=True))
    return _seen(scored, named, lambda x: x, sample.seen_rows)


def _by_definition(
    sample: _Sample,
    rows: HeadRows,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    entropy_requires_grad: bool,
) -> tuple[dict[str, Tensor], Tensor]:
    """The same in float64, and the largest logit: from the logits of these few tokens over the whole vocabulary."""
    part, spread = sample.part, rows.sharded
    h, w, b, adapter = _inputs(sample, rows, part.gathered(sample.hidden_nH))
    dtype, replaced = operand_dtype(h, w), adapter.replaced()
    term = adapter.low_rank(h, w, torch.float64)
    x = Operands.of(h, w, b, term, adapter.rows)
    up_dtype = dtype if term is None else term.dtype
    weights = [w] if spread is None or len(spread.blocks) == 1 else [block[1] for block in spread.blocks]
    logits_Mv = torch.cat(
        [
            dense_logits(
                *(x._replace(weight=some), transform, dtype, torch.float64), up_dtype=up_dtype, replaced=replaced
            )
            for some in weights
        ],
        1,
    )
    logits_MV = logits_Mv.detach()
    if spread is not None:
        counts = [sum(count for _, count in blocks) for blocks in spread.ranges]
        logits_MV = _columns_of_all(logits_MV, counts, spread.group)
    logits_MV.requires_grad_()
    scored = log_probs_of(
        logits_MV, part.gathered(sample.targets_n), outputs, entropy_requires_grad=entropy_requires_grad
    )
    loss = _loss(scored, sample.upstream_M, entropy_requires_grad)
    (gradient_MV,) = torch.autograd.grad(loss, logits_MV)
    first = 0 if spread is None else spread.blocks[0][0]
    trained = _trained(h, w, b, adapter)
    upstream = gradient_MV[:, first : first + logits_Mv.shape[1]]
    gradients = torch.autograd.grad(logits_Mv, list(trained.values()), upstream)
    named = dict(zip(trained, gradients, strict=True))
    named["hidden states"] = part.summed(named["hidden states"].double())
    return _seen(scored, named, part.own, sample.seen_rows), logits_MV.detach().abs().max()


def _columns_of_all(logits_Mv: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
    """The columns of every rank beside each other: `(M, V)` from `(M, v)`, each rank's as many as `counts` says."""
    own = logits_Mv.new_zeros(len(logits_Mv), max(counts))
    own[:, : logits_Mv.shape[1]] = logits_Mv
    every = own.new_empty(len(counts) * own.shape[0], own.shape[1])
    all_gather(every, own, group=group)
    return torch.cat([x[:, :count] for x, count in zip(every.chunk(len(counts)), counts, strict=True)], 1)


def _raise_if_off(name: str, expected: Tensor, difference: Tensor, off: Tensor) -> None:
    # A model that has itself gone to NaN is not the head's doing
    if expected.isfinite().all() and not off <= 1:
        raise RuntimeError(
            f"The tiled head disagrees with the dense definition on the first batch: {name}, largest difference "
            f"{difference.max():.3g}, {off:.3g} times what is allowed. Training would be wrong. "
            'Set `head="dense"` in the config to go on without the tiled head, and report this with the model\'s name '
            "and the output of `trl env`."
        )
