"""Checks on the model before the first step: the head, its adapters, token ids."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..heads.adapters import Operands
from ..heads.dense import dense_logits, log_probs_of
from ..heads.linear_log_probs import operand_dtype
from ..heads.logits import LinearLogProbs, LogitTransform
from ..heads.parallel import (
    Exchange,
    Part,
    ReplicatedTokens,
    ShardedTokens,
    VocabularyShard,
    all_gather,
    tokens_of_ranks,
)
from ..heads.products import statistics_dtype
from ..heads.tiled import Head, tiled_log_probs
from .head import HeadAdapter, LinearHead, OpaqueHead, resolve_head
from .weight_layout import WeightLayout, weight_layout_of

_SELF_TEST_TOKENS, _HIDDEN, _CLASSES = 64, 128, 1000
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def self_test(device: torch.device) -> tuple[str, ...]:
    """What was tried on `device`, in words; all of it agrees with the dense definition.

    Raises:
        `RuntimeError`: something does not; what the device itself raises is passed on.
    """
    tried = []
    generator = torch.Generator("cpu").manual_seed(0)
    hidden_NH = torch.randn(_SELF_TEST_TOKENS, _HIDDEN, generator=generator)
    weight_VH = torch.randn(_CLASSES, _HIDDEN, generator=generator) / 4
    targets_N = torch.randint(_CLASSES, (_SELF_TEST_TOKENS,), generator=generator).to(device)
    for dtype in (torch.bfloat16, torch.float32):
        for trained in (False, True):
            linear = nn.Linear(_HIDDEN, _CLASSES, bias=False, device=device, dtype=dtype)
            linear.weight = nn.Parameter(weight_VH.to(device, dtype), requires_grad=trained)
            hidden = hidden_NH.to(device, dtype)
            rows = weight_layout_of(
                LinearHead(linear), hidden, outputs=_OUTPUTS, whole=False, gradient=True, entropy_grad=False
            )
            check_head(hidden, rows, targets_N, LogitTransform(0.9, 1.0, None), _OUTPUTS, False)
            tried.append(f"{str(dtype).removeprefix('torch.')} with a {'trained' if trained else 'frozen'} weight")
    return tuple(tried)


_ADAPTER_TOKENS = 8
# Of a norm. The module rounds its logits and its gradients to the dtype that it computes in.
_ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_adapter(hidden_NH: Tensor, module: nn.Module, rows: WeightLayout) -> None:
    """Compare the product of a few tokens, and its gradients, with what `module` makes of them.

    The tiled head is checked against its definition elsewhere; here the definition is, whose parts were read from
    PEFT's layers. Not where an engine has spread the module, whose call it would have to know of.

    Raises:
        `RuntimeError`: they differ by more than rounding.
    """
    if any(isinstance(x, FSDPModule) for x in module.modules()):
        return
    if any(isinstance(x, DTensor) for x in module.parameters()):
        return
    some = torch.linspace(0, len(hidden_NH) - 1, min(len(hidden_NH), _ADAPTER_TOKENS), device=hidden_NH.device).long()
    trained = {name: x for name, x in module.named_parameters() if x.requires_grad}

    def with_gradients(product: Tensor, hidden: Tensor) -> dict[str, Tensor | None]:
        upstream = torch.linspace(-1, 1, product.numel(), device=product.device, dtype=product.dtype).cos_()
        inputs = [hidden, *trained.values()]
        gradients = torch.autograd.grad((product * upstream.view_as(product)).sum(), inputs, allow_unused=True)
        named = dict(zip(("gradient of the hidden states", *trained), gradients, strict=True))
        return {"product": product.detach(), **named}

    # The caller's hooks on saved tensors (activation offloading) are for the model's own graph
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        # Anew: what was read for the pass belongs to its graph
        head = resolve_head(module)
        if isinstance(head, OpaqueHead) or head.adapter is None:
            return
        adapter = head.adapter
        own, other = (hidden_NH[some].detach().requires_grad_() for _ in range(2))
        expected = with_gradients(module(own), own)
        dtype = operand_dtype(other, rows.weight)
        term, accumulate = adapter.low_rank(other, rows.weight), statistics_dtype(dtype)
        product = dense_logits(
            *(Operands.of(other, rows.weight, rows.bias, term, adapter.rows), LogitTransform(), dtype, accumulate),
            up_dtype=dtype if term is None else term.dtype,
            replaced=adapter.replaced(),
        )
        found = with_gradients(product, other)
    allowed = max(_ALLOWED[dtype], *(_ALLOWED.get(x.dtype, 0.0) for x in expected.values() if x is not None))
    for name, want in expected.items():
        got = found[name]
        difference = _norm(want if got is None else got if want is None else got.double() - want.double())
        if _norm(want) < float("inf") and not difference <= allowed * _norm(want) + 1e-6:
            raise RuntimeError(
                f"The LM head's adapter is not what it was taken for, {rows.reason}: PEFT's module gives another "
                f"{name}, by {difference:.3g} of {_norm(want):.3g}. Training would be wrong. Leave `lm_head` out of "
                "the adapter, and report this with its configuration and the version of PEFT."
            )


def _norm(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.double().norm())


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
    rows: WeightLayout,
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


def _sample(hidden_NH: Tensor, rows: WeightLayout, targets_N: Tensor) -> _Sample | None:
    N, spread = len(targets_N), rows.sharded
    exchange = Exchange()
    counts: tuple[int, ...] = (min(N, _TOKENS),)
    if spread is not None and spread.engine == "tensor parallel":
        exchange = ReplicatedTokens(spread.group)
    elif spread is not None:
        every = tokens_of_ranks(N, spread.group, hidden_NH.device)
        share = max(1, _TOKENS // len(every))
        counts = tuple(min(count, share) if rank < _TOKENS else 0 for rank, count in enumerate(every))
        exchange = ShardedTokens(spread.group, counts)
    if not any(counts):
        return None
    n = counts[spread.group.rank()] if isinstance(exchange, ShardedTokens) and spread is not None else counts[0]
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


def _inputs(sample: _Sample, rows: WeightLayout, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None, HeadAdapter]:
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
    rows: WeightLayout,
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
    rows: WeightLayout,
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


def missing_rows(model: Any, tokens: int) -> int | None:
    """How many tokens a model's embedding has, where a tokenizer has more; else `None`, and no id has to be looked at.

    Args:
        tokens (`int`): of the tokenizer.
    """
    rows: int | None = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return rows if rows is not None and rows < tokens else None


def check_token_ids(largest: Iterable[int | None], rows: int, tokens: int) -> None:
    """Raise `ValueError` if one of the ids is that of a token that the model has not.

    Args:
        rows (`int`): how many tokens the model has.
        tokens (`int`): how many the tokenizer has.
    """
    for token in largest:
        if token is not None and token >= rows:
            raise ValueError(
                f"`processing_class` has {tokens} tokens and `model` has {rows}: the data have the token id {token}. "
                "Pass the model's own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))` before."
            )


def watch_token_ids(model: Any, tokens: int) -> None:
    """Let a model, whose tokenizer has more tokens than it has, look at each batch before its embedding fails at it.

    On a GPU that failure is an assertion of the device, after which nothing runs. Tokens that no text has, such as one
    for padding that is never fed, do no harm.
    """
    rows = missing_rows(model, tokens)
    if rows is None:
        return

    def look(module: Any, inputs: tuple[Tensor, ...]) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].numel():
            check_token_ids([int(inputs[0].max())], rows, tokens)

    model.get_input_embeddings().register_forward_pre_hook(look)


def has_position_table(model: Any, positions: int) -> bool:
    """Whether a model looks its positions up in a table of so many rows, as GPT-2 does, and has none for others."""
    tokens = model.get_input_embeddings()
    return any(
        isinstance(module, nn.Embedding) and module is not tokens and 0 <= module.num_embeddings - positions <= 2
        for module in model.modules()  # OPT's table has two rows more
    )
