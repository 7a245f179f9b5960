"""The model's head: its rows, its adapters, and what it does to the logits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    """The transform of a causal or vision-language model's logits, from its config.

    A multiplier of None means none (MPT); 0.0 is a multiplier.
    """
    text = config.get_text_config()
    scale = next((x for x in (getattr(text, name, None) for name in _MULTIPLIERS) if x is not None), None)
    scaling = getattr(text, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if text.model_type in _MULTIPLY_BY_LOGITS_SCALING else 1 / scaling
    return LogitTransform(temperature, 1.0 if scale is None else scale, getattr(text, "final_logit_softcapping", None))


@dataclass(frozen=True)
class HeadAdapter:
    """What adapters add to a linear head.

    Args:
        factors (`tuple[Factors, ...]`): low-rank terms.
        classes (`tuple[int, ...]`): token ids with rows of their own, in ascending order.
        rows (`Tensor` of shape `(K, H)`, *optional*): their rows.
    """

    factors: tuple[Factors, ...] = ()
    classes: tuple[int, ...] = ()
    rows: Tensor | None = None

    def low_rank(self, hidden: Tensor, weight: Tensor, accumulate: torch.dtype | None = None) -> LowRank | None:
        """The term for hidden states `(N, H)`; differentiable. `accumulate` is by default what the head sums in."""
        if not self.factors:
            return None
        accumulate = accumulate or statistics_dtype(operand_dtype(hidden, weight))
        return low_rank_term(hidden, self.factors, operand_dtype(hidden, self.factors[0].first), accumulate)

    def replaced(self) -> ReplacedRows | None:
        """The classes whose rows are other ones than the weight's."""
        return None if self.rows is None else ReplacedRows.of(self.classes, self.rows.device)

    def detached(self) -> "HeadAdapter":
        """The same numbers in tensors of their own, that get a gradient where these do."""

        return self._mapped(lambda x: x.detach().requires_grad_(x.requires_grad))

    def whole(self) -> "HeadAdapter":
        """With what FSDP2 has spread gathered."""
        return self._mapped(lambda x: whole_tensor(x) if isinstance(x, DTensor) else x)

    def tensors(self) -> list[Tensor]:
        """Every tensor of it."""
        found = [self.rows, *(x for factors in self.factors for x in factors[:3])]
        return [x for x in found if x is not None]

    def _mapped(self, to: Callable[[Tensor], Tensor]) -> "HeadAdapter":
        factors = tuple(
            Factors(to(x.first), to(x.second), None if x.bias is None else to(x.bias), x.scaling) for x in self.factors
        )
        return replace(self, factors=factors, rows=None if self.rows is None else to(self.rows))

    def trained(self) -> dict[str, Tensor]:
        """What gets a gradient, by names for an error."""
        named = {"rows of single tokens": self.rows}
        for number, factors in enumerate(self.factors):
            named |= {f"{what} of adapter {number}": x for what, x in zip(_OF_FACTORS, factors[:3], strict=True)}
        return {name: x for name, x in named.items() if x is not None and x.requires_grad}


_OF_FACTORS = ("first factor", "second factor", "bias")


class LinearHead(NamedTuple):
    """A linear layer, and what adapters add to it.

    Args:
        linear (`nn.Module`): has the head's own weight and bias.
        adapter (`HeadAdapter`, *optional*): None where none is active.
        words (`str`): what there is beside the weight; empty for nothing.
        module (`nn.Module`, *optional*): the layer with its adapters, where any is active.
    """

    linear: nn.Module
    adapter: HeadAdapter | None = None
    words: str = ""
    module: nn.Module | None = None


class OpaqueHead(NamedTuple):
    """A head of which only its own forward knows what it computes, and why it is one."""

    module: nn.Module
    why: str


def resolve_head(lm_head: nn.Module) -> LinearHead | OpaqueHead:
    """What `lm_head` computes now: with the adapters that are active, merged or disabled at this moment.

    Raises:
        `NotImplementedError`: parameters that would have to be put together are spread over ranks; or an adapter acts
            on rows, not on tokens.
    """
    parts = _parts(lm_head)
    if isinstance(parts, OpaqueHead):
        if any(isinstance(module, FSDPModule) for module in lm_head.modules()):
            _refuse(f"only the module itself can be called, since {parts.why}")
        _refuse_spread(list(lm_head.parameters()), f"only the module itself can be called, since {parts.why}")
    elif parts.adapter is not None:
        spread = [parameter_of(parts.linear, "weight"), *parts.adapter.tensors()]
        _refuse_spread(spread, "it has an adapter", gathered=True)
        return parts._replace(adapter=parts.adapter.whole())
    return parts


def device_of(head: LinearHead | OpaqueHead) -> torch.device:
    """Where the head computes."""
    if isinstance(head, OpaqueHead):
        return next(head.module.parameters()).device
    device: torch.device = parameter_of(head.linear, "weight").device
    return device


def _parts(lm_head: nn.Module) -> LinearHead | OpaqueHead:
    factors: list[Factors] = []
    rows: dict[int, tuple[Tensor, int]] = {}
    module: Any = lm_head
    while True:
        kind = _kind(module)
        below: Any = None
        if kind is ModulesToSaveWrapper:
            below = _saved(module)
        elif kind is TrainableTokensWrapper:
            below = module.token_adapter
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
    own = _in_order(rows, classes)
    named = ["LoRA's low-rank term"] * bool(factors) + ["the rows of single tokens"] * bool(rows)
    return LinearHead(module, HeadAdapter(tuple(factors), classes, own), " and ".join(named), lm_head)


def _kind(module: nn.Module) -> type[Any]:
    """The module's class; FSDP2 puts one of its own before it."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))


def _saved(module: Any) -> nn.Module:
    active = module.active_adapters
    own = not module.disable_adapters and active and all(name in module._adapters for name in active)
    return module.modules_to_save[active[0]] if own else module.original_module  # type: ignore[no-any-return]


def _token_rows(module: Any, rows: dict[int, tuple[Tensor, int]]) -> nn.Module | str:
    """Note the rows of the active adapters; the layer below them, or why they cannot be told."""
    if module.disable_adapters or module.merged or not module.active_adapters:
        return _below(module)
    base: nn.Module = module.get_base_layer()
    if parameter_of(base, "bias") is not None:
        return "PEFT leaves out the bias of a head with `trainable_token_indices`"
    for name in module.active_adapters:
        classes = module.token_indices[name]
        if len({*classes, *rows}) < len(classes) + len(rows) or min(classes, default=0) < 0:
            return "`trainable_token_indices` name a token twice, or by a negative number"
        rows |= {token: (module.trainable_tokens_delta[name], place) for place, token in enumerate(classes)}
    return base


def _low_rank(module: Any, factors: list[Factors]) -> nn.Module | str:
    """Note the factors of the active adapters; the layer below them, or why they cannot be told."""
    if module.disable_adapters or module.merged:
        return _below(module)
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
        if not isinstance(dropout, nn.Identity) and (
            type(dropout) is not nn.Dropout or (module.training and dropout.p)
        ):
            return "its LoRA has dropout"
        if any(_kind(x[name]) is not nn.Linear for x in (module.lora_A, module.lora_B)):
            return "its LoRA has factors that are no linear layers"
        second = module.lora_B[name]
        factors.append(Factors(module.lora_A[name].weight, second.weight, second.bias, module.scaling[name]))
    return module.base_layer  # type: ignore[no-any-return]


def _below(module: Any) -> nn.Module | str:
    if module.merged and module.disable_adapters:
        return "its adapter is merged and disabled, and only its forward takes it out again"
    return module.base_layer  # type: ignore[no-any-return]


def _in_order(rows: dict[int, tuple[Tensor, int]], classes: tuple[int, ...]) -> Tensor | None:
    """The rows of `classes`, of shape `(K, H)`, in which gradients flow back to the adapters'."""
    if not rows:
        return None
    adapters = list({id(x): x for x, _ in rows.values()}.values())
    starts, first = {}, 0
    for x in adapters:
        starts[id(x)] = first
        first += len(x)
    of_all = adapters[0] if len(adapters) == 1 else torch.cat(adapters)
    return of_all[[starts[id(rows[token][0])] + rows[token][1] for token in classes]]


def _refuse_spread(tensors: list[Any], why: str, gathered: bool = False) -> None:
    for x in tensors:
        split = isinstance(x, DTensor) and not (gathered and "tp" not in (x.device_mesh.mesh_dim_names or ()))
        if split or is_zero3(x):
            _refuse(why)


def _refuse(why: str) -> None:
    raise NotImplementedError(
        f"The LM head's parameters are spread over ranks, and {why}. That is supported under DDP and on one process, "
        "and LoRA and `trainable_token_indices` also under FSDP2. Leave `lm_head` out of the adapter, put it into "
        "`modules_to_save`, or use such an engine."
    )


# Elements of one tile of the product: wide, because an adapter may form something as large as the weight in each call
_ELEMENTS = {"cuda": 2**25, "cpu": 2**20}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def score_by_module(
    lm_head: nn.Module,
    hidden_NH: Tensor,
    targets_N: Tensor,
    *,
    transform: LogitTransform,
    outputs: tuple[str, ...],
    vocabulary: int,
    head: str,
    entropy_requires_grad: bool,
    chunk_size: int | None,
) -> LinearLogProbs:
    """Per-token results from the logits that `lm_head` gives, in its own precision and with its own dropout.

    A tile's product is made again in the backward, with the same random numbers. At least one tile is called, so that
    every parameter has a gradient also where there is no token.

    Args:
        vocabulary (`int`): V, for the size of a tile.
        head (`str`): `"dense"` makes one tile of all tokens, and takes log-probs by their definition.
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
    found = []
    for first in range(0, max(1, len(hidden_NH)), n):
        tile = hidden_NH[first : first + n], targets_N[first : first + n]
        recorded = torch.is_grad_enabled()
        found.append(checkpoint(scored, *tile, use_reentrant=False) if recorded else scored(*tile))
    return LinearLogProbs(*(None if x[0] is None else torch.cat(x) for x in zip(*found, strict=True)))
