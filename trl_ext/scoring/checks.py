"""Checks of the LM head and its adapters on the first batch, and of the token ids in each batch."""

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

_SELF_TEST_TOKENS, _HIDDEN, _CLASSES = 64, 128, 1000
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

# Number of tokens to compare
_TOKENS = 8
# Tolerance of values, in units of max(1, largest logit / 32). The head is exact to 1e-5 of this unit
_VALUES = 1e-3
# Tolerance of a gradient, relative to its norm. Half-precision products are exact to 2e-3
_GRADIENT = 2e-2
# Tolerance of a gradient, relative to its size at p = 0: if every 1 - p is below this, 1 - p has no correct digits in
# float64 either. With a softcap, the slope 1 - tanh^2 has an absolute error of 1e-7 in fp32, however small it is
_NEGLIGIBLE, _NEGLIGIBLE_CAPPED = 1e-10, 1e-5
# Tolerance of an adapter, relative to a norm. PEFT's module rounds its logits and gradients to its compute dtype
_ADAPTER = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


def self_test(device: torch.device) -> tuple[str, ...]:
    """Compare the tiled head with its definition on `device`, with random numbers.

    Returns:
        `tuple[str, ...]`: descriptions of the cases, which all agree.

    Raises:
        `RuntimeError`: the two differ in a case. Errors of the device are not caught.
    """
    described = []
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
            described.append(f"{str(dtype).removeprefix('torch.')} with a {'trained' if trained else 'frozen'} weight")
    return tuple(described)


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
    with _own_graph():
        found = comparison.tiled(kernels)
        expected, largest_logit = comparison.dense()
    sizes = comparison.gradient_sizes()
    for name, value in expected.items():
        if not value.numel():
            continue
        difference = (found[name].double() - value.double()).abs()
        if name in sizes:
            # fp16 cannot represent smaller gradients
            finest = torch.finfo(found[name].dtype)
            lost = finest.smallest_normal * finest.eps * sqrt(value.numel())
            negligible = _NEGLIGIBLE if transform.softcap is None else _NEGLIGIBLE_CAPPED
            off = difference.norm() / (_GRADIENT * value.double().norm() + negligible * sizes[name] + lost)
        else:
            off = difference.amax() / (_VALUES * (largest_logit / 32).clamp(min=1))
        # If the definition gives NaN too, the head is not wrong
        if value.isfinite().all() and not off <= 1:
            raise RuntimeError(
                f"The tiled LM head differs from its definition on the first batch: {name}, largest difference "
                f"{difference.max():.3g}, {off:.3g} times the tolerance. Training would be wrong. "
                'Set `head="dense"` in the config to train without the tiled head, and report this with the model\'s '
                "name and the output of `trl-ext doctor`."
            )
    return True


@contextmanager
def _own_graph() -> Iterator[None]:
    """Record gradients without the caller's hooks on saved tensors, such as those of activation offloading."""
    with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, lambda x: x):
        yield


class _Comparison:
    """The tiled head and its definition, on n of the M tokens that all ranks score together."""

    def __init__(
        self, rows: WeightLayout, transform: LogitTransform, outputs: tuple[str, ...], entropy_requires_grad: bool
    ) -> None:
        self.rows, self.transform, self.outputs = rows, transform, outputs
        self.entropy_requires_grad = entropy_requires_grad

    def sample(self, hidden_NH: Tensor, targets_N: Tensor) -> bool:
        """Choose the tokens, and return whether any rank has one."""
        N, sharded = len(targets_N), self.rows.sharded
        self.exchange = Exchange()
        n = tokens = min(N, _TOKENS)
        if sharded is not None and sharded.engine == "tensor parallel":
            self.exchange = Exchange(sharded.group)
        elif sharded is not None:
            every = tokens_of_ranks(N, sharded.group, hidden_NH.device)
            share = max(1, _TOKENS // len(every))
            counts = tuple(min(count, share) if rank < _TOKENS else 0 for rank, count in enumerate(every))
            self.exchange = Exchange(sharded.group, counts)
            n, tokens = counts[sharded.group.rank()], sum(counts)
        if not tokens:
            return False
        some = torch.linspace(0, N - 1, n, device=targets_N.device).long()
        self.hidden_nH, self.targets_n = hidden_NH[some].detach(), targets_N[some]
        (self.part,) = self.exchange.parts(n, hidden_NH.device)
        real_M = self.part.gathered(torch.ones(n, device=hidden_NH.device))
        upstream_M = torch.linspace(1, 2, len(real_M), device=real_M.device)
        # The incoming gradients of log-probs, entropy and mean log-probs
        self.upstreams_M = upstream_M * real_M, upstream_M.flip(0) * real_M, -upstream_M * real_M
        # Rows of this rank's weight whose gradients are compared: those of the targets and a few others
        local = self.part.gathered(self.targets_n) - (0 if sharded is None else sharded.blocks[0][0])
        count = len(self.rows.weight)
        others = torch.linspace(0, max(count - 1, 0), min(32, count), device=local.device).long()
        self.seen_rows = torch.cat([local[(local >= 0) & (local < count)], others])
        return True

    def tiled(self, kernels: str | None) -> dict[str, Tensor]:
        """Return values and gradients of the tiled head."""
        hidden, rows, trained = self._leaves(self.hidden_nH)
        shard = rows.shard or VocabularyShard()
        scored = run_head(
            *("tiled", hidden, rows.weight, self.targets_n),
            bias=rows.bias,
            transform=self.transform,
            outputs=self.outputs,
            entropy_requires_grad=self.entropy_requires_grad,
            chunk_size=-(-len(self.upstreams_M[0]) // 3),
            tile_columns=max(1, -(-len(rows.weight) // 3)),
            kernels=kernels,
            shard=replace(shard, exchange=self.exchange) if shard.partial else shard,
            **rows.adapter.operands(hidden, rows.weight),
        )
        loss = self._loss(scored, self.part.own(*self.upstreams_M))
        return self._compared(scored, _gradients(loss, trained))

    def dense(self) -> tuple[dict[str, Tensor], Tensor]:
        """Return values and gradients in float64 from the logits of the whole vocabulary, and the largest logit."""
        part, sharded = self.part, self.rows.sharded
        hidden, rows, trained = self._leaves(part.gathered(self.hidden_nH))
        blocks = [rows.weight]
        if sharded is not None and len(sharded.blocks) > 1:
            blocks = [block[1] for block in sharded.blocks]
        logits_Mv = torch.cat([_logits(hidden, rows, self.transform, torch.float64, x) for x in blocks], 1)
        logits_MV, first = logits_Mv.detach(), 0
        if sharded is not None:
            counts = [sum(count for _, count in of_rank) for of_rank in sharded.ranges]
            logits_MV, first = _columns_of_all(logits_MV, counts, sharded.group), sharded.blocks[0][0]
        logits_MV.requires_grad_()
        targets_M, entropy_grad = part.gathered(self.targets_n), self.entropy_requires_grad
        scored = log_probs_of(logits_MV, targets_M, self.outputs, entropy_requires_grad=entropy_grad)
        grad_MV = _gradients(self._loss(scored, self.upstreams_M), {"logits": logits_MV})["logits"]
        gradients = _gradients(logits_Mv, trained, grad_MV[:, first : first + logits_Mv.shape[1]])
        gradients["hidden states"] = part.summed(gradients["hidden states"].double())
        return self._compared(LinearLogProbs(*part.own(*scored)), gradients), logits_MV.detach().abs().max()

    def gradient_sizes(self) -> dict[str, Tensor]:
        """Return an upper bound of each gradient's size at p = 0."""
        slope = abs(self.transform.logit_scale) / self.transform.temperature
        hidden_size = self.hidden_nH.double().norm() * slope
        sizes = {
            "hidden states": self.rows.weight.detach()[self.seen_rows].double().norm() * slope,
            "weight": hidden_size,
            "bias": torch.tensor(slope * sqrt(_TOKENS)),
        }
        adapter = self.rows.adapter
        factors = [abs(x.scaling) * float(y.detach().double().norm()) for x in adapter.factors for y in x[:2]]
        sizes |= dict.fromkeys(adapter.tensors(), hidden_size * max([1.0, *factors]))
        return {f"gradient of the {name}": size for name, size in sizes.items()}

    def _leaves(self, hidden: Tensor) -> tuple[Tensor, WeightLayout, dict[str, Tensor]]:
        """Return hidden states and weights as leaves of a new graph, and by name those that require a gradient."""
        rows, hidden = self.rows, hidden.detach().requires_grad_()
        weight = rows.weight.detach().requires_grad_(rows.trained[0])
        bias = None if rows.bias is None else rows.bias.detach().requires_grad_(rows.trained[1])
        rows = rows._replace(weight=weight, bias=bias, adapter=rows.adapter.detached())
        named = {"hidden states": hidden, "weight": weight, "bias": bias} | rows.adapter.tensors()
        return hidden, rows, {name: x for name, x in named.items() if x is not None and x.requires_grad}

    def _loss(self, scored: LinearLogProbs, upstreams: Iterable[Any]) -> Tensor:
        entropy = scored.entropy if self.entropy_requires_grad else None
        differentiable = zip((scored.log_probs, entropy, scored.mean_log_probs), upstreams, strict=True)
        return torch.stack([(x * upstream).sum() for x, upstream in differentiable if x is not None]).sum()

    def _compared(self, scored: LinearLogProbs, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what to compare. `is_top1` is excluded, because rounding decides between equal logits."""
        values = {name: x.detach() for name, x in scored._asdict().items() if x is not None and name != "is_top1"}
        rows = self.seen_rows
        return values | {
            f"gradient of the {name}": x[rows] if name in ("weight", "bias") else x for name, x in gradients.items()
        }


def _logits(
    hidden: Tensor, rows: WeightLayout, transform: LogitTransform, accumulate: torch.dtype, weight: Tensor
) -> Tensor:
    """Return the logits by definition, from the head's operands, for the layout's rows `weight`."""
    dtype, term = operand_dtype(hidden, weight), rows.adapter.low_rank(hidden, weight, accumulate)
    return dense_logits(
        Operands.of(hidden, weight, rows.bias, term, rows.adapter.rows),
        *(transform, dtype, accumulate),
        up_dtype=term.dtype if term else dtype,
        replaced=rows.adapter.replaced(),
    )


def _gradients(of: Tensor, inputs: dict[str, Tensor], upstream: Tensor | None = None, **options: Any) -> dict[str, Any]:
    return dict(zip(inputs, torch.autograd.grad(of, list(inputs.values()), upstream, **options), strict=True))


def _columns_of_all(logits_Mv: Tensor, counts: list[int], group: ProcessGroup) -> Tensor:
    """Return `(M, V)`, the columns of all ranks side by side. `counts` has the number of columns of each rank."""
    own = logits_Mv.new_zeros(len(logits_Mv), max(counts))
    own[:, : logits_Mv.shape[1]] = logits_Mv
    every = own.new_empty(len(counts) * own.shape[0], own.shape[1])
    all_gather(every, own, group=group)
    return torch.cat([x[:, :count] for x, count in zip(every.chunk(len(counts)), counts, strict=True)], 1)


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
    some = torch.linspace(0, len(hidden_NH) - 1, min(len(hidden_NH), _TOKENS), device=hidden_NH.device).long()
    trained = {name: x for name, x in module.named_parameters() if x.requires_grad}

    def with_gradients(product: Tensor, hidden: Tensor) -> dict[str, Tensor | None]:
        upstream = torch.linspace(-1, 1, product.numel(), device=product.device, dtype=product.dtype).cos_()
        inputs = {"gradient of the hidden states": hidden, **trained}
        return {"product": product.detach()} | _gradients(product, inputs, upstream.view_as(product), allow_unused=True)

    with _own_graph():
        head = resolve_head(module)  # resolved again, because the pass's tensors belong to its graph
        if isinstance(head, OpaqueHead) or head.module is None:
            return
        own, other = (hidden_NH[some].detach().requires_grad_() for _ in range(2))
        expected = with_gradients(module(own), own)
        dtype = operand_dtype(other, rows.weight)
        layout = rows._replace(adapter=head.adapter)
        found = with_gradients(_logits(other, layout, LogitTransform(), statistics_dtype(dtype), rows.weight), other)
    allowed = max(_ADAPTER[dtype], *(_ADAPTER.get(x.dtype, 0.0) for x in expected.values() if x is not None))
    for name, want in expected.items():
        got = found[name]
        size = _norm(want)
        difference = _norm(want if got is None else got if want is None else got.double() - want.double())
        if size < inf and not difference <= allowed * size + 1e-6:
            raise RuntimeError(
                f"The adapter on the LM head was misread ({rows.reason}): its {name} differs by {difference:.3g} from "
                f"that of PEFT's module, whose norm is {size:.3g}. Training would be wrong. Leave `lm_head` out of the "
                "adapter, and report this with the adapter's configuration and the version of PEFT."
            )


def _norm(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.double().norm())


def check_decoder(model: Any, argument: str) -> None:
    """Raise `ValueError` if `model`, the trainer's `argument`, is no decoder-only language model."""
    # TRL crashes in the first step, or trains: then the encoder of BART sees the tokens that the decoder predicts
    if model.config.is_encoder_decoder:
        lacks = "has an encoder"
    elif model.get_output_embeddings() is None:
        lacks = "has no output embedding"
    else:
        return
    raise ValueError(
        f"`{argument}` is a {type(model).__name__}, which {lacks}. Pass a decoder-only language model, which "
        "`AutoModelForCausalLM` or `AutoModelForImageTextToText` loads."
    )


def missing_rows(model: Any, tokens: int) -> int | None:
    """Return the number of rows of the token embedding if the tokenizer has more `tokens`, else None: all are valid."""
    rows: int | None = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return rows if rows is not None and rows < tokens else None


def check_token_ids(largest: Iterable[int | None], rows: int, tokens: int, name: str = "model") -> None:
    """Raise `ValueError` if an id is not below `rows`, the number of the model's tokens; the tokenizer has `tokens`."""
    for token in largest:
        if token is not None and token >= rows:
            hint = "Pass a reference with the policy's vocabulary, or leave `ref_model` out."
            if name == "model":
                hint = "Pass the model's own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))` first."
            raise ValueError(
                f"`processing_class` has {tokens} tokens, but `{name}` has only {rows}, and the data contain the token "
                f"id {token}. {hint}"
            )


def watch_token_ids(model: Any, tokens: int, name: str = "model") -> None:
    """Check the token ids of each batch, if the tokenizer has more tokens than the model.

    On a GPU, an invalid id triggers a device-side assertion, after which nothing runs. Only ids that occur in a batch
    are an error: a tokenizer may have other invalid ones, such as a padding token that no forward reads.
    """
    rows = missing_rows(model, tokens)
    if rows is None:
        return

    def check(module: Any, inputs: tuple[Tensor, ...]) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].numel():
            check_token_ids([int(inputs[0].max())], rows, tokens, name)

    model.get_input_embeddings().register_forward_pre_hook(check)


def has_position_table(model: Any, positions: int) -> bool:
    """Whether the model looks up positions in a table of `positions` rows, like GPT-2, and supports no more."""
    tokens = model.get_input_embeddings()
    return any(
        isinstance(module, nn.Embedding) and module is not tokens and 0 <= module.num_embeddings - positions <= 2
        for module in model.modules()  # OPT's table has two extra rows
    )
