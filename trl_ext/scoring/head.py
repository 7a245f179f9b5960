"""The LM head of a model: its linear layer, its adapters, and the scaling of its logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ..distributed.shards import is_zero3, parameter_of, whole_tensor
from ..heads.adapters import Factors, LowRank, ReplacedRows, low_rank_term
from ..heads.dense import log_probs_from_logits, log_probs_of, masked_logits
from ..heads.linear_log_probs import operand_dtype
from ..heads.logits import LinearLogProbs, LogitTransform
from ..heads.products import statistics_dtype
from ..heads.sampling_mask import SamplingMask

# Config fields that multiply the head's product, in Cohere, Muse and Falcon-H1
_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
# Models that multiply by `logits_scaling`; Granite and MiniCPM3 divide by it
_MULTIPLY_BY_LOGITS_SCALING = ("hyperclovax",)


def logit_transform(config: Any, temperature: float) -> LogitTransform:
    """Return the scaling and softcap of a model's logits, from its config, with `temperature`."""
    text = config.get_text_config()
    # None means no multiplier (MPT); 0.0 is a multiplier
    scale = next((x for x in (getattr(text, name, None) for name in _MULTIPLIERS) if x is not None), None)
    scaling = getattr(text, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if text.model_type in _MULTIPLY_BY_LOGITS_SCALING else 1 / scaling
    return LogitTransform(temperature, 1.0 if scale is None else scale, getattr(text, "final_logit_softcapping", None))


@dataclass(frozen=True)
class HeadAdapter:
    """What the active adapters change in a linear head."""

    factors: tuple[Factors, ...] = ()  # low-rank terms
    classes: tuple[int, ...] = ()  # ids of tokens whose rows of the weight are replaced, in ascending order
    rows: Tensor | None = None  # (K, H), the rows of `classes`

    def low_rank(self, hidden: Tensor, weight: Tensor, accumulate: torch.dtype | None = None) -> LowRank | None:
        """Return the low-rank term for hidden states `(N, H)`; differentiable. `accumulate` defaults to the head's."""
        if not self.factors:
            return None
        accumulate = accumulate or statistics_dtype(operand_dtype(hidden, weight))
        return low_rank_term(hidden, self.factors, operand_dtype(hidden, self.factors[0].first), accumulate)

    def replaced(self) -> ReplacedRows | None:
        return None if self.rows is None else ReplacedRows.of(self.classes, self.rows.device)

    def operands(self, hidden: Tensor, weight: Tensor) -> dict[str, Any]:
        """Return the arguments of [`run_head`] for the adapter."""
        return {"low_rank": self.low_rank(hidden, weight), "replaced": self.replaced(), "rows": self.rows}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the adapter, by their names in error messages."""
        tensors = {"rows of `trainable_token_indices`": self.rows}
        for number, factors in enumerate(self.factors):
            for name, x in zip(("first factor", "second factor", "bias"), factors[:3], strict=True):
                tensors[f"{name} of adapter {number}"] = x
        return {name: x for name, x in tensors.items() if x is not None}

    def detached(self) -> "HeadAdapter":
        """Return a copy whose tensors are leaves of a new graph."""

        def leaf(x: Tensor | None) -> Any:
            return None if x is None else x.detach().requires_grad_(x.requires_grad)

        factors = tuple(Factors(leaf(x.first), leaf(x.second), leaf(x.bias), x.scaling) for x in self.factors)
        return replace(self, factors=factors, rows=leaf(self.rows))


class LinearHead(NamedTuple):
    """A head that is a linear layer with optional adapters."""

    linear: nn.Module  # has the weight and bias of the head
    adapter: HeadAdapter = HeadAdapter()
    description: str = ""  # of the adapter
    module: nn.Module | None = None  # the layer with its adapters, if one is active


class OpaqueHead(NamedTuple):
    """A head that only the model's code can compute, with the reason."""

    run: Callable[[Tensor], Tensor]  # hidden states `(N, H)` to the product or the logits, `(N, V)`
    reason: str
    description: str = "the head's own forward runs on tiles of tokens"
    runs_once: bool = False  # whether it runs once, on all tokens
    in_adapter: bool = False  # whether the reason is an adapter, not the head below it


def resolve_head(lm_head: nn.Module) -> LinearHead | OpaqueHead:
    """Return what `lm_head` computes now, given which adapters are active, merged or disabled.

    Raises:
        `NotImplementedError`: parameters that must be whole are sharded, or the adapter is aLoRA.
    """
    head = _unwrapped(lm_head)
    if isinstance(head, OpaqueHead):
        under_fsdp2 = any(isinstance(module, FSDPModule) for module in lm_head.modules())
        if under_fsdp2 or any(isinstance(x, DTensor) or is_zero3(x) for x in lm_head.parameters()):
            _refuse_sharded(f"only the module's own forward computes it, because {head.reason}", head.in_adapter)
    elif head.module is not None:
        _refuse_split(parameter_of(head.linear, "weight"))
    return head


def _refuse_split(x: Any) -> None:
    """Raise `NotImplementedError` under tensor parallelism and ZeRO-3, which do not gather an adapted head."""
    if is_zero3(x) or (isinstance(x, DTensor) and "tp" in (x.device_mesh.mesh_dim_names or ())):
        _refuse_sharded("it has an adapter")


def _whole(x: Any) -> Any:
    """Return a tensor of an adapter, gathered if FSDP2 shards it."""
    _refuse_split(x)
    return whole_tensor(x) if isinstance(x, DTensor) else x


def _refuse_sharded(reason: str, in_adapter: bool = True) -> NoReturn:
    remedy = "Use DDP or one process, or a model whose LM head is a plain `torch.nn.Linear` without quantization."
    if in_adapter:
        remedy = (
            "Leave `lm_head` out of the adapter, or use DDP or one process. On the head, FSDP2 and ZeRO-3 support "
            "`modules_to_save`, and FSDP2 also LoRA and `trainable_token_indices`."
        )
    raise NotImplementedError(
        f"The LM head is sharded over ranks, and {reason}. This combination is not supported. {remedy}"
    )


def _unwrapped(lm_head: nn.Module) -> LinearHead | OpaqueHead:
    """Return the layer below PEFT's layers, unwrapped one by one, with what each of them adds."""
    factors: list[Factors] = []
    rows: dict[int, Tensor] = {}
    module: Any = lm_head
    while True:
        kind = _kind(module)
        below: nn.Module | str | None = None  # the next layer, or why only the forward can compute this one
        in_adapter = isinstance(module, BaseTunerLayer) or kind.__module__.startswith("peft.")
        if in_adapter:
            below = _below_adapter(module, kind, factors, rows)
        elif kind.forward is not nn.Linear.forward or not parameter_of(module, "weight").is_floating_point():
            below = f"it is a `{kind.__name__}`"
        if below is None:
            break
        if isinstance(below, str):
            return OpaqueHead(lm_head, below, in_adapter=in_adapter)
        module = below
    if not factors and not rows:
        return LinearHead(module)
    classes = tuple(sorted(rows))
    rows_KH = torch.stack([rows[token] for token in classes]) if rows else None
    changes = ["LoRA's low-rank term"] * bool(factors) + ["the rows of `trainable_token_indices`"] * bool(rows)
    return LinearHead(module, HeadAdapter(tuple(factors), classes, rows_KH), " and ".join(changes), lm_head)


def _below_adapter(module: Any, kind: type[Any], factors: list[Factors], rows: dict[int, Tensor]) -> nn.Module | str:
    """Collect what a layer of PEFT adds. Return the layer below, or why only its forward can compute this one."""
    from peft.utils.other import TrainableTokensWrapper  # private: a head without adapters does not need it

    if kind is ModulesToSaveWrapper:
        return _module_to_run(module)
    if kind is TrainableTokensWrapper:
        return module.token_adapter  # type: ignore[no-any-return]
    if kind in (TrainableTokensLayer, LoraLinear) and (
        module.disable_adapters or module.merged or not module.active_adapters
    ):
        if module.disable_adapters and module.merged:
            return "its adapter is merged and disabled, and only its forward unmerges it"
        return module.base_layer  # type: ignore[no-any-return]
    if kind is TrainableTokensLayer:
        return _collect_rows(module, rows)
    if kind is LoraLinear:
        return _collect_factors(module, factors)
    return f"its adapter is a `{kind.__module__.removeprefix('peft.tuners.')}.{kind.__name__}`"


def _kind(module: nn.Module) -> type[Any]:
    """Return the module's class, without the class that FSDP2 adds."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def _module_to_run(module: Any) -> nn.Module:
    """Return what a module of `modules_to_save` runs: its copy, or the original where no adapter of it is active."""
    active = module.active_adapters
    is_saved = not module.disable_adapters and active and all(name in module._adapters for name in active)
    return module.modules_to_save[active[0]] if is_saved else module.original_module  # type: ignore[no-any-return]


def _collect_rows(module: Any, rows: dict[int, Tensor]) -> nn.Module | str:
    """Collect the rows of the active adapters. Return the layer below, or why only its forward can compute them."""
    base: nn.Module = module.get_base_layer()
    if parameter_of(base, "bias") is not None:
        return "PEFT drops the bias of a head with `trainable_token_indices`"
    for name in module.active_adapters:
        classes = module.token_indices[name]
        if len({*classes, *rows}) < len(classes) + len(rows) or min(classes, default=0) < 0:
            return "`trainable_token_indices` has a token twice, or a negative index"
        rows |= zip(classes, _whole(module.trainable_tokens_delta[name]).unbind(), strict=True)
    return base


def _collect_factors(module: Any, factors: list[Factors]) -> nn.Module | str:
    """Collect the factors of the active adapters. Return the layer below, or why only its forward can compute it."""
    from peft.tuners.lora.variants import ALoraLinearVariant  # private

    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        if isinstance(module.lora_variant.get(name), ALoraLinearVariant):
            raise NotImplementedError(
                f'The adapter "{name}" is an aLoRA adapter on the LM head. aLoRA starts at the invocation tokens of a '
                "row, but the head processes single tokens. Remove `lm_head` from its `target_modules`."
            )
        if name in module.lora_variant:
            return f"its LoRA is a variant, `{type(module.lora_variant[name]).__name__}`"
        dropout = module.lora_dropout[name]
        active = type(dropout) is not nn.Dropout or (module.training and dropout.p)
        if active and not isinstance(dropout, nn.Identity):
            return "its LoRA has dropout"
        first = module.lora_A[name]
        second = module.lora_B[name]
        if _kind(first) is not nn.Linear or _kind(second) is not nn.Linear:
            return "its LoRA factors are not linear layers"
        factors.append(Factors(_whole(first.weight), _whole(second.weight), _whole(second.bias), module.scaling[name]))
    return module.base_layer  # type: ignore[no-any-return]


# Elements of a tile of the product. Large, because an adapter may make a tensor as large as the weight in each call
_ELEMENTS = {"cuda": 2**25, "cpu": 2**20}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def score_by_module(
    lm_head: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    targets_N: Tensor,
    *,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    vocabulary: int,  # V, which determines the tokens in a tile
    head: str,  # "dense" computes all tokens at once, by the definition
    entropy_requires_grad: bool,
    chunk_size: int | None,
    sampling_mask: SamplingMask | None = None,
) -> LinearLogProbs:
    """Return per-token results from what `lm_head` returns, with its precision and dropout.

    The backward recomputes each tile's product with the same random numbers. At least one tile runs, so every parameter
    gets a gradient even without tokens.
    """
    if sampling_mask is not None:
        sampling_mask = sampling_mask.with_targets(targets_N)
    if head == "dense":
        product = lm_head(hidden_NH)
        logits_NV = transform(product.to(torch.float64 if product.dtype == torch.float64 else torch.float32))
        logits_NV = masked_logits(logits_NV, sampling_mask)
        return log_probs_of(logits_NV, targets_N, outputs, entropy_requires_grad=entropy_requires_grad)

    def score_tile(hidden_nH: Tensor, targets_n: Tensor, first: int) -> Any:
        product = lm_head(hidden_nH)
        absent = None
        if sampling_mask is not None:
            absent = sampling_mask.absent(slice(first, first + len(product)), slice(0, product.shape[1]))
        return log_probs_from_logits(
            product, targets_n, transform, outputs, entropy_requires_grad=entropy_requires_grad, absent=absent
        )

    fitting = _ELEMENTS["cpu" if hidden_NH.device.type == "cpu" else "cuda"] // vocabulary
    n = max(1, min(fitting, chunk_size or fitting))
    run = partial(checkpoint, score_tile, use_reentrant=False) if torch.is_grad_enabled() else score_tile
    starts = range(0, max(1, len(hidden_NH)), n)
    tiles = [run(hidden_NH[first : first + n], targets_N[first : first + n], first) for first in starts]
    return LinearLogProbs(*(None if x[0] is None else torch.cat(x) for x in zip(*tiles, strict=True)))
