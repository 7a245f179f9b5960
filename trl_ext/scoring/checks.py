"""Checks of the LM head and its adapters on the first batch: against their definition, and against PEFT's layers."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..heads.adapters import Operands
from ..heads.dense import dense_logits, log_probs_of
from ..heads.linear_log_probs import operand_dtype, run_head
from ..heads.logits import LinearLogProbs, LogitTransform
from ..heads.parallel import Exchange, VocabularyShard, all_gather, tokens_of_ranks
from ..heads.products import statistics_dtype
from .head import OpaqueHead, resolve_head
from .weight_layout import WHOLE_HERE, WeightLayout

# Sizes of the self-test
_SELF_TEST_TOKENS = 64
_HIDDEN = 128
_CLASSES = 1000
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

# Number of tokens to compare
_TOKENS = 8
# Tolerance of values, in units of max(1, largest logit / 32). The head is exact to 1e-5 of this unit
_VALUES = 1e-3
# Tolerance of a gradient, relative to its norm. Half-precision products are exact to 2e-3
_GRADIENT = 2e-2
# Tolerance of a gradient, relative to its size at p = 0: if every 1 - p is below this, 1 - p has no correct digits in
# float64 either. With a softcap, the slope 1 - tanh^2 has an absolute error of 1e-7 in fp32, however small it is
_NEGLIGIBLE = 1e-10
_NEGLIGIBLE_CAPPED = 1e-5
# Tolerance of an adapter, relative to a norm. PEFT's module rounds its logits and gradients to its compute dtype
_ADAPTER = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


def self_test(device: torch.device) -> tuple[str, ...]:
    """Compare the tiled head with its definition on `device`, with random numbers.

    Returns:
        `tuple[str, ...]`: descriptions of the cases, which all agree.

    Raises:
        `RuntimeError`: the two differ in a case. Errors of the device are not caught.
    """
    descriptions = []
    generator = torch.Generator("cpu").manual_seed(0)
    hidden_NH = torch.randn(_SELF_TEST_TOKENS, _HIDDEN, generator=generator)
    weight_VH = torch.randn(_CLASSES, _HIDDEN, generator=generator) / 4
    targets_N = torch.randint(_CLASSES, (_SELF_TEST_TOKENS,), generator=generator).to(device)
    transform = LogitTransform(0.9, 1.0, None)
    for dtype in (torch.bfloat16, torch.float32):
        for trained in (False, True):
            weight = weight_VH.to(device, dtype)
            rows = WeightLayout(weight, None, (trained, False), None, None, nullcontext, WHOLE_HERE)
            with warnings.catch_warnings():  # fp32 is slow on a GPU; here that is asked for
                warnings.filterwarnings("ignore", "The LM head multiplies fp32")
                check_head(hidden_NH.to(device, dtype), rows, targets_N, transform, _OUTPUTS, False)
            descriptions.append(
                f"{str(dtype).removeprefix('torch.')} with a {'trained' if trained else 'frozen'} weight"
            )
    return tuple(descriptions)


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
    """Compare values and gradients of the tiled head with its definition in float64, on up to 8 tokens of the batch.

    The tokens are spread over the batch and split into up to three tiles of tokens and three of columns. Weight and
    bias get a gradient if they get one in training. With a sharded weight, the 8 tokens come from all ranks, and every
    rank calls this function, even one without a token.

    Returns:
        `bool`: whether there was a token to check.

    Raises:
        `RuntimeError`: the two differ.
    """
    if hidden_NH.device.type == "mps":
        return True  # MPS has no float64 for the definition
    comparison = _Comparison(rows, transform, outputs, entropy_requires_grad)
    if not comparison.sample(hidden_NH, targets_N):
        return False
    with _new_graph():
        tiled = comparison.score_tiled(kernels)
        dense, largest_logit = comparison.score_dense()
    sizes = comparison.gradient_sizes()
    for name, value in dense.items():
        if not value.numel():
            continue
        difference = (tiled[name].double() - value.double()).abs()
        if name in sizes:
            # fp16 cannot represent smaller gradients
            finest = torch.finfo(tiled[name].dtype)
            lost = finest.smallest_normal * finest.eps * sqrt(value.numel())
            negligible = _NEGLIGIBLE if transform.softcap is None else _NEGLIGIBLE_CAPPED
            off = difference.norm() / (_GRADIENT * value.double().norm() + negligible * sizes[name] + lost)
        else:
            off = difference.amax() / (_VALUES * (largest_logit / 32).clamp(min=1))
        # If the definition gives NaN too, the head is not wrong
        if value.isfinite().all() and not off <= 1:
            raise RuntimeError(
                f"The tiled LM head differs from its definition on the first batch: {name}, by up to "
                f"{difference.max():.3g}; the error is {off:.3g} times the tolerance. Training would be wrong. "
                'Set `head="dense"` in the config to train without the tiled head, and report this with the model\'s '
                "name and the output of `trl-ext doctor`."
            )
    return True


@contextmanager
def _new_graph() -> Iterator[None]:
    """Record gradients without the caller's hooks on saved tensors, such as those of activation offloading."""
    with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, lambda x: x):
        yield


class _Comparison:
    """The tiled head and its definition, on n of the M tokens that all ranks score together."""

    def __init__(
        self, rows: WeightLayout, transform: LogitTransform, outputs: tuple[str, ...], entropy_requires_grad: bool
    ) -> None:
        self.rows = rows
        self.transform = transform
        self.outputs = outputs
        self.entropy_requires_grad = entropy_requires_grad

    def sample(self, hidden_NH: Tensor, targets_N: Tensor) -> bool:
        """Choose the tokens, and return whether any rank has one."""
        N = len(targets_N)
        sharded = self.rows.sharded
        self.exchange = Exchange()
        n = min(N, _TOKENS)
        total = n
        if sharded is not None and sharded.engine == "tensor parallel":
            self.exchange = Exchange(sharded.group)
        elif sharded is not None:
            rank_tokens = tokens_of_ranks(N, sharded.group, hidden_NH.device)
            share = max(1, _TOKENS // len(rank_tokens))
            counts = tuple(min(count, share) if rank < _TOKENS else 0 for rank, count in enumerate(rank_tokens))
            self.exchange = Exchange(sharded.group, counts)
            n = counts[sharded.group.rank()]
            total = sum(counts)
        if not total:
            return False
        token_n = torch.linspace(0, N - 1, n, device=targets_N.device).long()
        self.hidden_nH = hidden_NH[token_n].detach()
        self.targets_n = targets_N[token_n]
        (self.part,) = self.exchange.parts(n, hidden_NH.device)
        real_M = self.part.gather(torch.ones(n, device=hidden_NH.device))
        upstream_M = torch.linspace(1, 2, len(real_M), device=real_M.device)
        # The incoming gradients of log-probs, entropy and mean log-probs
        self.upstreams_M = upstream_M * real_M, upstream_M.flip(0) * real_M, -upstream_M * real_M
        # Rows of this rank's weight whose gradients are compared: those of the targets and a few others
        target_rows = self.part.gather(self.targets_n) - (0 if sharded is None else sharded.blocks[0][0])
        count = len(self.rows.weight)
        spread_rows = torch.linspace(0, max(count - 1, 0), min(32, count), device=target_rows.device).long()
        is_local = (target_rows >= 0) & (target_rows < count)
        self.compared_rows = torch.cat([target_rows[is_local], spread_rows])
        return True

    def score_tiled(self, kernels: str | None) -> dict[str, Tensor]:
        """Return values and gradients of the tiled head."""
        hidden, rows, trained = self._leaves(self.hidden_nH)
        shard = rows.shard or VocabularyShard()
        scores = run_head(
            "tiled",
            hidden,
            rows.weight,
            self.targets_n,
            bias=rows.bias,
            transform=self.transform,
            outputs=self.outputs,
            entropy_requires_grad=self.entropy_requires_grad,
            chunk_size=-(-len(self.upstreams_M[0]) // 3),
            tile_columns=max(1, -(-len(rows.weight) // 3)),
            kernels=kernels,
            shard=replace(shard, exchange=self.exchange) if shard.is_partial else shard,
            **rows.adapter.operands(hidden, rows.weight),
        )
        loss = self._loss(scores, self.part.select_local(*self.upstreams_M))
        return self._compared(scores, _gradients(loss, trained))

    def score_dense(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return values and gradients in float64 from the logits of the whole vocabulary, and the largest logit."""
        part = self.part
        sharded = self.rows.sharded
        hidden, rows, trained = self._leaves(part.gather(self.hidden_nH))
        blocks = [rows.weight]
        if sharded is not None and len(sharded.blocks) > 1:
            blocks = [block[1] for block in sharded.blocks]
        logits_Mv = torch.cat([_logits(hidden, rows, self.transform, torch.float64, x) for x in blocks], 1)
        logits_MV = logits_Mv.detach()
        first = 0
        if sharded is not None:
            counts = [sum(count for _, count in ranges) for ranges in sharded.ranges]
            logits_MV = _gather_columns(logits_MV, counts, sharded.group)
            first = sharded.blocks[0][0]
        logits_MV.requires_grad_()
        targets_M = part.gather(self.targets_n)
        scores = log_probs_of(logits_MV, targets_M, self.outputs, entropy_requires_grad=self.entropy_requires_grad)
        grad_MV = _gradients(self._loss(scores, self.upstreams_M), {"logits": logits_MV})["logits"]
        gradients = _gradients(logits_Mv, trained, grad_MV[:, first : first + logits_Mv.shape[1]])
        gradients["hidden states"] = part.sum_over_ranks(gradients["hidden states"].double())
        return self._compared(LinearLogProbs(*part.select_local(*scores)), gradients), logits_MV.detach().abs().max()

    def gradient_sizes(self) -> dict[str, Tensor]:
        """Return an upper bound of each gradient's size at p = 0."""
        slope = abs(self.transform.logit_scale) / self.transform.temperature
        hidden_size = self.hidden_nH.double().norm() * slope
        sizes = {
            "hidden states": self.rows.weight.detach()[self.compared_rows].double().norm() * slope,
            "weight": hidden_size,
            "bias": torch.tensor(slope * sqrt(_TOKENS)),
        }
        adapter = self.rows.adapter
        factors = [abs(x.scaling) * float(y.detach().double().norm()) for x in adapter.factors for y in x[:2]]
        sizes |= dict.fromkeys(adapter.tensors(), hidden_size * max([1.0, *factors]))
        return {f"gradient of the {name}": size for name, size in sizes.items()}

    def _leaves(self, hidden: Tensor) -> tuple[Tensor, WeightLayout, dict[str, Tensor]]:
        """Return hidden states and weights as leaves of a new graph, and by name those that require a gradient."""
        rows = self.rows
        hidden = hidden.detach().requires_grad_()
        weight = rows.weight.detach().requires_grad_(rows.trained[0])
        bias = None if rows.bias is None else rows.bias.detach().requires_grad_(rows.trained[1])
        rows = rows._replace(weight=weight, bias=bias, adapter=rows.adapter.detached())
        leaves = {"hidden states": hidden, "weight": weight, "bias": bias} | rows.adapter.tensors()
        return hidden, rows, {name: x for name, x in leaves.items() if x is not None and x.requires_grad}

    def _loss(self, scores: LinearLogProbs, upstreams: Iterable[Any]) -> Tensor:
        entropy = scores.entropy if self.entropy_requires_grad else None
        differentiable = zip((scores.log_probs, entropy, scores.mean_log_probs), upstreams, strict=True)
        return torch.stack([(x * upstream).sum() for x, upstream in differentiable if x is not None]).sum()

    def _compared(self, scores: LinearLogProbs, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what to compare. `is_top1` is excluded, because rounding decides between equal logits."""
        values = {name: x.detach() for name, x in scores._asdict().items() if x is not None and name != "is_top1"}
        rows = self.compared_rows
        return values | {
            f"gradient of the {name}": x[rows] if name in ("weight", "bias") else x for name, x in gradients.items()
        }


def _logits(
    hidden: Tensor, rows: WeightLayout, transform: LogitTransform, accumulate: torch.dtype, weight: Tensor
) -> Tensor:
    """Return the logits by definition, from the head's operands, for the layout's rows `weight`."""
    dtype = operand_dtype(hidden, weight)
    term = rows.adapter.low_rank(hidden, weight, accumulate)
    return dense_logits(
        Operands.of(hidden, weight, rows.bias, term, rows.adapter.rows),
        transform,
        dtype,
        accumulate,
        up_dtype=term.dtype if term else dtype,
        replaced=rows.adapter.replaced(),
    )


def _gradients(
    output: Tensor, inputs: dict[str, Tensor], upstream: Tensor | None = None, **options: Any
) -> dict[str, Any]:
    gradients = torch.autograd.grad(output, list(inputs.values()), upstream, **options)
    return dict(zip(inputs, gradients, strict=True))


def _gather_columns(logits_Mv: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
    """Return `(M, V)`, the columns of all ranks side by side. `counts` has the number of columns of each rank."""
    padded = logits_Mv.new_zeros(len(logits_Mv), max(counts))
    padded[:, : logits_Mv.shape[1]] = logits_Mv
    gathered = padded.new_empty(len(counts) * padded.shape[0], padded.shape[1])
    all_gather(gathered, padded, group=group)
    return torch.cat([x[:, :count] for x, count in zip(gathered.chunk(len(counts)), counts, strict=True)], 1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def check_adapter(hidden_NH: Tensor, module: nn.Module, rows: WeightLayout) -> None:
    """Compare the product of a few tokens, and its gradients, with PEFT's `module`.

    [`check_head`] compares the tiled head with its definition. This function checks the definition, which comes from
    PEFT's layers. It skips a module that an engine shards, because calling it needs the engine's hooks.

    Raises:
        `RuntimeError`: the two differ by more than rounding.
    """
    if any(isinstance(x, FSDPModule) for x in module.modules()):
        return
    if any(isinstance(x, DTensor) for x in module.parameters()):
        return
    token_n = torch.linspace(0, len(hidden_NH) - 1, min(len(hidden_NH), _TOKENS), device=hidden_NH.device).long()
    trained = {name: x for name, x in module.named_parameters() if x.requires_grad}

    def with_gradients(product: Tensor, hidden: Tensor) -> dict[str, Tensor | None]:
        upstream = torch.linspace(-1, 1, product.numel(), device=product.device, dtype=product.dtype).cos_()
        inputs = {"gradient of the hidden states": hidden, **trained}
        return {"product": product.detach()} | _gradients(product, inputs, upstream.view_as(product), allow_unused=True)

    with _new_graph():
        head = resolve_head(module)  # resolved again, because the pass's tensors belong to its graph
        if isinstance(head, OpaqueHead) or head.module is None:
            return
        hidden_nH = hidden_NH[token_n].detach().requires_grad_()
        of_module = with_gradients(module(hidden_nH), hidden_nH)
        hidden_nH = hidden_NH[token_n].detach().requires_grad_()
        dtype = operand_dtype(hidden_nH, rows.weight)
        layout = rows._replace(adapter=head.adapter)
        product = _logits(hidden_nH, layout, LogitTransform(), statistics_dtype(dtype), rows.weight)
        of_definition = with_gradients(product, hidden_nH)
    tolerance = max(_ADAPTER[dtype], *(_ADAPTER.get(x.dtype, 0.0) for x in of_module.values() if x is not None))
    for name, value in of_module.items():
        size = _norm(value)
        difference = _difference(value, of_definition[name])
        if size < inf and not difference <= tolerance * size + 1e-6:
            raise RuntimeError(
                f"The adapter on the LM head was misread ({rows.reason}): its {name} differs by {difference:.3g} from "
                f"that of PEFT's module, whose norm is {size:.3g}. Training would be wrong. Leave `lm_head` out of the "
                "adapter, and report this with the adapter's configuration and the version of PEFT."
            )


def _norm(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.double().norm())


def _difference(x: Tensor | None, y: Tensor | None) -> float:
    """Return the norm of the difference; None is a gradient of 0."""
    if x is None or y is None:
        return _norm(y if x is None else x)
    return _norm(y.double() - x.double())
