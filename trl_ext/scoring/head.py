"""The LM head of a model: its linear layer, its adapters, and what it does to the logits."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.variants import ALoraLinearVariant
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ..distributed.shards import is_zero3, parameter_of, whole_tensor
from ..heads.adapters import Factors, LowRank, ReplacedRows, low_rank_term
from ..heads.dense import log_probs_from_logits, log_probs_of
from ..heads.linear_log_probs import operand_dtype
from ..heads.logits import LinearLogProbs, LogitTransform
from ..heads.products import statistics_dtype

# Config fields that multiply the head's product: Cohere, Muse, Falcon-H1
_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
# Granite and MiniCPM3 divide by `logits_scaling`; these multiply by it
_MULTIPLY_BY_LOGITS_SCALING = ("hyperclovax",)


def logit_transform(config: Any, temperature: float) -> LogitTransform:
    """What a causal or vision-language model does to its logits, from its config."""
    text = config.get_text_config()
    # None is no multiplier (MPT), 0.0 is one
    scale = next((x for x in (getattr(text, name, None) for name in _MULTIPLIERS) if x is not None), None)
    scaling = getattr(text, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if text.model_type in _MULTIPLY_BY_LOGITS_SCALING else 1 / scaling
    return LogitTransform(temperature, 1.0 if scale is None else scale, getattr(text, "final_logit_softcapping", None))


@dataclass(frozen=True)
class HeadAdapter:
    """What the active adapters add to a linear head."""

    factors: tuple[Factors, ...] = ()  # low-rank terms
    classes: tuple[int, ...] = ()  # token ids whose rows of the weight are replaced, in ascending order
    rows: Tensor | None = None  # (K, H), the rows of `classes`

    def low_rank(self, hidden: Tensor, weight: Tensor, accumulate: torch.dtype | None = None) -> LowRank | None:
        """The low-rank term for hidden states `(N, H)`; differentiable. `accumulate` is by default the head's."""
        if not self.factors:
            return None
        accumulate = accumulate or statistics_dtype(operand_dtype(hidden, weight))
        return low_rank_term(hidden, self.factors, operand_dtype(hidden, self.factors[0].first), accumulate)

    def replaced(self) -> ReplacedRows | None:
        return None if self.rows is None else ReplacedRows.of(self.classes, self.rows.device)

    def operands(self, hidden: Tensor, weight: Tensor) -> dict[str, Any]:
        """The arguments of [`run_head`] for the adapter."""
        return {"low_rank": self.low_rank(hidden, weight), "replaced": self.replaced(), "rows": self.rows}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the adapter, by its name in an error."""
        named = {"rows of single tokens": self.rows}
        for number, factors in enumerate(self.factors):
            for name, x in zip(("first factor", "second factor", "bias"), factors[:3], strict=True):
                named[f"{name} of adapter {number}"] = x
        return {name: x for name, x in named.items() if x is not None}

    def detached(self) -> "HeadAdapter":
        """The same numbers as leaves of another graph."""

        def leaf(x: Tensor | None) -> Any:
            return None if x is None else x.detach().requires_grad_(x.requires_grad)

        factors = tuple(Factors(leaf(x.first), leaf(x.second), leaf(x.bias), x.scaling) for x in self.factors)
        return replace(self, factors=factors, rows=leaf(self.rows))


class LinearHead(NamedTuple):
    """A linear layer, and what adapters add to it."""

    linear: nn.Module  # holds the head's own weight and bias
    adapter: HeadAdapter = HeadAdapter()
    description: str = ""  # of the adapter
    module: nn.Module | None = None  # the layer with its adapters, where one is active


class OpaqueHead(NamedTuple):
    """A head that only its own forward can compute, and the reason."""

    module: nn.Module
    reason: str


def resolve_head(lm_head: nn.Module) -> LinearHead | OpaqueHead:
    """What `lm_head` computes at this moment, given which adapters are active, merged or disabled.

    Raises:
        `NotImplementedError`: parameters that must be whole are sharded; or an adapter acts on rows, not on tokens.
    """
    head = _unwrapped(lm_head)
    if isinstance(head, OpaqueHead):
        under_fsdp2 = any(isinstance(module, FSDPModule) for module in lm_head.modules())
        if under_fsdp2 or any(isinstance(x, DTensor) or is_zero3(x) for x in lm_head.parameters()):
            _refuse_sharded(f"only the module itself can be called, since {head.reason}")
    elif head.module is not None:
        _refuse_split(parameter_of(head.linear, "weight"))
    return head


def _refuse_split(x: Any) -> None:
    """Tensor parallelism and ZeRO-3 do not gather what an adapted head needs whole."""
    if is_zero3(x) or (isinstance(x, DTensor) and "tp" in (x.device_mesh.mesh_dim_names or ())):
        _refuse_sharded("it has an adapter")


def _whole(x: Any) -> Any:
    """A tensor of an adapter, gathered where FSDP2 shards it."""
    _refuse_split(x)
    return whole_tensor(x) if isinstance(x, DTensor) else x


def _refuse_sharded(reason: str) -> NoReturn:
    raise NotImplementedError(
        f"The LM head's parameters are spread over ranks, and {reason}. That is supported under DDP and on one "
        "process, and LoRA and `trainable_token_indices` also under FSDP2. Leave `lm_head` out of the adapter, put it "
        "into `modules_to_save`, or use such an engine."
    )


def _unwrapped(lm_head: nn.Module) -> LinearHead | OpaqueHead:
    """Take PEFT's layers off one by one, and note what each adds."""
    factors: list[Factors] = []
    rows: dict[int, Tensor] = {}
    module: Any = lm_head
    while True:
        kind = _kind(module)
        below: nn.Module | str | None = None  # the next layer, or why it cannot be told what this one computes
        if kind is ModulesToSaveWrapper:
            below = _saved(module)
        elif kind is TrainableTokensWrapper:
            below = module.token_adapter
        elif kind in (TrainableTokensLayer, LoraLinear) and (
            module.disable_adapters or module.merged or not module.active_adapters
        ):
            below = module.base_layer
            if module.disable_adapters and module.merged:
                below = "its adapter is merged and disabled, and only its forward takes it out again"
        elif kind is TrainableTokensLayer:
            below = _token_rows(module, rows)
        elif kind is LoraLinear:
            below = _low_rank(module, factors)
        elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            below = f"its adapter is a `{kind.__module__.removeprefix('peft.tuners.')}.{kind.__name__}`"
        elif kind.forward is not nn.Linear.forward or not parameter_of(module, "weight").is_floating_point():
            below = f"it is a `{kind.__name__}`"
        if below is None:
            break
        if isinstance(below, str):
            return OpaqueHead(lm_head, below)
        module = below
    if not factors and not rows:
        return LinearHead(module)
    classes = tuple(sorted(rows))
    rows_KH = torch.stack([rows[token] for token in classes]) if rows else None
    named = ["LoRA's low-rank term"] * bool(factors) + ["the rows of single tokens"] * bool(rows)
    return LinearHead(module, HeadAdapter(tuple(factors), classes, rows_KH), " and ".join(named), lm_head)


def _kind(module: nn.Module) -> type[Any]:
    """The module's class, below the one that FSDP2 adds."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def _saved(module: Any) -> nn.Module:
    active = module.active_adapters
    own = not module.disable_adapters and active and all(name in module._adapters for name in active)
    return module.modules_to_save[active[0]] if own else module.original_module  # type: ignore[no-any-return]


def _token_rows(module: Any, rows: dict[int, Tensor]) -> nn.Module | str:
    """Note the rows of the active adapters; the layer below them, or why they cannot be told."""
    base: nn.Module = module.get_base_layer()
    if parameter_of(base, "bias") is not None:
        return "PEFT leaves out the bias of a head with `trainable_token_indices`"
    for name in module.active_adapters:
        classes = module.token_indices[name]
        if len({*classes, *rows}) < len(classes) + len(rows) or min(classes, default=0) < 0:
            return "`trainable_token_indices` name a token twice, or by a negative number"
        rows |= zip(classes, _whole(module.trainable_tokens_delta[name]).unbind(), strict=True)
    return base


def _low_rank(module: Any, factors: list[Factors]) -> nn.Module | str:
    """Note the factors of the active adapters; the layer below them, or why they cannot be told."""
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        if isinstance(module.lora_variant.get(name), ALoraLinearVariant):
            raise NotImplementedError(
                f'The adapter "{name}" is aLoRA on the LM head: it acts from the invocation tokens of a row on, and '
                "the head is given single tokens. Leave `lm_head` out of its `target_modules`."
            )
        if name in module.lora_variant:
            return f"its LoRA is a variant, `{type(module.lora_variant[name]).__name__}`"
        dropout = module.lora_dropout[name]
        active = type(dropout) is not nn.Dropout or (module.training and dropout.p)
        if active and not isinstance(dropout, nn.Identity):
            return "its LoRA has dropout"
        first, second = module.lora_A[name], module.lora_B[name]
        if _kind(first) is not nn.Linear or _kind(second) is not nn.Linear:
            return "its LoRA has factors that are no linear layers"
        factors.append(Factors(_whole(first.weight), _whole(second.weight), _whole(second.bias), module.scaling[name]))
    return module.base_layer  # type: ignore[no-any-return]


# Elements of a tile of the product: many, because an adapter may form a tensor as large as the weight in each call
_ELEMENTS = {"cuda": 2**25, "cpu": 2**20}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def score_by_module(
    lm_head: nn.Module,
    hidden_NH: Tensor,
    targets_N: Tensor,
    *,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    vocabulary: int,  # V, for the size of a tile
    head: str,  # "dense" takes all tokens at once, and log-probs by their definition
    entropy_requires_grad: bool,
    chunk_size: int | None,
) -> LinearLogProbs:
    """Per-token results from the logits of `lm_head` itself, in its own precision and with its own dropout.

    The backward computes each tile's product again, with the same random numbers. At least one tile is called, so that
    every parameter has a gradient even without tokens.
    """
    if head == "dense":
        product = lm_head(hidden_NH)
        logits_NV = transform(product.to(torch.float64 if product.dtype == torch.float64 else torch.float32))
        return log_probs_of(logits_NV, targets_N, outputs, entropy_requires_grad=entropy_requires_grad)

    def scored(hidden_nH: Tensor, targets_n: Tensor) -> Any:
        return log_probs_from_logits(
            lm_head(hidden_nH), targets_n, transform, outputs, entropy_requires_grad=entropy_requires_grad
        )

    fitting = _ELEMENTS["cpu" if hidden_NH.device.type == "cpu" else "cuda"] // vocabulary
    n = max(1, min(fitting, chunk_size or fitting))
    run = partial(checkpoint, scored, use_reentrant=False) if torch.is_grad_enabled() else scored
    starts = range(0, max(1, len(hidden_NH)), n)
    found = [run(hidden_NH[first : first + n], targets_N[first : first + n]) for first in starts]
    return LinearLogProbs(*(None if x[0] is None else torch.cat(x) for x in zip(*found, strict=True)))
