"""How a model's own forward computes logits from hidden states, found by running it with stand-ins for its parts.

Config fields do not tell: one model ignores its `logit_scale`, another has layers before its output embedding. So the
model's forward runs without its backbone, on hidden states that are given.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import log10
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..distributed.shards import parameter_of
from ..heads.logits import LogitTransform
from ..packing.first_batch import evaluating
from ..packing.support import backbone_of

# The largest |product| of the probe, which saturates any softcap, and the smallest, at which a softcap bends nothing
_LARGEST = 1e4
_SMALLEST = 1e-3
# Relative tolerances of the probe: in fp32, and if the model rounds its logits
_EXACT = 1e-5
_ROUNDED = 1e-2

ModelForward = Callable[..., Any]  # takes the model and the arguments of its forward


class ForwardNotReadError(RuntimeError):
    """The model's forward does not compute its logits from the last hidden states of its backbone."""


class _Outputs(tuple[Any, ...]):
    """The outputs of a backbone: the last hidden states, and `None` for every other field but the router's."""

    router_logits: Any = None

    @property
    def last_hidden_state(self) -> Any:
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else super().__getitem__(key)


class _StandIn(nn.Module):
    """Runs in place of a module, and of its parts. It has the module's attributes, but not its parameters or hooks."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        # Not as a child, which would add its parameters to the model's
        self.__dict__["replaced"] = module
        self.__dict__["run"] = run

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["replaced"], name)
        # OPT and the decoders of BART's family call a part of their backbone
        return _StandIn(value, self.__dict__["run"]) if isinstance(value, nn.Module) else value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["run"](*args, **kwargs)


@contextmanager
def _stand_in(model: nn.Module, module: nn.Module, run: Callable[..., Any]) -> Iterator[list[int]]:
    """Replace `module`, wherever `model` has it, in the `with` block. Yields a list with one entry for each call."""
    calls: list[int] = []

    def count_and_run(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return run(*args, **kwargs)

    stand_in = _StandIn(module, count_and_run)
    places = [(x._modules, name) for x in model.modules() for name, child in x._modules.items() if child is module]
    for children, name in places:
        children[name] = stand_in
    try:
        yield calls
    finally:
        for children, name in places:
            children[name] = module


def _run(model: Any, forward: ModelForward, hidden_BSH: Tensor, router_logits: Any = None, **inputs: Any) -> Any:
    """Return the outputs of the model's forward on these hidden states."""
    outputs = _Outputs((hidden_BSH,))
    outputs.router_logits = router_logits
    ids_BS = torch.zeros(hidden_BSH.shape[:2], dtype=torch.long, device=hidden_BSH.device)
    with _stand_in(model, backbone_of(model), lambda *_, **__: outputs) as calls:
        results = forward(model, **accepted(model, {"input_ids": ids_BS, "use_cache": False, **inputs}))
    if len(calls) != 1:
        raise ForwardNotReadError(f"The forward calls its backbone {len(calls)} times.")
    return results


def accepted(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return those of `inputs` that the model's forward takes."""
    parameters = inspect.signature(type(model).forward).parameters
    if any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values()):
        return inputs
    return {name: x for name, x in inputs.items() if name in parameters}


def logits_of(model: Any, forward: ModelForward, hidden_NH: Tensor) -> Tensor:
    """Return the logits `(N, V)` that the model's forward computes from hidden states; differentiable.

    Raises:
        `ForwardNotReadError`: its forward computes them from something else.
    """
    # Without tokens a made-up one runs, so that every parameter gets a gradient, which is 0
    padded_NH = hidden_NH if len(hidden_NH) else F.pad(hidden_NH, (0, 0, 0, 1))
    logits_NV: Tensor = _run(model, forward, padded_NH.unsqueeze(0)).logits.squeeze(0)
    return logits_NV[: len(hidden_NH)]


def router_loss_of(
    model: Any, forward: ModelForward, router_logits: tuple[Tensor, ...], attention_mask: Tensor | None
) -> Tensor | None:
    """Return the load-balancing loss that the model's forward computes from the logits of its routers.

    None if it computes none. Its output embedding does not run.
    """
    # Of any size, because nothing but the stand-in reads it
    hidden_111 = router_logits[0].new_zeros(1, 1, 1)
    inputs = {"router_logits": router_logits, "output_router_logits": True, "attention_mask": attention_mask}
    with _stand_in(model, model.get_output_embeddings(), lambda hidden: hidden):
        return getattr(_run(model, forward, hidden_111, **inputs), "aux_loss", None)


def read_transform(model: Any, forward: ModelForward, config_transform: LogitTransform) -> LogitTransform | None:
    """Return the scale and softcap that the model's forward applies to the product of its output embedding.

    The embedding is not run, so its weight may be sharded, or on the device "meta".

    Args:
        config_transform: of the config. It is returned if the forward agrees, because its numbers are not rounded.

    Returns:
        `LogitTransform`, *optional*: None if the forward does more, such as a layer before the embedding.

    Raises:
        `ForwardNotReadError`: it does not run on stand-ins, so nothing is known.
    """
    lm_head = model.get_output_embeddings()
    weight = parameter_of(lm_head, "weight")
    failure: Exception | None = None
    # In fp32 a scale is read without rounding. A layer before the embedding needs the dtype of its weights
    for dtype in dict.fromkeys((torch.float32, weight.dtype)):
        try:
            return _read_transform(model, forward, config_transform, lm_head, weight.device, dtype)
        except Exception as error:  # of the model's code, which may read what a stand-in does not have
            failure = error
    raise ForwardNotReadError(str(failure)) from failure


def _read_transform(
    model: Any,
    forward: ModelForward,
    config_transform: LogitTransform,
    lm_head: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> LogitTransform | None:
    device = torch.device("cpu") if device.type == "meta" else device
    V = lm_head.out_features
    H = getattr(model.config.get_text_config(), "hidden_size", lm_head.in_features)
    # Powers of two, which no dtype rounds
    hidden_1NH = (2.0 ** (torch.arange(2 * H, device=device, dtype=dtype) % 9 - 4)).view(1, 2, H)
    # Each class of both tokens has another product, of either sign and any size
    sizes_V = torch.logspace(log10(_SMALLEST), log10(_LARGEST), V, device=device)
    signed_V = sizes_V * (1 - 2 * (torch.arange(V, device=device) % 2))
    product_1NV = torch.stack([signed_V, signed_V.flip(0)]).unsqueeze(0)
    head_inputs: list[Tensor] = []

    def head(hidden: Tensor) -> Tensor:
        head_inputs.append(hidden)
        return product_1NV.clone()  # the model may write to it

    with evaluating(model), _stand_in(model, lm_head, head):
        logits = _run(model, forward, hidden_1NH).logits
    if len(head_inputs) != 1:
        raise ForwardNotReadError("The forward does not call its output embedding once.")
    if head_inputs[0].shape != hidden_1NH.shape or logits.shape != product_1NV.shape:
        return None
    ratio = (head_inputs[0].double() / hidden_1NH.double()).flatten()
    scale = float(ratio[0])
    if not _is_close(ratio, torch.full_like(ratio, scale), _EXACT) or scale == 0:
        return None
    if abs(scale - 1) > _EXACT and parameter_of(lm_head, "bias") is not None:
        return None  # the forward scales what the embedding multiplies, but not its bias
    return _fit(product_1NV.double() / scale, logits, config_transform)


def _fit(product: Tensor, logits: Tensor, config_transform: LogitTransform) -> LogitTransform | None:
    """Return the transform that gives `logits`, or None."""
    tolerance = _ROUNDED if logits.dtype in (torch.bfloat16, torch.float16) else _EXACT
    logits = logits.double()
    scale = float(logits.flatten()[product.abs().argmin()] / product.flatten()[product.abs().argmin()])
    scale = 1.0 if abs(scale - 1) < tolerance else scale
    for transform in (
        replace(config_transform, temperature=1.0),
        LogitTransform(logit_scale=scale),
        LogitTransform(logit_scale=scale, softcap=float(logits.abs().max())),
    ):
        if _is_close(transform(product), logits, tolerance):
            return replace(transform, temperature=config_transform.temperature)
    return None


def _is_close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    # An infinite logit excludes its class
    return bool((((x - y).abs() <= tolerance * y.abs()) & y.isfinite()).all())
